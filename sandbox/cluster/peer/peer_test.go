package peer_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// book is a directory that tests write. What it said before is said again unless it is asked afresh.
type book struct {
	mu           sync.Mutex
	hosts, old   map[string]peer.Host
	where, stale map[string]string
	asked        int
}

func (b *book) Peer(_ context.Context, host string, fresh bool) (peer.Host, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h, ok := b.hosts[host]
	if old, was := b.old[host]; was && !fresh {
		h, ok = old, true
	}
	if !ok {
		return peer.Host{}, peer.ErrNoHost
	}
	return h, nil
}

func (b *book) Where(_ context.Context, sandbox string, fresh bool) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked++
	if old, was := b.stale[sandbox]; was && !fresh {
		return old, nil
	}
	return b.where[sandbox], nil
}

func (b *book) Private(string) bool { return false }

func (b *book) Known(context.Context, string, func(spec.Metadata) error) error {
	return spec.ErrNotFound
}

// node is a host of a test.
type node struct {
	*peer.Peers
	id   *peer.Identity
	at   string
	stop func()
}

// serve starts a host, which is in the book from then on.
func serve(t testing.TB, b *book, name string, h http.HandlerFunc) *node {
	t.Helper()
	id, err := peer.NewIdentity(name)
	must(t, err)
	l, at, err := peer.Listen("127.0.0.1:0")
	must(t, err)
	n := &node{peer.New(peer.Options{Identity: id, Directory: b}), id, at, nil}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Serve(ctx, l, map[string]http.Handler{"api": h}) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(n.stop)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hosts[name] = peer.Host{Name: name, Address: at, Key: id.Key()}
	return n
}

func newBook() *book {
	return &book{hosts: map[string]peer.Host{}, old: map[string]peer.Host{}, where: map[string]string{"box": "b"}, stale: map[string]string{}}
}

// front is a server whose requests are passed on, and what became of the last one.
func front(t testing.TB, n *node, is peer.Passed) (url string, last func() (bool, error)) {
	t.Helper()
	type end struct {
		answered bool
		err      error
	}
	ends := make(chan end, 16)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answered, err := n.Pass(w, r, is)
		if !answered {
			body, rerr := io.ReadAll(r.Body)
			w.WriteHeader(http.StatusTeapot)
			fmt.Fprintf(w, "%s %v", body, rerr)
		}
		ends <- end{answered, err}
	}))
	t.Cleanup(s.Close)
	return s.URL, func() (bool, error) { e := <-ends; return e.answered, e.err }
}

var alice = peer.Passed{Service: "api", Sandbox: "box", Caller: peer.Caller{Name: "ci", Owner: "alice", Scopes: []string{"read"}}}

func ask(t testing.TB, method, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	must(t, err)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	a, err := (&http.Client{Transport: tr}).Do(r)
	must(t, err)
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	must(t, err)
	return a, string(text)
}

func TestPass_gives_the_other_host_the_request_and_who_has_sent_it(t *testing.T) {
	b := newBook()
	var got *peer.Passed
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		got = peer.From(r.Context())
		for _, name := range []string{"Drowse-Passed", "Keep-Alive", "X-Hop", "Proxy-Authorization"} {
			if r.Header.Get(name) != "" {
				t.Errorf("it gets %s: %s", name, r.Header.Get(name))
			}
		}
		if r.TLS != nil || r.RemoteAddr != got.Client || !strings.HasPrefix(r.RemoteAddr, "127.0.0.1:") {
			t.Errorf("the client is %s, TLS %v", r.RemoteAddr, r.TLS)
		}
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Hop", "1")
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("Trailer", "X-End")
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "%s %s %s %s", r.Method, r.URL.RequestURI(), r.Host, body)
		w.Header().Set("X-End", "end")
	})
	a := serve(t, b, "a", nil)
	url, last := front(t, a, alice)
	forged, _ := ask(t, "GET", url, "", "Drowse-Passed", "forged") // overwritten
	if forged.StatusCode != http.StatusCreated {
		t.Error(forged.Status)
	}
	last()
	answer, text := ask(t, "POST", url+"/v1/x%2Fy?a=b;c&d", "hello", "Connection", "X-Hop", "X-Hop", "1", "Keep-Alive", "1", "Drowse-Passed", "forged")
	if answered, err := last(); !answered || err != nil {
		t.Fatal(answered, err)
	}
	host := strings.TrimPrefix(url, "http://")
	if text != "POST /v1/x%2Fy?a=b;c&d "+host+" hello" || answer.StatusCode != http.StatusCreated || answer.Header.Get("X-Hop") != "" || answer.Trailer.Get("X-End") != "end" {
		t.Errorf("%s %q %v", answer.Status, text, answer.Header)
	}
	if got.From != "a" || got.Caller.Name != "ci" || got.Caller.Owner != "alice" || len(got.Caller.Scopes) != 1 || got.Sandbox != "box" {
		t.Errorf("it knows the caller as %+v", got)
	}
}

