package gateway_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestGateway_wakes_a_sandbox_and_delivers_the_request_that_woke_it(t *testing.T) {
	var carried []gateway.Carried
	w := begin(t, func(o *gateway.Options, _ *gateway.Listeners) {
		o.Carried = func(c gateway.Carried) { carried = append(carried, c) }
	})
	w.create("web-1", nil, spec.Idle{})
	w.serves("web-1", 8080, func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "hello ", r.Method) })
	w.sleep("web-1")
	if a, body := w.get("8080-web-1." + domain); a.StatusCode != 200 || body != "hello GET" {
		t.Error(a.Status, body)
	}
	if p := w.phase("web-1"); p != state.Running {
		t.Error(p)
	}
	if len(carried) != 1 || !carried[0].Woken || carried[0].Port != 8080 || carried[0].Ready.Before(carried[0].Came) {
		t.Errorf("%+v", carried)
	}
}

func TestGateway_reaches_a_server_that_binds_to_the_loopback_of_IPv6_alone(t *testing.T) {
	w := begin(t, nil)
	w.create("v", nil, spec.Idle{})
	w.serves("v", 1, func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "six") })
	w.listens("v", "[::1]:5173", w.servers["v 127.0.0.1:1"])
	if a, body := w.get("5173-v." + domain); a.StatusCode != 200 || body != "six" {
		t.Error(a.Status, body)
	}
}

