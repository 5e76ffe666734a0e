package proxy

import (
	"crypto/x509"
	"fmt"
	"os"
)

// RootsEnv names a file with PEM certificates that the proxies of VMs trust besides the host's, for private
// servers.
const RootsEnv = "DROWSE_PROXY_ROOTS"

// maxRoots bounds the size of that file, in bytes.
const maxRoots = 256 << 10

// ExtraRoots returns the text of RootsEnv's file; empty if there is none.
func ExtraRoots() ([]byte, error) {
	path := os.Getenv(RootsEnv)
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading certificates for proxies ($%s): %w", RootsEnv, err)
	case len(text) > maxRoots:
		return nil, fmt.Errorf("reading certificates for proxies ($%s): %s has %d bytes: at most %d", RootsEnv, path, len(text), maxRoots)
	case !x509.NewCertPool().AppendCertsFromPEM(text):
		return nil, fmt.Errorf("reading certificates for proxies ($%s): %s has none", RootsEnv, path)
	}
	return text, nil
}

// Roots returns the roots that verify servers' certificates: the host's, and extra ones as PEM. It opens files.
func Roots(extra []byte) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("reading the host's certificates: %w", err)
	}
	pool.AppendCertsFromPEM(extra)
	return pool, nil
}
