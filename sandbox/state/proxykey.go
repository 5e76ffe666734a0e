package state

import (
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ProxyKeyFile has the secret from which the authorities, placeholders and gateway tokens of all VMs of the store are
// derived.
const ProxyKeyFile = "proxy.key"

// ProxyKey returns the store's key, and makes it if it does not exist.
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
	if err := osfile.WriteNew(path, key, 0o600); err != nil && !errors.Is(err, fs.ErrExist) { // another may be first
		return nil, fmt.Errorf("making the key of proxies: %w", err)
	}
	return readProxyKey(path)
}

func readProxyKey(path string) ([]byte, error) {
	key, err := osfile.ReadPrivate(path, proxy.KeyBytes+1)
	switch {
	case errors.Is(err, osfile.ErrShared):
		return nil, fmt.Errorf("%w: %w: remove it, and start VMs with a proxy anew", spec.ErrRecord, err)
	case err != nil:
		return nil, fmt.Errorf("reading the key of proxies: %w", err)
	case len(key) != proxy.KeyBytes:
		return nil, fmt.Errorf("%w: %s has not %d bytes: remove it, and start VMs with a proxy anew", spec.ErrRecord, path, proxy.KeyBytes)
	}
	return key, nil
}

// ProxyIdentity returns the authority that signs for the proxy of a VM.
func (s *Store) ProxyIdentity(r *Record) (*proxy.Identity, error) {
	key, err := s.ProxyKey()
	if err != nil {
		return nil, err
	}
	return proxy.NewIdentity(key, r.MemoryOf())
}

// gatewayPrefix begins tokens of the gateway, so that a leaked token is recognized.
const gatewayPrefix = "drowsegw_"

// GatewayToken returns the token that lets requests in to a sandbox through the gateway, which has metadata w. It is
// derived from the store's key, so it is stored nowhere, and a fork or an imported copy has another.
func (s *Store) GatewayToken(name string, w spec.Gateway) (string, error) {
	r, err := s.Load(name)
	if err != nil {
		return "", err
	}
	key, err := s.ProxyKey()
	if err != nil {
		return "", err
	}
	b, err := hkdf.Key(sha256.New, key, []byte(r.ID), fmt.Sprintf("drowse gateway 1 token %d", w.Tokens), sha256.Size)
	if err != nil {
		return "", fmt.Errorf("deriving the token of %s: %w", name, err)
	}
	return gatewayPrefix + base64.RawURLEncoding.EncodeToString(b), nil
}
