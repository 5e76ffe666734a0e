package proxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// backend is all servers that the proxy of a fuzz target can reach. They answer without TLS, even where the proxy
// would speak it.
type backend struct {
	w *world
	// answer is what each connection answers its first request with, before it closes. nil means a right answer to
	// each request.
	answer []byte

	// The listeners of servers and tunnels are made once. A port that had a listener is not free for a client until
	// a minute after its last connection, and a minute of inputs would use up all ports.
	servers, tunnels net.Listener

	mu    sync.Mutex        // guards what follows, and answer
	peers map[string]string // by the address of the proxy's end of a connection
	got   map[string][]byte // by the peer, all bytes of its connections
	// open counts the connections served now. idle wakes when there are none.
	open int
	idle *sync.Cond
}

// newBackend returns a proxy with these servers.
func newBackend(f *testing.F) *backend {
	w := newWorld(f, func(c *Config) {
		c.HeaderTimeout, c.SecretTimeout = 200*time.Millisecond, 10*time.Millisecond
	})
	b := &backend{w: w, got: map[string][]byte{}, peers: map[string]string{}}
	b.idle = sync.NewCond(&b.mu)
	w.srv.transport.DialTLSContext = func(ctx context.Context, _, addr string) (net.Conn, error) {
		t, err := ParseTarget(addr, 0)
		if err != nil {
			return nil, err
		}
		return w.srv.reach(ctx, t, true)
	}
	w.srv.transport.DisableKeepAlives = true // so that an input's connections end with it
	w.srv.cfg.Dial = func(ctx context.Context, peer netip.AddrPort, _ string) (*net.TCPConn, error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp4", b.servers.Addr().String())
		if err != nil {
			return nil, err
		}
		b.peers[c.LocalAddr().String()] = peer.String()
		b.open++
		return c.(*net.TCPConn), nil
	}
	for _, ln := range []*net.Listener{&b.servers, &b.tunnels} {
		var err error
		if *ln, err = net.Listen("tcp4", "127.0.0.1:0"); err != nil {
			f.Fatal(err)
		}
	}
	accepting := make(chan struct{})
	go func() {
		defer close(accepting)
		for {
			c, err := b.servers.Accept()
			if err != nil {
				return
			}
			go b.accepted(c)
		}
	}()
	f.Cleanup(func() {
		_, _ = b.servers.Close(), b.tunnels.Close()
		<-accepting
	})
	return b
}

// accepted serves a connection, unless the proxy gave it up while it was being made.
func (b *backend) accepted(c net.Conn) {
	b.mu.Lock()
	from := c.RemoteAddr().String()
	peer, ok := b.peers[from]
	delete(b.peers, from)
	b.mu.Unlock()
	if !ok {
		c.Close()
		return
	}
	b.serve(c, peer)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open--; b.open == 0 {
		b.idle.Broadcast()
	}
}

// serve answers one connection. It notes what came before each answer, or before the connection's end.
func (b *backend) serve(c net.Conn, peer string) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	var seen bytes.Buffer
	in := bufio.NewReader(io.TeeReader(c, &seen))
	for {
		r, err := http.ReadRequest(in)
		if err == nil {
			_, err = io.Copy(io.Discard, r.Body)
		}
		b.mu.Lock()
		b.got[peer] = append(b.got[peer], seen.Bytes()...)
		b.mu.Unlock()
		seen.Reset()
		if err != nil {
			return
		}
		b.mu.Lock()
		answer := b.answer
		b.mu.Unlock()
		if answer != nil {
			_, _ = c.Write(answer)
			return
		}
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"); err != nil {
			return
		}
	}
}

