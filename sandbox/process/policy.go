package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// setPolicy implements SetPolicy in the VM's process.
func (p *process) setPolicy(policy *netpolicy.Policy) (spec.PolicyResult, error) {
	end, err := p.begin()
	if err != nil {
		return spec.PolicyResult{}, err
	}
	defer end()
	n := p.net
	if n == nil {
		return spec.PolicyResult{}, control.NoNetwork(p.r.Spec.Name)
	}
	old := p.r.Spec.Policy
	// Save first: a process that is killed in between comes back with the new policy.
	if err := p.save(func() error { p.r.Spec.Policy = policy; return nil }); err != nil {
		return spec.PolicyResult{}, err
	}
	if p.sentAll {
		p.log.Info("the policy will be in force when the VM's owner may send again")
	} else if err := n.SetPolicy(policy); err != nil {
		p.r.Spec.Policy = old
		return spec.PolicyResult{}, errors.Join(err, p.store.Save(p.r))
	}
	if before := p.r.TrustedCA; policy.ProxyOn() {
		if p.trustProxy(p.lasting); p.r.TrustedCA != before {
			if err := p.store.Save(p.r); err != nil {
				// The policy is in force. The next start gives the guest the certificate again.
				p.log.Warn("noting that the VM trusts its proxy", "error", err)
			}
		}
	}
	return spec.PolicyResult{Name: p.r.Spec.Name, Live: true, Network: n.Info()}, nil
}

// egressPoll is how often a VM adds what it has sent to its owner's day.
const egressPoll = time.Minute

// meterEgress keeps the VM within what its owner may send, until ctx ends.
func (p *process) meterEgress(ctx context.Context) {
	for tick := time.NewTicker(egressPoll); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
			p.op.Lock()
			if p.alive() == nil {
				p.limitEgress(time.Now())
			}
			p.op.Unlock()
		}
	}
}

// limitEgress denies everything when the VM's owner has sent as much as it may, and puts the policy in force again on
// the next day, or when the limit is raised. If that fails, it tries again at the next look. p.op must be held.
func (p *process) limitEgress(now time.Time) {
	all, err := p.countEgress(now)
	if all == p.sentAll {
		return
	}
	policy := p.r.Spec.Policy
	if all || policy == nil {
		policy = &netpolicy.Policy{}
	}
	if serr := p.net.SetPolicy(policy); serr != nil {
		p.log.Error("changing the policy for the limit of the VM's owner", "error", serr)
		return
	}
	if p.sentAll = all; all {
		p.net.Warn(deniedFor(err))
	} else {
		p.log.Info("the VM's owner may send again")
	}
}

func deniedFor(why error) string { return "all is denied for the rest of the day: " + why.Error() }

// countEgress adds what the VM has sent since it was called last to its owner's day, and reports whether the owner has
// sent as much as it may, and why. If that is unknown, it is as before. p.op must be held, or the VM not have started.
func (p *process) countEgress(now time.Time) (all bool, why error) {
	_, out := p.net.Bytes()
	err := limits.AddEgress(p.store.Dir(), p.store.Owner(p.r.Spec.Name), now, out-min(p.counted, out))
	switch {
	case errors.Is(err, spec.ErrQuota):
		all, why = true, err
	case err != nil:
		p.log.Warn("the limit of what the VM's owner may send", "error", err)
		return p.sentAll, nil
	}
	p.counted = max(p.counted, out)
	return all, why
}

func (p *process) networkStats() (st spec.NetworkStats, err error) {
	n := p.net
	if n == nil {
		return st, control.NoNetwork(p.r.Spec.Name)
	}
	return n.Stats()
}

// watched returns the network whose records the client wants. Without a network it answers with an error and
// returns nil.
func (p *process) watched(w http.ResponseWriter) Network {
	if n := p.net; n != nil {
		return n
	}
	writeError(w, control.NoNetwork(p.r.Spec.Name))
	return nil
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
		writeError(w, err)
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
		_ = json.NewEncoder(&b).Encode(e) // cannot fail: plain data into a buffer
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

// setTags implements SetTags in the VM's process.
func (p *process) setTags(c spec.TagChange) (control.TagsResult, error) {
	end, err := p.begin()
	if err != nil {
		return control.TagsResult{}, err
	}
	defer end()
	n := p.net
	if n == nil {
		return control.TagsResult{}, control.NoNetworkTags(p.r.Spec.Name)
	}
	if err := c.Validate(); err != nil {
		return control.TagsResult{}, err
	}
	old := p.r.Spec.Tags
	// Save first: a process that is killed in between comes back with the new tags.
	if err := p.save(func() error { return p.r.Spec.UseTags(c) }); err != nil {
		return control.TagsResult{}, err
	}
	if err := n.SetTags(p.r.Spec.Tags); err != nil {
		p.r.Spec.Tags = old
		return control.TagsResult{}, errors.Join(err, n.SetTags(old), p.store.Save(p.r))
	}
	return control.TagsOf(p.r, true), nil
}
