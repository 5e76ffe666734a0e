package tlsname

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// Child is what this binary runs instead of tests, as a process that a test kills.
var Child func() error

// ChildEnv makes the binary run Child, and is the directory of the pins.
const ChildEnv = "DROWSE_TEST_TLSNAME_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(ChildEnv) != "" {
		if err := Child(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// goHello returns the first message of crypto/tls.
func goHello(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	a, b := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = tls.Client(a, cfg).Handshake()
	}()
	head := make([]byte, recordHeader)
	if _, err := io.ReadFull(b, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, binary.BigEndian.Uint16(head[3:]))
	if _, err := io.ReadFull(b, body); err != nil {
		t.Fatal(err)
	}
	a.Close()
	b.Close()
	<-done
	return append(head, body...)
}

type ext struct {
	typ  uint16
	body []byte
}

func u16(n int) []byte { return []byte{byte(n >> 8), byte(n)} }

// sni returns a server_name extension with entries of type 0.
func sni(names ...string) ext {
	var list []byte
	for _, n := range names {
		list = append(append(append(list, 0), u16(len(n))...), n...)
	}
	return ext{extServerName, append(u16(len(list)), list...)}
}

// message returns a ClientHello with these extensions. nil leaves out even their list.
func message(exts []ext) []byte {
	m := append([]byte{3, 3}, bytes.Repeat([]byte{7}, 32)...)
	m = append(m, 4, 1, 2, 3, 4)                // session id
	m = append(m, 0, 4, 0x13, 0x01, 0x2a, 0x2a) // suites, GREASE among them
	m = append(m, 1, 0)                         // compression
	if exts != nil {
		var all []byte
		for _, e := range exts {
			all = append(append(append(all, u16(int(e.typ))...), u16(len(e.body))...), e.body...)
		}
		m = append(append(m, u16(len(all))...), all...)
	}
	return append([]byte{clientHello, byte(len(m) >> 16), byte(len(m) >> 8), byte(len(m))}, m...)
}

// records splits a message into records of at most this many bytes.
func records(msg []byte, each int) (out []byte) {
	for part := range slices.Chunk(msg, each) {
		out = append(append(append(out, typeHandshake, 3, 1), u16(len(part))...), part...)
	}
	return out
}

func helloFor(exts ...ext) []byte { return records(message(exts), maxRecord) }

func TestHello_of_crypto_tls_has_its_name(t *testing.T) {
	for _, cfg := range []*tls.Config{
		{ServerName: "www.example.com"},
		{ServerName: "WWW.Example.COM"},
		{ServerName: "www.example.com", MaxVersion: tls.VersionTLS12},
		{ServerName: "www.example.com", NextProtos: []string{"h2", "http/1.1"}, CurvePreferences: []tls.CurveID{tls.X25519}},
	} {
		cfg.InsecureSkipVerify = true
		b := goHello(t, cfg)
		name, n, err := Hello(b)
		if err != nil || name != "www.example.com" || n != len(b) {
			t.Errorf("%q, %d of %d bytes, %v", name, n, len(b), err)
		}
	}
	if _, _, err := Hello(goHello(t, &tls.Config{InsecureSkipVerify: true})); !errors.Is(err, ErrNoName) {
		t.Errorf("without a name: %v", err)
	}
}

func TestHello_split_anywhere_is_the_same(t *testing.T) {
	msg := message([]ext{{0x1a1a, nil}, sni("a.example.com"), {0x0033, bytes.Repeat([]byte{1}, 1216)}})
	for _, each := range []int{1, 2, 3, 4, 5, 47, 48, 100, 1000, len(msg)} {
		b := append(records(msg, each), "what follows"...)
		want := len(b) - len("what follows")
		for cut := 0; cut < want; cut++ {
			_, need, err := Hello(b[:cut])
			if !errors.Is(err, ErrShort) || need <= cut || need > want {
				t.Fatalf("records of %d: %d of %d bytes: %v, needs %d", each, cut, want, err, need)
			}
		}
		name, n, err := Hello(b)
		if err != nil || name != "a.example.com" || n != want {
			t.Fatalf("records of %d: %q, %d, %v", each, name, n, err)
		}
	}
}

