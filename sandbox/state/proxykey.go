package state

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ProxyKeyFile has the secret that authorities and placeholders of all VMs of the store follow from.
const ProxyKeyFile = "proxy.key"

// ProxyKey reads the store's key, or makes it.
func (s *Store) ProxyKey() ([]byte, error) {
	path := filepath.Join(s.Dir(), ProxyKeyFile)
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
		return nil, fmt.Errorf("%w: %s can be read by others (mode %#o): remove it, and start VMs with a proxy anew", spec.ErrRecord, path, st.Mode().Perm())
	case len(key) != proxy.KeyBytes:
		return nil, fmt.Errorf("%w: %s has not %d bytes: remove it, and start VMs with a proxy anew", spec.ErrRecord, path, proxy.KeyBytes)
	}
	return key, nil
}

// ProxyIdentity is the authority that the proxy of a VM signs by.
func (s *Store) ProxyIdentity(r *Record) (*proxy.Identity, error) {
	key, err := s.ProxyKey()
	if err != nil {
		return nil, err
	}
	return proxy.NewIdentity(key, r.MemoryOf())
}