func TestGateway_reaches_servers_that_speak_HTTPS(t *testing.T) {
	w := beginHTTPS(t)
	w.create("a", nil, spec.Idle{})
	w.serves("a", 443, func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			echoes(rw, r)
			return
		}
		fmt.Fprint(rw, r.Proto, " ", r.TLS != nil, " ", r.Host)
	})
	host := "443-a." + domain
	if _, body := w.get(host); body != "HTTP/1.1 true "+host {
		t.Error(body)
	}
	c, r := w.upgrade(host)
	echo := make([]byte, 4)
	if _, err := io.WriteString(c, "ping"); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(r, echo); err != nil || string(echo) != "ping" {
		t.Errorf("%q %v", echo, err)
	}
	c.Close()
	w.answers("a", 80, func(c net.Conn) { _, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n") })
	for port, want := range map[int]string{80: "no TLS", 81: "closed"} {
		if a, body := w.get(fmt.Sprintf("%d-a.%s", port, domain)); a.StatusCode != 502 {
			t.Errorf("%s: %s %s", want, a.Status, body)
		}
	}
}

func TestGateway_is_closed_without_the_token_of_the_sandbox(t *testing.T) {
	w := begin(t, nil)
	var seen http.Header
	for _, name := range []string{"mine", "other"} {
		w.create(name, &spec.Gateway{PublicPorts: []uint16{3000}}, spec.Idle{})
		for _, port := range []int{3000, 8080} {
			w.serves(name, port, func(rw http.ResponseWriter, r *http.Request) { seen = r.Header })
		}
	}
	w.sleep("mine")
	host := "8080-mine." + domain
	for name, c := range map[string]struct {
		header []string
		want   int
	}{
		"no token":          {nil, 401},
		"an empty token":    {[]string{"Drowse-Token", ""}, 403},
		"another's token":   {[]string{"Drowse-Token", w.token("other")}, 403},
		"a cut token":       {[]string{"Drowse-Token", w.token("mine")[:20]}, 403},
		"two tokens":        {[]string{"Drowse-Token", w.token("mine"), "Drowse-Token", w.token("mine")}, 403},
		"joined tokens":     {[]string{"Drowse-Token", w.token("other") + ", " + w.token("mine")}, 403},
		"other's by header": {[]string{"Drowse-Token", w.token("mine"), "Drowse-Sandbox", "other", "Drowse-Port", "8080"}, 400},
	} {
		if a, body := w.get(host, c.header...); a.StatusCode != c.want {
			t.Errorf("%s: %s %s", name, a.Status, body)
		}
	}
	if p := w.phase("mine"); p != state.Asleep {
		t.Fatal("a refused request woke it:", p)
	}
	if a, _ := w.get(host, "Drowse-Token", w.token("mine")); a.StatusCode != 200 {
		t.Error(a.Status)
	}
	if len(seen.Values("Drowse-Token")) > 0 {
		t.Error("the guest sees the token")
	}
	if a, _ := w.get("3000-mine." + domain); a.StatusCode != 200 {
		t.Error("a public port:", a.Status)
	}
	// A new token invalidates the old one at once.
	old := w.token("mine")
	_, err := w.host.State.SetMetadata(t.Context(), "mine", func(m *spec.Metadata, err error) error { m.Gateway.Tokens++; return err })
	if err != nil {
		t.Fatal(err)
	}
	if a, _ := w.get(host, "Drowse-Token", old); a.StatusCode != 403 {
		t.Error(a.Status)
	}
	// A fork has a token of its own, and no open port.
	if _, err := w.host.Sandbox("mine").Fork(t.Context(), sandbox.ForkOptions{Name: "child"}); err != nil {
		t.Fatal(err)
	}
	if a, _ := w.get("8080-child."+domain, "Drowse-Token", w.token("mine")); a.StatusCode != 403 {
		t.Error(a.Status)
	}
	if a, _ := w.get("3000-child." + domain); a.StatusCode != 401 {
		t.Error(a.Status)
	}
}

func TestGateway_answers_for_what_it_cannot_reach(t *testing.T) {
	w := begin(t, nil)
	w.create("up", nil, spec.Idle{})
	for host, want := range map[string]string{
		"80-nobody." + domain: `502 {"sandbox":"nobody","port":80,"message":"The sandbox was not found","code":502}`,
		"81-up." + domain:     `502 {"sandbox":"up","port":81,"message":"Nothing listens at the port","code":502}`,
		domain:                `400 {"message":"The host of the request names no sandbox and port","code":400}`,
	} {
		a, body := w.get(host)
		if got := fmt.Sprint(a.StatusCode, " ", strings.TrimSpace(body)); got != want {
			t.Errorf("%s: %s, want %s", host, got, want)
		}
	}
}

func TestGateway_takes_the_route_from_headers_at_its_own_domain(t *testing.T) {
	w := begin(t, nil)
	w.create("a", nil, spec.Idle{})
	w.serves("a", 80, func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprint(rw, len(r.Header.Values("Drowse-Sandbox")), len(r.Header.Values("Drowse-Port")))
	})
	if a, body := w.get(domain, "Drowse-Sandbox", "a", "Drowse-Port", "80"); a.StatusCode != 200 || body != "0 0" {
		t.Error(a.Status, body)
	}
	for _, h := range [][]string{
		{"Drowse-Sandbox", "a"}, {"Drowse-Port", "80"}, {"Drowse-Sandbox", "a", "Drowse-Sandbox", "a", "Drowse-Port", "80"},
		{"Drowse-Sandbox", "../a", "Drowse-Port", "80"}, {"Drowse-Sandbox", "a", "Drowse-Port", "080"},
	} {
		if a, _ := w.get(domain, h...); a.StatusCode != 400 {
			t.Error(h, a.Status)
		}
	}
}

