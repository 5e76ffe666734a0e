// Package vouch has an OpenID Connect issuer and a certificate authority for tests.
package vouch

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// Audience is that of tokens that say nothing else.
const Audience = "drowse"

// Issuer is an issuer in this process.
type Issuer struct {
	// URL is the issuer, and CA a file with the authority of its own certificate.
	URL, CA string
	// Asked counts requests for keys.
	Asked atomic.Int32

	tb testing.TB

	mu   sync.Mutex // guards what follows
	keys []jose.JSONWebKey
	in   func(w http.ResponseWriter, r *http.Request) bool
}

// NewIssuer starts an issuer with one key, which has the id "1" and signs with ES256.
func NewIssuer(tb testing.TB) *Issuer {
	i := &Issuer{tb: tb}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"issuer": i.URL, "jwks_uri": i.URL + "/keys"})
	})
	mux.HandleFunc("GET /keys", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(i.Keys()) })
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/keys" {
			i.Asked.Add(1)
		}
		i.mu.Lock()
		in := i.in
		i.mu.Unlock()
		if in == nil || !in(w, r) {
			mux.ServeHTTP(w, r)
		}
	}))
	s.Config.ErrorLog = nil
	s.StartTLS()
	tb.Cleanup(s.Close)
	i.URL = s.URL
	i.CA = filepath.Join(tb.TempDir(), "issuer.pem")
	writePEM(tb, i.CA, s.Certificate().Raw)
	i.Add(jose.JSONWebKey{Key: ECKey(tb), KeyID: "1", Algorithm: "ES256"})
	return i
}

// Answer has f answer requests; those for which it returns false are answered as usual. nil has none.
func (i *Issuer) Answer(f func(w http.ResponseWriter, r *http.Request) bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.in = f
}

// Add adds a key, which signs from now on. It is a private key.
func (i *Issuer) Add(k jose.JSONWebKey) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keys = append(i.keys, k)
}

// Withdraw removes all keys but the last.
func (i *Issuer) Withdraw() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keys = i.keys[len(i.keys)-1:]
}

// Keys returns the set of public keys.
func (i *Issuer) Keys() []byte {
	i.mu.Lock()
	defer i.mu.Unlock()
	var set jose.JSONWebKeySet
	for _, k := range i.keys {
		set.Keys = append(set.Keys, k.Public())
	}
	text, err := json.Marshal(set)
	if err != nil {
		i.tb.Error(err)
	}
	return text
}

// Claims returns claims of a valid token for a subject, in which some are replaced; nil removes one.
func (i *Issuer) Claims(subject string, other map[string]any) map[string]any {
	now := time.Now()
	out := map[string]any{"iss": i.URL, "aud": Audience, "sub": subject, "iat": now.Unix(), "nbf": now.Unix(), "exp": now.Add(time.Hour).Unix()}
	for name, value := range other {
		if out[name] = value; value == nil {
			delete(out, name)
		}
	}
	return out
}

// Token returns a token of the issuer, signed with its last key.
func (i *Issuer) Token(subject string, other map[string]any) string {
	i.mu.Lock()
	k := i.keys[len(i.keys)-1]
	i.mu.Unlock()
	return Sign(i.tb, k, nil, i.Claims(subject, other))
}

// Sign returns a token that is signed with a key by its Algorithm. header has further fields.
func Sign(tb testing.TB, k jose.JSONWebKey, header map[string]any, claims any) string {
	tb.Helper()
	o := (&jose.SignerOptions{}).WithType("JWT")
	for name, value := range header {
		o.WithHeader(jose.HeaderKey(name), value)
	}
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.SignatureAlgorithm(k.Algorithm), Key: k}, o)
	if err != nil {
		tb.Fatal(err)
	}
	text, err := json.Marshal(claims)
	if err != nil {
		tb.Fatal(err)
	}
	jws, err := s.Sign(text)
	if err != nil {
		tb.Fatal(err)
	}
	out, err := jws.CompactSerialize()
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

// Unsigned returns the text that is signed of a token: header and claims, as they are.
func Unsigned(tb testing.TB, header, claims any) string {
	tb.Helper()
	var parts [2]string
	for n, part := range []any{header, claims} {
		text, err := json.Marshal(part)
		if err != nil {
			tb.Fatal(err)
		}
		parts[n] = base64.RawURLEncoding.EncodeToString(text)
	}
	return parts[0] + "." + parts[1]
}

