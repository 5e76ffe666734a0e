package identity

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/internal/test/vouch"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a store with one issuer, whose clock tests turn.
type world struct {
	*Store
	issuer *vouch.Issuer
	file   string
	none   *tokens.Store

	mu    sync.Mutex
	ahead time.Duration
}

const rules = `
  rules:
  - match: {sub: "ci:*", env: prod}
    owner: ci
    scopes: read,exec
  - match: {groups: admins}
    all_owners: true
    scopes: read,admin
  - match: {sub: "team:**"}
    owner_from: team
    scopes: read,exec,files,create
    scopes_from: scope
    streams: 6h
  - match: {sub: slow}
    owner: slow
    scopes: read
    rate: 2
`

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{issuer: vouch.NewIssuer(t), file: filepath.Join(t.TempDir(), "identities.yaml"), none: tokens.Open(filepath.Join(t.TempDir(), "none"))}
	w.write(t, rules)
	w.open(t, Options{File: w.file})
	return w
}

func (w *world) open(t *testing.T, o Options) {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	s.now = func() time.Time {
		w.mu.Lock()
		defer w.mu.Unlock()
		return time.Now().Add(w.ahead)
	}
	w.Store = s
	t.Cleanup(s.Close)
}

func (w *world) write(t *testing.T, rules string) {
	t.Helper()
	text := fmt.Sprintf("issuers:\n- name: idp\n  url: %s\n  audience: %s\n  ca: %s\n%s", w.issuer.URL, vouch.Audience, w.issuer.CA, strings.TrimPrefix(rules, "\n"))
	if err := os.WriteFile(w.file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// later turns the clock on.
func (w *world) later(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ahead += d
}

func (w *world) admit(t *testing.T, text string) (Identity, error) {
	t.Helper()
	id, _, err := w.Admit(t.Context(), w.none, text)
	return id, err
}

type more = map[string]any

func TestToken_gets_what_the_first_rule_that_matches_grants(t *testing.T) {
	w := newWorld(t)
	for name, tc := range map[string]struct {
		subject string
		claims  more
		is      string // name, owner and scopes
		err     error
	}{
		"all that a rule wants":       {"ci:app", more{"env": "prod"}, "idp:ci:app ci read,exec", nil},
		"one claim missing":           {"ci:app", nil, "", ErrUnmapped},
		"one claim other":             {"ci:app", more{"env": "prod2"}, "", ErrUnmapped},
		"more parts than the pattern": {"ci:app:x", more{"env": "prod"}, "", ErrUnmapped},
		"no part":                     {"ci:", more{"env": "prod"}, "", ErrUnmapped},
		"something before":            {"xci:app", more{"env": "prod"}, "", ErrUnmapped},
		// A name cannot forge a line of the log.
		"a line more":                      {"ci:app\n", more{"env": "prod"}, "idp:ci:app%0A ci read,exec", nil},
		"a group of several":               {"x", more{"groups": []string{"devs", "admins"}}, "idp:x  read,admin", nil},
		"a group of similar name":          {"x", more{"groups": []string{"admins2"}}, "", ErrUnmapped},
		"an object for a group":            {"x", more{"groups": more{"admins": true}}, "", ErrUnmapped},
		"an owner of a claim":              {"team:a/b", more{"team": "red", "scope": "exec openid read"}, "idp:team:a/b idp/red read,exec", nil},
		"scopes in a list":                 {"team:a", more{"team": "red", "scope": []string{"files"}}, "idp:team:a idp/red files", nil},
		"scopes beyond those of the rule":  {"team:a", more{"team": "red", "scope": "admin write *"}, "", ErrUnmapped},
		"scopes beside those of the rule":  {"team:a", more{"team": "red", "scope": "admin,create"}, "idp:team:a idp/red create", nil},
		"no owner in the claim":            {"team:a", more{"scope": "read"}, "", ErrUnmapped},
		"two owners in the claim":          {"team:a", more{"team": []string{"a", "b"}, "scope": "read"}, "", ErrUnmapped},
		"an unprintable owner":             {"team:a", more{"team": "a\x00b", "scope": "read"}, "", ErrUnmapped},
		"an owner that is too long":        {"team:a", more{"team": strings.Repeat("x", 200), "scope": "read"}, "", ErrUnmapped},
		"an owner that is no text":         {"team:a", more{"team": more{"a": 1}, "scope": "read"}, "", ErrUnmapped},
		"an owner like a token's":          {"team:a", more{"team": "ci", "scope": "read"}, "idp:team:a idp/ci read", nil},
		"no rule":                          {"somebody", nil, "", ErrUnmapped},
		"no subject":                       {"", more{"groups": "admins"}, "", tokens.ErrUnknown},
		"a subject that is too long":       {strings.Repeat("x", 256), more{"groups": "admins"}, "", tokens.ErrUnknown},
		"a subject that names another":     {"x%20y z", more{"groups": "admins"}, "idp:x%2520y%20z  read,admin", nil},
		"a claim whose case is another":    {"x", more{"groups": "admins", "SUB": "y"}, "", tokens.ErrUnknown},
		"an issuer whose case is another":  {"x", more{"groups": "admins", "Iss": "y"}, "", tokens.ErrUnknown},
		"an audience of another case":      {"x", more{"groups": "admins", "aud": "other", "AUD": "drowse"}, "", tokens.ErrUnknown},
		"claims that are somewhere else":   {"x", more{"_claim_names": more{"groups": "s"}, "_claim_sources": more{"s": more{"endpoint": w.issuer.URL}}}, "", ErrUnmapped},
		"a subject that is no text at all": {"x", more{"sub": 5, "groups": "admins"}, "", tokens.ErrUnknown},
	} {
		id, err := w.admit(t, w.issuer.Token(tc.subject, tc.claims))
		if !errors.Is(err, tc.err) || err != nil && tc.err == nil {
			t.Errorf("%s: %v, want %v", name, err, tc.err)
			continue
		}
		if err == nil {
			if is := fmt.Sprintf("%s %s %s", id.Name, id.Owner, id.Scopes); is != tc.is {
				t.Errorf("%s: %q, want %q", name, is, tc.is)
			}
			if err := w.Valid(w.none, id); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if errors.Is(err, ErrUnmapped) && !strings.Contains(err.Error(), "idp:"+tc.subject) {
			t.Errorf("%s: %q does not say who may do nothing", name, err)
		}
	}
	if n := w.issuer.Asked.Load(); n != 1 {
		t.Errorf("the issuer was asked %d times", n)
	}
}

func TestToken_that_is_not_whole_valid_and_for_this_server_is_refused(t *testing.T) {
	w := newWorld(t)
	key := vouch.RSAKey(t)
	signs := jose.JSONWebKey{Key: key, KeyID: "rsa", Algorithm: "RS256"}
	w.issuer.Add(signs)
	good := w.issuer.Claims("x", more{"groups": "admins"})
	with := func(other more) string { return w.issuer.Token("x", more2(more{"groups": "admins"}, other)) }
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	keyJSON, err := jose.JSONWebKey{Key: key.Public(), KeyID: "rsa", Algorithm: "RS256"}.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	hs := func(secret []byte) string {
		text := vouch.Unsigned(t, more{"alg": "HS256", "kid": "rsa", "typ": "JWT"}, good)
		m := hmac.New(sha256.New, secret)
		m.Write([]byte(text))
		return text + "." + base64.RawURLEncoding.EncodeToString(m.Sum(nil))
	}
	whole := with(nil)
	head, rest, _ := strings.Cut(whole, ".")
	payload, signature, _ := strings.Cut(rest, ".")
	other := vouch.RSAKey(t)
	foreign := vouch.NewIssuer(t)
	now := time.Now()
	for name, tc := range map[string]struct {
		text string
		err  error
	}{
		"a good one":                              {whole, nil},
		"several audiences":                       {with(more{"aud": []string{"a", "drowse"}}), nil},
		"for access":                              {vouch.Sign(t, signs, more{"typ": "at+jwt"}, good), nil},
		"by PSS with a key for PKCS 1":            {vouch.Sign(t, jose.JSONWebKey{Key: key, KeyID: "rsa", Algorithm: "PS256"}, nil, good), tokens.ErrUnknown},
		"no algorithm":                            {vouch.Unsigned(t, more{"alg": "none", "kid": "rsa"}, good) + ".", tokens.ErrUnknown},
		"no algorithm, in another case":           {vouch.Unsigned(t, more{"alg": "nOnE", "kid": "rsa"}, good) + ".", tokens.ErrUnknown},
		"no algorithm and the signature":          {vouch.Unsigned(t, more{"alg": "none", "kid": "rsa"}, good) + "." + signature, tokens.ErrUnknown},
		"HS256 with the public key as PEM":        {hs(keyPEM), tokens.ErrUnknown},
		"HS256 with the public key as DER":        {hs(der), tokens.ErrUnknown},
		"HS256 with the public key as JSON":       {hs(keyJSON), tokens.ErrUnknown},
		"HS256 with nothing":                      {hs(nil), tokens.ErrUnknown},
		"another key of that id":                  {vouch.Sign(t, jose.JSONWebKey{Key: other, KeyID: "rsa", Algorithm: "RS256"}, nil, good), tokens.ErrUnknown},
		"a key that comes with it":                {vouch.Sign(t, jose.JSONWebKey{Key: other, KeyID: "rsa", Algorithm: "RS256"}, more{"jwk": jose.JSONWebKey{Key: other.Public(), KeyID: "rsa"}}, good), tokens.ErrUnknown},
		"a place of keys that comes with it":      {vouch.Sign(t, jose.JSONWebKey{Key: other, KeyID: "rsa", Algorithm: "RS256"}, more{"jku": foreign.URL + "/keys"}, good), tokens.ErrUnknown},
		"an extension that must be understood":    {vouch.Sign(t, signs, more{"crit": []string{"x"}, "x": 1}, good), tokens.ErrUnknown},
		"an elliptic key for the RSA key's id":    {vouch.Sign(t, jose.JSONWebKey{Key: vouch.ECKey(t), KeyID: "rsa", Algorithm: "ES256"}, nil, good), tokens.ErrUnknown},
		"an unknown key id":                       {vouch.Sign(t, jose.JSONWebKey{Key: key, KeyID: "other", Algorithm: "RS256"}, nil, good), tokens.ErrUnknown},
		"no key id where there are two keys":      {vouch.Sign(t, jose.JSONWebKey{Key: other, Algorithm: "RS256"}, nil, good), tokens.ErrUnknown},
		"a logout token":                          {vouch.Sign(t, signs, more{"typ": "logout+jwt"}, good), tokens.ErrUnknown},
		"an issuer that is not known":             {foreign.Token("x", more{"groups": "admins"}), tokens.ErrUnknown},
		"another issuer's key and this one's URL": {vouch.Sign(t, jose.JSONWebKey{Key: other, KeyID: "1", Algorithm: "RS256"}, nil, good), tokens.ErrUnknown},
		"an issuer with a slash more":             {with(more{"iss": w.issuer.URL + "/"}), tokens.ErrUnknown},
		"no issuer":                               {with(more{"iss": nil}), tokens.ErrUnknown},
		"another audience":                        {with(more{"aud": "other"}), tokens.ErrUnknown},
		"a longer audience":                       {with(more{"aud": "drowse2"}), tokens.ErrUnknown},
		"no audience":                             {with(more{"aud": nil}), tokens.ErrUnknown},
		"expired":                                 {with(more{"exp": now.Add(-time.Second).Unix()}), tokens.ErrExpired},
		"no expiry":                               {with(more{"exp": nil}), tokens.ErrExpired},
		"not yet valid":                           {with(more{"nbf": now.Add(time.Hour).Unix()}), tokens.ErrUnknown},
		"a huge one":                              {with(more{"x": strings.Repeat("x", maxToken)}), tokens.ErrUnknown},
		"another payload":                         {head + "." + payload[:len(payload)-4] + "." + signature, tokens.ErrUnknown},
		"no signature":                            {head + "." + payload + ".", tokens.ErrUnknown},
		"half a signature":                        {head + "." + payload + "." + signature[:20], tokens.ErrUnknown},
		"four parts":                              {whole + ".x", tokens.ErrUnknown},
		"as JSON":                                 {fmt.Sprintf(`{"protected":%q,"payload":%q,"signature":%q}`, head, payload, signature), tokens.ErrUnknown},
		"a space before":                          {" " + whole, tokens.ErrUnknown},
		"nothing":                                 {"", tokens.ErrUnknown},
		"dots":                                    {"eyJ..", tokens.ErrUnknown},
	} {
		if _, err := w.admit(t, tc.text); !errors.Is(err, tc.err) || err != nil && tc.err == nil {
			t.Errorf("%s: %v, want %v", name, err, tc.err)
		}
	}
	if n := foreign.Asked.Load(); n != 0 {
		t.Errorf("an issuer that nobody configured was asked %d times", n)
	}
}

func more2(a, b more) more {
	for name, value := range b {
		a[name] = value
	}
	return a
}

func TestKeys_are_asked_for_when_needed_and_no_stranger_makes_the_server_ask_more(t *testing.T) {
	w := newWorld(t)
	asked := func(want int32, what string) {
		t.Helper()
		w.all.Wait() // also what nobody waits for
		if n := w.issuer.Asked.Load(); n != want {
			t.Errorf("%s: the issuer was asked %d times, want %d", what, n, want)
		}
	}
	admin := more{"groups": "admins"}
	asked(0, "before the first token")
	old := w.issuer.Token("x", admin)
	if _, err := w.admit(t, old); err != nil {
		t.Error(err)
	}
	strange := vouch.ECKey(t)
	for n := range 2000 {
		text := vouch.Sign(t, jose.JSONWebKey{Key: strange, KeyID: fmt.Sprint("kid", n), Algorithm: "ES256"}, nil, w.issuer.Claims("x", admin))
		if _, err := w.admit(t, text); !errors.Is(err, tokens.ErrUnknown) {
			t.Fatal(err)
		}
	}
	asked(1, "2000 unknown keys")
	w.issuer.Add(jose.JSONWebKey{Key: vouch.RSAKey(t), KeyID: "2", Algorithm: "RS256"})
	rotated := w.issuer.Token("x", admin)
	if _, err := w.admit(t, rotated); !errors.Is(err, tokens.ErrUnknown) {
		t.Errorf("a new key just after the last request: %v", err)
	}
	w.later(keysPause)
	for _, text := range []string{rotated, old} {
		if _, err := w.admit(t, text); err != nil {
			t.Errorf("after a rotation: %v", err)
		}
	}
	asked(2, "a rotation")
	w.issuer.Withdraw()
	w.later(keysFresh - time.Second)
	if _, err := w.admit(t, old); err != nil {
		t.Errorf("a key that was withdrawn, before the server knows: %v", err)
	}
	asked(2, "keys that are not old")
	w.later(time.Second)
	if _, err := w.admit(t, old); !errors.Is(err, tokens.ErrUnknown) {
		t.Errorf("a key that was withdrawn: %v", err)
	}
	asked(3, "keys that are old")
	// 1,000 requests at once are one request to the issuer.
	w.later(keysPause)
	var all sync.WaitGroup
	for n := range maxWaiting {
		text := vouch.Sign(t, jose.JSONWebKey{Key: strange, KeyID: fmt.Sprint("kid", n), Algorithm: "ES256"}, nil, w.issuer.Claims("x", admin))
		all.Go(func() {
			if _, _, err := w.Admit(context.Background(), w.none, text); !errors.Is(err, tokens.ErrUnknown) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	asked(4, "many at once")
}

func TestIssuer_that_does_not_answer_as_it_should_keeps_nobody_else_out(t *testing.T) {
	elsewhere := vouch.NewIssuer(t)
	endless := strings.Repeat(`{"kty":"EC","crv":"P-256"},`, 1000)
	for name, answer := range map[string]func(w *world, out http.ResponseWriter, r *http.Request) bool{
		"an error": func(_ *world, out http.ResponseWriter, _ *http.Request) bool {
			out.WriteHeader(http.StatusInternalServerError)
			return true
		},
		"an end in the middle": func(*world, http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) },
		"no JSON": func(_ *world, out http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprint(out, "<html>\x1b[31m")
			return true
		},
		"another issuer's name": func(_ *world, out http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprintf(out, `{"issuer":%q,"jwks_uri":%q}`, elsewhere.URL, elsewhere.URL+"/keys")
			return true
		},
		"keys without TLS": func(w *world, out http.ResponseWriter, r *http.Request) bool {
			fmt.Fprintf(out, `{"issuer":%q,"jwks_uri":%q}`, w.issuer.URL, strings.Replace(w.issuer.URL, "https", "http", 1)+"/keys")
			return r.URL.Path != "/keys"
		},
		"keys in a file": func(w *world, out http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprintf(out, `{"issuer":%q,"jwks_uri":"file:///etc/passwd"}`, w.issuer.URL)
			return true
		},
		"a redirect to another host": func(_ *world, out http.ResponseWriter, r *http.Request) bool {
			http.Redirect(out, r, elsewhere.URL+r.URL.Path, http.StatusFound)
			return true
		},
		"a redirect of the keys to another host": func(_ *world, out http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/keys" {
				return false
			}
			http.Redirect(out, r, elsewhere.URL+"/keys", http.StatusTemporaryRedirect)
			return true
		},
		"a redirect in a circle": func(_ *world, out http.ResponseWriter, r *http.Request) bool {
			http.Redirect(out, r, r.URL.Path+"/", http.StatusFound)
			return true
		},
		"100 MB of keys": func(_ *world, out http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/keys" {
				return false
			}
			fmt.Fprint(out, `{"keys":[`)
			for sent := 0; sent < 100<<20; sent += len(endless) {
				if _, err := fmt.Fprint(out, endless); err != nil {
					break // it has heard enough
				}
				if sent > 16<<20 {
					t.Error("16 MiB of keys were taken")
					break
				}
			}
			return true
		},
		"no keys":                  keysAre(`{"keys":[]}`),
		"keys of another type":     keysAre(`[]`),
		"only a symmetric key":     keysAre(`{"keys":[{"kty":"oct","kid":"1","k":"c2VjcmV0"}]}`),
		"only keys for encryption": keysAre(`{"keys":[{"kty":"EC","crv":"P-256","kid":"1","use":"enc","x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}`),
		"keys without end":         keysAre(`{"keys":[` + strings.Repeat(`{},`, maxKeys) + `{}]}`),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			file := filepath.Join(t.TempDir(), tokens.File)
			known := tokens.Open(file)
			secret, err := known.Create(tokens.Token{Name: "static", Scopes: tokens.All()})
			if err != nil {
				t.Fatal(err)
			}
			w.issuer.Answer(func(out http.ResponseWriter, r *http.Request) bool { return answer(w, out, r) })
			text := w.issuer.Token("x", more{"groups": "admins"})
			for range 3 {
				if _, _, err := w.Admit(t.Context(), known, text); !errors.Is(err, ErrIssuer) || strings.Contains(err.Error(), "html") {
					t.Errorf("a token: %v", err)
				}
			}
			if id, _, err := w.Admit(t.Context(), known, secret); err != nil || id.Name != "static" {
				t.Errorf("a token of the file: %+v, %v", id, err)
			}
			if n := w.issuer.Asked.Load(); n > maxHops+2 {
				t.Errorf("it was asked %d times", n)
			}
			w.issuer.Answer(nil)
			w.later(keysPause)
			if _, _, err := w.Admit(t.Context(), known, text); err != nil {
				t.Errorf("when it answers again: %v", err)
			}
			// From here on, its keys are known for a while.
			w.issuer.Answer(func(out http.ResponseWriter, r *http.Request) bool { return answer(w, out, r) })
			w.later(keysFresh)
			_, _, soon := w.Admit(t.Context(), known, text)
			w.all.Wait()
			w.later(keysLast - keysFresh - time.Minute)
			_, _, late := w.Admit(t.Context(), known, w.issuer.Token("x", more{"groups": "admins", "exp": time.Now().Add(24 * time.Hour).Unix()}))
			if soon != nil || late != nil {
				t.Errorf("while it is down, with a key that is known: %v, %v", soon, late)
			}
			w.all.Wait()
			w.later(time.Minute)
			if _, _, err := w.Admit(t.Context(), known, w.issuer.Token("x", more{"groups": "admins", "exp": time.Now().Add(24 * time.Hour).Unix()})); !errors.Is(err, ErrIssuer) {
				t.Errorf("when it has been down for too long: %v", err)
			}
		})
	}
	if n := elsewhere.Asked.Load(); n != 0 {
		t.Errorf("another host was asked %d times", n)
	}
}

func keysAre(text string) func(*world, http.ResponseWriter, *http.Request) bool {
	return func(_ *world, out http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/keys" {
			fmt.Fprint(out, text)
		}
		return r.URL.Path == "/keys"
	}
}

