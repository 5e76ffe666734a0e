package proxy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/netpolicy"
)

// rankSum returns by how many standard deviations the ranks of two samples differ from those of samples of one
// distribution (Mann and Whitney). A disturbance of both alike, as of a busy machine, does not affect it.
func rankSum(a, b []float64) float64 {
	type sample struct {
		v float64
		a bool
	}
	var all []sample
	for _, v := range a {
		all = append(all, sample{v, true})
	}
	for _, v := range b {
		all = append(all, sample{v, false})
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] }) // equal values get ranks by chance
	slices.SortStableFunc(all, func(x, y sample) int {
		switch {
		case x.v < y.v:
			return -1
		case x.v > y.v:
			return 1
		}
		return 0
	})
	sum := 0.0
	for i, s := range all {
		if s.a {
			sum += float64(i + 1)
		}
	}
	na, nb := float64(len(a)), float64(len(b))
	return (sum - na*(na+nb+1)/2) / math.Sqrt(na*nb*(na+nb+1)/12)
}

// records is a connection that notes the TLS records that it reads (RFC 8446, 5.1).
type records struct {
	net.Conn
	left    int    // bytes left of the current record
	head    []byte // of the next one
	lengths []int
}

func (r *records) Read(p []byte) (int, error) {
	n, err := r.Conn.Read(p)
	for b := p[:n]; len(b) > 0; {
		if r.left > 0 {
			k := min(r.left, len(b))
			r.left, b = r.left-k, b[k:]
			continue
		}
		r.head, b = append(r.head, b[0]), b[1:]
		if len(r.head) == 5 {
			r.left = int(binary.BigEndian.Uint16(r.head[3:]))
			r.lengths, r.head = append(r.lengths, r.left), nil
		}
	}
	return n, err
}

// seen describes the records so far. crypto/tls makes them smaller at the start of a connection and after pauses. So
// of more than 1 KiB it gives only the sum of their contents (17 bytes less each, RFC 8446, 5.2).
func (r *records) seen() string {
	sum := 0
	for _, n := range r.lengths {
		sum += n - 17
	}
	if sum > 1<<10 {
		return fmt.Sprint(sum, " bytes")
	}
	return fmt.Sprint(r.lengths)
}

// spy is a guest and a server that together try to find out a secret that the server does not know.
type spy struct {
	w *world
	// script is the server's next answer. The server sends each text as a record of its own. Before each empty text
	// it waits for the guest.
	script [][]byte
	goOn   chan struct{}
	conn   *records
	client *tls.Conn
	in     *bufio.Reader
}

func newSpy(w *world) *spy {
	w.t.Helper()
	s := &spy{w: w, goOn: make(chan struct{})}
	ln, err := tls.Listen("tcp4", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{w.certificate("api.example.com")}, DynamicRecordSizingDisabled: true,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { ln.Close() })
	w.mu.Lock()
	w.routes[apiAddr+":443"] = ln.Addr().String()
	w.mu.Unlock()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go s.answer(c)
		}
	}()
	return s
}

func (s *spy) answer(c net.Conn) {
	defer c.Close()
	in := bufio.NewReader(c)
	for {
		if _, err := http.ReadRequest(in); err != nil {
			return
		}
		for _, part := range s.script {
			if len(part) == 0 {
				<-s.goOn
			} else if _, err := c.Write(part); err != nil {
				return
			}
		}
	}
}

// connect makes a new connection of the guest.
func (s *spy) connect() {
	s.w.t.Helper()
	c, head := s.w.tunnel("api.example.com:443")
	if c == nil {
		s.w.t.Fatal("no tunnel: " + head)
	}
	s.w.t.Cleanup(func() { c.Close() })
	trust := x509.NewCertPool()
	trust.AppendCertsFromPEM(s.w.id.Root())
	s.conn = &records{Conn: c}
	s.client = tls.Client(s.conn, &tls.Config{ServerName: "api.example.com", RootCAs: trust})
	if err := s.client.Handshake(); err != nil {
		s.w.t.Fatal(err)
	}
	s.in = bufio.NewReader(s.client)
}

