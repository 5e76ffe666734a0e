package sandbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

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
	path := filepath.Join(s.Dir(), proxyKeyFile)
	key, err := readProxyKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	key = make([]byte, proxy.KeyBytes)
	if _, err := rand.Read(key); err != nil {
		return nil, fmt.Errorf("making the key of proxies: %w", err)
	}
	if err := osfile.WriteNew(path, key, 0o600); err != nil && !errors.Is(err, fs.ErrExist) { // somebody else may be first
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
// certificates, and the placeholders of secrets. Command and Entrypoint add it by themselves. A VM without a proxy has
// none.
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
