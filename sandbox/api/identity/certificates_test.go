package identity

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/vouch"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

const certificateRules = `
certificates:
  rules:
  - match: {uri: "spiffe://prod/ns/ci/sa/*"}
    owner: ci
    scopes: read,exec
  - match: {dns: "*.build.example"}
    owner_from: dns
    scopes: read
  - match: {cn: admin}
    all_owners: true
    scopes: write
    streams: 1h
`

// shown returns the state of a connection whose client has shown a certificate.
func shown(t *testing.T, c tls.Certificate) *tls.ConnectionState {
	t.Helper()
	out := &tls.ConnectionState{}
	for _, der := range c.Certificate {
		parsed, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		out.PeerCertificates = append(out.PeerCertificates, parsed)
	}
	return out
}

func newCertificates(t *testing.T) (*world, *vouch.Authority) {
	t.Helper()
	w := &world{file: filepath.Join(t.TempDir(), "identities.yaml"), none: tokens.Open("")}
	if err := os.WriteFile(w.file, []byte(certificateRules), 0o600); err != nil {
		t.Fatal(err)
	}
	ca := vouch.NewAuthority(t)
	w.open(t, Options{File: w.file, ClientCA: ca.File})
	return w, ca
}

func TestCertificate_is_a_caller_if_the_authority_vouches_for_it_as_a_clients(t *testing.T) {
	w, ca := newCertificates(t)
	spiffe := vouch.URI(t, "spiffe://prod/ns/ci/sa/builder")
	now := time.Now()
	tooMany := ca.Client(&x509.Certificate{URIs: spiffe})
	for range maxChain {
		tooMany.Certificate = append(tooMany.Certificate, tooMany.Certificate[0])
	}
	below := ca.Below()
	alone := below.Client(&x509.Certificate{URIs: spiffe})
	alone.Certificate = alone.Certificate[:1]
	noCA := ca.Client(&x509.Certificate{Subject: pkix.Name{CommonName: "admin"}})
	for name, tc := range map[string]struct {
		shown tls.Certificate
		is    string
		err   error
	}{
		"a URI":                       {ca.Client(&x509.Certificate{URIs: spiffe}), "cert:uri:spiffe://prod/ns/ci/sa/builder ci read,exec", nil},
		"by an intermediate":          {below.Client(&x509.Certificate{URIs: spiffe}), "cert:uri:spiffe://prod/ns/ci/sa/builder ci read,exec", nil},
		"without its intermediate":    {alone, "", tokens.ErrUnknown},
		"a DNS name":                  {ca.Client(&x509.Certificate{DNSNames: []string{"a.build.example"}}), "cert:dns:a.build.example cert/a.build.example read", nil},
		"a common name":               {ca.Client(&x509.Certificate{Subject: pkix.Name{CommonName: "admin"}}), "cert:cn:admin  read,exec,files,create,admin", nil},
		"a common name like a URI":    {ca.Client(&x509.Certificate{Subject: pkix.Name{CommonName: "spiffe://prod/ns/ci/sa/builder"}}), "", ErrUnmapped},
		"a URI elsewhere":             {ca.Client(&x509.Certificate{URIs: vouch.URI(t, "spiffe://prod/ns/other/sa/builder")}), "", ErrUnmapped},
		"a deeper URI":                {ca.Client(&x509.Certificate{URIs: vouch.URI(t, "spiffe://prod/ns/ci/sa/builder/x")}), "", ErrUnmapped},
		"two URIs":                    {ca.Client(&x509.Certificate{URIs: append(vouch.URI(t, "spiffe://a/b"), spiffe...)}), "", tokens.ErrUnknown},
		"two DNS names for an owner":  {ca.Client(&x509.Certificate{DNSNames: []string{"a.build.example", "b.build.example"}}), "", ErrUnmapped},
		"no name":                     {ca.Client(&x509.Certificate{}), "", tokens.ErrUnknown},
		"another authority":           {vouch.NewAuthority(t).Client(&x509.Certificate{URIs: spiffe}), "", tokens.ErrUnknown},
		"an expired one":              {ca.Client(&x509.Certificate{URIs: spiffe, NotBefore: now.Add(-2 * time.Hour), NotAfter: now.Add(-time.Hour)}), "", tokens.ErrExpired},
		"one that is not yet valid":   {ca.Client(&x509.Certificate{URIs: spiffe, NotBefore: now.Add(time.Hour), NotAfter: now.Add(2 * time.Hour)}), "", tokens.ErrUnknown},
		"a server's":                  {ca.Client(&x509.Certificate{URIs: spiffe, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}), "", tokens.ErrUnknown},
		"a long chain":                {tooMany, "", tokens.ErrUnknown},
		"one by what is no authority": {vouch.Under(t, noCA, &x509.Certificate{URIs: spiffe}), "", tokens.ErrUnknown},
		"none":                        {tls.Certificate{}, "", tokens.ErrUnknown},
	} {
		for range 2 { // the second time from what is remembered
			id, _, err := w.AdmitCertificate(shown(t, tc.shown))
			if !errors.Is(err, tc.err) || err != nil && tc.err == nil {
				t.Errorf("%s: %v, want %v", name, err, tc.err)
				continue
			}
			if err != nil {
				continue
			}
			if is := fmt.Sprintf("%s %s %s", id.Name, id.Owner, id.Scopes); is != tc.is {
				t.Errorf("%s: %q, want %q", name, is, tc.is)
			}
			if err := w.Valid(w.none, id); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestCertificate_ends_with_its_time_and_with_its_authority(t *testing.T) {
	w, ca := newCertificates(t)
	builder := shown(t, ca.Client(&x509.Certificate{URIs: vouch.URI(t, "spiffe://prod/ns/ci/sa/builder")}))
	admin := shown(t, ca.Client(&x509.Certificate{Subject: pkix.Name{CommonName: "admin"}}))
	a, _, err := w.AdmitCertificate(builder)
	if err != nil {
		t.Fatal(err)
	}
	b, _, err := w.AdmitCertificate(admin)
	if err != nil {
		t.Fatal(err)
	}
	w.later(time.Hour)
	if _, _, err := w.AdmitCertificate(builder); !errors.Is(err, tokens.ErrExpired) {
		t.Errorf("after an hour, on a connection that goes on: %v", err)
	}
	if e, l := w.Valid(w.none, a), w.Valid(w.none, b); !errors.Is(e, tokens.ErrExpired) || l != nil {
		t.Errorf("what runs: %v and %v", e, l)
	}
	w.later(-time.Hour)
	// The file has another authority now. Then it is cut, and the one that was read counts.
	other := vouch.NewAuthority(t)
	text, err := os.ReadFile(other.File)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ca.File, text, 0o600); err != nil {
		t.Fatal(err)
	}
	w.later(checkEvery)
	next := shown(t, other.Client(&x509.Certificate{Subject: pkix.Name{CommonName: "admin"}}))
	for range 2 {
		if _, _, err := w.AdmitCertificate(builder); !errors.Is(err, tokens.ErrUnknown) {
			t.Errorf("of an authority that is gone: %v", err)
		}
		if err := w.Valid(w.none, a); !errors.Is(err, tokens.ErrUnknown) {
			t.Errorf("what runs: %v", err)
		}
		if _, _, err := w.AdmitCertificate(next); err != nil {
			t.Errorf("of the new authority: %v", err)
		}
		if err := os.WriteFile(ca.File, text[:50], 0o600); err != nil {
			t.Fatal(err)
		}
		w.later(checkEvery)
	}
}

func TestAuthorities_are_refused_without_rules_or_a_certificate(t *testing.T) {
	dir := t.TempDir()
	rules, none, ca, open := filepath.Join(dir, "rules"), filepath.Join(dir, "none"), vouch.NewAuthority(t).File, vouch.NewAuthority(t).File
	if err := os.Chmod(open, 0o662); err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{rules: certificateRules, none: "issuers: []\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, o := range map[string]Options{
		"no rules": {File: none, ClientCA: ca}, "no certificate": {File: rules, ClientCA: rules}, "an authority that others write": {File: rules, ClientCA: open}, "no file": {File: rules, ClientCA: dir + "/missing"}, "no file of rules": {File: dir + "/missing"},
	} {
		if _, err := Open(o); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var s *Store
	if _, _, err := s.AdmitCertificate(&tls.ConnectionState{}); !errors.Is(err, tokens.ErrUnknown) {
		t.Errorf("without a store: %v", err)
	}
}
