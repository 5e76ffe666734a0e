package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/crypto/acme"
	"golang.org/x/crypto/acme/autocert"

	"github.com/drowse-vm/drowse/sandbox"
)

// Certificates returns the TLS of a certificate and its key in PEM files. The files are read again when they have
// changed: connections that begin after CheckEvery have the new certificate, and others go on. While the files cannot
// be used, as between two writes, the old certificate stays in use, and log gets the error.
func Certificates(certFile, keyFile string, log *slog.Logger) (*tls.Config, error) {
	c := &certFiles{cert: certFile, key: keyFile, log: log, now: time.Now}
	if err := c.read(); err != nil {
		return nil, fmt.Errorf("%w: the certificate: %w", ErrListen, err)
	}
	return &tls.Config{GetCertificate: c.get, MinVersion: tls.VersionTLS12}, nil
}

// CheckEvery is how often files of certificates are looked at.
const CheckEvery = time.Second

type certFiles struct {
	cert, key string
	log       *slog.Logger
	now       func() time.Time

	mu      sync.Mutex // guards what follows
	pair    *tls.Certificate
	stamp   [2]os.FileInfo
	checked time.Time
}

func (c *certFiles) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.now(); now.Sub(c.checked) >= CheckEvery {
		c.checked = now
		if err := c.reread(); err != nil {
			c.log.Warn("the old certificate stays in use", "file", c.cert, "error", err)
		}
	}
	return c.pair, nil
}

// reread reads files that have changed.
func (c *certFiles) reread() error {
	for i, path := range []string{c.cert, c.key} {
		st, err := os.Stat(path)
		if err != nil {
			return err
		}
		if was := c.stamp[i]; !os.SameFile(st, was) || st.Size() != was.Size() || !st.ModTime().Equal(was.ModTime()) {
			return c.read()
		}
	}
	return nil
}

// read reads the files. Their stamps come first: a change while they are read is seen the next time.
func (c *certFiles) read() error {
	var stamp [2]os.FileInfo
	for i, path := range []string{c.cert, c.key} {
		st, err := os.Stat(path)
		if err != nil {
			return err
		}
		stamp[i] = st
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return err
	}
	c.pair, c.stamp = &pair, stamp
	return nil
}

// ACMEOptions say where certificates come from.
type ACMEOptions struct {
	// Names is the form of host names.
	Names Names
	// Dir keeps certificates and keys.
	Dir string
	// Email is for messages of the authority, and Directory its address: empty is Let's Encrypt. Use of ACME accepts
	// the authority's terms.
	Email, Directory string
}

// ACME returns the TLS of certificates that an authority issues on demand (RFC 8555, by TLS-ALPN-01, so the authority
// must reach the HTTP listener at port 443 of each name): for the domain itself, and for PublicPorts of existing
// sandboxes. Wildcards would need DNS-01. Other ports are reached by the domain itself, with HeaderSandbox and
// HeaderPort.
func ACME(h *sandbox.Host, o ACMEOptions) *tls.Config {
	m := &autocert.Manager{
		Prompt: autocert.AcceptTOS, Cache: autocert.DirCache(o.Dir), Email: o.Email,
		HostPolicy: func(_ context.Context, host string) error {
			if host == o.Names.Domain {
				return nil
			}
			to, err := o.Names.ResolveName(host)
			if err == nil && o.Names.Host(to) != host {
				err = errors.New("the name is not in lower case")
			}
			if err == nil {
				err = PublicName(h, to)
			}
			return err
		},
	}
	if o.Directory != "" {
		m.Client = &acme.Client{DirectoryURL: o.Directory}
	}
	c := m.TLSConfig()
	c.NextProtos, c.MinVersion = []string{acme.ALPNProto}, tls.VersionTLS12
	return c
}