func TestIssuer_that_is_slow_holds_a_bounded_number_of_requests_while_others_go_on(t *testing.T) {
	w := newWorld(t)
	held := make(chan struct{})
	w.issuer.Answer(func(_ http.ResponseWriter, r *http.Request) bool {
		select {
		case <-held:
		case <-r.Context().Done():
		}
		return false
	})
	text := w.issuer.Token("x", more{"groups": "admins"})
	var all sync.WaitGroup
	for range maxWaiting {
		all.Go(func() {
			if _, _, err := w.Admit(context.Background(), w.none, text); err != nil {
				t.Error(err)
			}
		})
	}
	i := w.Store.issuer(place{w.issuer.URL, w.issuer.CA, ""})
	for waiting := 0; waiting < maxWaiting; time.Sleep(time.Millisecond) {
		i.mu.Lock()
		waiting = i.waiting
		i.mu.Unlock()
	}
	if _, err := w.admit(t, text); !errors.Is(err, ErrIssuer) {
		t.Errorf("one more: %v", err)
	}
	if _, err := w.admit(t, "drowse_x"); !errors.Is(err, tokens.ErrUnknown) {
		t.Errorf("another token: %v", err)
	}
	close(held)
	all.Wait()
	// A client that goes does not wait.
	w.later(keysLast)
	never := make(chan struct{})
	defer close(never)
	w.issuer.Answer(func(_ http.ResponseWriter, r *http.Request) bool {
		select {
		case <-never:
		case <-r.Context().Done():
		}
		return false
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := w.Admit(ctx, w.none, text); !errors.Is(err, ErrIssuer) {
		t.Errorf("a client that has gone: %v", err)
	}
	w.Close() // waits for nothing
}

func TestKeys_of_a_file_or_another_URL_need_no_discovery(t *testing.T) {
	w := newWorld(t)
	keys := filepath.Join(t.TempDir(), "keys.json")
	if err := os.WriteFile(keys, w.issuer.Keys(), 0o600); err != nil {
		t.Fatal(err)
	}
	w.issuer.Answer(func(out http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/other" {
			_, _ = out.Write(w.issuer.Keys())
			return true
		}
		t.Errorf("%s was asked for", r.URL)
		return false
	})
	text := w.issuer.Token("x", more{"groups": "admins"})
	open := filepath.Join(t.TempDir(), "open.json")
	if err := os.WriteFile(open, w.issuer.Keys(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o666); err != nil {
		t.Fatal(err)
	}
	for at, want := range map[string]error{keys: nil, w.issuer.URL + "/other": nil, open: ErrIssuer} {
		w.write(t, "  keys: "+at+rules)
		if _, err := w.admit(t, text); !errors.Is(err, want) || err != nil && want == nil {
			t.Errorf("%s: %v, want %v", at, err, want)
		}
	}
}

func TestFile_that_changes_counts_at_once_and_a_bad_one_lets_nobody_in(t *testing.T) {
	w := newWorld(t)
	token := w.issuer.Token("ci:app", more{"env": "prod"})
	id, err := w.admit(t, token)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, admits, valid error) {
		t.Helper()
		if _, err := w.admit(t, token); !errors.Is(err, admits) || err != nil && admits == nil {
			t.Errorf("%s: %v, want %v", what, err, admits)
		}
		if err := w.Valid(w.none, id); !errors.Is(err, valid) || err != nil && valid == nil {
			t.Errorf("%s: what runs: %v, want %v", what, err, valid)
		}
	}
	check("unchanged", nil, nil)
	w.write(t, strings.Replace(rules, "owner: ci", "owner: cj", 1))
	check("another owner", nil, tokens.ErrUnknown)
	w.write(t, strings.Replace(rules, "read,exec\n", "read\n", 1))
	check("another scope", nil, tokens.ErrUnknown)
	w.write(t, rules)
	check("as it was", nil, nil)
	w.write(t, "  rules: []\n")
	check("no rules", ErrUnmapped, tokens.ErrUnknown)
	w.write(t, "  # of tokens for something else\n"+rules)
	check("a comment", nil, nil)
	text, err := os.ReadFile(w.file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.file, bytes.Replace(text, []byte("audience: drowse"), []byte("audience: other"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	check("another audience", tokens.ErrUnknown, tokens.ErrUnknown)
	if err := os.WriteFile(w.file, []byte("issuers: [\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("no YAML", ErrConfig, ErrConfig)
	w.write(t, rules)
	if err := os.Chmod(w.file, 0o622); err != nil {
		t.Fatal(err)
	}
	check("others may write", ErrConfig, ErrConfig)
	if err := os.Chmod(w.file, 0o644); err != nil {
		t.Fatal(err)
	}
	check("others may read", nil, nil)
	if err := os.WriteFile(w.file, bytes.Repeat([]byte("#"), maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	check("a file that is too large", ErrConfig, ErrConfig)
	if err := os.WriteFile(w.file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check("an empty file", tokens.ErrUnknown, tokens.ErrUnknown)
	if err := os.Remove(w.file); err != nil {
		t.Fatal(err)
	}
	check("no file", ErrConfig, ErrConfig)
}

func TestIdentity_that_expires_ends_what_runs_when_its_rule_says(t *testing.T) {
	w := newWorld(t)
	exact, err := w.admit(t, w.issuer.Token("ci:app", more{"env": "prod"}))
	if err != nil {
		t.Fatal(err)
	}
	longer, err := w.admit(t, w.issuer.Token("team:a", more{"team": "red", "scope": "read"}))
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		after         time.Duration
		exact, longer error
	}{{0, nil, nil}, {time.Hour, tokens.ErrExpired, nil}, {5 * time.Hour, tokens.ErrExpired, nil}, {time.Hour, tokens.ErrExpired, tokens.ErrExpired}} {
		w.later(tc.after)
		if e, l := w.Valid(w.none, exact), w.Valid(w.none, longer); !errors.Is(e, tc.exact) || !errors.Is(l, tc.longer) {
			t.Errorf("after %v more: %v and %v", tc.after, e, l)
		}
	}
}

func TestRate_is_each_identitys_own_and_takes_bounded_memory(t *testing.T) {
	w := newWorld(t)
	w.write(t, `
  rules:
  - match: {sub: "**"}
    owner: o
    scopes: read
    rate: 2
`)
	still := time.Now()
	w.now = func() time.Time { return still }
	spend := func(name string) error {
		id := Identity{Token: tokens.Token{Name: name, Rate: 2, Hash: sha256.Sum256([]byte(name))}}
		_, err := w.spend(&id)
		return err
	}
	one, two := w.issuer.Token("one", nil), w.issuer.Token("two", nil)
	for n, want := range []error{nil, nil, tokens.ErrRate, tokens.ErrRate} {
		id, wait, err := w.Admit(t.Context(), w.none, one)
		if !errors.Is(err, want) || (wait > 0) != (want != nil) || id.Name != "idp:one" {
			t.Errorf("request %d: %v, %v", n, err, wait)
		}
	}
	if _, err := w.admit(t, two); err != nil {
		t.Errorf("another one: %v", err)
	}
	// As many as there may be. One more has no place, and no use of a name is forgotten for it.
	for n := range maxRates - 2 {
		if err := spend(fmt.Sprint("n", n)); err != nil {
			t.Fatal(err)
		}
	}
	if err := spend("more"); !errors.Is(err, tokens.ErrRate) || len(w.rates) != maxRates {
		t.Errorf("%v with %d names", err, len(w.rates))
	}
	if _, err := w.admit(t, one); !errors.Is(err, tokens.ErrRate) {
		t.Errorf("one of too many requests got another: %v", err)
	}
	still = still.Add(2 * time.Second)
	if err := spend("more"); err != nil || len(w.rates) > 1 {
		t.Errorf("%v with %d names", err, len(w.rates))
	}
}

func TestFile_says_what_is_wrong_with_it(t *testing.T) {
	issuer := func(more string) string {
		return "issuers:\n- {name: a, url: https://a.example, audience: x, " + more + "}\n"
	}
	rule := func(text string) string { return issuer("rules: [{" + text + "}]") }
	for name, tc := range map[string]struct{ text, want string }{
		"nothing":               {"", ""},
		"rules":                 {rule("match: {sub: a}, owner: o, scopes: read"), ""},
		"certificates":          {"certificates: {rules: [{match: {cn: a}, all_owners: true, scopes: write}]}", ""},
		"JSON":                  {`{"issuers": [{"name": "a", "url": "https://a.example", "audience": "x"}]}`, ""},
		"a bool":                {rule("match: {email_verified: true}, owner: o, scopes: read"), ""},
		"an unknown field":      {issuer("rule: []"), "field rule not found"},
		"a field twice":         {issuer("name: b"), "already defined"},
		"two documents":         {"issuers: []\n---\nissuers: []\n", "more than one document"},
		"no match":              {rule("owner: o, scopes: read"), "everybody"},
		"an empty match":        {rule("match: {sub: ''}, owner: o, scopes: read"), "pattern"},
		"a null match":          {rule("match: {sub: }, owner: o, scopes: read"), "pattern"},
		"a list for a match":    {rule("match: {sub: [a]}, owner: o, scopes: read"), "pattern"},
		"stars in the middle":   {rule("match: {sub: 'a**b'}, owner: o, scopes: read"), "at its end"},
		"three stars":           {rule("match: {sub: 'a***'}, owner: o, scopes: read"), "at its end"},
		"no owner":              {rule("match: {sub: a}, scopes: read"), "one of owner"},
		"two owners":            {rule("match: {sub: a}, owner: o, all_owners: true, scopes: read"), "one of owner"},
		"an unprintable owner":  {rule(`match: {sub: a}, owner: "a\nb", scopes: read`), "printable"},
		"an owner, admin":       {rule("match: {sub: a}, owner: o, scopes: write"), "scope admin"},
		"a claim, admin":        {rule("match: {sub: a}, owner_from: sub, scopes: admin"), "scope admin"},
		"no scopes":             {rule("match: {sub: a}, owner: o"), "use read, exec"},
		"another scope":         {rule("match: {sub: a}, owner: o, scopes: all"), "use read, exec"},
		"a rate":                {rule("match: {sub: a}, owner: o, scopes: read, rate: -1"), "rate"},
		"streams without unit":  {rule("match: {sub: a}, owner: o, scopes: read, streams: 6"), "cannot unmarshal"},
		"streams without end":   {rule("match: {sub: a}, owner: o, scopes: read, streams: 1000h"), "6h"},
		"plain http":            {"issuers: [{name: a, url: 'http://a.example', audience: x}]", "https"},
		"no audience":           {"issuers: [{name: a, url: 'https://a.example'}]", "audience"},
		"no name":               {"issuers: [{url: 'https://a.example', audience: x}]", "name"},
		"a name with a slash":   {"issuers: [{name: a/b, url: 'https://a.example', audience: x}]", "name"},
		"the certificates' one": {"issuers: [{name: cert, url: 'https://a.example', audience: x}]", "taken"},
		"a name twice":          {"issuers: [{name: a, url: 'https://a.example', audience: x}, {name: a, url: 'https://b.example', audience: x}]", "taken"},
		"a URL twice":           {"issuers: [{name: a, url: 'https://a.example', audience: x}, {name: b, url: 'https://a.example', audience: x}]", "another one"},
		"a relative authority":  {issuer("ca: ca.pem"), "absolute"},
		"keys without TLS":      {issuer("keys: 'http://a.example/keys'"), "https"},
		"certificates, issuer":  {"certificates: {url: 'https://a.example'}", "rules alone"},
	} {
		_, err := parse([]byte(tc.text))
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

func TestClaims_are_found_by_name_or_by_pointer(t *testing.T) {
	c, err := readClaims([]byte(`{"a":"b","n":5,"t":true,"l":["x",1,{}],"kubernetes.io":{"namespace":"ci","a/b":"c"},"/":"root","null":null}`))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"a": "[b]", "n": "[5]", "t": "[true]", "l": "[x 1]", "null": "[]", "none": "[]", "kubernetes.io": "[]",
		"/kubernetes.io/namespace": "[ci]", "/kubernetes.io/a~1b": "[c]", "/a": "[b]", "/a/b": "[]", "/": "[]", "//": "[]", "/kubernetes.io": "[]", "/l/0": "[]",
	} {
		if got := fmt.Sprint(c.values(name)); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

func FuzzKeys(f *testing.F) {
	f.Add([]byte(`{"keys":[{"kty":"EC","crv":"P-256","kid":"1","use":"sig","x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}`))
	f.Add([]byte(`{"keys":[{"kty":"oct","k":"AA"},{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"},{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		keys, err := parseKeys(text)
		if (err == nil) != (len(keys) > 0) || len(keys) > maxKeys {
			t.Fatalf("%d keys, %v", len(keys), err)
		}
		for _, k := range keys {
			if !k.IsPublic() || !usable(k.Key) {
				t.Fatalf("%T", k.Key)
			}
		}
	})
}

func FuzzClaims(f *testing.F) {
	f.Add([]byte(`{"sub":"ci:a","env":"prod","groups":["admins"]}`), "team:**")
	f.Add([]byte(`{"sub":"team:a","team":"x","scope":"read write","kubernetes.io":{"namespace":"a"}}`), "/kubernetes.io/namespace")
	f.Fuzz(func(t *testing.T, text []byte, word string) {
		c, err := readClaims(text)
		if err != nil {
			return
		}
		s := source{Name: "idp", Rules: []rule{{OwnerFrom: word, ScopesFrom: word, scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec}}, {Owner: "o", scopes: tokens.Scopes{tokens.ScopeRead}}}}
		if p, err := newPattern(word); err == nil {
			s.Rules[0].Match = map[string]pattern{"sub": p}
			_ = p.matches(string(text))
		}
		_, owner, scopes, err := s.grant(c)
		if err != nil {
			return
		}
		if owner == "o" && len(scopes) == 1 {
			return
		}
		as := tokens.Token{Name: "x", Owner: owner, Scopes: scopes}
		if as.Check() != nil || !strings.HasPrefix(owner, "idp/") || scopes.Has(tokens.ScopeAdmin) || len(scopes) > 2 {
			t.Fatalf("%q gets %q and %s", text, owner, scopes)
		}
	})
}

func FuzzToken(f *testing.F) {
	f.Add("eyJhbGciOiJFUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJodHRwczovL2EuZXhhbXBsZSJ9.AAAA")
	f.Add("eyJ..")
	file := filepath.Join(f.TempDir(), "identities.yaml")
	keys := filepath.Join(f.TempDir(), "keys.json")
	public, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: vouch.ECKey(f).Public(), KeyID: "1"}}})
	if err != nil {
		f.Fatal(err)
	}
	text := "issuers: [{name: a, url: 'https://a.example', audience: x, keys: " + keys + ", rules: [{match: {sub: '**'}, all_owners: true, scopes: write}]}]"
	for path, text := range map[string]string{keys: string(public), file: text} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			f.Fatal(err)
		}
	}
	known, err := Open(Options{File: file})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(known.Close)
	none := tokens.Open("")
	f.Fuzz(func(t *testing.T, text string) {
		if id, _, err := known.Admit(t.Context(), none, text); !errors.Is(err, tokens.ErrUnknown) && !errors.Is(err, tokens.ErrExpired) {
			t.Fatalf("%q is %+v, %v", text, id, err)
		}
	})
}

func TestFile_of_the_guide_is_one(t *testing.T) {
	text, err := os.ReadFile("../../../docs/guides/api.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ = bytes.Cut(text, []byte("```yaml\n"))
	text, _, ok := bytes.Cut(text, []byte("```"))
	if c, err := parse(text); !ok || err != nil || len(c.Issuers) != 2 || c.Certificates == nil {
		t.Errorf("%v: %s", err, text)
	}
}
