package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// setPolicy is SetPolicy in the VM's process.
func (p *process) setPolicy(policy *netpolicy.Policy) (control.PolicyResult, error) {
	p.op.Lock()
	defer p.op.Unlock()
	if err := p.alive(); err != nil {
		return control.PolicyResult{}, err
	}
	defer p.in.KeepRunning()()
	n := p.in.Network()
	if n == nil {
		return control.PolicyResult{}, control.NoNetwork(p.r.Spec.Name)
	}
	old := p.r.Spec.Policy
	p.r.Spec.Policy = policy
	// First what lasts: a process that is killed in between comes back with the new one.
	if err := p.store.Save(p.r); err != nil {
		p.r.Spec.Policy = old
		return control.PolicyResult{}, err
	}
	if err := n.SetPolicy(policy); err != nil {
		p.r.Spec.Policy = old
		return control.PolicyResult{}, errors.Join(err, p.store.Save(p.r))
	}
	if before := p.r.TrustedCA; policy.ProxyOn() {
		if p.trustProxy(p.lasting); p.r.TrustedCA != before {
			if err := p.store.Save(p.r); err != nil {
				// It is in force, and its proxy is trusted: that is given again at the next start.
				p.log.Warn("noting that the VM trusts its proxy", "error", err)
			}
		}
	}
	return control.PolicyResult{Name: p.r.Spec.Name, Live: true, Network: n.Info()}, nil
}

func (p *process) networkStats() (st spec.NetworkStats, err error) {
	n := p.in.Network()
	if n == nil {
		return st, control.NoNetwork(p.r.Spec.Name)
	}
	return n.Stats()
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
func (p *process) watched(w http.ResponseWriter) Network {
	if n := p.in.Network(); n != nil {
		return n
	}
	failed(w, control.NoNetwork(p.r.Spec.Name))
	return nil
}

// failed answers with an error.
func failed(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusInternalServerError)
	_ = json.NewEncoder(w).Encode(control.ReportError(err))
}

// serveFlows writes records of flows as lines of JSON.
func (p *process) serveFlows(w http.ResponseWriter, r *http.Request) {
	n := p.watched(w)
	if n == nil {
		return
	}
	out := http.NewResponseController(w)
	begun := false
	err := n.Flows(r.Context(), r.URL.Query().Get("follow") == "true", func(recs []netpolicy.FlowRecord) error {
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
