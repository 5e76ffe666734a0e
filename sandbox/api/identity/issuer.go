package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"
)

// Times and bounds of an issuer's keys.
const (
	keysPause   = 10 * time.Second // between two requests for them, whatever callers show
	keysFresh   = 10 * time.Minute // after which they are asked for again
	keysLast    = time.Hour        // for which they count while the issuer does not answer
	fetchTime   = 8 * time.Second
	maxDocument = 1 << 20 // bytes
	maxKeys     = 100
	maxWaiting  = 64 // requests that wait for one issuer's keys
	maxHops     = 3  // redirects, all within one host
	maxCause    = 300
)

// algorithms are those of public keys. With the others, whoever can verify a token can make one, or anybody can.
var algorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512, jose.ES256, jose.ES384, jose.ES512, jose.EdDSA,
}

// place says where an issuer's keys come from.
type place struct{ url, ca, keys string }

// issuer keeps the keys of an issuer, and asks for them when they are needed.
type issuer struct {
	place
	s *Store

	mu      sync.Mutex // guards what follows
	keys    []jose.JSONWebKey
	fetched time.Time     // when the keys were asked for
	tried   time.Time     // when keys were last asked for
	err     error         // of that
	running chan struct{} // closed when the answer is there; nil if none is awaited
	waiting int
}

// errKey means that an issuer has no key with which a token can have been signed.
var errKey = errors.New("it is signed with a key that its issuer does not have")

// keysFor returns the keys with which a token may have been signed. It waits for the issuer if no such key is known,
// or the keys are old. Whatever callers show, the issuer is asked once in keysPause. While it does not answer, nobody
// waits who has a key that is known.
func (i *issuer) keysFor(ctx context.Context, id, algorithm string) ([]any, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	known := i.pick(id, algorithm)
	old := i.s.now().Sub(i.fetched) >= keysFresh
	if len(known) > 0 && !old {
		return known, nil
	}
	running := i.refresh()
	if len(known) > 0 && i.err != nil {
		running = nil
	}
	switch {
	case running == nil:
	case i.waiting < maxWaiting:
		i.waiting++
		i.mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
		}
		i.mu.Lock()
		i.waiting--
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	case len(known) == 0:
		return nil, fmt.Errorf("%d requests wait for it", maxWaiting)
	}
	if known = i.pick(id, algorithm); len(known) > 0 {
		return known, nil
	}
	if i.err != nil {
		return nil, i.err
	}
	return nil, errKey
}

// pick returns the keys of an id, if they are not too old. A token that names none is of an issuer with one key (OpenID
// Connect Core 1.0, section 10.1).
func (i *issuer) pick(id, algorithm string) (out []any) {
	if i.s.now().Sub(i.fetched) >= keysLast {
		return nil
	}
	for _, k := range i.keys {
		if (id == "" || k.KeyID == id) && (k.Algorithm == "" || k.Algorithm == algorithm) && suits(k.Key, algorithm) {
			out = append(out, k.Key)
		}
	}
	if id == "" && len(out) > 1 {
		return nil
	}
	return out
}

func suits(key any, algorithm string) bool {
	switch key.(type) {
	case *rsa.PublicKey:
		return strings.HasPrefix(algorithm, "RS") || strings.HasPrefix(algorithm, "PS")
	case *ecdsa.PublicKey:
		return strings.HasPrefix(algorithm, "ES")
	case ed25519.PublicKey:
		return algorithm == string(jose.EdDSA)
	}
	return false
}

// refresh asks for the keys, unless that was done just now. The channel is closed when the answer is there. The caller
// holds mu.
func (i *issuer) refresh() <-chan struct{} {
	now := i.s.now()
	if i.running != nil || !i.tried.IsZero() && now.Sub(i.tried) < keysPause {
		return i.running
	}
	done := make(chan struct{})
	begun := i.s.work(func() {
		ctx, cancel := context.WithTimeout(i.s.life, fetchTime)
		defer cancel()
		keys, err := i.fetch(ctx)
		i.mu.Lock()
		defer i.mu.Unlock()
		if i.err = err; err == nil {
			i.keys, i.fetched = keys, now
		} else {
			i.s.log.Warn("an issuer's keys are not to be had", "issuer", i.url, "error", err)
		}
		i.running = nil
		close(done)
	})
	if begun {
		i.running, i.tried = done, now
	}
	return i.running
}

// fetch gets the keys.
func (i *issuer) fetch(ctx context.Context) (keys []jose.JSONWebKey, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%.*q", maxCause, err.Error()) // it may quote an answer
		}
	}()
	if strings.HasPrefix(i.place.keys, "/") {
		text, err := readTrusted(i.place.keys, maxDocument)
		if err != nil {
			return nil, err
		}
		return parseKeys(text)
	}
	client, done, err := i.client()
	if err != nil {
		return nil, err
	}
	defer done()
	at := i.place.keys
	if at == "" {
		p, err := oidc.NewProvider(oidc.ClientContext(ctx, client), i.url)
		if err != nil {
			return nil, err
		}
		var has struct {
			Keys string `json:"jwks_uri"`
		}
		if err := p.Claims(&has); err != nil {
			return nil, err
		}
		if err := secureURL(has.Keys); err != nil {
			return nil, err
		}
		at = has.Keys
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("its keys: %s", resp.Status)
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	return parseKeys(text)
}

// client returns an HTTP client for an issuer: by TLS, within bounds, and without redirects to other hosts.
func (i *issuer) client() (_ *http.Client, done func(), err error) {
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment, MaxResponseHeaderBytes: 64 << 10, ForceAttemptHTTP2: true,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12},
	}
	if i.ca != "" {
		text, err := readTrusted(i.ca, maxDocument)
		if err != nil {
			return nil, nil, err
		}
		t.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(text) {
			return nil, nil, fmt.Errorf("%s has no certificate", i.ca)
		}
	}
	return &http.Client{Transport: bounded{t}, CheckRedirect: func(to *http.Request, via []*http.Request) error {
		if from := via[0].URL; to.URL.Host != from.Host || to.URL.Scheme != from.Scheme || len(via) > maxHops {
			return fmt.Errorf("it redirects to %.200q", to.URL.Redacted())
		}
		return nil
	}}, t.CloseIdleConnections, nil
}

// bounded bounds the bodies of answers.
type bounded struct{ http.RoundTripper }

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = http.MaxBytesReader(nil, resp.Body, maxDocument)
	}
	return resp, err
}

// parseKeys reads a JSON Web Key Set (RFC 7517). Keys that are of another kind, or for another use, are left out.
func parseKeys(text []byte) ([]jose.JSONWebKey, error) {
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(text, &set); err != nil {
		return nil, fmt.Errorf("its keys: %w", err)
	}
	if len(set.Keys) > maxKeys {
		return nil, fmt.Errorf("it has %d keys, and %d are possible", len(set.Keys), maxKeys)
	}
	var out []jose.JSONWebKey
	for _, text := range set.Keys {
		var k jose.JSONWebKey
		if json.Unmarshal(text, &k) == nil && (k.Use == "" || k.Use == "sig") && usable(k.Key) {
			out = append(out, jose.JSONWebKey{KeyID: k.KeyID, Algorithm: k.Algorithm, Key: k.Key})
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("none of its %d keys is a public key for signatures", len(set.Keys))
	}
	return out, nil
}

// usable reports whether a key is public, strong enough, and no burden to verify with.
func usable(key any) bool {
	switch k := key.(type) {
	case *rsa.PublicKey:
		return k.N.BitLen() >= 2048 && k.N.BitLen() <= 8192
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return true
	}
	return false
}
