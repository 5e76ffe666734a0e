package sandbox

import (
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// ProxyEnvironment returns the variables, as KEY=VALUE, that commands in a VM need for its proxy: its address,
// files with certificates, and placeholders of secrets. Command and Entrypoint add them by themselves. Without a
// proxy there are none.
func (b *Sandbox) ProxyEnvironment() ([]string, error) {
	s, name := b.host, b.name
	r, err := s.State.Load(name)
	if err != nil {
		return nil, err
	}
	return s.proxyEnvironment(r)
}

func (s *Host) proxyEnvironment(r *state.Record) ([]string, error) {
	if !r.Spec.Policy.ProxyOn() {
		return nil, nil
	}
	id, err := s.State.ProxyIdentity(r)
	if err != nil {
		return nil, err
	}
	agents, err := hostnet.Range()
	if err != nil {
		return nil, err
	}
	return proxy.Environment(r.Spec.Policy, id, agents)
}
