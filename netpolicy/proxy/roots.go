package proxy

import (
	"crypto/x509"
	"fmt"
	"os"
)

// RootsEnv names a file with PEM certificates that the proxies of VMs trust besides the host's, for private
// servers.
const RootsEnv = "DROWSE_PROXY_ROOTS"

// Roots returns the roots that verify servers' certificates; nil means the host's.
func Roots() (*x509.CertPool, error) {
	path := os.Getenv(RootsEnv)
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading certificates for proxies ($%s): %w", RootsEnv, err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("reading the host's certificates: %w", err)
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("reading certificates for proxies ($%s): %s has none", RootsEnv, path)
	}
	return pool, nil
}
