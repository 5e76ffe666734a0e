package cluster_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/e2b"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

const gateDomain = "boxes.test"

// gate is a door with a gateway.
type gate struct {
	*door
	gateway  *gateway.Gateway
	web, raw string // addresses
	close    func() // ends the gateway
}

// servers are those in guests, by port: of all sandboxes of a test.
type servers struct {
	mu sync.Mutex
	at map[string]string
}

func (s *servers) dial(ctx context.Context, _, network, address string) (net.Conn, error) {
	s.mu.Lock()
	at := s.at[address]
	s.mu.Unlock()
	if at == "" {
		return nil, syscall.ECONNREFUSED
	}
	return new(net.Dialer).DialContext(ctx, network, at)
}

func (s *servers) set(port int, at string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[string]string{}
	}
	s.at[fmt.Sprintf("127.0.0.1:%d", port)] = at
}

func (s *servers) http(t *testing.T, port int, h http.HandlerFunc) {
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	s.set(port, server.Listener.Addr().String())
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	return l
}

// gateTLS is the certificate of the gateways.
var gateTLS = sync.OnceValues(func() (*tls.Config, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, DNSNames: []string{"*." + gateDomain}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		panic(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, pool
})

func newGate(t *testing.T, name string, store blob.Store, o cluster.Options, guests *servers) *gate {
	t.Helper()
	g := &gate{door: newDoor(t, name, store, o)}
	g.vms.Dial = guests.dial
	g.serve(t)
	return g
}

// serve makes the gateway, and serves it until the test ends.
func (g *gate) serve(t *testing.T) {
	t.Helper()
	var err error
	g.gateway, err = gateway.New(g.Host, gateway.Options{Resolver: gateway.Names{Domain: gateDomain}, Peers: g.peers})
	must(t, err)
	maps.Copy(g.passed, g.gateway.PeerHandlers())
	config, _ := gateTLS()
	web, raw := listen(t), listen(t)
	g.web, g.raw = web.Addr().String(), raw.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	// HTTP without TLS, and raw connections with it, are two gateways.
	go func() { done <- g.gateway.Serve(ctx, gateway.Listeners{Raw: raw, TLS: config}) }()
	plain := &http.Server{Handler: g.gateway, Protocols: new(http.Protocols)}
	plain.Protocols.SetHTTP1(true)
	plain.Protocols.SetUnencryptedHTTP2(true)
	go func() { done <- plain.Serve(web) }()
	g.close = sync.OnceFunc(func() {
		cancel()
		if err := errors.Join(<-done, plain.Close()); err != nil {
			t.Error(err)
		}
		<-done
	})
	t.Cleanup(g.close)
}

// open makes a sandbox that runs here, with open ports.
func (g *gate) open(name string, w spec.Gateway) {
	g.t.Helper()
	g.create(name)
	_, err := g.State.SetMetadata(g.t.Context(), name, func(m *spec.Metadata, _ error) error { m.Gateway = w; return nil })
	must(g.t, err)
	g.sleep(name)
	g.wake(name)
}

func (g *gate) get(host, body string, header ...string) (*http.Response, string) {
	g.t.Helper()
	r, err := http.NewRequestWithContext(g.t.Context(), "POST", "http://"+g.web+"/p%2Fq?a;b", strings.NewReader(body))
	must(g.t, err)
	r.Host = host
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	a, err := (&http.Client{Transport: tr}).Do(r)
	must(g.t, err)
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	must(g.t, err)
	return a, string(text)
}

func TestGateway_of_any_host_carries_requests_to_a_sandbox_that_another_one_runs(t *testing.T) {
	store, guests := dir(t), &servers{}
	a, b := newGate(t, "a", store, cluster.Options{}, guests), newGate(t, "b", store, cluster.Options{}, guests)
	b.open("box", spec.Gateway{PublicPorts: []uint16{80, 50051}})
	guests.http(t, 80, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "websocket" {
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			_, _ = io.Copy(c, rw)
			return
		}
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %s for %s of %s by %s", r.Method, r.Host, r.URL.RequestURI(), body, r.Header.Get("X-Forwarded-For"), r.Header.Get("X-Forwarded-Host"), r.Header.Get("X-Forwarded-Proto"))
		for _, name := range []string{"Drowse-Passed", "Drowse-Token", "X-Hop", "Drowse-Sandbox"} {
			if r.Header.Get(name) != "" {
				fmt.Fprint(w, " and ", name)
			}
		}
	})
	guests.http(t, 81, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "closed port") })
	host := "80-box." + gateDomain
	large := strings.Repeat("x", 1<<20)
	if _, text := a.get(host, large, "Connection", "X-Hop", "X-Hop", "1", "X-Forwarded-For", "192.0.2.1", "Drowse-Passed", "forged"); text != "POST "+host+" /p%2Fq?a;b "+large+" for 127.0.0.1 of "+host+" by http" {
		t.Error(strings.ReplaceAll(text, large, "LARGE"))
	}
	// Its token is its host's.
	m, err := b.State.Metadata("box")
	must(t, err)
	token, err := b.State.GatewayToken("box", m.Gateway)
	must(t, err)
	closed := "81-box." + gateDomain
	if answer, text := a.get(closed, "", "Drowse-Token", token); text != "closed port" {
		t.Error(answer.Status, text)
	}
	for _, header := range [][]string{nil, {"Drowse-Token", "wrong"}} {
		here, text := a.get(closed, "", header...)
		there, same := b.get(closed, "", header...)
		if here.StatusCode != there.StatusCode || text != same || here.StatusCode/100 != 4 {
			t.Errorf("%v: %s %s, at its host %s %s", header, here.Status, text, there.Status, same)
		}
	}
	// An upgrade.
	c, err := net.Dial("tcp", a.web)
	must(t, err)
	defer c.Close()
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", host)
	in := bufio.NewReader(c)
	answer, err := http.ReadResponse(in, nil)
	must(t, err)
	fmt.Fprintln(c, "hello")
	if line, err := in.ReadString('\n'); answer.StatusCode != http.StatusSwitchingProtocols || line != "hello\n" {
		t.Error(answer.Status, line, err)
	}
	// gRPC, with its trailers.
	s := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(s, health.NewServer())
	l := listen(t)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	guests.set(50051, l.Addr().String())
	conn, err := grpc.NewClient("passthrough:///"+a.web, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("50051-box."+gateDomain))
	must(t, err)
	defer conn.Close()
	got, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil || got.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Error(got, err)
	}
	if _, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "none"}); err == nil || !strings.Contains(err.Error(), "NotFound") {
		t.Error(err)
	}
	if a.phase("box") != "" || b.phase("box") != state.Running {
		t.Errorf("on a it is %q, on b %q", a.phase("box"), b.phase("box"))
	}
	// The gateway ends with what it passes on.
	a.close()
	if _, err := in.ReadString('\n'); err == nil {
		t.Error("the upgrade outlives its gateway")
	}
	eventually(t, "what was open on the gateway has ended", func() bool { return a.gateway.Stats().Open == 0 })
}

