package proxy

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

func TestParseTarget(t *testing.T) {
	for _, c := range []struct {
		in    string
		deflt uint16
		want  string // empty means an error
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
		// An accepted target has one form, and that form parses to the same target.
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

// pieces returns what a mask passes on for each piece of a text, and then the rest.
func pieces(secrets []string, chunks ...string) (given []string) {
	m := newMask(secrets)
	for _, c := range chunks {
		given = append(given, string(m.take([]byte(c))))
	}
	return append(given, string(m.rest()))
}

func TestMask(t *testing.T) {
	const secret, longer, shorter = "abcabcabcabcabcabd", "abcabcabcabcabcabd, and more", "fifteen letters"
	for name, c := range map[string]struct {
		secrets []string
		text    string
		want    string
	}{
		"nothing":                  {[]string{secret}, "", ""},
		"something else":           {[]string{secret}, "nothing here\n", "nothing here\n"},
		"the secret alone":         {[]string{secret}, secret, stars(18)},
		"within":                   {[]string{secret}, "x" + secret + "y", "x" + stars(18) + "y"},
		"after its own beginning":  {[]string{secret}, "abcabc" + secret, "abcabc" + stars(18)},
		"twice":                    {[]string{secret}, secret + secret + "!", stars(36) + "!"},
		"all but its end":          {[]string{secret}, secret[:17], secret[:17]},
		"a line break in it":       {[]string{secret}, secret[:9] + "\n" + secret[9:], secret[:9] + "\n" + secret[9:]},
		"over itself":              {[]string{strings.Repeat("a", 16)}, strings.Repeat("a", 20) + "b", stars(20) + "b"},
		"one that begins another":  {[]string{secret, longer}, "<" + longer + ">" + secret, "<" + stars(len(longer)) + ">" + stars(18)},
		"one that ends another":    {[]string{"0123456789" + secret, secret}, "0123456789" + secret, stars(28)},
		"one that is short":        {[]string{shorter, secret}, shorter + secret, shorter + stars(18)},
		"the longest":              {[]string{strings.Repeat("k", MaxSecret)}, strings.Repeat("k", MaxSecret), stars(MaxSecret)},
		"the longest but one byte": {[]string{strings.Repeat("k", MaxSecret)}, strings.Repeat("k", MaxSecret-1) + "l", strings.Repeat("k", MaxSecret-1) + "l"},
	} {
		for _, step := range []int{1, 2, 7, 5000} {
			var chunks []string
			for c := range slices.Chunk([]byte(c.text), step) {
				chunks = append(chunks, string(c))
			}
			if got := strings.Join(pieces(c.secrets, chunks...), ""); got != c.want {
				t.Errorf("%s, %d at a time: %q, want %q", name, step, got, c.want)
			}
		}
	}
	if newMask(nil) != nil {
		t.Error("there is a mask for nothing")
	}
}

func TestMask_holds_back_what_no_line_has_ended_and_no_more_than_its_bound(t *testing.T) {
	for _, secret := range []string{apiKey, "a short one", strings.Repeat("x", MaxSecret)} {
		got := pieces([]string{secret}, "a line\n", "and an", "other\r\n\r\n", "data: \u00fc sk", strings.Repeat("s", 2*maxHeld), "k")
		want := []string{"a line\n", "", "and another\r\n\r\n", "data: \u00fc", " sk" + strings.Repeat("s", maxHeld), "s", strings.Repeat("s", maxHeld-1) + "k"}
		if !slices.Equal(got, want) {
			t.Errorf("got %q,\nwant %q", got, want)
		}
	}
}

func FuzzMask(f *testing.F) {
	f.Add("0123456789abcdef", "0123456789abcdeg", []byte("0123456789abcdef0123456789abcde\n0123456789abcde"), uint8(1))
	f.Add("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbb", []byte("aaaaaaaaaaaaaaaaaaaaaabbbbbbbbb"), uint8(3))
	f.Add("sk-abcabcabcabcabd", "sk-abcabcabcabcabdsk-", []byte("data: sk-abcabcabcabcabcabd\n\ndata: sk-abcabcabcabcabd"), uint8(16))
	f.Fuzz(func(t *testing.T, one, two string, text []byte, step uint8) {
		for _, s := range []string{one, two} {
			if CheckSecret([]byte(s)) != nil || len(s) < minMasked || len(text) > 3*MaxSecret {
				return
			}
		}
		var chunks []string
		for c := range slices.Chunk(text, int(step)+1+len(text)/256) { // few chunks, so that it does not take long
			chunks = append(chunks, string(c))
		}
		// The masks pass on the same bytes at the same times, except for asterisks in place of a whole secret.
		a, b, both := pieces([]string{one}, chunks...), pieces([]string{two}, chunks...), pieces([]string{one, two}, chunks...)
		hidden := func(secret string) []bool {
			is := make([]bool, len(text))
			for i := range text {
				if bytes.HasPrefix(text[i:], []byte(secret)) {
					for j := range len(secret) {
						is[i+j] = true
					}
				}
			}
			return is
		}
		isOne, isTwo := hidden(one), hidden(two)
		at, came, held := 0, 0, 0
		for k := range a {
			if len(a[k]) != len(b[k]) || len(a[k]) != len(both[k]) {
				t.Fatalf("piece %d of %q: %q for %q, %q for %q, %q for both", k, text, a[k], one, b[k], two, both[k])
			}
			for i := range len(a[k]) {
				want := func(is bool) byte {
					if is {
						return '*'
					}
					return text[at]
				}
				if a[k][i] != want(isOne[at]) || b[k][i] != want(isTwo[at]) || both[k][i] != want(isOne[at] || isTwo[at]) {
					t.Fatalf("byte %d of %q: %q for %q, %q for %q, %q for both", at, text, a[k][i], one, b[k][i], two, both[k][i])
				}
				at++
			}
			if k < len(chunks) {
				came += len(chunks[k])
			}
			if held = came - at; held > maxHeld || held < 0 {
				t.Fatalf("%d bytes are held back", held)
			}
		}
		if held != 0 {
			t.Fatalf("%d bytes of %d are missing", held, len(text))
		}
	})
}

// A client gets a line without an end after a while, and no part of a secret before all of the secret could have
// come.
func TestAnswerer_gives_on_what_is_held_back_when_nothing_comes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := httptest.NewRecorder()
		a := &answerer{ResponseWriter: rec, x: &exchange{length: -1, mask: newMask([]string{apiKey})}, patience: HeldTimeout}
		write := func(text string) {
			t.Helper()
			if n, err := a.Write([]byte(text)); n != len(text) || err != nil {
				t.Errorf("%q: %d, %v", text, n, err)
			}
		}
		got := func(want string) {
			t.Helper()
			synctest.Wait()
			if text := rec.Body.String(); text != want {
				t.Errorf("%v: %q was given on, want %q", time.Now(), text, want)
			}
		}
		write("one\ntwo " + apiKey[:10])
		got("one\n")
		time.Sleep(HeldTimeout - 1)
		got("one\n")
		write(apiKey[10:20]) // and the wait starts again
		time.Sleep(HeldTimeout - 1)
		got("one\n")
		write(apiKey[20:])
		time.Sleep(HeldTimeout)
		got("one\ntwo " + stars(len(apiKey)))
		write(".")
		a.giveRest()
		got("one\ntwo " + stars(len(apiKey)) + ".")
		time.Sleep(2 * HeldTimeout)
		write("no more of this")
		a.end()
		time.Sleep(2 * HeldTimeout)
		got("one\ntwo " + stars(len(apiKey)) + ".")
	})
}

