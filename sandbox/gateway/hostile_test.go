package gateway_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestNames_there_is_one_way_to_write_a_host(t *testing.T) {
	n := gateway.Names{Domain: "d.test"}
	for host, want := range map[string]string{
		"80-a.d.test": "80 a", "80-a.d.test.": "80 a", "80-A.D.TEST": "80 a", "80-a-b-c.d.test": "80 a-b-c", "80-a.d.test:443": "80 a",
		"65535-a.d.test": "65535 a", "80-8080-a.d.test": "80 8080-a",
	} {
		to, err := n.Resolve(&http.Request{Host: host})
		if got := fmt.Sprint(to.Port, " ", to.Sandbox); err != nil || got != want {
			t.Errorf("%s: %s, %v", host, got, err)
		}
	}
	for _, host := range []string{
		"", ".", "d.test", ".d.test", "-.d.test", "-a.d.test", "0-x.d.test", "65536-x.d.test", "22-.d.test", "080-a.d.test", "+80-a.d.test", " 80-a.d.test",
		"80-a.d.test..", "80-a..d.test", "x.80-a.d.test", "80-a.x.d.test", "80-a.d.test.evil", "80-a.evil", "80-a", "80.a.d.test", "a-80.d.test", "8_0-a.d.test",
		"80-a%2ed.test", "80-%61.d.test", "80-\u212a.d.test", "80-a.d\u3002test", "８０-a.d.test", "80-xn--a-.d.test", "80--a.d.test", "80-a-.d.test", "80-a_b.d.test", "80-a/b.d.test",
		"80-a\\b.d.test", "80-..d.test", "80-a.d.test:", "80-a.d.test:x", "80-a.d.test:1:2", "80-a.d.test:99999", "user@80-a.d.test", "80-a.d.test@evil", "[80-a.d.test]",
		"[::1]:80", "80-" + strings.Repeat("a", 41) + ".d.test", "80-a.d.test\x00", "80-a.d.test,80-b.d.test", "9999999999999999999999-a.d.test", "0x50-a.d.test", "80-a.d.test#", "80-a.d.test?x",
	} {
		if to, err := n.Resolve(&http.Request{Host: host}); !errors.Is(err, gateway.ErrRoute) {
			t.Errorf("%q: %v, %v", host, to, err)
		}
	}
	if _, err := (gateway.Names{}).ResolveName("80-a"); err == nil {
		t.Error("names without a domain")
	}
}

func FuzzNames(f *testing.F) {
	for _, s := range []string{"80-a.d.test", "65535-a-b.D.test.:80", "0-x.d.test", "80-\u212a.d.test", "80-a.d.test:"} {
		f.Add(s)
	}
	n := gateway.Names{Domain: "d.test"}
	f.Fuzz(func(t *testing.T, host string) {
		to, err := n.Resolve(&http.Request{Host: host})
		if err != nil {
			if to != (gateway.Route{}) || !errors.Is(err, gateway.ErrRoute) {
				t.Fatal(to, err)
			}
			return
		}
		if to.Port == 0 || !spec.ValidName(to.Sandbox) || !strings.EqualFold(n.Host(to), strings.TrimSuffix(strings.Split(host, ":")[0], ".")) {
			t.Fatalf("%q is %v", host, to)
		}
		if again, err := n.ResolveName(n.Host(to)); err != nil || again != to {
			t.Fatal(again, err)
		}
	})
}

