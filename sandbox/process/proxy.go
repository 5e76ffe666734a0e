package process

import (
	"context"
	"slices"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// trustProxy gives the guest the certificate of its proxy, unless the record says that its memory has it. The
// caller must save the record. A guest that cannot install it runs on, with a warning: the policy holds.
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

// forGuest reports whether there are secrets that the guest finds as files.
func forGuest(list []spec.SecretFile) bool {
	return slices.ContainsFunc(list, func(f spec.SecretFile) bool { return !f.Proxy })
}