// ask makes one request. The guest tells the server to continue when the body has until bytes. seen is all that the
// guest can observe except time. first and rest are how long it waited for each part.
func (s *spy) ask(until int) (seen string, first, rest time.Duration) {
	s.w.t.Helper()
	if s.client == nil {
		s.connect()
	}
	_ = s.client.SetDeadline(time.Now().Add(time.Minute))
	before := s.w.srv.Stats()
	s.conn.lengths = nil
	begin := time.Now()
	if _, err := fmt.Fprintf(s.client, "GET / HTTP/1.1\r\nHost: api.example.com\r\nAuthorization: Bearer %s\r\n\r\n", s.w.placeholder("API_KEY")); err != nil {
		s.w.t.Fatal(err)
	}
	resp, err := http.ReadResponse(s.in, nil)
	if err != nil {
		s.w.t.Fatal(err)
	}
	defer resp.Body.Close()
	body := make([]byte, until)
	if _, err := io.ReadFull(resp.Body, body); err != nil {
		s.w.t.Fatal(err)
	}
	first = time.Since(begin)
	early := "" // empty if the server did not wait
	begin = time.Now()
	if until > 0 {
		early = s.conn.seen()
		s.goOn <- struct{}{}
	}
	more, err := io.ReadAll(resp.Body)
	rest = time.Since(begin)
	after := s.w.srv.Stats()
	if n := len(s.conn.lengths); resp.Close && n > 0 && s.conn.lengths[n-1] == 19 {
		s.conn.lengths = s.conn.lengths[:n-1] // a close_notify, which may come later
	}
	resp.Header.Del("Date") // the proxy's own clock
	seen = fmt.Sprintf("status %d, header %v, encoding %v, length %d, body %q, %v, records %s, then %s, %d requests, %d injected, %d refused",
		resp.StatusCode, resp.Header, resp.TransferEncoding, resp.ContentLength, append(body, more...), err, early, s.conn.seen(),
		after.Requests-before.Requests, after.Injected-before.Injected, after.Refused-before.Refused)
	if resp.Close {
		s.client.Close()
		s.client = nil
	}
	return seen, first, rest
}

func chunk(b []byte) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(b), b) }

