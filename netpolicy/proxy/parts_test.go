package proxy

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

func TestParseTarget(t *testing.T) {
	for _, c := range []struct {
		in    string
		deflt uint16
		want  string // empty is an error
	}{
		{"example.com:443", 0, "example.com:443"},
		{"Example.COM", 80, "example.com:80"},
		{"93.184.216.34:80", 0, "93.184.216.34:80"},
		{"xn--bcher-kva.example", 443, "xn--bcher-kva.example:443"},
		{"a_b.example", 443, "a_b.example:443"},
		{"4u.example", 443, "4u.example:443"},
		{"0xfeed.example", 443, "0xfeed.example:443"},

		{"", 80, ""}, {"example.com", 0, ""}, {":80", 0, ""}, {"example.com:", 80, ""},
		{"example.com:0", 0, ""}, {"example.com:65536", 0, ""}, {"example.com:080", 0, ""}, {"example.com:+80", 0, ""}, {"example.com:80:80", 0, ""},
		{"user@example.com:80", 0, ""}, {"example.com/x:80", 0, ""}, {"exam ple.com", 80, ""}, {"example.com\x00", 80, ""}, {"ex%61mple.com", 80, ""},
		{"example.com.", 80, ""}, {".example.com", 80, ""}, {"a..b", 80, ""}, {"-a.example", 80, ""}, {"bücher.example", 80, ""},
		{"127.1", 80, ""}, {"2130706433", 80, ""}, {"0x7f000001", 80, ""}, {"0177.0.0.1", 80, ""}, {"127.0.0.01", 80, ""}, {"1.2.3.4.5", 80, ""}, {"127.0.0.0x1", 80, ""},
		{"[::1]:80", 0, ""}, {"::1", 80, ""}, {"[::ffff:127.0.0.1]:80", 0, ""}, {"::ffff:127.0.0.1", 80, ""}, {"fe80::1%lo", 80, ""},
		{strings.Repeat("a", 64) + ".example", 80, ""}, {strings.Repeat("a.", 127) + "example", 80, ""},
	} {
		got, err := ParseTarget(c.in, c.deflt)
		if c.want == "" {
			if !errors.Is(err, ErrTarget) {
				t.Errorf("%q: %v, %v, want ErrTarget", c.in, got, err)
			}
			continue
		}
		if err != nil || got.String() != c.want {
			t.Errorf("%q: %v, %v, want %s", c.in, got, err, c.want)
		}
	}
}

func FuzzParseTarget(f *testing.F) {
	for _, s := range []string{"example.com:443", "127.0.0.1:80", "[::1]:80", "a..b:1", "0x7f.1:80", "2130706433", "a@b:80", "EXAMPLE.com"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseTarget(s, 443)
		if err != nil {
			if !errors.Is(err, ErrTarget) {
				t.Fatal(err)
			}
			return
		}
		// What was understood has one form, and is understood in the same way again.
		again, err := ParseTarget(got.String(), 0)
		if err != nil || again != got {
			t.Fatalf("%q is %v, and that is %v, %v", s, got, again, err)
		}
		if got.Address.IsValid() != (func() bool { _, err := netip.ParseAddr(got.Host); return err == nil })() {
			t.Fatalf("%q: %+v", s, got)
		}
		if strings.ContainsAny(got.Host, ":/@%[] \t\r\n\x00") || got.Host != strings.ToLower(got.Host) {
			t.Fatalf("%q has the host %q", s, got.Host)
		}
	})
}