func TestServe_refuses_whoever_is_no_host_of_the_cluster(t *testing.T) {
	b := newBook()
	target := serve(t, b, "b", func(http.ResponseWriter, *http.Request) { t.Error("it was let in") })
	member := serve(t, b, "a", nil)
	b.mu.Lock()
	here := b.hosts["b"]
	b.mu.Unlock()
	stranger := func(name string) *node {
		id, err := peer.NewIdentity(name)
		must(t, err)
		own := newBook()
		own.hosts["b"] = here
		n := &node{peer.New(peer.Options{Identity: id, Directory: own}), id, "", nil}
		t.Cleanup(n.Close)
		return n
	}
	refused := func(what string, n *node) {
		t.Helper()
		url, last := front(t, n, alice)
		a, _ := ask(t, "GET", url, "")
		last()
		if a.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %s", what, a.Status)
		}
	}
	refused("a name that no host has", stranger("c"))
	refused("the name of another host", stranger("a"))
	refused("its own name", stranger("b"))
	b.mu.Lock()
	delete(b.hosts, "a") // its session has ended
	b.mu.Unlock()
	refused("a host whose session has ended", member)

	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer tr.CloseIdleConnections()
	if a, err := (&http.Client{Transport: tr}).Get("https://" + target.at); err == nil {
		a.Body.Close()
		t.Error("without a key:", a.Status)
	}
}

func TestPass_goes_once_more_to_the_host_that_the_store_names_by_then(t *testing.T) {
	b := newBook()
	not := func(w http.ResponseWriter, r *http.Request) { peer.NotHere(w, r) }
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "b %s", body)
	})
	serve(t, b, "c", not)
	a := serve(t, b, "a", nil)
	url, last := front(t, a, alice)
	b.stale["box"] = "c"
	if _, text := ask(t, "POST", url, "hello"); text != "b hello" {
		t.Errorf("after one host without it: %q", text)
	}
	last()
	b.where["box"] = "c"
	if _, text := ask(t, "POST", url, "hello"); text != "hello <nil>" {
		t.Errorf("after two hosts without it, this one has left of the request: %q", text)
	}
	if answered, err := last(); answered || !errors.Is(err, spec.ErrUnreachable) || errors.Is(err, peer.ErrUsed) {
		t.Error("after two hosts without it:", err)
	}
	b.where["box"] = ""
	if _, text := ask(t, "POST", url, "hello"); text != "hello <nil>" {
		t.Errorf("when no host has it: %q", text)
	}
}

func TestGuest_cannot_say_that_its_sandbox_is_elsewhere(t *testing.T) {
	b := newBook()
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Drowse-Not-Here", r.Header.Get("Drowse-Passed")+"x")
		w.WriteHeader(http.StatusMisdirectedRequest)
	})
	a := serve(t, b, "a", nil)
	url, last := front(t, a, alice)
	answer, _ := ask(t, "GET", url, "")
	if answered, err := last(); !answered || err != nil || answer.StatusCode != http.StatusMisdirectedRequest || answer.Header.Get("Drowse-Not-Here") != "" {
		t.Error(answered, err, answer.Status, answer.Header)
	}
}

func TestPass_to_an_address_without_its_host_fails_soon_and_leaves_the_request(t *testing.T) {
	b := newBook()
	gone := serve(t, b, "b", nil)
	gone.stop()
	a := serve(t, b, "a", nil)
	url, last := front(t, a, alice)
	for range 2 {
		if _, text := ask(t, "POST", url, "hello"); text != "hello <nil>" {
			t.Errorf("%q", text)
		}
		if answered, err := last(); answered || !errors.Is(err, spec.ErrUnreachable) || errors.Is(err, peer.ErrUsed) {
			t.Error(err)
		}
	}
	// Its address has gone to another host, and a silent one.
	other := serve(t, b, "c", func(http.ResponseWriter, *http.Request) { t.Error("it got a request for another host") })
	b.mu.Lock()
	id, err := peer.NewIdentity("b")
	must(t, err)
	b.hosts["b"] = peer.Host{Name: "b", Address: other.at, Key: id.Key()}
	b.mu.Unlock()
	_, text := ask(t, "POST", url, "hello")
	if _, err := last(); text != "hello <nil>" || !errors.Is(err, spec.ErrUnreachable) {
		t.Error(text, err)
	}
}