func TestGateway_of_any_host_carries_raw_connections(t *testing.T) {
	store, guests := dir(t), &servers{}
	a, b := newGate(t, "a", store, cluster.Options{}, guests), newGate(t, "b", store, cluster.Options{}, guests)
	b.open("box", spec.Gateway{AllPublic: true, GuestTLS: []uint16{443}})
	config, pool := gateTLS()
	tcp, secure := listen(t), tls.NewListener(listen(t), config)
	for _, l := range []net.Listener{tcp, secure} {
		var all sync.WaitGroup
		all.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				all.Go(func() {
					defer c.Close()
					text, err := io.ReadAll(c)
					if err != nil {
						return
					}
					fmt.Fprintf(c, "got %d", len(text))
				})
			}
		})
		t.Cleanup(func() { l.Close(); all.Wait() })
	}
	guests.set(5432, tcp.Addr().String())
	guests.set(443, secure.Addr().String())
	for _, name := range []string{"5432-box", "443-box"} {
		c, err := tls.Dial("tcp", a.raw, &tls.Config{ServerName: name + "." + gateDomain, RootCAs: pool})
		must(t, err)
		_, err = c.Write(make([]byte, 100_000))
		must(t, err)
		must(t, c.CloseWrite())
		if text, err := io.ReadAll(c); string(text) != "got 100000" || err != nil {
			t.Errorf("%s: %q, %v", name, text, err)
		}
		c.Close()
	}
	// A host that breaks off does not end the stream well.
	c, err := tls.Dial("tcp", a.raw, &tls.Config{ServerName: "5432-box." + gateDomain, RootCAs: pool})
	must(t, err)
	defer c.Close()
	_, err = c.Write([]byte("x"))
	must(t, err)
	b.close()
	if text, err := io.ReadAll(c); err == nil {
		t.Errorf("its host is gone, and the stream ends well after %q", text)
	}
}

