package sandbox

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"syscall"
	"time"

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
func (b *Sandbox) SetPolicy(ctx context.Context, p *netpolicy.Policy) (res control.PolicyResult, err error) {
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
	for {
		r, err := s.State.Get(name)
		if err != nil {
			return res, err
		}
		if r.Spec.Network != spec.NetworkTAP {
			return res, control.NoNetwork(name)
		}
		if r.Phase == state.Running {
			err = control.CallWith(ctx, s.State, name, http.MethodPut, "/policy", text, func(body io.Reader) error {
				return json.NewDecoder(io.LimitReader(body, 1<<20)).Decode(&res)
			})
		} else {
			res = control.PolicyResult{Name: name}
			err = s.storePolicy(name, p)
		}
		if !passing(err) {
			if err == nil {
				s.State.Tell(s.State.Event(ctx, r, events.PolicyChanged))
			}
			return res, err
		}
		select {
		case <-ctx.Done():
			return res, errors.Join(fmt.Errorf("setting the network policy of %s: %w", name, ctx.Err()), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// passing says whether an error means that a VM has gone to sleep, been woken or ended in
// between, or is about to, so that what does no harm twice is to be tried again.
func passing(err error) bool {
	for _, e := range []error{ErrNotRunning, ErrRunning, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// storePolicy sets the policy of a VM that has no process.
func (s *Host) storePolicy(name string, p *netpolicy.Policy) error {
	l, err := s.State.Lock(name)
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := s.State.Load(name)
	if err != nil {
		return err
	}
	r.Spec.Policy = p
	return s.State.Save(r)
}

// NetworkStats asks a running VM what its network has done.
func (b *Sandbox) NetworkStats(ctx context.Context) (st spec.NetworkStats, err error) {
	s, name := b.host, b.name
	err = control.Call(ctx, s.State, name, http.MethodGet, "/policy/stats", &st)
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
	err := control.CallWith(ctx, s.State, name, http.MethodGet, path+"?follow="+strconv.FormatBool(follow), nil, func(body io.Reader) error {
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