// TestAttack_time_of_a_search_does_not_tell_a_right_guess has a text of many beginnings of a secret. A search that
// compares bytes takes longer for it.
func TestAttack_time_of_a_search_does_not_tell_a_right_guess(t *testing.T) {
	const secret = "sk-the-real-key-0123456789abcdef"
	for _, k := range []int{1, 2, 8, 31} {
		text := []byte(strings.Repeat(secret[:k], 32<<10/k))
		var times [2][]float64
		for range 400 {
			for _, which := range rand.Perm(2) {
				// The wrong secret differs in the first byte.
				m := newMask([]string{[]string{secret, "x" + secret[1:]}[which]})
				begin := time.Now()
				m.take(text)
				times[which] = append(times[which], float64(time.Since(begin)))
			}
		}
		if z := rankSum(times[0], times[1]); math.Abs(z) > 6 {
			t.Errorf("%d bytes of a guess: right and wrong ones differ in time by %.1f standard deviations", k, z)
		}
	}
}

func TestMaskHeader(t *testing.T) {
	const secret = "the-secret-of-them-all"
	h := http.Header{"X-A": {secret + "!", "no"}, "X-The-Secret-Of-Them-All-Name": {"x"}, "Location": {"https://a/?k=" + secret + "!"}}
	maskHeader(h, []string{secret})
	if h.Get("X-A") != stars(22)+"!" || h["X-A"][1] != "no" || h.Get("Location") != "https://a/?k="+stars(22)+"!" || len(h) != 2 {
		t.Errorf("%v", h)
	}
}

func identity(t testing.TB, key byte, lineage string) *Identity {
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
	// A client that trusts the first identity accepts a certificate of the second. A wake needs this.
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

func stars(n int) string { return strings.Repeat("*", n) }
