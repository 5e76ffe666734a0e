package sandbox

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ProxyRootsEnv names a file with certificates, as PEM, that the proxies of VMs trust besides those of the host: for
// servers of one's own.
const ProxyRootsEnv = "DROWSE_PROXY_ROOTS"

// proxyKeyFile has the secret that authorities and placeholders of all VMs of the store follow from.
const proxyKeyFile = "proxy.key"

// lineage is what a VM has in common with those that began as it, and so with what is in its memory of its proxy.
func (r *Record) lineage() string {
	if r.Lineage != "" {
		return r.Lineage
	}
	return r.ID
}

// inherit notes what a VM that is made of another one's memory has of its proxy.
func (r *Record) inherit(from *Record) {
	// A snapshot may come from elsewhere.
	if l := from.lineage(); idRE.MatchString(l) {
		r.Lineage, r.TrustedCA = l, from.TrustedCA
	}
}

// proxyKey reads the store's key, or makes it.
func (s *Store) proxyKey() ([]byte, error) {
	path := filepath.Join(s.dir, proxyKeyFile)
	key, err := readProxyKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	key = make([]byte, proxy.KeyBytes)
	if _, err := rand.Read(key); err != nil {
		return nil, fmt.Errorf("making the key of proxies: %w", err)
	}
	// By a link, which fails if somebody else was first.
	f, err := os.CreateTemp(s.dir, ".tmp-*") // with mode 0600
	if err != nil {
		return nil, fmt.Errorf("making the key of proxies: %w", err)
	}
	_, err = f.Write(key)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		if err = os.Link(f.Name(), path); errors.Is(err, fs.ErrExist) {
			err = nil
		}
	}
	if err = errors.Join(err, os.Remove(f.Name()), syncDir(s.dir)); err != nil {
		return nil, fmt.Errorf("making the key of proxies: %w", err)
	}
	return readProxyKey(path)
}

func readProxyKey(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the key of proxies: %w", err)
	}
	defer f.Close()
	key, err := io.ReadAll(io.LimitReader(f, proxy.KeyBytes+1))
	if err != nil {
		return nil, fmt.Errorf("reading the key of proxies: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("reading the key of proxies: %w", err)
	}
	switch {
	case st.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("%w: %s can be read by others (mode %#o): remove it, and start VMs with a proxy anew", ErrRecord, path, st.Mode().Perm())
	case len(key) != proxy.KeyBytes:
		return nil, fmt.Errorf("%w: %s has not %d bytes: remove it, and start VMs with a proxy anew", ErrRecord, path, proxy.KeyBytes)
	}
	return key, nil
}

func (s *Store) proxyIdentity(r *Record) (*proxy.Identity, error) {
	key, err := s.proxyKey()
	if err != nil {
		return nil, err
	}
	return proxy.NewIdentity(key, r.lineage())
}

// ProxyEnvironment is what commands in a VM have to know of its proxy, as KEY=VALUE: where it is, files with
// certificates, and the placeholders of secrets. Command and Entrypoint add it by themselves. A VM without a proxy has none.
func (s *Store) ProxyEnvironment(name string) ([]string, error) {
	r, err := s.load(name)
	if err != nil {
		return nil, err
	}
	return s.proxyEnvironment(r)
}

func (s *Store) proxyEnvironment(r *Record) ([]string, error) {
	if !r.Spec.Policy.ProxyOn() {
		return nil, nil
	}
	id, err := s.proxyIdentity(r)
	if err != nil {
		return nil, err
	}
	agents, err := hostnet.Range()
	if err != nil {
		return nil, err
	}
	return proxy.Environment(r.Spec.Policy, id, agents)
}

// The rest is in the VM's process.

// proxyRoots are what certificates of servers are verified by; nil are those of the host.
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

// hiddenSecrets are those of a VM that its guest does not have.
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

// listenProxy has the proxy listen if the policy has one. The lock is held.
func (n *network) listenProxy() error {
	if !n.policy.ProxyOn() || n.proxy != nil {
		return nil
	}
	if n.parts.ProxyIdentity == nil {
		return fmt.Errorf("%w: the policy has a proxy, and there is no identity for one", ErrSpec)
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
	ctx, cancel := context.WithCancel(n.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := server.Serve(ctx, ln); err != nil {
			n.log.Error("the VM's proxy has failed", "error", err)
		}
	}()
	n.proxy = server
	n.stopProxy = func() {
		cancel()
		<-ended
		n.proxy, n.stopProxy = nil, nil
	}
	return nil
}

// proxied notes what the proxy tells.
func (n *network) proxied(e proxy.Event) {
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

// trustLimit is how long the agent may take to take in a certificate.
const trustLimit = time.Minute

// trustProxy gives the guest the certificate of its proxy, unless what is in its memory says that it has it. The record
// is the caller's to save. A guest that cannot take it runs on, with a warning: the policy holds.
func (p *process) trustProxy(ctx context.Context) {
	if !p.r.Spec.Policy.ProxyOn() || p.in.network == nil {
		return
	}
	id, err := p.in.parts.ProxyIdentity()
	if err != nil || id.Fingerprint() == p.r.TrustedCA {
		return
	}
	if err := p.in.trust(ctx, id.Root()); err != nil {
		p.in.network.warn("programs in the VM do not trust its proxy: " + err.Error())
		return
	}
	p.r.TrustedCA = id.Fingerprint()
}

// guestTrust is what programs in a guest of Debian trust, and what most others do.
const guestTrust = "/etc/ssl/certs/ca-certificates.crt"

// maxGuestTrust bounds it, in bytes.
const maxGuestTrust = 4 << 20

// trust writes the certificate to a file of its own, and to one with what the guest trusts besides, in its memory.
func (in *Instance) trust(ctx context.Context, root []byte) error {
	ctx, cancel := context.WithTimeout(ctx, trustLimit)
	defer cancel()
	ctx, stop := in.whileRunning(ctx)
	defer stop()
	c, err := in.Agent(ctx)
	if err != nil {
		return in.explain(ctx, err)
	}
	defer c.Close()
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

// forGuest says whether there are secrets that the guest finds as files.
func forGuest(list []spec.SecretFile) bool {
	return slices.ContainsFunc(list, func(f spec.SecretFile) bool { return !f.Proxy })
}