func TestGateway_says_when_the_host_of_a_sandbox_does_not_answer_and_takes_it_over(t *testing.T) {
	store, guests := dir(t), &servers{}
	o := cluster.Options{TTL: 3 * time.Second}
	a, b := newGate(t, "a", store, o, guests), newGate(t, "b", store, o, guests)
	b.open("box", spec.Gateway{AllPublic: true})
	guests.http(t, 80, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "here") })
	host := "80-box." + gateDomain
	if _, text := a.get(host, ""); text != "here" {
		t.Error(text)
	}
	b.close()
	b.endDoor()
	b.stop()
	b.stop = nil
	if answer, text := a.get(host, "body"); answer.StatusCode != http.StatusServiceUnavailable || answer.Header.Get("Retry-After") == "" {
		t.Error("at once:", answer.Status, text)
	}
	eventually(t, "a takes it", func() bool { _, text := a.get(host, "body"); return text == "here" })
	if a.phase("box") != state.Running {
		t.Error("on a it is", a.phase("box"))
	}
}

// e2bDoor is a door with a server of E2B's wire.
type e2bDoor struct {
	*door
	wire *e2b.Server
	at   string
}

const e2bDomain = "e2b.test"

func newE2B(t *testing.T, name string, store blob.Store, guests *servers) *e2bDoor {
	t.Helper()
	d := &e2bDoor{door: newDoor(t, name, store, cluster.Options{})}
	d.vms.Dial = guests.dial
	var err error
	d.wire, err = e2b.New(e2b.Options{Host: d.Host, Tokens: d.tokens, Peers: d.peers, Cluster: d.node.Catalog(d.peers), Domain: e2bDomain, Templates: map[string]string{"base": sandboxtest.Image}, Network: true})
	must(t, err)
	d.passed[e2b.PeerService] = d.wire
	l := listen(t)
	d.at = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.wire.Serve(ctx, l, nil) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *e2bDoor) key(owner string) string {
	d.t.Helper()
	key, err := d.tokens.CreateE2B(tokens.Token{Name: "key-" + owner, Owner: owner, Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}})
	must(d.t, err)
	return key
}

// ask asks the control plane, or a sandbox if host is not empty.
func (d *e2bDoor) ask(method, host, path, body string, header ...string) (int, string) {
	d.t.Helper()
	r, err := http.NewRequestWithContext(d.t.Context(), method, "http://"+d.at+path, strings.NewReader(body))
	must(d.t, err)
	r.Host = host
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	a, err := (&http.Client{Transport: tr}).Do(r)
	must(d.t, err)
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	must(d.t, err)
	return a.StatusCode, string(text)
}