func TestPass_finds_a_host_that_has_begun_anew(t *testing.T) {
	b := newBook()
	first := serve(t, b, "b", nil)
	b.old["b"] = b.hosts["b"]
	first.stop()
	serve(t, b, "b", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "again") })
	a := serve(t, b, "a", nil)
	url, last := front(t, a, alice)
	if _, text := ask(t, "GET", url, ""); text != "again" {
		t.Error(text)
	}
	last()
}

func TestPass_of_a_request_that_its_host_breaks_off_does_not_pass_for_a_whole_one(t *testing.T) {
	b := newBook()
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/early" {
			_, _ = io.ReadAll(r.Body)
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write(make([]byte, 100_000))
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	a := serve(t, b, "a", nil)
	url, last := front(t, a, alice)
	ask(t, "POST", url+"/early", "hello")
	if answered, err := last(); answered || !errors.Is(err, peer.ErrUsed) {
		t.Error("before its answer:", err)
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	r, err := (&http.Client{Transport: tr}).Get(url)
	must(t, err)
	defer r.Body.Close()
	if n, err := io.Copy(io.Discard, r.Body); err == nil {
		t.Errorf("%d bytes pass for the whole", n)
	}
}

func TestPass_carries_upgrades_both_ways_until_one_end_is_gone(t *testing.T) {
	b := newBook()
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.Copy(c, rw)
	})
	a := serve(t, b, "a", nil)
	url, _ := front(t, a, alice)
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	must(t, err)
	defer c.Close()
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	in := bufio.NewReader(c)
	answer, err := http.ReadResponse(in, nil)
	must(t, err)
	if answer.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(answer.Status)
	}
	for _, word := range []string{"one", "two"} {
		fmt.Fprintln(c, word)
		if got, err := in.ReadString('\n'); got != word+"\n" {
			t.Fatal(got, err)
		}
	}
}

func TestDial_opens_a_stream_whose_ends_close_one_after_the_other(t *testing.T) {
	b := newBook()
	var all sync.WaitGroup
	t.Cleanup(all.Wait)
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		c, err := peer.Accept(w, r)
		if err != nil {
			return
		}
		all.Go(func() {
			defer c.Close()
			text, _ := io.ReadAll(c)
			fmt.Fprintf(c, "got %s", text)
		})
	})
	a := serve(t, b, "a", nil)
	c, err := a.Dial(t.Context(), alice)
	must(t, err)
	defer c.Close()
	fmt.Fprint(c, "hello")
	must(t, c.(interface{ CloseWrite() error }).CloseWrite())
	if text, err := io.ReadAll(c); string(text) != "got hello" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	b.where["box"] = ""
	if c, err := a.Dial(t.Context(), alice); c != nil || err != nil {
		t.Error("when no host has it:", c, err)
	}
	b.where["box"] = "gone"
	if _, err := a.Dial(t.Context(), alice); !errors.Is(err, spec.ErrUnreachable) {
		t.Error("when its host is gone:", err)
	}
}

func TestStream_that_is_cut_does_not_end_well(t *testing.T) {
	b := newBook()
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		c, err := peer.Accept(w, r)
		if err != nil {
			return
		}
		fmt.Fprint(c, "a part")
		_ = c.Abort()
	})
	a := serve(t, b, "a", nil)
	c, err := a.Dial(t.Context(), alice)
	must(t, err)
	defer c.Close()
	if text, err := io.ReadAll(c); err == nil {
		t.Errorf("%q passes for the whole", text)
	}
}

func TestListen_refuses_what_others_cannot_dial(t *testing.T) {
	for _, at := range []string{"", ":7400", "0.0.0.0:7400", "[::]:7400", "host", "192.0.2.1:1"} {
		if l, _, err := peer.Listen(at); !errors.Is(err, peer.ErrListen) {
			t.Errorf("%q: %v", at, err)
			if l != nil {
				l.Close()
			}
		}
	}
}

func TestPass_sends_a_body_on_and_no_interim_answer_that_nobody_has_asked_for(t *testing.T) {
	b := newBook()
	serve(t, b, "b", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%d", len(body))
	})
	a := serve(t, b, "a", nil)
	url, _ := front(t, a, alice)
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	must(t, err)
	defer c.Close()
	fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil || line != "HTTP/1.1 200 OK\r\n" {
		t.Errorf("%q, %v", line, err)
	}
}

func TestPass_ends_with_its_request(t *testing.T) {
	b := newBook()
	began, ended := make(chan struct{}), make(chan struct{})
	serve(t, b, "b", func(_ http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
		close(ended)
	})
	a := serve(t, b, "a", nil)
	url, _ := front(t, a, alice)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	r, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	must(t, err)
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	if _, err := (&http.Client{Transport: tr}).Do(r); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the other host works on")
	}
}