func TestHello_that_is_not_as_the_RFCs_have_it_is_refused(t *testing.T) {
	good := helloFor(sni("example.com"))
	edit := func(f func(b []byte)) []byte {
		b := bytes.Clone(good)
		f(b)
		return b
	}
	at := func(i int, v byte) []byte { return edit(func(b []byte) { b[i] = v }) }
	long := strings.Repeat("a.", 127)
	for name, c := range map[string]struct {
		b    []byte
		want error
	}{
		"HTTP":                        {[]byte("GET / HTTP/1.1\r\n"), ErrHello},
		"SSH":                         {[]byte("SSH-2.0-x\r\n"), ErrHello},
		"SSL 2":                       {append([]byte{0x80, 0x2e, 1, 3, 1}, make([]byte, 44)...), ErrHello},
		"record of another type":      {at(0, 23), ErrHello},
		"record of SSL 3":             {at(2, 0), ErrHello},
		"record of version 3.4":       {at(2, 4), ErrHello},
		"record of version 2":         {at(1, 2), ErrHello},
		"empty record":                {[]byte{22, 3, 1, 0, 0}, ErrHello},
		"record too long":             {[]byte{22, 3, 1, 0x40, 1}, ErrHello},
		"a ServerHello":               {at(5, 2), ErrHello},
		"message shorter than said":   {at(8, good[8]+1), ErrShort},
		"message longer than said":    {at(8, good[8]-1), ErrHello},
		"message of 16 MiB":           {at(6, 255), ErrHello},
		"message of 16 KiB":           {edit(func(b []byte) { b[7] = 0x40 }), ErrHello},
		"version 3.4":                 {at(10, 4), ErrHello},
		"version 3.0":                 {at(10, 0), ErrHello},
		"session id of 33 bytes":      {at(43, 33), ErrHello},
		"odd cipher suites":           {at(49, 3), ErrHello},
		"no cipher suites":            {at(49, 0), ErrHello},
		"no extensions":               {records(message(nil), maxRecord), ErrNoName},
		"empty extensions":            {helloFor(), ErrNoName},
		"no name":                     {helloFor(ext{0x002b, []byte{2, 3, 4}}), ErrNoName},
		"two name extensions":         {helloFor(sni("example.com"), sni("example.com")), ErrHello},
		"another extension twice":     {helloFor(sni("example.com"), ext{0x1a1a, nil}, ext{0x1a1a, nil}), ErrHello},
		"two names":                   {helloFor(sni("example.com", "example.org")), ErrHello},
		"empty list of names":         {helloFor(ext{extServerName, []byte{0, 0}}), ErrHello},
		"empty name extension":        {helloFor(ext{extServerName, nil}), ErrHello},
		"empty name":                  {helloFor(sni("")), ErrHello},
		"name of another type":        {helloFor(ext{extServerName, []byte{0, 4, 1, 0, 1, 'a'}}), ErrHello},
		"bytes behind the list":       {helloFor(ext{extServerName, []byte{0, 4, 0, 0, 1, 'a', 0}}), ErrHello},
		"bytes behind the name":       {helloFor(ext{extServerName, []byte{0, 5, 0, 0, 1, 'a', 0}}), ErrHello},
		"name longer than its list":   {helloFor(ext{extServerName, []byte{0, 4, 0, 0, 9, 'a'}}), ErrHello},
		"extension beyond the end":    {helloFor(ext{0x1a1a, nil}, ext{extServerName, []byte{0, 4, 0, 0, 1}}), ErrHello},
		"IPv4 address":                {helloFor(sni("192.0.2.1")), ErrHello},
		"IPv4 address, short":         {helloFor(sni("127.1")), ErrHello},
		"a number":                    {helloFor(sni("2130706433")), ErrHello},
		"IPv6 address":                {helloFor(sni("2001:db8::1")), ErrHello},
		"final dot":                   {helloFor(sni("example.com.")), ErrHello},
		"two dots":                    {helloFor(sni("example..com")), ErrHello},
		"zero byte":                   {helloFor(sni("example.com\x00.evil.org")), ErrHello},
		"space":                       {helloFor(sni("example.com ")), ErrHello},
		"the other capital K":         {helloFor(sni("\u212Aelvin.example")), ErrHello},
		"underscore":                  {helloFor(sni("a_b.example.com")), nil},
		"hyphen at the end":           {helloFor(sni("a-.example.com")), ErrHello},
		"name of 254 bytes":           {helloFor(sni(long)), ErrHello},
		"label of 64 bytes":           {helloFor(sni(strings.Repeat("a", 64) + ".com")), ErrHello},
		"encrypted hello":             {helloFor(sni("example.com"), ext{extECH, make([]byte, 200)}), ErrECH},
		"encrypted hello, no name":    {helloFor(ext{extECH, []byte{1}}), ErrECH},
		"encrypted name of a draft":   {helloFor(ext{extESNI, nil}, sni("example.com")), ErrECH},
		"encrypted hello, bad name":   {helloFor(ext{extECH, nil}, sni("-")), ErrHello},
		"hello of 16 KiB and more":    {records(message([]ext{sni("example.com"), {21, make([]byte, 17000)}}), 1000), ErrHello},
		"another message behind it":   {records(append(message([]ext{sni("a.example")}), message([]ext{sni("b.example")})...), maxRecord), ErrHello},
		"another message, own record": {append(helloFor(sni("a.example")), helloFor(sni("b.example"))...), nil},
	} {
		if _, _, err := Hello(c.b); !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// For all single damaged bytes, a server of crypto/tls sees the name that Hello finds.
func TestHello_damaged_has_the_name_that_a_server_sees_or_none(t *testing.T) {
	good := goHello(t, &tls.Config{ServerName: "www.example.com", InsecureSkipVerify: true, CurvePreferences: []tls.CurveID{tls.X25519}})
	passed := 0
	for i := range good {
		for _, x := range []byte{1, 0x20, 0x80, 0xff} {
			b := bytes.Clone(good)
			b[i] ^= x
			name, n, err := Hello(b)
			if err != nil {
				continue
			}
			passed++
			if seen, ok := seenByServer(b[:n]); ok && !strings.EqualFold(seen, name) {
				t.Errorf("byte %d ^ %#x: the server sees %q, Hello %q", i, x, seen, name)
			}
		}
	}
	if passed == 0 {
		t.Error("all were refused")
	}
}

// seenByServer returns the name that crypto/tls takes from a hello, if it accepts the hello.
func seenByServer(b []byte) (name string, ok bool) {
	a, c := net.Pipe()
	srv := tls.Server(a, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		name, ok = h.ServerName, true
		return nil, errors.New("enough")
	}})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Handshake()
		a.Close()
	}()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	_, _ = c.Write(b)
	// Nothing more comes, so a server that waits for more gives up.
	c.Close()
	<-done
	return name, ok
}