// run gives the proxy the bytes of a guest, inside a tunnel that ends at the proxy or directly. It returns what the
// guest gets and what the peers got.
func (b *backend) run(t *testing.T, data []byte, inner bool) (answer []byte, got map[string][]byte) {
	t.Helper()
	w := b.w
	w.mu.Lock()
	w.events, w.log = nil, nil
	clear(w.pins)
	w.mu.Unlock()
	b.mu.Lock()
	b.got = map[string][]byte{}
	b.mu.Unlock()
	var c net.Conn
	if inner {
		var err error
		if c, err = net.Dial("tcp4", b.tunnels.Addr().String()); err != nil {
			t.Fatal(err)
		}
		is, err := b.tunnels.Accept()
		if err != nil {
			t.Fatal(err)
		}
		w.srv.hand(&ended{is, Target{Host: "api.example.com", Port: 443}})
	} else {
		var err error
		if c, err = net.Dial("tcp4", w.at); err != nil {
			t.Fatal(err)
		}
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	written := make(chan struct{})
	go func() {
		defer close(written)
		_, _ = c.Write(data)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	answer, err := io.ReadAll(c)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%q: the connection stays open after %q", data, answer)
	}
	c.Close()
	<-written
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.open > 0 {
		b.idle.Wait()
	}
	got, b.got = b.got, map[string][]byte{}
	return answer, got
}

// FuzzRequest is what a guest sends to its proxy. The servers get only judged requests, each to the host that it
// names, with the secret in its place and nowhere else.
func FuzzRequest(f *testing.F) {
	b := newBackend(f)
	holder := b.w.placeholder("API_KEY")
	for _, s := range []string{
		"GET http://web.example.com/ HTTP/1.1\r\nHost: web.example.com\r\n\r\n",
		"POST http://web.example.com/ HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET http://never.example.com/ HTTP/1.1\r\nHost: never.example.com\r\n\r\n",
		"GET http://web.example.com/ HTTP/1.1\r\nHost: inside.example.com\r\nConnection: Host, close\r\n\r\nGET http://127.0.0.1/ HTTP/1.1\r\nHost: x\r\n\r\n",
		"CONNECT blind.example.com:443 HTTP/1.1\r\nHost: blind.example.com\r\n\r\n\x16\x03\x01",
		"CONNECT 10.9.0.1:80 HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: 10.9.0.1\r\n\r\n",
		"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
		"GET http://0x7f.1/ HTTP/1.0\r\nProxy-Authorization: x\r\nKeep-Alive: 1\r\n\r\n",
		"GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\nAuthorization: Bearer " + holder + "\r\n\r\n",
	} {
		f.Add([]byte(s), false)
	}
	for _, s := range []string{
		"GET /v1?k=" + holder + " HTTP/1.1\r\nHost: api.example.com\r\nAuthorization: Bearer " + holder + "\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: api.example.com\r\nauthorization:  Bearer " + holder + " \r\nX-Key: " + holder + "\r\n\r\nGET / HTTP/1.1\r\nHost: api2.example.com\r\nAuthorization: Bearer " + holder + "\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: api.example.com\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\nTrailer: Authorization\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: Bearer " + holder + "\r\n\r\n",
		"TRACE https://api.example.com/ HTTP/1.1\r\nHost: web.example.com\r\nUpgrade: x\r\nConnection: upgrade\r\nAuthorization: Bearer " + holder + "\r\nAuthorization: x\r\n\r\n",
	} {
		f.Add([]byte(s), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, inner bool) {
		before := b.w.srv.Stats()
		answer, got := b.run(t, data, inner)
		after := b.w.srv.Stats()
		if bytes.Contains(answer, []byte(apiKey)) {
			t.Fatalf("the guest gets the secret: %q", answer)
		}
		forwarded := uint64(0)
		for peer, all := range got {
			at := netip.MustParseAddrPort(peer)
			if a := at.Addr().String(); !slices.Contains([]string{apiAddr, blindAddr, webAddr, "93.184.216.50"}, a) && !strings.HasPrefix(a, "10.9.") {
				t.Fatalf("%s was connected to", peer)
			}
			if len(all) == 0 {
				continue // http.Transport may still connect for a request that was given up, even of the last input
			}
			if inner && peer != apiAddr+":443" {
				t.Fatalf("a tunnel to %s:443 leads to %s", apiAddr, peer)
			}
			if !inner && after.Tunnels > before.Tunnels {
				continue // the guest's own bytes
			}
			in := bufio.NewReader(bytes.NewReader(all))
			for {
				r, err := http.ReadRequest(in)
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatalf("%s has got %q: %v", peer, all, err)
				}
				body, err := io.ReadAll(r.Body)
				if err != nil {
					break // the request broke off
				}
				forwarded++
				host := r.Host
				if h, p, err := net.SplitHostPort(host); err == nil {
					if host = h; p != strconv.Itoa(int(at.Port())) {
						t.Fatalf("%s is asked for %s", peer, r.Host)
					}
				}
				b.w.mu.Lock()
				is := strings.Contains(" "+b.w.zone[host]+" ", " "+at.Addr().String()+" ")
				b.w.mu.Unlock()
				if !is && host != at.Addr().String() {
					t.Fatalf("%s is asked for %s", peer, r.Host)
				}
				for _, name := range oneConnection {
					if name != "Connection" && r.Header[name] != nil {
						t.Fatalf("%s has got the field %s: %q", peer, name, all)
					}
				}
				if r.Trailer != nil {
					t.Fatalf("%s has got trailers: %q", peer, all)
				}
				for name, values := range r.Header {
					for _, v := range values {
						if strings.Contains(v, apiKey) && (!inner || name != "Authorization" || v != "Bearer "+apiKey) {
							t.Fatalf("%s has got the secret in %s: %q", peer, name, v)
						}
					}
				}
				if strings.Contains(r.RequestURI, apiKey) || bytes.Contains(body, []byte(apiKey)) {
					t.Fatalf("%s has got the secret in %q", peer, all)
				}
			}
		}
		if judged := after.Requests - before.Requests; forwarded > judged {
			t.Fatalf("%d requests were judged, and servers have got %d: %q", judged, forwarded, got)
		}
	})
}

