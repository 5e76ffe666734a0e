package instance

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ProxyRootsEnv names a file with PEM certificates that the proxies of VMs trust besides the host's, for private
// servers.
const ProxyRootsEnv = "DROWSE_PROXY_ROOTS"

// proxyRoots returns the roots that verify servers' certificates; nil means the host's.
func proxyRoots() (*x509.CertPool, error) {
	path := os.Getenv(ProxyRootsEnv)
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading certificates for proxies ($%s): %w", ProxyRootsEnv, err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("reading the host's certificates: %w", err)
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("reading certificates for proxies ($%s): %s has none", ProxyRootsEnv, path)
	}
	return pool, nil
}

// hiddenSecrets are the secrets of a VM that its guest does not get.
type hiddenSecrets struct{ in *Instance }

// Secret implements [proxy.Secrets].
func (h hiddenSecrets) Secret(name string) (value string, ok bool, changed <-chan struct{}) {
	<-h.in.assembled
	if h.in.machine == nil {
		return "", false, nil
	}
	ok, changed = h.in.machine.Secrets().Use(name, func(v []byte) { value = string(v) })
	return value, ok, changed
}

// listenProxy starts the proxy if the policy has one. The lock must be held.
func (n *Network) listenProxy() error {
	if !n.policy.ProxyOn() || n.proxy != nil {
		return nil
	}
	if n.parts.ProxyIdentity == nil {
		return fmt.Errorf("%w: the policy has a proxy, and there is no identity for one", spec.ErrInvalid)
	}
	id, err := n.parts.ProxyIdentity()
	if err != nil {
		return err
	}
	roots, err := proxyRoots()
	if err != nil {
		return err
	}
	ln, err := proxy.Listen(n.ctx, n.tap.Name())
	if err != nil {
		return fmt.Errorf("%w: is there a server of the host's on port %d of all addresses?", err, netpolicy.ProxyPort)
	}
	server := proxy.New(proxy.Config{Identity: id, Rules: n.link, Names: n.dns, Secrets: n.secrets, Roots: roots, Event: n.proxied})
	n.proxy = server
	n.stopProxy = n.serve("the VM's proxy has failed", func(ctx context.Context) error { return server.Serve(ctx, ln) })
	return nil
}

// proxied records an event of the proxy.
func (n *Network) proxied(e proxy.Event) {
	ev := spec.NetEvent{
		Time: time.Now().UTC(), Direction: netpolicy.Egress, Verdict: netpolicy.Reject, Reason: e.Reason, Rule: e.Rule, Protocol: "tcp",
		PeerPort: e.Port, Guest: n.address.Addr(), Host: e.Host, Secret: e.Secret, Status: e.Status, Suppressed: e.Suppressed,
	}
	if e.Sent {
		ev.Verdict = netpolicy.Allow
	}
	if e.Peer.IsValid() {
		ev.Peer = e.Peer.Addr()
	}
	n.events.add(ev)
}

// trustLimit is how long the agent may take to install a certificate.
const trustLimit = time.Minute

// guestTrust is the file of trusted certificates that programs in a Debian guest use, and most others.
const guestTrust = "/etc/ssl/certs/ca-certificates.crt"

// maxGuestTrust bounds the size of guestTrust, in bytes.
const maxGuestTrust = 4 << 20

// TrustAuthority writes the certificate into the guest's memory: to a file of its own, and to a file that also has
// all other certificates that the guest trusts.
func (in *Instance) TrustAuthority(ctx context.Context, root []byte) error {
	ctx, cancel := context.WithTimeout(ctx, trustLimit)
	defer cancel()
	return in.ask(ctx, func(ctx context.Context, c *guest.Client) error {
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
	})
}