func TestE2B_of_any_host_answers_for_a_sandbox_that_another_one_runs(t *testing.T) {
	store, guests := dir(t), &servers{}
	a, b := newE2B(t, "a", store, guests), newE2B(t, "b", store, guests)
	guests.http(t, 3000, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "app ", r.Host) })
	ours, theirs, home := a.key("us"), a.key("them"), b.key("us")
	var made struct{ SandboxID, EnvdAccessToken string }
	code, text := b.ask("POST", "api."+e2bDomain, "/v2/sandboxes", `{"templateID":"base","timeout":300,"autoPause":true}`, "X-API-KEY", home)
	if code != http.StatusCreated || json.Unmarshal([]byte(text), &made) != nil {
		t.Fatal(code, text)
	}
	id := made.SandboxID
	pause := func(d *e2bDoor, key string) {
		t.Helper()
		if code, text := d.ask("POST", "api."+e2bDomain, "/sandboxes/"+id+"/pause", "", "X-API-KEY", key); code != http.StatusNoContent {
			t.Fatal("pause:", code, text)
		}
		must(t, b.node.Publish(t.Context(), id))
	}
	pause(b, home)
	connect := func(d *e2bDoor, key string, want int) {
		t.Helper()
		code, text := d.ask("POST", "api."+e2bDomain, "/sandboxes/"+id+"/connect", `{"timeout":300}`, "X-API-KEY", key)
		if code != want || json.Unmarshal([]byte(text), &made) != nil {
			t.Fatal("connect:", code, text)
		}
	}
	connect(b, home, http.StatusCreated)
	connect(a, ours, http.StatusOK)
	envd := "49983-" + id + "." + e2bDomain
	var form bytes.Buffer
	form.WriteString("--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\n" + strings.Repeat("y", 300_000) + "\r\n--b--\r\n")
	if code, text := a.ask("POST", envd, "/files?path=/root/x", form.String(), "X-Access-Token", made.EnvdAccessToken, "Content-Type", "multipart/form-data; boundary=b"); code != http.StatusOK {
		t.Error("upload:", code, text)
	}
	if code, text := a.ask("GET", envd, "/files?path=/root/x", "", "X-Access-Token", made.EnvdAccessToken); code != http.StatusOK || text != strings.Repeat("y", 300_000) {
		t.Error("download:", code, len(text))
	}
	if code, _ := a.ask("GET", envd, "/files?path=/root/x", ""); code != http.StatusUnauthorized {
		t.Error("without its token:", code)
	}
	if code, text := a.ask("GET", "3000-"+id+"."+e2bDomain, "/", ""); code != http.StatusOK || text != "app 3000-"+id+"."+e2bDomain {
		t.Error("a port:", code, text)
	}
	if code, text := a.ask("GET", "api."+e2bDomain, "/sandboxes/"+id, "", "X-API-KEY", ours); code != http.StatusOK || !strings.Contains(text, `"state":"running"`) {
		t.Error("its detail:", code, text)
	}
	for _, ask := range [][2]string{{"GET", ""}, {"DELETE", ""}, {"POST", "/pause"}, {"POST", "/connect"}, {"GET", "/logs"}} {
		here, text := a.ask(ask[0], "api."+e2bDomain, "/sandboxes/"+id+ask[1], "", "X-API-KEY", theirs)
		none, same := a.ask(ask[0], "api."+e2bDomain, "/sandboxes/inix"+ask[1], "", "X-API-KEY", theirs)
		if here != none || text != strings.ReplaceAll(same, "inix", id) || here != http.StatusNotFound {
			t.Errorf("another owner: %s %s: %d %s, and of none %d %s", ask[0], ask[1], here, text, none, same)
		}
	}
	if a.phase(id) != "" {
		t.Error("a has it as well")
	}
	list := func(key string) (n int) {
		t.Helper()
		var rows []struct{ SandboxID, State string }
		code, text := a.ask("GET", "api."+e2bDomain, "/v2/sandboxes?state=running", "", "X-API-KEY", key)
		if code != http.StatusOK || json.Unmarshal([]byte(text), &rows) != nil {
			t.Fatal("list:", code, text)
		}
		return len(rows)
	}
	if ours, theirs := list(ours), list(theirs); ours != 1 || theirs != 0 {
		t.Errorf("its owner's list has %d, another's %d", ours, theirs)
	}
	pause(a, ours)
	if code, text := a.ask("GET", "api."+e2bDomain, "/sandboxes/"+id, "", "X-API-KEY", ours); code != http.StatusOK || !strings.Contains(text, `"state":"paused"`) {
		t.Error("its detail in its sleep:", code, text)
	}
	// Nobody has it: whoever is asked resumes it.
	connect(a, ours, http.StatusCreated)
	if code, text := a.ask("DELETE", "api."+e2bDomain, "/sandboxes/"+id, "", "X-API-KEY", ours); code != http.StatusNoContent || b.phase(id) != "" {
		t.Error(code, text)
	}
	if _, err := os.Stat(b.State.Dir()); err != nil {
		t.Error(err)
	}
}
