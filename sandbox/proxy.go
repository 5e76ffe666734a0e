package sandbox

import (
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
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
