package sandbox

import (
	"bufio"
	"bytes"
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
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Policy is a VM's network policy: the one that it runs with, or will when it is brought
// back. A VM without a policy of its own has the empty one, which denies everything.
func (s *Store) Policy(name string) (*netpolicy.Policy, error) {
	r, err := s.Get(name)
	if err != nil {
		return nil, err
	}
	if r.Spec.Network != spec.NetworkTAP {
		return nil, noNetwork(name)
	}
	if r.Spec.Policy == nil {
		return &netpolicy.Policy{}, nil
	}
	return r.Spec.Policy, nil
}

func noNetwork(name string) error {
	return fmt.Errorf("%w: %s has no network, and so no policy: VMs get one with --net %s", ErrSpec, name, spec.NetworkTAP)
}

// PolicyResult says what SetPolicy has done.
type PolicyResult struct {
	Name string `json:"name"`
	// Live says that the VM runs and packets are judged by the new policy; else it is
	// the one that the VM will be brought back with.
	Live    bool              `json:"live"`
	Network *spec.NetworkInfo `json:"network,omitempty"`
}

// SetPolicy replaces a VM's network policy, for good: it is stored before it is put into
// force. When it returns, no packet is judged by the old policy any more, and flows that
// the new one would not open are cut. The size of the flow table stays until the VM is
// brought back from a sleep or a stop. If it fails, the old policy holds.
func (s *Store) SetPolicy(ctx context.Context, name string, p *netpolicy.Policy) (res PolicyResult, err error) {
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
		r, err := s.Get(name)
		if err != nil {
			return res, err
		}
		if r.Spec.Network != spec.NetworkTAP {
			return res, noNetwork(name)
		}
		if r.Phase == state.Running {
			err = s.callWith(ctx, name, http.MethodPut, "/policy", text, func(body io.Reader) error {
				return json.NewDecoder(io.LimitReader(body, 1<<20)).Decode(&res)
			})
		} else {
			res = PolicyResult{Name: name}
			err = s.storePolicy(name, p)
		}
		if !passing(err) {
			if err == nil {
				s.Tell(s.Event(ctx, r, events.PolicyChanged))
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
func (s *Store) storePolicy(name string, p *netpolicy.Policy) error {
	l, err := s.Lock(name)
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := s.Load(name)
	if err != nil {
		return err
	}
	r.Spec.Policy = p
	return s.Save(r)
}

// setPolicy is SetPolicy in the VM's process.
func (p *process) setPolicy(policy *netpolicy.Policy) (PolicyResult, error) {
	p.op.Lock()
	defer p.op.Unlock()
	if err := p.alive(); err != nil {
		return PolicyResult{}, err
	}
	defer p.in.KeepRunning()()
	n := p.in.Network()
	if n == nil {
		return PolicyResult{}, noNetwork(p.r.Spec.Name)
	}
	old := p.r.Spec.Policy
	p.r.Spec.Policy = policy
	// First what lasts: a process that is killed in between comes back with the new one.
	if err := p.store.Save(p.r); err != nil {
		p.r.Spec.Policy = old
		return PolicyResult{}, err
	}
	if err := n.SetPolicy(policy); err != nil {
		p.r.Spec.Policy = old
		return PolicyResult{}, errors.Join(err, p.store.Save(p.r))
	}
	if before := p.r.TrustedCA; policy.ProxyOn() {
		if p.trustProxy(p.lasting); p.r.TrustedCA != before {
			if err := p.store.Save(p.r); err != nil {
				// It is in force, and its proxy is trusted: that is given again at the next start.
				p.log.Warn("noting that the VM trusts its proxy", "error", err)
			}
		}
	}
	return PolicyResult{Name: p.r.Spec.Name, Live: true, Network: n.Info()}, nil
}

// NetworkStats asks a running VM what its network has done.
func (s *Store) NetworkStats(ctx context.Context, name string) (st spec.NetworkStats, err error) {
	err = s.call(ctx, name, http.MethodGet, "/policy/stats", &st)
	return st, err
}

func (p *process) networkStats() (st spec.NetworkStats, err error) {
	n := p.in.Network()
	if n == nil {
		return st, noNetwork(p.r.Spec.Name)
	}
	return n.Stats()
}

// maxEventLine bounds one event as JSON, in bytes.
const maxEventLine = 64 << 10

// NetworkEvents calls fn for the last packets of a running VM that did not pass, the
// oldest first, and, if follow is set, for all to come, until ctx ends or the VM's process
// does. At most 1024 are kept. It returns what fn returns, if that is an error.
func (s *Store) NetworkEvents(ctx context.Context, name string, follow bool, fn func(spec.NetEvent) error) error {
	return watch(ctx, s, name, "/policy/events", follow, fn)
}

// NetworkFlows calls fn for the flows of a running VM that have ended or were denied, the oldest first,
// as far as they are kept, and then, if follow is set, for those that end, until ctx ends or the
// VM's process does, which writes all; else for those that are open. Times, counts and bounds are
// those of netpolicy.FlowLog. It returns what fn returns, if that is an error.
func (s *Store) NetworkFlows(ctx context.Context, name string, follow bool, fn func(netpolicy.FlowRecord) error) error {
	return watch(ctx, s, name, "/policy/flows", follow, fn)
}

// watch calls fn for each line of JSON of a VM's process.
func watch[T any](ctx context.Context, s *Store, name, path string, follow bool, fn func(T) error) error {
	var stop error
	err := s.callWith(ctx, name, http.MethodGet, path+"?follow="+strconv.FormatBool(follow), nil, func(body io.Reader) error {
		lines := bufio.NewScanner(body)
		lines.Buffer(make([]byte, 0, 4096), maxEventLine)
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

// handlePolicy answers for the network policy on the control socket.
func (p *process) handlePolicy(mux *http.ServeMux, handle func(string, func(*http.Request) (any, error), func())) {
	handle("PUT /policy", func(r *http.Request) (any, error) {
		text, err := io.ReadAll(io.LimitReader(r.Body, netpolicy.MaxFileBytes+1))
		if err != nil {
			return nil, fmt.Errorf("reading a network policy: %w", err)
		}
		policy, err := netpolicy.Parse(text)
		if err != nil {
			return nil, err
		}
		return p.setPolicy(policy)
	}, nil)
	handle("GET /policy/stats", func(*http.Request) (any, error) { return p.networkStats() }, nil)
	mux.HandleFunc("GET /policy/events", p.serveEvents)
	mux.HandleFunc("GET /policy/flows", p.serveFlows)
}

// watched is the network of which somebody asks for lines of JSON; nil, when that was answered, if
// there is none.
func (p *process) watched(w http.ResponseWriter) *instance.Network {
	if n := p.in.Network(); n != nil {
		return n
	}
	failed(w, noNetwork(p.r.Spec.Name))
	return nil
}

// failed answers with an error.
func failed(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusInternalServerError)
	_ = json.NewEncoder(w).Encode(reportError(err))
}

// serveFlows writes records of flows as lines of JSON.
func (p *process) serveFlows(w http.ResponseWriter, r *http.Request) {
	n := p.watched(w)
	if n == nil {
		return
	}
	out := http.NewResponseController(w)
	begun := false
	err := n.FlowLog().Records(r.Context(), r.URL.Query().Get("follow") == "true", func(recs []netpolicy.FlowRecord) error {
		if !begun {
			w.Header().Set("Content-Type", "application/x-ndjson")
			begun = true
		}
		lines := json.NewEncoder(w)
		for i := range recs {
			if err := lines.Encode(&recs[i]); err != nil {
				return err
			}
		}
		return out.Flush()
	})
	switch {
	case err == nil || r.Context().Err() != nil:
	case !begun:
		failed(w, err)
	default:
		p.log.Warn("telling of the network's flows", "error", err)
	}
}

// serveEvents writes events as lines of JSON.
func (p *process) serveEvents(w http.ResponseWriter, r *http.Request) {
	n := p.watched(w)
	if n == nil {
		return
	}
	events, f, stop := n.RecentEvents(r.URL.Query().Get("follow") == "true")
	defer stop()
	w.Header().Set("Content-Type", "application/x-ndjson")
	var b bytes.Buffer
	for _, e := range events {
		_ = json.NewEncoder(&b).Encode(e) // of a buffer, and of plain data
	}
	if _, err := b.WriteTo(w); err != nil || f == nil {
		return
	}
	out := http.NewResponseController(w)
	for {
		if err := out.Flush(); err != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-n.Done():
			return
		case e := <-f:
			if err := json.NewEncoder(w).Encode(e); err != nil {
				return
			}
		}
	}
}