// FuzzServerAnswer is what a server answers to a request with a secret. The guest gets an HTTP answer that ends, or
// a connection that breaks off, and no secret.
func FuzzServerAnswer(f *testing.F) {
	b := newBackend(f)
	request := []byte("GET / HTTP/1.1\r\nHost: api.example.com\r\nAuthorization: Bearer " + b.w.placeholder("API_KEY") + "\r\nConnection: close\r\n\r\n")
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n" + apiKey,
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n10\r\n" + apiKey[:16] + "\r\n10\r\n" + apiKey[16:] + "\r\n0\r\nX-T: " + apiKey + "\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 x\r\nLink: " + apiKey + "\r\n\r\nHTTP/1.1 302 " + apiKey + "\r\nLocation: https://x/?" + apiKey + "\r\n" + apiKey + ": 1\r\n\r\n" + apiKey[:20],
		"HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + apiKey,
		"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\ndata: " + apiKey + "\n\ndata: sk-the",
		"HTTP/1.0 204 x\r\nContent-Length: 5\r\n\r\nhello", "HTTP/1.1 304 x\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 099 x\r\n\r\n", apiKey + "\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nContent-Length: 12\r\n\r\nhalf",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		b.mu.Lock()
		b.answer = append([]byte{}, answer...) // not nil
		b.mu.Unlock()
		got, _ := b.run(t, request, true)
		if len(got) > 16*len(answer)+4096 {
			t.Fatalf("%d bytes have become %d", len(answer), len(got))
		}
		if bytes.Contains(got, []byte(apiKey)) {
			t.Fatalf("the guest gets the secret: %q", got)
		}
		in := bufio.NewReader(bytes.NewReader(got))
		r, err := http.ReadResponse(in, &http.Request{Method: http.MethodGet})
		if err != nil {
			if len(got) > 0 && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("the guest gets %q: %v", got, err)
			}
			return // broken off before any of the answer was sent
		}
		body, err := io.ReadAll(r.Body)
		if bytes.Contains(body, []byte(apiKey)) {
			t.Fatalf("the guest gets the secret: %q", got)
		}
		if err != nil {
			return // the guest sees that it broke off
		}
		if r.StatusCode < 200 || r.Header.Get("Upgrade") != "" || r.Trailer != nil {
			t.Fatalf("the guest gets %q", got)
		}
		if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
			t.Fatalf("there is more than one answer: %q", got)
		}
	})
}