func masked(t *testing.T, secret string, chunks ...string) string {
	t.Helper()
	var parts []io.Reader
	for _, c := range chunks {
		parts = append(parts, strings.NewReader(c))
	}
	out, err := io.ReadAll(newMask(io.NopCloser(io.MultiReader(parts...)), secret))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestMask(t *testing.T) {
	const secret = "abcabcabd"
	for _, chunks := range [][]string{
		{""}, {"nothing"}, {"abcabcabd"}, {"xabcabcabdy"}, {"abcabc", "abd"}, {"abcabcabcabd"}, {"abcabcabcabcabd!"}, {"abcabcab"}, {"abcabca", "bcabcabd"},
		{"abcabcabdabcabcabd"}, {"a", "b", "c", "a", "b", "c", "a", "b", "d"}, {"abcabcabdabcabcab"},
	} {
		all := strings.Join(chunks, "")
		if got, want := masked(t, secret, chunks...), strings.ReplaceAll(all, secret, stars(len(secret))); got != want {
			t.Errorf("%q: %q, want %q", chunks, got, want)
		}
	}
	// What there is comes at once, and with the error that ends it.
	m := newMask(io.NopCloser(io.MultiReader(strings.NewReader("datum abc"), iotest.ErrReader(io.ErrUnexpectedEOF))), secret)
	b := make([]byte, 64)
	if n, err := m.Read(b); err != nil || string(b[:n]) != "datum " {
		t.Errorf("%q, %v", b[:n], err)
	}
	if rest, err := io.ReadAll(m); !errors.Is(err, io.ErrUnexpectedEOF) || string(rest) != "abc" {
		t.Errorf("%q, %v", rest, err)
	}
}

func FuzzMask(f *testing.F) {
	f.Add("aab", []byte("aaab"), uint8(1))
	f.Add("abcabcabd", []byte("abcabcabcabd"), uint8(3))
	f.Fuzz(func(t *testing.T, secret string, text []byte, step uint8) {
		if secret == "" {
			return
		}
		var chunks []string
		for c := range slices.Chunk(text, int(step)+1) {
			chunks = append(chunks, string(c))
		}
		if got, want := masked(t, secret, chunks...), strings.ReplaceAll(string(text), secret, stars(len(secret))); got != want {
			t.Fatalf("%q in %q: %q, want %q", secret, text, got, want)
		}
	})
}

func TestMaskHeader(t *testing.T) {
	h := http.Header{"X-A": {"the-secret!", "no"}, "X-The-Secret-Name": {"x"}, "Location": {"https://a/?k=the-secret!"}}
	maskHeader(h, []string{"the-secret"})
	if h.Get("X-A") != "**********!" || h["X-A"][1] != "no" || h.Get("Location") != "https://a/?k=**********!" || len(h) != 2 {
		t.Errorf("%v", h)
	}
}

func identity(t *testing.T, key byte, lineage string) *Identity {
	t.Helper()
	id, err := NewIdentity(bytes.Repeat([]byte{key}, KeyBytes), lineage)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestIdentity_is_the_same_for_a_lineage_and_differs_between_them(t *testing.T) {
	holder := func(id *Identity) string {
		p, err := id.Placeholder("KEY")
		if err != nil || !strings.HasPrefix(p, PlaceholderPrefix) || len(p) != len(PlaceholderPrefix)+32 {
			t.Fatalf("%q, %v", p, err)
		}
		return p
	}
	a, again := identity(t, 1, "a"), identity(t, 1, "a")
	if a.Fingerprint() != again.Fingerprint() || holder(a) != holder(again) {
		t.Error("the same lineage has another identity")
	}
	for _, other := range []*Identity{identity(t, 1, "b"), identity(t, 2, "a")} {
		if a.Fingerprint() == other.Fingerprint() || holder(a) == holder(other) {
			t.Error("another lineage, or another host, has the same identity")
		}
	}
	if p, _ := a.Placeholder("OTHER"); p == holder(a) {
		t.Error("two secrets have one placeholder")
	}
	// A certificate of the one made later is believed by who trusts the first, which is what a wake needs.
	block, _ := pem.Decode(a.Root())
	root, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(root)
	now := time.Now()
	c, err := again.certificate("api.example.com", now)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Leaf.Verify(x509.VerifyOptions{DNSName: "api.example.com", Roots: pool}); err != nil {
		t.Error(err)
	}
	if _, err := c.Leaf.Verify(x509.VerifyOptions{DNSName: "other.example.com", Roots: pool}); err == nil {
		t.Error("it is for another host as well")
	}
	stranger, err := identity(t, 1, "b").certificate("api.example.com", now)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stranger.Leaf.Verify(x509.VerifyOptions{DNSName: "api.example.com", Roots: pool}); err == nil {
		t.Error("a certificate of another lineage is believed")
	}
	if kept, _ := again.certificate("api.example.com", now.Add(time.Hour)); kept != c {
		t.Error("a certificate that is good is made anew")
	}
	if fresh, _ := again.certificate("api.example.com", now.Add(leafLife)); fresh == c {
		t.Error("a certificate that has expired is used")
	}
	for _, bad := range [][]byte{nil, make([]byte, 31)} {
		if _, err := NewIdentity(bad, "a"); err == nil {
			t.Errorf("a key of %d bytes is taken", len(bad))
		}
	}
}

func TestCheckSecret(t *testing.T) {
	for text, good := range map[string]bool{
		"sk-1234567890": true, "two words": true, "12345678": true, strings.Repeat("x", MaxSecret): true,
		"": false, "1234567": false, strings.Repeat("x", MaxSecret+1): false, "with\nbreak": false, "with\r\nX: y": false, "zero\x00zero": false,
		" begins1": false, "ends1234 ": false, "über-geheim": false, "tab\ttab\tab": false,
	} {
		if err := CheckSecret([]byte(text)); (err == nil) != good || err != nil && !errors.Is(err, ErrSecret) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
}

func TestEnvironment(t *testing.T) {
	p, err := netpolicy.Parse([]byte(policyText))
	if err != nil {
		t.Fatal(err)
	}
	id := identity(t, 1, "a")
	env, err := Environment(p, id, netip.MustParsePrefix("10.200.0.0/16"))
	if err != nil {
		t.Fatal(err)
	}
	holder, _ := id.Placeholder("API_KEY")
	for _, want := range []string{
		"http_proxy=http://172.31.255.1:3128", "HTTPS_PROXY=http://172.31.255.1:3128", "no_proxy=localhost,127.0.0.1,::1,172.31.255.1,10.200.0.0/16",
		"SSL_CERT_FILE=" + TrustFile, "NODE_EXTRA_CA_CERTS=" + AuthorityFile, "GIT_SSL_CAINFO=" + TrustFile, "API_KEY=" + holder,
	} {
		if !slices.Contains(env, want) {
			t.Errorf("no %s in %q", want, env)
		}
	}
	p.Proxy.Enabled = false
	if env, err := Environment(p, id); err != nil || env != nil {
		t.Errorf("without a proxy: %q, %v", env, err)
	}
}
