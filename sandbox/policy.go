package sandbox

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Policy is a VM's network policy: the one that it runs with, or will when it is brought
// back. A VM without a policy of its own has the empty one, which denies everything.
func (b *Sandbox) Policy() (*netpolicy.Policy, error) {
	s, name := b.host, b.name
	r, err := s.State.Get(name)
	if err != nil {
		return nil, err
	}
	if r.Spec.Network != spec.NetworkTAP {
		return nil, control.NoNetwork(name)
	}
	if r.Spec.Policy == nil {
		return &netpolicy.Policy{}, nil
	}
	return r.Spec.Policy, nil
}

// SetPolicy replaces a VM's network policy, for good: it is stored before it is put into
// force. When it returns, no packet is judged by the old policy any more, and flows that
// the new one would not open are cut. The size of the flow table stays until the VM is
// brought back from a sleep or a stop. If it fails, the old policy holds.
func (b *Sandbox) SetPolicy(ctx context.Context, p *netpolicy.Policy) (res spec.PolicyResult, err error) {
	s, name := b.host, b.name
	if p == nil {
		p = &netpolicy.Policy{}
	}
	if err := p.Validate(); err != nil {
		return res, err
	}
	text, err := json.Marshal(p)
	if err != nil {
		return res, err
	}
	if len(text) > netpolicy.MaxFileBytes {
		return res, fmt.Errorf("%w: it has %d bytes as JSON, at most %d are possible", netpolicy.ErrPolicy, len(text), netpolicy.MaxFileBytes)
	}
	r, err := b.change(ctx, "setting the network policy of", func() error {
		return control.Do(ctx, s.State, name, "policy", p, &res)
	}, func(r *state.Record) error {
		if r.Spec.Network != spec.NetworkTAP {
			return control.NoNetwork(name)
		}
		r.Spec.Policy, res = p, spec.PolicyResult{Name: name}
		return nil
	})
	if err == nil {
		s.State.Tell(s.State.Event(ctx, r, events.PolicyChanged))
	}
	return res, err
}

// NetworkStats asks a running VM what its network has done.
func (b *Sandbox) NetworkStats(ctx context.Context) (st spec.NetworkStats, err error) {
	s, name := b.host, b.name
	err = control.Get(ctx, s.State, name, "/policy/stats", &st)
	return st, err
}

// NetworkEvents calls fn for the last packets of a running VM that did not pass, the
// oldest first, and, if follow is set, for all to come, until ctx ends or the VM's process
// does. At most 1024 are kept. It returns what fn returns, if that is an error.
func (b *Sandbox) NetworkEvents(ctx context.Context, follow bool, fn func(spec.NetEvent) error) error {
	s, name := b.host, b.name
	return watch(ctx, s, name, "/policy/events", follow, fn)
}

// NetworkFlows calls fn for the flows of a running VM that have ended or were denied, the oldest first,
// as far as they are kept, and then, if follow is set, for those that end, until ctx ends or the
// VM's process does, which writes all; else for those that are open. Times, counts and bounds are
// those of flow.Log. It returns what fn returns, if that is an error.
func (b *Sandbox) NetworkFlows(ctx context.Context, follow bool, fn func(netpolicy.FlowRecord) error) error {
	s, name := b.host, b.name
	return watch(ctx, s, name, "/policy/flows", follow, fn)
}

// watch calls fn for each line of JSON of a VM's process.
func watch[T any](ctx context.Context, s *Host, name, path string, follow bool, fn func(T) error) error {
	var stop error
	err := control.Read(ctx, s.State, name, path+"?follow="+strconv.FormatBool(follow), func(body io.Reader) error {
		lines := bufio.NewScanner(body)
		lines.Buffer(make([]byte, 0, 4096), control.MaxEventLine)
		for lines.Scan() {
			var e T
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				return err
			}
			if stop = fn(e); stop != nil {
				return nil
			}
		}
		return lines.Err()
	})
	switch {
	case stop != nil:
		return stop
	case ctx.Err() != nil:
		return ctx.Err()
	case follow && errors.Is(err, io.ErrUnexpectedEOF):
		return nil // the VM's process has ended
	}
	return err
}