// A client must not get a second request past the gateway's judgement, or to another sandbox.
func TestGateway_smuggling(t *testing.T) {
	w := begin(t, nil)
	var mu sync.Mutex
	var seen []string
	for _, name := range []string{"a", "closed"} {
		g := &spec.Gateway{AllPublic: name == "a"}
		w.create(name, g, spec.Idle{})
		w.serves(name, 80, func(rw http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, fmt.Sprintf("%s %s %s %q TE=%v CL=%d fold=%q", name, r.Method, r.RequestURI, body, r.TransferEncoding, r.ContentLength, r.Header.Get("X-Fold")))
		})
	}
	host := "Host: 80-a." + domain + "\r\n"
	end := "Connection: close\r\n\r\n"
	for name, c := range map[string]struct {
		say    string
		status int
		seen   string // "" is that no guest sees anything
	}{
		"CL and TE: TE counts, and CL is gone": {"POST / HTTP/1.1\r\n" + host + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n" + end + "0\r\n\r\nGET /x HTTP/1.1\r\n", 200, `a POST / "" TE=[chunked] CL=-1 fold=""`},
		"two CL":                               {"POST / HTTP/1.1\r\n" + host + "Content-Length: 4\r\nContent-Length: 5\r\n" + end + "abcde", 400, ""},
		"a list of CL":                         {"POST / HTTP/1.1\r\n" + host + "Content-Length: 4, 5\r\n" + end + "abcde", 400, ""},
		"a signed CL":                          {"POST / HTTP/1.1\r\n" + host + "Content-Length: +4\r\n" + end + "abcd", 400, ""},
		"two TE":                               {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n" + end + "0\r\n\r\n", 501, ""},
		"an odd TE":                            {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: xchunked\r\n" + end + "0\r\n\r\n", 501, ""},
		"a space before the colon":             {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding : chunked\r\n" + end + "0\r\n\r\n", 400, ""},
		"a folded line":                        {"GET / HTTP/1.1\r\n" + host + "X-Fold: a\r\n b\r\n" + end, 200, `a GET / "" TE=[] CL=0 fold="a b"`},
		"two hosts":                            {"GET / HTTP/1.1\r\n" + host + "Host: 80-closed." + domain + "\r\n" + end, 400, ""},
		"no host":                              {"GET / HTTP/1.1\r\n" + end, 400, ""},
		"HTTP/1.0 without a host":              {"GET / HTTP/1.0\r\n\r\n", 400, ""},
		"the target counts, if it has a host":  {"GET http://80-closed." + domain + "/ HTTP/1.1\r\n" + host + end, 401, ""},
		"and the other way about":              {"GET http://80-a." + domain + "/t HTTP/1.1\r\nHost: 80-closed." + domain + "\r\n" + end, 200, `a GET /t "" TE=[] CL=0 fold=""`},
		"CONNECT":                              {"CONNECT 80-a." + domain + ":80 HTTP/1.1\r\n" + host + end, 400, ""},
		"a host with a user":                   {"GET / HTTP/1.1\r\nHost: 80-closed." + domain + "@80-a." + domain + "\r\n" + end, 400, ""},
		"a host in percents":                   {"GET / HTTP/1.1\r\nHost: 80-%61." + domain + "\r\n" + end, 400, ""},
		"an upgrade to h2c is no upgrade":      {"GET /u HTTP/1.1\r\n" + host + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n", 200, `a GET /u "" TE=[] CL=0 fold=""`},
		"dots stay in the path":                {"GET /a/../..//%2e%2e/b?x=%zz;y HTTP/1.1\r\n" + host + end, 200, `a GET /a/../..//%2e%2e/b?x=%zz;y "" TE=[] CL=0 fold=""`},
	} {
		mu.Lock()
		seen = nil
		mu.Unlock()
		_, r := w.say(c.say)
		a, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if a.StatusCode != c.status {
			t.Errorf("%s: %s", name, a.Status)
		}
		mu.Lock()
		if got := strings.Join(seen, "; "); got != c.seen {
			t.Errorf("%s: %s", name, got)
		}
		mu.Unlock()
	}
}

func TestGateway_bounds_the_header_of_a_request(t *testing.T) {
	w := begin(t, nil)
	w.create("a", nil, spec.Idle{})
	w.serves("a", 80, func(http.ResponseWriter, *http.Request) {})
	_, r := w.say("GET / HTTP/1.1\r\nHost: 80-a." + domain + "\r\nX: " + strings.Repeat("x", 80<<10) + "\r\n\r\n")
	if a, err := http.ReadResponse(r, nil); err != nil || a.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Error(a, err)
	}
}

func TestGateway_survives_hostile_servers(t *testing.T) {
	w := begin(t, nil)
	w.create("a", nil, spec.Idle{})
	request := func(c net.Conn) { _, _ = http.ReadRequest(bufio.NewReader(c)) }
	endless := func(first, again string) func(net.Conn) {
		return func(c net.Conn) {
			request(c)
			_, err := io.WriteString(c, first)
			for err == nil {
				_, err = io.WriteString(c, again)
			}
		}
	}
	once := func(text string) func(net.Conn) { return endless2(request, text) }
	for i, s := range []struct {
		name string
		do   func(net.Conn)
	}{
		{"garbage", once("\x00\xff nothing of HTTP\r\n\r\n")},
		{"a close", once("")},
		{"an endless header", endless("HTTP/1.1 200 OK\r\n", "X: "+strings.Repeat("x", 1000)+"\r\n")},
		{"an endless line", endless("HTTP/1.1 200 OK\r\nX: ", strings.Repeat("x", 1000))},
		{"a flood of 1xx", endless("", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")},
		{"an upgrade that nobody asked for", once("HTTP/1.1 101 Switching Protocols\r\n\r\nHTTP/1.1 200 OK\r\n\r\n")},
		{"a named upgrade that nobody asked for", once("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")},
		{"two lengths", once("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab")},
		{"a bad status", once("HTTP/1.1 99999 OK\r\n\r\n")},
	} {
		port := 1000 + i
		w.answers("a", port, s.do)
		// At a bound, interim answers precede the error.
		a, body := w.get(fmt.Sprintf("%d-a.%s", port, domain))
		if a.StatusCode != 502 || !strings.Contains(body, "no valid answer") {
			t.Errorf("%s: %s %q", s.name, a.Status, body)
		}
	}
	// What a server says after its answer is no second answer, neither to this client nor to the next.
	w.answers("a", 2000, once("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"))
	c := w.client(nil)
	for range 3 {
		a, err := c.Get("http://2000-a." + domain + "/")
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(a.Body); string(b) != "ok" {
			t.Errorf("%q %v", b, err)
		}
		a.Body.Close()
	}
	// A cut answer is not complete.
	w.answers("a", 2001, once("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart"))
	if a, err := c.Get("http://2001-a." + domain + "/"); err == nil {
		if b, err := io.ReadAll(a.Body); err == nil {
			t.Errorf("%q", b)
		}
		a.Body.Close()
	}
	until(t, "no request is open", func() bool { return w.gate.Stats().Open == 0 })
}

// endless2 answers once.
func endless2(request func(net.Conn), text string) func(net.Conn) {
	return func(c net.Conn) {
		request(c)
		_, _ = io.WriteString(c, text)
	}
}

func TestGateway_raw_connections_go_by_server_name(t *testing.T) {
	dir := t.TempDir()
	cert, key, pool := certificate(t, dir, 1, "*."+domain)
	w := begin(t, func(_ *gateway.Options, l *gateway.Listeners) {
		var err error
		if l.TLS, err = gateway.Certificates(cert, key, nil); err != nil {
			t.Fatal(err)
		}
	})
	w.create("pub", &spec.Gateway{PublicPorts: []uint16{5432, 5433}, GuestTLS: []uint16{5433}}, spec.Idle{})
	w.answers("pub", 5432, func(c net.Conn) {
		_, _ = io.WriteString(c, "first ") // as protocols do whose server speaks first
		_, _ = io.Copy(c, c)
	})
	w.answers("pub", 6000, func(c net.Conn) {})
	guestCert, guestKey, guestPool := certificate(t, t.TempDir(), 2, "5433-pub."+domain)
	pair, err := tls.LoadX509KeyPair(guestCert, guestKey)
	if err != nil {
		t.Fatal(err)
	}
	w.answers("pub", 5433, func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{pair}})
		_, _ = io.WriteString(s, "guest ")
		_, _ = io.Copy(s, s)
		_ = s.CloseWrite()
	})
	w.sleep("pub")
	for _, s := range []struct {
		port int
		c    *tls.Config
		want string
	}{{5432, &tls.Config{RootCAs: pool}, "first hello"}, {5433, &tls.Config{RootCAs: guestPool}, "guest hello"}} {
		s.c.ServerName = fmt.Sprintf("%d-pub.%s", s.port, domain)
		c, err := tls.Dial("tcp", w.raw, s.c)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "hello")
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); string(b) != s.want || err != nil {
			t.Errorf("%d: %q %v", s.port, b, err)
		}
		c.Close()
	}
	for name, server := range map[string]string{"a closed port": "6000-pub." + domain, "no sandbox": "1-x." + domain, "another domain": "5432-pub.evil", "no name": ""} {
		if c, err := tls.Dial("tcp", w.raw, &tls.Config{InsecureSkipVerify: true, ServerName: server}); err == nil {
			t.Error(name, "is let in")
			c.Close()
		}
	}
	c, err := net.Dial("tcp", w.raw)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
	if b, err := io.ReadAll(c); len(b) > 0 || err == nil {
		t.Errorf("%q %v", b, err)
	}
	// A sleep resets the connection.
	s, err := tls.Dial("tcp", w.raw, &tls.Config{RootCAs: pool, ServerName: "5432-pub." + domain})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := io.ReadFull(s, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	w.sleep("pub")
	if _, err := s.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Error(err)
	}
	until(t, "it lets go", func() bool { return w.gate.Stats() == gateway.Stats{Refused: w.gate.Stats().Refused} })
}