func TestGateway_the_guest_sees_who_asks_and_not_what_the_client_says_of_that(t *testing.T) {
	w := begin(t, nil)
	w.create("a", &spec.Gateway{AllPublic: true, Host: "localhost:${PORT}"}, spec.Idle{})
	var seen *http.Request
	w.serves("a", 80, func(rw http.ResponseWriter, r *http.Request) {
		seen = r
		rw.Header().Set("Connection", "X-Hop")
		rw.Header().Set("X-Hop", "1")
		rw.Header().Set("Proxy-Authenticate", "1")
	})
	a, _ := w.get("80-a."+domain, "X-Forwarded-For", "9.9.9.9", "X-Forwarded-Host", "evil", "X-Forwarded-Port", "1", "x-forwarded-user", "root",
		"X-Real-IP", "9.9.9.9", "Forwarded", "for=9.9.9.9", "Connection", "X-Secret", "X-Secret", "1", "Keep-Alive", "1", "Proxy-Authorization", "x", "Te", "gzip", "X-Mine", "1")
	want := map[string]string{
		"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "80-a." + domain, "X-Forwarded-Proto": "http", "X-Mine": "1",
		"X-Forwarded-Port": "", "X-Forwarded-User": "", "X-Real-Ip": "", "Forwarded": "", "X-Secret": "", "Keep-Alive": "", "Proxy-Authorization": "", "Te": "",
	}
	for name, want := range want {
		if got := strings.Join(seen.Header.Values(name), "|"); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if seen.Host != "localhost:80" {
		t.Error(seen.Host)
	}
	if a.Header.Get("X-Hop") != "" || a.Header.Get("Proxy-Authenticate") != "" {
		t.Error(a.Header)
	}
}

func TestGateway_a_pooled_connection_neither_keeps_a_sandbox_awake_nor_is_used_after_a_sleep(t *testing.T) {
	w := begin(t, nil)
	w.create("a", nil, spec.Idle{SleepSeconds: 1})
	var mu sync.Mutex
	conns := map[string]bool{} // by the address of the peer
	w.serves("a", 80, func(rw http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		conns[r.RemoteAddr] = true
	})
	c := w.client(nil)
	for round := range 2 {
		for range 3 { // over one connection of the client, and one to the guest
			a, err := c.Get("http://80-a." + domain + "/")
			if err != nil || a.StatusCode != 200 {
				t.Fatal(round, a, err)
			}
			_, _ = io.Copy(io.Discard, a.Body)
			a.Body.Close()
		}
		until(t, "it sleeps", func() bool { return w.phase("a") == state.Asleep })
	}
	mu.Lock()
	defer mu.Unlock()
	if len(conns) < 2 {
		t.Error("connections to the guest:", conns)
	}
}

func TestGateway_an_open_WebSocket_keeps_a_sandbox_awake_until_it_is_put_to_sleep(t *testing.T) {
	w := begin(t, nil)
	w.create("a", nil, spec.Idle{SleepSeconds: 1})
	w.serves("a", 80, echoes)
	c, r := w.upgrade("80-a." + domain)
	slept := func() int {
		rec, err := w.host.State.Get("a")
		if err != nil {
			t.Fatal(err)
		}
		return len(rec.Sleeps)
	}
	for range 15 { // longer than the idle time
		time.Sleep(100 * time.Millisecond)
		if _, err := io.WriteString(c, "x\n"); err != nil {
			t.Fatal(err)
		}
		if line, err := r.ReadString('\n'); line != "x\n" {
			t.Fatal(line, err)
		}
	}
	time.Sleep(1500 * time.Millisecond) // quiet
	if n := slept(); n != 0 {
		t.Fatal("it slept", n, "times")
	}
	w.sleep("a")
	if _, err := r.ReadString('\n'); err == nil {
		t.Error("the WebSocket goes on over a sleep")
	}
}

func TestGateway_a_quiet_WebSocket_lets_a_sandbox_sleep_if_its_owner_wants(t *testing.T) {
	w := begin(t, nil)
	w.create("a", &spec.Gateway{AllPublic: true, IdleStreams: true}, spec.Idle{SleepSeconds: 2})
	w.serves("a", 80, echoes)
	c, r := w.upgrade("80-a." + domain)
	for range 16 { // longer than the idle time: bytes are use
		if _, err := io.WriteString(c, "x\n"); err != nil {
			t.Fatal(err)
		}
		if line, err := r.ReadString('\n'); line != "x\n" {
			t.Fatal(line, err)
		}
		time.Sleep(200 * time.Millisecond)
	}
	if p := w.phase("a"); p != state.Running {
		t.Error(p)
	}
	if _, err := r.ReadString('\n'); err == nil {
		t.Error("the WebSocket goes on over a sleep")
	}
	until(t, "it sleeps", func() bool { return w.phase("a") == state.Asleep })
}

func TestGateway_a_kill_cuts_answers_so_that_they_do_not_look_complete(t *testing.T) {
	w := begin(t, nil)
	b := w.create("a", nil, spec.Idle{})
	w.serves("a", 80, func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprint(rw, "begun")
		_ = http.NewResponseController(rw).Flush()
		<-r.Context().Done()
	})
	a, err := w.client(nil).Get("http://80-a." + domain + "/")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	if _, err := io.ReadFull(a.Body, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if err := b.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(a.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	if err := b.Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if a, body := w.get("80-a." + domain); a.StatusCode != 502 || !strings.Contains(body, "not found") {
		t.Error(a.Status, body)
	}
}

func TestGateway_bounds_open_connections_of_a_sandbox_an_owner_and_all(t *testing.T) {
	w := begin(t, func(o *gateway.Options, _ *gateway.Listeners) {
		o.Limits = gateway.Limits{Requests: 6, RequestsOfOwner: 4, RequestsOf: 3}
	})
	for name, owner := range map[string]string{"a1": "a", "a2": "a", "b1": "b", "c1": ""} {
		w.createFor(owner, name, &spec.Gateway{AllPublic: true}, spec.Idle{})
		w.serves(name, 80, echoes)
	}
	open := map[string]net.Conn{}
	for i, s := range []struct {
		to   string
		want bool
	}{
		{"a1", true}, {"a1", true}, {"a1", true}, {"a1", false}, // a sandbox has all
		{"a2", true}, {"a2", false}, // its owner has all
		{"b1", true}, {"c1", true}, {"b1", false}, // the gateway is full
	} {
		host := "80-" + s.to + "." + domain
		if s.want {
			open[fmt.Sprint(s.to, i)], _ = w.upgrade(host)
			continue
		}
		a, body := w.get(host, "Connection", "Upgrade", "Upgrade", "websocket")
		if a.StatusCode != http.StatusServiceUnavailable || a.Header.Get("Retry-After") != "1" || !strings.Contains(body, "no room") {
			t.Errorf("connection %d, to %s: %s %s", i, s.to, a.Status, body)
		}
	}
	open["a10"].Close()
	until(t, "there is room again", func() bool { return w.gate.Stats().Open == 5 })
	open["again"], _ = w.upgrade("80-a2." + domain)
	for _, c := range open {
		c.Close()
	}
	until(t, "all have left", func() bool { return w.gate.Stats().Open == 0 && w.gate.Stats().Sessions == 0 })
}

func TestGateway_bounds_the_requests_that_wait_for_a_sandbox(t *testing.T) {
	w := begin(t, func(o *gateway.Options, _ *gateway.Listeners) { o.Limits = gateway.Limits{WaitingOf: 2, Requests: 6} })
	hold, held := make(chan struct{}), make(chan struct{}, 10)
	for _, name := range []string{"a", "b"} {
		w.create(name, nil, spec.Idle{})
		w.serves(name, 80, func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "ok") })
		w.sleep(name)
	}
	w.vms.Fail = func(op, name string) error {
		if op == "restore" && name == "a" {
			held <- struct{}{}
			<-hold
		}
		return nil
	}
	var all sync.WaitGroup
	var statuses [6]string
	for i := range statuses {
		all.Go(func() {
			a, body := w.get("80-a." + domain)
			statuses[i] = fmt.Sprint(a.StatusCode, " ", a.Header.Get("Retry-After"), " ", strings.HasPrefix(body, "{"))
		})
	}
	<-held
	until(t, "four are refused", func() bool { // they do not wait
		return w.gate.Stats().Refused == 4
	})
	if a, body := w.get("80-b." + domain); body != "ok" {
		t.Error("another sandbox waits with it:", a.Status, body)
	}
	close(hold)
	all.Wait()
	if got := strings.Join(statuses[:], ","); strings.Count(got, "503 1 true") != 4 || strings.Count(got, "200  false") != 2 {
		t.Error(got)
	}
}