// ECKey returns a new key on P-256.
func ECKey(tb testing.TB) *ecdsa.PrivateKey {
	tb.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return k
}

// RSAKey returns a new RSA key of 2048 bits.
func RSAKey(tb testing.TB) *rsa.PrivateKey {
	tb.Helper()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		tb.Fatal(err)
	}
	return k
}

// Authority is a certificate authority.
type Authority struct {
	// File has its certificate.
	File string

	tb   testing.TB
	cert *x509.Certificate
	key  crypto.Signer
	over [][]byte // certificates between it and its root
}

var serial atomic.Int64

// NewAuthority makes a root.
func NewAuthority(tb testing.TB) *Authority {
	tb.Helper()
	a := &Authority{tb: tb, key: ECKey(tb), File: filepath.Join(tb.TempDir(), "ca.pem")}
	is := &x509.Certificate{Subject: pkix.Name{CommonName: "root"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.cert = a.sign(is, is, a.key.Public(), a.key)
	writePEM(tb, a.File, a.cert.Raw)
	return a
}

// Below makes an intermediate authority, whose certificates come with its own.
func (a *Authority) Below() *Authority {
	a.tb.Helper()
	b := &Authority{tb: a.tb, key: ECKey(a.tb)}
	is := &x509.Certificate{Subject: pkix.Name{CommonName: "intermediate"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	b.cert = a.sign(is, a.cert, b.key.Public(), a.key)
	b.over = append([][]byte{b.cert.Raw}, a.over...)
	return b
}

// Client issues the certificate of a client. A certificate without times is good for an hour, and one without usages is
// for clients.
func (a *Authority) Client(is *x509.Certificate) tls.Certificate {
	a.tb.Helper()
	if is.ExtKeyUsage == nil {
		is.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	return a.issue(is)
}

// Server issues the certificate of a server at 127.0.0.1 and localhost.
func (a *Authority) Server() tls.Certificate {
	a.tb.Helper()
	return a.issue(&x509.Certificate{
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

func (a *Authority) issue(is *x509.Certificate) tls.Certificate {
	key := ECKey(a.tb)
	leaf := a.sign(is, a.cert, key.Public(), a.key)
	return tls.Certificate{Certificate: append([][]byte{leaf.Raw}, a.over...), PrivateKey: key, Leaf: leaf}
}

func (a *Authority) sign(is, by *x509.Certificate, public crypto.PublicKey, key crypto.Signer) *x509.Certificate {
	is.SerialNumber = big.NewInt(serial.Add(1))
	if is.NotAfter.IsZero() {
		is.NotBefore, is.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	}
	der, err := x509.CreateCertificate(rand.Reader, is, by, public, key)
	if err != nil {
		a.tb.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		a.tb.Fatal(err)
	}
	return out
}

// Under issues a client's certificate by one that is no authority.
func Under(tb testing.TB, by tls.Certificate, is *x509.Certificate) tls.Certificate {
	tb.Helper()
	a := &Authority{tb: tb, cert: by.Leaf, key: by.PrivateKey.(crypto.Signer), over: by.Certificate} //nolint:forcetypeassert // of issue
	return a.Client(is)
}

// Pool returns the authority as a pool of roots.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

// Files writes a certificate with its chain, and its key, to new files.
func Files(tb testing.TB, c tls.Certificate) (cert, key string) {
	tb.Helper()
	dir := tb.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	Replace(tb, c, cert, key)
	return cert, key
}

// Replace is Files for files that there are.
func Replace(tb testing.TB, c tls.Certificate, cert, key string) {
	tb.Helper()
	writePEM(tb, cert, c.Certificate...)
	der, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		tb.Fatal(err)
	}
}

// URI returns a URI for a certificate.
func URI(tb testing.TB, text string) []*url.URL {
	tb.Helper()
	u, err := url.Parse(text)
	if err != nil {
		tb.Fatal(err)
	}
	return []*url.URL{u}
}

func writePEM(tb testing.TB, path string, certs ...[]byte) {
	tb.Helper()
	var text []byte
	for _, der := range certs {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		tb.Fatal(err)
	}
}
