package sandbox

import (
	"context"
	"slices"

	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// ProxyEnvironment is what commands in a VM have to know of its proxy, as KEY=VALUE: where it is, files with
// certificates, and the placeholders of secrets. Command and Entrypoint add it by themselves. A VM without a proxy has
// none.
func (s *Store) ProxyEnvironment(name string) ([]string, error) {
	r, err := s.Load(name)
	if err != nil {
		return nil, err
	}
	return s.proxyEnvironment(r)
}

func (s *Store) proxyEnvironment(r *state.Record) ([]string, error) {
	if !r.Spec.Policy.ProxyOn() {
		return nil, nil
	}
	id, err := s.ProxyIdentity(r)
	if err != nil {
		return nil, err
	}
	agents, err := hostnet.Range()
	if err != nil {
		return nil, err
	}
	return proxy.Environment(r.Spec.Policy, id, agents)
}

// trustProxy gives the guest the certificate of its proxy, unless what is in its memory says that it has it. The record
// is the caller's to save. A guest that cannot take it runs on, with a warning: the policy holds.
func (p *process) trustProxy(ctx context.Context) {
	if !p.r.Spec.Policy.ProxyOn() || p.in.Network() == nil {
		return
	}
	id, err := p.in.Parts().ProxyIdentity()
	if err != nil || id.Fingerprint() == p.r.TrustedCA {
		return
	}
	if err := p.in.TrustAuthority(ctx, id.Root()); err != nil {
		p.in.Network().Warn("programs in the VM do not trust its proxy: " + err.Error())
		return
	}
	p.r.TrustedCA = id.Fingerprint()
}

// forGuest says whether there are secrets that the guest finds as files.
func forGuest(list []spec.SecretFile) bool {
	return slices.ContainsFunc(list, func(f spec.SecretFile) bool { return !f.Proxy })
}