func TestGateway_certificates_rotate_under_load(t *testing.T) {
	dir := t.TempDir()
	cert, key, _ := certificate(t, dir, 1, "*."+domain)
	w := begin(t, func(_ *gateway.Options, l *gateway.Listeners) {
		var err error
		if l.TLS, err = gateway.Certificates(cert, key, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
	})
	w.create("a", nil, spec.Idle{})
	finish := make(chan struct{})
	w.serves("a", 80, func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprint(rw, r.Header.Get("X-Forwarded-Proto"))
		if r.URL.Path == "/long" {
			_ = http.NewResponseController(rw).Flush()
			<-finish
			fmt.Fprint(rw, " end")
		}
	})
	any := &tls.Config{InsecureSkipVerify: true} // what counts here is the serial number
	serial := func() int64 {
		c := w.client(any.Clone())
		defer c.CloseIdleConnections()
		a, err := c.Get("https://80-a." + domain + "/")
		if err != nil {
			t.Error(err)
			return 0
		}
		defer a.Body.Close()
		if b, err := io.ReadAll(a.Body); string(b) != "https" || err != nil || a.ProtoMajor != 2 {
			t.Error(string(b), err, a.Proto)
		}
		return a.TLS.PeerCertificates[0].SerialNumber.Int64()
	}
	long, err := w.client(any.Clone()).Get("https://80-a." + domain + "/long")
	if err != nil {
		t.Fatal(err)
	}
	defer long.Body.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			for ctx.Err() == nil {
				serial()
			}
		})
	}
	for n := range int64(2) {
		until(t, "the certificate", func() bool { return serial() == n+1 })
		if n == 0 {
			if err := os.WriteFile(key, []byte("no key"), 0o600); err != nil { // as between two writes
				t.Fatal(err)
			}
			time.Sleep(gateway.CheckEvery)
			if serial() != 1 {
				t.Error("the old certificate is gone")
			}
			certificate(t, dir, 2, "*."+domain)
		}
	}
	cancel()
	all.Wait()
	close(finish)
	if b, err := io.ReadAll(long.Body); string(b) != "https end" || err != nil {
		t.Error(string(b), err)
	}
}