func TestAsksAgain(t *testing.T) {
	retry := append([]byte{22, 3, 3, 0, 100, 2, 0, 0, 96, 3, 3}, retryRandom[:]...)
	for i := range retry {
		if again, known := asksAgain(retry[:i]); again || known {
			t.Fatalf("after %d bytes: %v, %v", i, again, known)
		}
	}
	if again, known := asksAgain(retry); !again || !known {
		t.Errorf("a whole one: %v, %v", again, known)
	}
	for name, b := range map[string][]byte{
		"alert":               {21},
		"text":                []byte("HTTP/1.1 400 Bad Request"),
		"another handshake":   {22, 3, 3, 0, 100, 11},
		"another ServerHello": append(bytes.Clone(retry[:11]), make([]byte, 32)...),
	} {
		if again, known := asksAgain(b); again || !known {
			t.Errorf("%s: %v, %v", name, again, known)
		}
	}
}

// For any bytes: a part of a hello is not a hello, and its records do not change its name.
func FuzzHello(f *testing.F) {
	f.Add(helloFor(sni("example.com")))
	f.Add(records(message([]ext{{0x0a0a, nil}, sni("a.example.com"), {0x0033, make([]byte, 40)}}), 7))
	f.Add(helloFor(sni("example.com"), ext{extECH, []byte{0}}))
	f.Add(records(message(nil), 1))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		name, n, err := Hello(b)
		if errors.Is(err, ErrShort) {
			if n <= len(b) || n > MaxHello {
				t.Fatalf("%d bytes, and %d are needed", len(b), n)
			}
			return
		}
		if err != nil {
			return
		}
		if n > len(b) || n > MaxHello {
			t.Fatalf("a hello of %d bytes of %d", n, len(b))
		}
		if again, ok := normal(name); !ok || again != name {
			t.Fatalf("the name %q", name)
		}
		for _, cut := range []int{0, 1, n / 2, n - 1} {
			if _, need, err := Hello(b[:cut]); !errors.Is(err, ErrShort) || need <= cut || need > n {
				t.Fatalf("%d of %d bytes: %v, needs %d", cut, n, err, need)
			}
		}
		msg, _, err := handshake(b)
		if err != nil {
			t.Fatal(err)
		}
		whole := append([]byte{clientHello, byte(len(msg) >> 16), byte(len(msg) >> 8), byte(len(msg))}, msg...)
		for _, each := range []int{16, 1000, maxRecord} {
			r := records(whole, each)
			if len(r) > MaxHello {
				continue
			}
			if other, m, err := Hello(r); err != nil || other != name || m != len(r) {
				t.Fatalf("in records of %d: %q, %d, %v", each, other, m, err)
			}
		}
		if !bytes.Contains(bytes.ToLower(whole), []byte(name)) {
			t.Fatalf("the name %q is nowhere in it", name)
		}
	})
}
