package proxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"sync"
	"time"
)

// KeyBytes is the size of the key from which identities are derived.
const KeyBytes = 32

// PlaceholderPrefix begins every placeholder.
const PlaceholderPrefix = "drowse_placeholder_"

// Certificates for hosts are valid for a week. They are renewed when a day is left, and begin a day early for
// guests whose clock is behind.
const (
	leafLife   = 7 * 24 * time.Hour
	leafMargin = 24 * time.Hour
)

// Identity is what a guest trusts its proxy by: an authority for certificates, and placeholders. All of it derives
// from a key of the host and the endpoint's lineage. So it is the same after a sleep, and in forks and clones,
// which inherit both in their memory. Its methods are safe for concurrent use.
type Identity struct {
	key     []byte
	lineage string
	root    *x509.Certificate
	signer  *ecdsa.PrivateKey
	// placeholders are those of a Delegate, which has no key.
	placeholders map[string]string

	mu     sync.Mutex // guards leaves
	leaves map[string]*tls.Certificate
}

// NewIdentity derives an identity from a secret key of KeyBytes bytes and a lineage, which is not secret.
func NewIdentity(key []byte, lineage string) (*Identity, error) {
	if len(key) != KeyBytes || lineage == "" {
		return nil, fmt.Errorf("making a proxy's identity: a key of %d bytes and lineage %q: a key has %d, and there is a lineage", len(key), lineage, KeyBytes)
	}
	id := &Identity{key: key, lineage: lineage, leaves: map[string]*tls.Certificate{}}
	var err error
	if id.signer, err = id.authorityKey(); err != nil {
		return nil, err
	}
	serial, err := id.derive("serial", 16)
	if err != nil {
		return nil, err
	}
	serial[0] &= 0x7f // positive (RFC 5280, 4.1.2.2)
	name := pkix.Name{CommonName: "drowse proxy of " + lineage[:min(12, len(lineage))], Organization: []string{"drowse"}}
	template := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial), Subject: name,
		// These are the same each time. The certificate is useful only to this endpoint and this host.
		NotBefore: time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC), NotAfter: time.Date(2120, 1, 1, 0, 0, 0, 0, time.UTC),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &id.signer.PublicKey, id.signer)
	if err == nil {
		id.root, err = x509.ParseCertificate(der)
	}
	if err != nil {
		return nil, fmt.Errorf("making a proxy's authority: %w", err)
	}
	return id, nil
}

// Delegate is what the proxy of one endpoint needs of its Identity, without the host's key, from which the
// identities of all endpoints derive.
type Delegate struct {
	Signer       []byte            `json:"signer"` // the authority's private key
	Root         []byte            `json:"root"`   // its certificate, as DER
	Placeholders map[string]string `json:"placeholders,omitempty"`
}

// Delegate returns what a proxy needs that puts these secrets into requests.
func (id *Identity) Delegate(secrets ...string) (d Delegate, err error) {
	d = Delegate{Root: id.root.Raw, Placeholders: map[string]string{}}
	if d.Signer, err = id.signer.Bytes(); err != nil {
		return d, fmt.Errorf("delegating the authority of a proxy: %w", err)
	}
	for _, s := range secrets {
		if d.Placeholders[s], err = id.Placeholder(s); err != nil {
			return d, err
		}
	}
	return d, nil
}

// Identity returns an identity that knows the delegate's placeholders only.
func (d Delegate) Identity() (*Identity, error) {
	id := &Identity{placeholders: d.Placeholders, leaves: map[string]*tls.Certificate{}}
	var err error
	if id.signer, err = ecdsa.ParseRawPrivateKey(elliptic.P256(), d.Signer); err == nil {
		id.root, err = x509.ParseCertificate(d.Root)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the authority of a proxy: %w", err)
	}
	return id, nil
}

// derive derives bytes from the key, the lineage and their purpose (HKDF, RFC 5869).
func (id *Identity) derive(what string, n int) ([]byte, error) {
	b, err := hkdf.Key(sha256.New, id.key, []byte(id.lineage), "drowse proxy 1 "+what, n)
	if err != nil {
		return nil, fmt.Errorf("deriving the %s of a proxy: %w", what, err)
	}
	return b, nil
}

func (id *Identity) authorityKey() (*ecdsa.PrivateKey, error) {
	// One in 2^32 candidates is not a key of this curve.
	for i := range 8 {
		b, err := id.derive(fmt.Sprintf("authority %d", i), 32)
		if err != nil {
			return nil, err
		}
		if k, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), b); err == nil {
			return k, nil
		}
	}
	return nil, fmt.Errorf("deriving the authority of a proxy: no key in 8 tries: replace the host's key")
}

// Root returns the certificate that the endpoint must trust, as PEM. Two of one identity differ only in the signature.
func (id *Identity) Root() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: id.root.Raw})
}

// Fingerprint identifies an identity by its authority: 32 hex digits.
func (id *Identity) Fingerprint() string {
	sum := sha256.Sum256(id.root.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:16])
}

// Placeholder returns what the endpoint has in place of a secret.
func (id *Identity) Placeholder(secret string) (string, error) {
	if id.key == nil {
		if text, ok := id.placeholders[secret]; ok {
			return text, nil
		}
		return "", fmt.Errorf("the proxy was not told the placeholder of %s", secret)
	}
	b, err := id.derive("placeholder "+secret, 16)
	if err != nil {
		return "", err
	}
	return PlaceholderPrefix + hex.EncodeToString(b), nil
}

// certificate returns a certificate for a host. Only hosts of injections get one.
func (id *Identity) certificate(host string, now time.Time) (*tls.Certificate, error) {
	id.mu.Lock()
	defer id.mu.Unlock()
	if c := id.leaves[host]; c != nil && now.Before(c.Leaf.NotAfter.Add(-leafMargin)) && now.After(c.Leaf.NotBefore) {
		return c, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a certificate for %s: %w", host, err)
	}
	serial := make([]byte, 16)
	if _, err := rand.Read(serial); err != nil {
		return nil, fmt.Errorf("making a certificate for %s: %w", host, err)
	}
	serial[0] &= 0x7f
	template := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial), DNSNames: []string{host},
		NotBefore: now.Add(-leafMargin), NotAfter: now.Add(leafLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, id.root, &key.PublicKey, id.signer)
	if err != nil {
		return nil, fmt.Errorf("making a certificate for %s: %w", host, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("making a certificate for %s: %w", host, err)
	}
	if len(id.leaves) >= maxLeaves {
		clear(id.leaves)
	}
	c := &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
	id.leaves[host] = c
	return c, nil
}

// maxLeaves bounds the cached certificates; successive policies may name any number of hosts.
const maxLeaves = 1024
