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

// Policy returns the network policy that a VM runs with, or will run with after its next start or wake. A VM
// without a policy of its own has the empty one, which denies everything.
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

// SetPolicy replaces a VM's network policy permanently: it stores the policy before it enforces it. When it
// returns, the old policy judges no more packets, and flows that the new one would not open are cut. The size of
// the flow table stays until the VM's next wake or start. If SetPolicy fails, the old policy holds.
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

// NetworkStats returns the network statistics of a running VM.
func (b *Sandbox) NetworkStats(ctx context.Context) (st spec.NetworkStats, err error) {
	s, name := b.host, b.name
	err = control.Get(ctx, s.State, name, "/policy/stats", &st)
	return st, err
}

// NetworkEvents calls fn for the last packets of a running VM that did not pass, the oldest first. If follow is
// set, it continues with later ones until ctx ends or the VM's process does. At most 1024 are kept. If fn returns
// an error, NetworkEvents returns it.
func (b *Sandbox) NetworkEvents(ctx context.Context, follow bool, fn func(spec.NetEvent) error) error {
	s, name := b.host, b.name
	return watch(ctx, s, name, "/policy/events", follow, fn)
}

// NetworkFlows calls fn for the kept flows of a running VM that have ended or were denied, the oldest first. With
// follow it continues with flows that end, until ctx ends or the VM's process does, which writes all; without it
// continues with the open flows. See flow.Log for times, counts and bounds. If fn returns an error, NetworkFlows
// returns it.
func (b *Sandbox) NetworkFlows(ctx context.Context, follow bool, fn func(netpolicy.FlowRecord) error) error {
	s, name := b.host, b.name
	return watch(ctx, s, name, "/policy/flows", follow, fn)
}

// watch calls fn for each line of JSON from a VM's process.
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