func TestGateway_does_not_wake_if_the_authorizer_does_not_let_it(t *testing.T) {
	w := begin(t, func(o *gateway.Options, _ *gateway.Listeners) {
		o.Authorizer = authorizer(func(http.Header) (gateway.Grant, error) { return gateway.Grant{}, nil })
		o.Refuse = func(rw http.ResponseWriter, _ *http.Request, f *gateway.Refusal) {
			f.WriteJSON(rw, map[string]any{"sandboxId": f.Route.Sandbox, "asleep": errors.Is(f.Err, gateway.ErrAsleep)})
		}
	})
	w.create("a", nil, spec.Idle{})
	w.serves("a", 80, func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "ok") })
	if _, body := w.get("80-a." + domain); body != "ok" {
		t.Error(body)
	}
	w.sleep("a")
	a, body := w.get("80-a." + domain)
	var doc struct {
		SandboxID string
		Asleep    bool
	}
	if err := json.Unmarshal([]byte(body), &doc); err != nil || a.StatusCode != 502 || doc.SandboxID != "a" || !doc.Asleep {
		t.Error(a.Status, body)
	}
	if p := w.phase("a"); p != state.Asleep {
		t.Error(p)
	}
}

func TestGateway_what_was_let_in_ends_when_its_token_or_its_open_port_does(t *testing.T) {
	w := begin(t, nil)
	hangs := make(chan struct{}, 1)
	for _, name := range []string{"a", "b"} {
		w.create(name, &spec.Gateway{PublicPorts: []uint16{80}}, spec.Idle{})
		for _, port := range []int{80, 81} {
			w.serves(name, port, func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Hangs") != "" {
					hangs <- struct{}{}
					<-r.Context().Done()
					return
				}
				echoes(rw, r)
			})
		}
	}
	token := "Drowse-Token: " + w.token("a")
	type stream struct {
		c net.Conn
		r *bufio.Reader
	}
	goes := func(s stream) bool {
		_, werr := io.WriteString(s.c, "x\n")
		line, err := s.r.ReadString('\n')
		return werr == nil && err == nil && line == "x\n"
	}
	open := func(host string, header ...string) stream {
		c, r := w.upgrade(host+"."+domain, header...)
		return stream{c, r}
	}
	public, other := open("80-a"), open("80-b")
	shown := open("81-a", token)
	change := func(do func(*spec.Gateway)) {
		t.Helper()
		if _, err := w.host.State.SetMetadata(t.Context(), "a", func(m *spec.Metadata, _ error) error { do(&m.Gateway); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	answered := make(chan string, 1)
	go func() {
		a, body := w.get("81-a."+domain, "Drowse-Token", strings.TrimPrefix(token, "Drowse-Token: "), "X-Hangs", "yes")
		answered <- a.Status + body
	}()
	<-hangs
	change(func(g *spec.Gateway) { g.PublicPorts = nil })
	until(t, "the stream to the closed port ends", func() bool { return !goes(public) })
	for what, s := range map[string]stream{"another sandbox's": other, "one with the token": shown} {
		if !goes(s) {
			t.Errorf("%s has ended as well", what)
		}
	}
	change(func(g *spec.Gateway) { g.Tokens++ })
	until(t, "the stream of the old token ends", func() bool { return !goes(shown) })
	if a := <-answered; !strings.HasPrefix(a, "403") {
		t.Errorf("a request that waits for its answer: %s", a)
	}
	if !goes(other) {
		t.Error("another sandbox's has ended as well")
	}
	if s := open("81-a", "Drowse-Token: "+w.token("a")); !goes(s) {
		t.Error("the new token does not let in")
	}
}