// TestAttack_beginnings_of_a_secret_that_a_server_says_are_not_told_from_others has a server send the guest guesses
// of its key, each a byte longer. The guest must not find out for which of some keys a guess is right.
func TestAttack_beginnings_of_a_secret_that_a_server_says_are_not_told_from_others(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nX-Guess: %s\r\n"
	line, page := []byte("a line\n"), append(bytes.Repeat([]byte("a page "), 1200), '\n')
	gzipped := func(b []byte) []byte {
		var out bytes.Buffer
		z, _ := gzip.NewWriterLevel(&out, gzip.NoCompression)
		_, _ = z.Write(b)
		_ = z.Flush()
		return out.Bytes()
	}
	var wait []byte
	last := []byte("0\r\n\r\n")
	// In each way the server sends a guess and may pause. until is how much of the body comes before the pause.
	ways := []struct {
		name   string
		script func(guess []byte) [][]byte
		until  int
		less   int // how many times less often it runs
	}{
		{"sized", func(g []byte) [][]byte {
			return [][]byte{fmt.Appendf(nil, head+"Content-Length: %d\r\n\r\n", g, len(line)+len(g)+1), slices.Concat(line, g), []byte("\n")}
		}, 0, 1},
		{"sized and large, with a pause", func(g []byte) [][]byte {
			return [][]byte{fmt.Appendf(nil, head+"Content-Length: %d\r\n\r\n", g, len(page)+len(g)+1), slices.Concat(page, g), wait, []byte("\n")}
		}, len(page), 1},
		{"chunks, with a pause", func(g []byte) [][]byte {
			return [][]byte{fmt.Appendf(nil, head+"Transfer-Encoding: chunked\r\n\r\n", g), chunk(slices.Concat(line, g)), wait, chunk([]byte("\n")), last}
		}, len(line), 1},
		{"a chunk and a record for each byte", func(g []byte) [][]byte {
			s := [][]byte{fmt.Appendf(nil, head+"Transfer-Encoding: chunked\r\n\r\n", g), chunk(line), wait}
			for _, c := range g {
				s = append(s, chunk([]byte{c}))
			}
			return append(s, chunk([]byte("\n")), last)
		}, len(line), 4},
		{"events, with a pause", func(g []byte) [][]byte {
			return [][]byte{fmt.Appendf(nil, head+"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", g), chunk(slices.Concat([]byte("data: 1\n\ndata: "), g)), wait, chunk([]byte("\n\n")), last}
		}, len("data: 1\n\n"), 1},
		{"compressed, with a pause", func(g []byte) [][]byte {
			z := gzipped(slices.Concat(line, g))
			at := bytes.Index(z, line) + len(line) + len(g)
			return [][]byte{fmt.Appendf(nil, head+"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", g), chunk(z[:at]), wait, chunk(z[at:]), chunk([]byte("\n")), last}
		}, bytes.Index(gzipped(line), line) + len(line), 1},
		{"until the end of the connection", func(g []byte) [][]byte {
			return [][]byte{fmt.Appendf(nil, head+"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n", g), chunk(g), last}
		}, 0, 8},
		{"no answer at all", func(g []byte) [][]byte { return [][]byte{slices.Concat(g, []byte("\r\n\r\n"))} }, 0, 8},
	}
	guessed := apiKey
	secrets := []string{guessed, "xx" + guessed[2:], strings.Repeat("another one ", 7) + ".", guessed[:12]}
	w := newWorld(t)
	s := newSpy(w)
	type try struct{ way, length, secret int }
	var tries []try
	times := racetest.Cases(20, 1)
	for way := range ways {
		for length := 1; length < len(guessed); length++ {
			for range max(1, times/ways[way].less) {
				for secret := range secrets {
					tries = append(tries, try{way, length, secret})
				}
			}
		}
	}
	if times > 1 && len(tries) < 10_000 {
		t.Fatalf("%d requests", len(tries))
	}
	rand.Shuffle(len(tries), func(i, j int) { tries[i], tries[j] = tries[j], tries[i] })
	seen := map[[2]int]map[string]int{} // way and length -> what was seen -> for which secret first
	var firsts, rests [4][]float64
	for _, x := range tries {
		way := ways[x.way]
		w.setSecret("API_KEY", secrets[x.secret])
		s.script = way.script([]byte(guessed[:x.length]))
		got, first, rest := s.ask(way.until)
		key := [2]int{x.way, x.length}
		if seen[key] == nil {
			seen[key] = map[string]int{}
		}
		if _, ok := seen[key][got]; !ok {
			seen[key][got] = x.secret
		}
		if way.less == 1 {
			firsts[x.secret], rests[x.secret] = append(firsts[x.secret], float64(first)), append(rests[x.secret], float64(rest))
		}
	}
	t.Logf("%d requests", len(tries))
	told := map[string]int{}
	for key, texts := range seen {
		if len(texts) == 1 {
			continue
		}
		if told[ways[key[0]].name]++; told[ways[key[0]].name] == 1 {
			t.Errorf("%s: a guess of %d bytes is seen in %d ways:", ways[key[0]].name, key[1], len(texts))
			for text, secret := range texts {
				t.Errorf("  for the secret %d: %.600s", secret, text)
			}
		}
	}
	for name, n := range told {
		t.Errorf("%s: guesses of %d lengths are told apart", name, n)
	}
	for what, took := range map[string][4][]float64{"the first part": firsts, "the rest": rests} {
		if z := rankSum(took[0], took[1]); math.Abs(z) > 6 {
			t.Errorf("%s: right and wrong guesses differ in time by %.1f standard deviations", what, z)
		}
	}
}

// A guest sends requests on one connection to a server that closes its own connection after each. The host opens one
// connection for each request, and the programs count only the guest's.
func TestAttack_requests_on_one_connection_open_connections_of_the_host_without_end(t *testing.T) {
	t.Parallel()
	s := New(Config{})
	s.SetPolicy(&netpolicy.Policy{})
	most := 2 * netpolicy.DefaultConnections.Burst
	opened := uint64(0)
	for opened < most && s.admit() {
		opened++
	}
	if opened < netpolicy.DefaultConnections.Burst || opened == most {
		t.Errorf("without a limit of the policy %d connections may be opened at once, want some %d", opened, netpolicy.DefaultConnections.Burst)
	}
}
