package process

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// trustProxy gives the guest the certificate of its proxy, unless the record says that its memory has it. The
// caller must save the record. A guest that cannot install it runs on, with a warning: the policy holds.
func (p *process) trustProxy(ctx context.Context) {
	if !p.r.Spec.Policy.ProxyOn() || p.net == nil {
		return
	}
	id, err := p.identity()
	if err != nil || id.Fingerprint() == p.r.TrustedCA {
		return
	}
	if err := p.trustAuthority(ctx, id.Root()); err != nil {
		p.net.Warn("programs in the VM do not trust its proxy: " + err.Error())
		return
	}
	p.r.TrustedCA = id.Fingerprint()
}

// trustLimit is how long the agent may take to install a certificate.
const trustLimit = time.Minute

// guestTrust is the file of trusted certificates that programs in a Debian guest use, and most others.
const guestTrust = "/etc/ssl/certs/ca-certificates.crt"

// maxGuestTrust bounds the size of guestTrust, in bytes.
const maxGuestTrust = 4 << 20

// trustAuthority writes the certificate into the guest's memory: to a file of its own, and to a file that also has all
// other certificates that the guest trusts.
func (p *process) trustAuthority(ctx context.Context, root []byte) error {
	ctx, cancel := context.WithTimeout(ctx, trustLimit)
	defer cancel()
	ctx, stop := p.in.WhileRunning(ctx)
	defer stop()
	c, err := p.in.Agent(ctx)
	if err == nil {
		defer c.Close()
		err = writeAuthority(ctx, c, root)
	}
	if err != nil {
		return p.in.Explain(ctx, err)
	}
	return nil
}

func writeAuthority(ctx context.Context, c *guest.Client, root []byte) error {
	var all bytes.Buffer
	if f, err := c.Stat(ctx, guestTrust); err == nil && f.Mode.IsRegular() && f.Size > 0 && f.Size <= maxGuestTrust {
		if _, err := c.ReadFile(ctx, guestTrust, &all, 0, f.Size); err != nil {
			return err
		}
		all.WriteByte('\n')
	} else if err != nil && !errors.Is(err, guest.ErrNotFound) {
		return err
	}
	all.Write(root)
	for _, f := range []struct {
		path string
		text []byte
	}{{proxy.AuthorityFile, root}, {proxy.TrustFile, all.Bytes()}} {
		o := guest.WriteOptions{Perm: 0o644, Atomic: true, Parents: true}
		if err := c.WriteFile(ctx, f.path, bytes.NewReader(f.text), o); err != nil {
			return err
		}
	}
	return nil
}

// forGuest reports whether there are secrets that the guest finds as files.
func forGuest(list []spec.SecretFile) bool {
	return slices.ContainsFunc(list, func(f spec.SecretFile) bool { return !f.Proxy })
}
