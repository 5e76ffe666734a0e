package identity

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

// Bounds of client certificates.
const (
	maxChain    = 8
	maxVerdicts = 1024
	verdictTime = time.Minute
	checkEvery  = time.Second // looks at the file of authorities
)

// authorities are those of client certificates. A Store's mutex guards them.
type authorities struct {
	seen     stamp
	checked  time.Time
	pool     *x509.CertPool
	verdicts map[[sha256.Size]byte]verdict // of chains, by these authorities
}

type verdict struct {
	err error
	at  time.Time
}

func (a *authorities) read(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("%w: the authorities of client certificates: %w", ErrConfig, err)
	}
	text, err := readTrusted(path, maxDocument)
	pool := x509.NewCertPool()
	if err == nil && !pool.AppendCertsFromPEM(text) {
		err = fmt.Errorf("%s has no certificate", path)
	}
	if err != nil {
		return fmt.Errorf("%w: the authorities of client certificates: %w", ErrConfig, err)
	}
	a.seen, a.pool, a.verdicts = stamp{info, time.Now()}, pool, map[[sha256.Size]byte]verdict{}
	return nil
}

// pool returns the authorities as they are now. The caller holds mu.
func (s *Store) pool() *x509.CertPool {
	a := &s.cas
	if now := s.now(); now.Sub(a.checked).Abs() >= checkEvery {
		a.checked = now
		info, err := os.Stat(s.o.ClientCA)
		if err == nil && !a.seen.sameAs(info) {
			err = a.read(s.o.ClientCA)
		}
		if err != nil {
			s.log.Warn("the old authorities of client certificates count", "error", err)
		}
	}
	return a.pool
}

// TLS returns the configuration of a server that asks its clients for certificates. They need not have one. The
// handshake proves that a client has the key; AdmitCertificate judges the certificate, for each request.
func (s *Store) TLS(c *tls.Config) *tls.Config {
	if s == nil || s.o.ClientCA == "" {
		return c
	}
	c = c.Clone()
	asks := c.Clone()
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		now := asks.Clone()
		// The names of authorities are a hint to clients that have several certificates.
		now.ClientAuth, now.ClientCAs = tls.RequestClientCert, s.pool()
		return now, nil
	}
	return c
}

// AdmitCertificate admits the client of a connection by its certificate. It counts as one request. Claims for the rules
// are "uri", "dns" and "cn": URI and DNS names, and the common name of the subject. The first name that there is tells
// who it is: "uri:NAME", "dns:NAME" or "cn:NAME".
func (s *Store) AdmitCertificate(state *tls.ConnectionState) (id Identity, wait time.Duration, err error) {
	refused := func(why string) (Identity, time.Duration, error) {
		return id, 0, refuse(tokens.ErrUnknown, "the client certificate is refused: %s", why)
	}
	if s == nil || s.o.ClientCA == "" || len(state.PeerCertificates) == 0 {
		return refused("the server takes none")
	}
	c, err := s.current()
	if err != nil {
		return id, 0, err
	}
	if c.Certificates == nil {
		return refused("the server has no rules for certificates")
	}
	leaf := state.PeerCertificates[0]
	if err := s.trusted(state.PeerCertificates, s.now()); err != nil {
		return id, 0, err
	}
	said, subject := claims{}, ""
	var uris []string
	for _, u := range leaf.URIs {
		uris = append(uris, u.String())
	}
	if len(uris) > 1 {
		return refused("it has more than one URI") // SPIFFE's X.509-SVID, section 2, and nobody could say who it is
	}
	for _, of := range []struct {
		claim string
		names []string
	}{{"uri", uris}, {"dns", leaf.DNSNames}, {"cn", []string{leaf.Subject.CommonName}}} {
		var list []any
		for _, name := range of.names {
			if name == "" {
				continue
			}
			if subject == "" {
				subject = of.claim + ":" + name
			}
			list = append(list, name)
		}
		if list != nil {
			said[of.claim] = list
		}
	}
	text, err := json.Marshal(said)
	if err != nil {
		return id, 0, err
	}
	id = Identity{Token: tokens.Token{Expires: leaf.NotAfter}, claims: text, chain: state.PeerCertificates}
	if err := s.name(&id, c.Certificates, subject, said); err != nil {
		return id, 0, err
	}
	wait, err = s.spend(&id)
	return id, wait, err
}

// trusted checks that an authority vouches for a chain, as a client's, at a time.
func (s *Store) trusted(chain []*x509.Certificate, at time.Time) error {
	bad := func(why any) error {
		return refuse(tokens.ErrUnknown, "the client certificate is refused: %s", cut(fmt.Sprint(why)))
	}
	if len(chain) > maxChain {
		return bad(fmt.Sprintf("its chain has %d certificates, and %d are possible", len(chain), maxChain))
	}
	hash := sha256.New()
	for _, c := range chain {
		fmt.Fprintf(hash, "%d ", len(c.Raw))
		hash.Write(c.Raw)
		if at.After(c.NotAfter) && c == chain[0] {
			return refuse(tokens.ErrExpired, "the client certificate has expired at %s", c.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	key := [sha256.Size]byte(hash.Sum(nil))
	s.mu.Lock()
	pool := s.pool()
	verdicts := s.cas.verdicts
	v := verdicts[key]
	s.mu.Unlock()
	if now := s.now(); v.at.IsZero() || now.Sub(v.at) >= verdictTime {
		o := x509.VerifyOptions{Roots: pool, Intermediates: x509.NewCertPool(), CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		for _, c := range chain[1:] {
			o.Intermediates.AddCert(c)
		}
		_, err := chain[0].Verify(o)
		v = verdict{err, now}
		s.mu.Lock()
		if len(verdicts) >= maxVerdicts {
			clear(verdicts)
		}
		verdicts[key] = v
		s.mu.Unlock()
	}
	if v.err != nil {
		return bad(v.err)
	}
	return nil
}
