package proxy

import (
	"bufio"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
)

const policyText = `
rules:
  - {name: never, direction: egress, verdict: deny, cidrs: [93.184.216.99/32]}
  - {name: apis, direction: egress, verdict: allow, names: [api.example.com, api2.example.com, blind.example.com, moves.example.com], protocols: [tcp], ports: [443]}
  - {name: web, direction: egress, verdict: allow, names: [web.example.com, api.example.com, never.example.com, inside.example.com], protocols: [tcp], ports: [80]}
  - {name: office, direction: egress, verdict: allow, cidrs: [10.9.0.0/16], protocols: [tcp], ports: [80]}
  - {name: host, direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [any]}
  - {name: others, direction: egress, verdict: allow, agents: [db], protocols: [tcp], ports: [any]}
  - {name: open, direction: egress, verdict: allow, cidrs: [93.184.216.50/32], protocols: [tcp], ports: [443]}
dns: {upstreams: ["192.0.2.53:53"], queries_per_second: 10000}
proxy:
  enabled: true
  inject:
    - {secret: API_KEY, hosts: [api.example.com], header: Authorization, prefix: "Bearer "}
    - {secret: SECOND, hosts: [api2.example.com], header: X-Key}
`

const (
	apiKey    = "sk-the-real-key-0123456789abcdef"
	apiAddr   = "93.184.216.34"
	blindAddr = "93.184.216.35"
	webAddr   = "93.184.216.36"
)

// world is a proxy with servers, some of which it may reach.
type world struct {
	t       testing.TB
	srv     *Server
	at      string // the proxy's address
	id      *Identity
	dialled chan netip.AddrPort

	mu      sync.Mutex
	model   *refmodel.Model
	pins    map[netip.Addr][]string
	zone    map[string]string
	lookups int
	routes  map[string]string // peer -> its real address
	values  map[string]string
	changed chan struct{}
	events  []Event
	log     []string // requests that the servers got

	// ca is the servers' certificate authority.
	ca    *x509.Certificate
	caKey *ecdsa.PrivateKey
}

func (w *world) Opens(peer netip.AddrPort, name string) (string, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a := w.model.Ask(refmodel.Question{Direction: netpolicy.Egress, Protocol: netpolicy.TCP, Peer: peer.Addr(), Port: peer.Port(), Names: w.pins[peer.Addr()], Hello: true, ServerName: name})
	return fmt.Sprint(a.Rule), a.Verdict == netpolicy.Allow && (a.Class == "public" || a.Class == "private")
}

func (w *world) Pin(name string, a netip.Addr, _ time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pins[a] = append(w.pins[a], name)
	return nil
}

func (w *world) Secret(name string) (string, bool, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	v, ok := w.values[name]
	return v, ok, w.changed
}

func (w *world) setSecret(name, value string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.values[name] = value
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *world) exchange(_ context.Context, m *dns.Msg, _ netip.AddrPort) (*dns.Msg, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lookups++
	a := new(dns.Msg)
	a.SetReply(m)
	for ip := range strings.FieldsSeq(w.zone[strings.TrimSuffix(m.Question[0].Name, ".")]) {
		a.Answer = append(a.Answer, &dns.A{Hdr: dns.RR_Header{Name: m.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(ip)})
	}
	return a, nil
}

func (w *world) dial(ctx context.Context, peer netip.AddrPort, _ string) (*net.TCPConn, error) {
	w.mu.Lock()
	to := w.routes[peer.String()]
	w.mu.Unlock()
	w.dialled <- peer
	if to == "" {
		return nil, errors.New("connection refused")
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp4", to)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func (w *world) event(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

func (w *world) told() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.events)
}

func (w *world) got() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.log, "\n")
}

func newWorld(t testing.TB, edit ...func(*Config)) *world {
	t.Helper()
	w := &world{
		t: t, id: identity(t, 1, "lineage"), dialled: make(chan netip.AddrPort, 10000), pins: map[netip.Addr][]string{}, changed: make(chan struct{}),
		zone: map[string]string{
			"api.example.com": apiAddr, "api2.example.com": apiAddr, "blind.example.com": blindAddr, "web.example.com": webAddr, "never.example.com": "93.184.216.99",
			"inside.example.com": "127.0.0.1 10.9.0.1 169.254.169.254 192.168.1.1", "other.example.com": webAddr,
		},
		routes: map[string]string{}, values: map[string]string{"API_KEY": apiKey, "SECOND": "another-real-secret"},
	}
	var err error
	if w.caKey, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, &w.caKey.PublicKey, w.caKey)
	if err != nil {
		t.Fatal(err)
	}
	if w.ca, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(w.ca)
	res := resolver.New(resolver.Config{Pinner: w, Exchange: w.exchange})
	cfg := Config{Identity: w.id, Rules: w, Names: res, Secrets: w, Roots: roots, Dial: w.dial, Event: w.event, SecretTimeout: 50 * time.Millisecond}
	for _, f := range edit {
		f(&cfg)
	}
	w.srv = New(cfg)
	w.setPolicy(res, policyText)
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	w.at = ln.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.srv.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if st := w.srv.Stats(); st.Open != 0 {
			t.Errorf("%+v after the end", st)
		}
	})
	return w
}

// setPolicy swaps the policy. res may be nil if the resolver's policy stays.
func (w *world) setPolicy(res *resolver.Resolver, text string) {
	w.t.Helper()
	p, err := netpolicy.Parse([]byte(text))
	if err != nil {
		w.t.Fatal(err)
	}
	id := netpolicy.Identity{Address4: netip.MustParseAddr("10.200.0.7")}
	env := netpolicy.Environment{
		Host: []netip.Addr{netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("93.184.216.77")}, Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")},
		Peers: []netpolicy.Peer{{Address: netip.MustParseAddr("10.200.0.8"), Tags: []string{"db"}}}, TLSPort: 1,
	}
	spec, err := netpolicy.Compile(p, id, env)
	if err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	w.model = refmodel.New(p, id, env)
	w.mu.Unlock()
	if res != nil {
		res.SetPolicy(p, spec)
	}
	w.srv.SetPolicy(p)
}

// certificate returns a certificate signed by the servers' authority.
func (w *world) certificate(names ...string) tls.Certificate {
	w.t.Helper()
	c := &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: names, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, w.ca, &w.caKey.PublicKey, w.caKey)
	if err != nil {
		w.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: w.caKey}
}

// serve makes a server at a peer's address, with TLS if names are given for its certificate. h may be nil.
func (w *world) serve(peer string, h http.HandlerFunc, names ...string) *httptest.Server {
	w.t.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20))
		w.mu.Lock()
		w.log = append(w.log, fmt.Sprintf("%s %s %s %s auth=%q body=%q te=%v", peer, r.Method, r.Host, r.URL, r.Header["Authorization"], body, r.TransferEncoding))
		w.mu.Unlock()
		if h != nil {
			h(rw, r)
		}
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	if len(names) > 0 {
		s.TLS = &tls.Config{Certificates: []tls.Certificate{w.certificate(names...)}}
		s.StartTLS()
	} else {
		s.Start()
	}
	w.t.Cleanup(s.Close)
	w.mu.Lock()
	w.routes[peer] = s.Listener.Addr().String()
	w.mu.Unlock()
	return s
}

// client returns an HTTP client as a program in the VM has it.
func (w *world) client() *http.Client {
	trust := x509.NewCertPool()
	trust.AppendCertsFromPEM(w.id.Root())
	trust.AddCert(w.ca)
	tr := &http.Transport{
		Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: w.at}), TLSClientConfig: &tls.Config{RootCAs: trust}, DisableCompression: true,
	}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (w *world) placeholder(secret string) string {
	w.t.Helper()
	p, err := w.id.Placeholder(secret)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// get requests a URL, with header fields "Name: value".
func (w *world) get(c *http.Client, u string, fields ...string) (status int, body string, h http.Header) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), http.MethodGet, u, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range fields {
		k, v, _ := strings.Cut(f, ": ")
		r.Header.Add(k, v)
	}
	resp, err := c.Do(r)
	if err != nil {
		return 0, err.Error(), nil
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return resp.StatusCode, "broken: " + err.Error(), resp.Header
	}
	return resp.StatusCode, string(b), resp.Header
}

// raw sends bytes to the proxy and returns what the proxy answers until it closes the connection.
func (w *world) raw(text string) string {
	w.t.Helper()
	c, err := net.Dial("tcp4", w.at)
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, text); err != nil {
		return err.Error()
	}
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	b, err := io.ReadAll(c)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		w.t.Errorf("%.100q: the connection stays open", text)
	}
	return string(b)
}

// tunnel opens a tunnel and returns it, or the answer that refuses it.
func (w *world) tunnel(target string) (*net.TCPConn, string) {
	w.t.Helper()
	c, err := net.Dial("tcp4", w.at)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, err.Error()
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, resp.Status
	}
	return c.(*net.TCPConn), ""
}

func (w *world) neverDialled(what string) {
	w.t.Helper()
	select {
	case p := <-w.dialled:
		w.t.Errorf("%s: %v was connected to", what, p)
	default:
	}
}

func TestServer_puts_a_secret_where_its_placeholder_is_and_nowhere_else(t *testing.T) {
	w := newWorld(t)
	w.serve(apiAddr+":443", nil, "api.example.com", "api2.example.com")
	w.serve(blindAddr+":443", nil, "blind.example.com")
	w.serve(apiAddr+":80", nil)
	w.serve(webAddr+":80", nil)
	c := w.client()
	holder := w.placeholder("API_KEY")
	for _, x := range []struct {
		name, url string
		fields    []string
		want      string // what the server got
	}{
		{"the rule's header", "https://api.example.com/v1?q=1", []string{"Authorization: Bearer " + holder}, "GET api.example.com /v1?q=1 auth=[\"Bearer " + apiKey + "\"]"},
		{"another prefix", "https://api.example.com/b", []string{"Authorization: Token " + holder}, "/b auth=[\"Token " + holder + "\"]"},
		{"more than the placeholder", "https://api.example.com/c", []string{"Authorization: Bearer " + holder + "x"}, "/c auth=[\"Bearer " + holder + "x\"]"},
		{"the placeholder in the URL", "https://api.example.com/d?k=" + holder, nil, "/d?k=" + holder + " auth=[]"},
		{"another host's secret", "https://api.example.com/e", []string{"Authorization: Bearer " + w.placeholder("SECOND")}, "/e auth=[\"Bearer " + w.placeholder("SECOND") + "\"]"},
		{"another host with TLS", "https://blind.example.com/f", []string{"Authorization: Bearer " + holder}, "blind.example.com /f auth=[\"Bearer " + holder + "\"]"},
		{"the other injection's host", "https://api2.example.com/g", []string{"Authorization: Bearer " + holder}, "api2.example.com /g auth=[\"Bearer " + holder + "\"]"},
		{"the host without TLS", "http://api.example.com/h", []string{"Authorization: Bearer " + holder}, "api.example.com /h auth=[\"Bearer " + holder + "\"]"},
		{"a host without TLS", "http://web.example.com/i", []string{"Authorization: Bearer " + holder}, "web.example.com /i auth=[\"Bearer " + holder + "\"]"},
	} {
		if status, body, _ := w.get(c, x.url, x.fields...); status != http.StatusOK || body != "" {
			t.Errorf("%s: %d %q", x.name, status, body)
		}
		if !strings.Contains(w.got(), x.want) {
			t.Errorf("%s: the servers have got\n%s\nwant %s", x.name, w.got(), x.want)
		}
	}
	if n := strings.Count(w.got(), apiKey); n != 1 {
		t.Errorf("the secret was sent %d times, want once", n)
	}
	events := w.told()
	if len(events) != 1 || !events[0].Sent || events[0].Secret != "API_KEY" || events[0].Host != "api.example.com" || events[0].Status != http.StatusOK ||
		events[0].Reason != netpolicy.ReasonInject || events[0].Peer.String() != apiAddr+":443" || events[0].Rule == "" {
		t.Errorf("events: %+v", events)
	}
	if st := w.srv.Stats(); st.Injected != 1 || st.Tunnels == 0 || st.Refused != 0 {
		t.Errorf("%+v", st)
	}
}

func TestServer_reflected_secret_does_not_come_back(t *testing.T) {
	w := newWorld(t)
	w.serve(apiAddr+":443", func(rw http.ResponseWriter, r *http.Request) {
		auth := r.Header.Get("Authorization")
		if r.Header.Get("Accept-Encoding") != "identity" {
			t.Errorf("the server is asked for encoding %q", r.Header.Get("Accept-Encoding"))
		}
		rw.Header().Set("X-Echo", auth)
		rw.Header().Set("Location", "https://elsewhere.example/?"+auth)
		rw.Header().Set("Trailer", "X-Late")
		if r.URL.Path == "/sized" {
			rw.Header().Set("Content-Length", fmt.Sprint(len(auth)+2))
		}
		rw.WriteHeader(http.StatusFound)
		for _, b := range []byte("<" + auth + ">") { // byte by byte
			_, _ = rw.Write([]byte{b})
			if r.URL.Path == "/pieces" {
				_ = http.NewResponseController(rw).Flush()
			}
		}
		rw.Header().Set("X-Late", auth)
	}, "api.example.com")
	c := w.client()
	for _, path := range []string{"/pieces", "/sized", "/"} {
		status, body, h := w.get(c, "https://api.example.com"+path, "Authorization: Bearer "+w.placeholder("API_KEY"), "Accept-Encoding: gzip")
		if want := "<Bearer " + stars(len(apiKey)) + ">"; status != http.StatusFound || body != want || h.Get("X-Echo") != "Bearer "+stars(len(apiKey)) {
			t.Errorf("%s: %d %q %q, want %q", path, status, body, h.Get("X-Echo"), want)
		}
		if text := fmt.Sprint(h); strings.Contains(text, apiKey) || h.Get("Trailer") != "" {
			t.Errorf("%s: %v", path, h)
		}
	}
	// A later answer may contain it too.
	w.serve(apiAddr+":443", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, apiKey) }, "api.example.com")
	w.srv.transport.CloseIdleConnections()
	if _, body, _ := w.get(c, "https://api.example.com/"); strings.Contains(body, apiKey) || body != stars(len(apiKey)) {
		t.Errorf("without a placeholder: %q", body)
	}
}

func TestServer_error_that_has_the_secret_in_it_does_not_say_it(t *testing.T) {
	const secret = `a "quoted" secret \ with signs`
	w := newWorld(t)
	w.setSecret("API_KEY", secret)
	for _, answer := range []string{secret + "\r\n\r\n", "HTTP/1.1 " + secret + "\r\n\r\n", "HTTP/1.1 200 OK\r\n" + secret + "\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: " + secret + "\r\n\r\n"} {
		ln, err := tls.Listen("tcp4", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{w.certificate("api.example.com")}})
		if err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.routes[apiAddr+":443"] = ln.Addr().String()
		w.mu.Unlock()
		served := make(chan struct{})
		go func() {
			defer close(served)
			c, err := ln.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, answer)
			}
		}()
		status, body, h := w.get(w.client(), "https://api.example.com/", "Authorization: Bearer "+w.placeholder("API_KEY"))
		if text := fmt.Sprint(body, h); status != http.StatusBadGateway || strings.Contains(text, "quoted") {
			t.Errorf("%q: %d %s", answer, status, text)
		}
		ln.Close()
		<-served
	}
}

// THREAT_MODEL says that this is not prevented.
func TestServer_compressed_reflection_is_passed_on(t *testing.T) {
	w := newWorld(t)
	w.serve(apiAddr+":443", func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(rw)
		_, _ = io.WriteString(z, r.Header.Get("Authorization"))
		z.Close()
	}, "api.example.com")
	_, body, h := w.get(w.client(), "https://api.example.com/", "Authorization: Bearer "+w.placeholder("API_KEY"))
	z, err := gzip.NewReader(strings.NewReader(body))
	if err != nil || h.Get("Content-Encoding") != "gzip" {
		t.Fatalf("%v: %q", err, body)
	}
	if b, err := io.ReadAll(z); err != nil || string(b) != "Bearer "+apiKey {
		t.Errorf("%q, %v: what is documented as not prevented is otherwise", b, err)
	}
}

func TestServer_host_that_cannot_prove_its_name_gets_nothing(t *testing.T) {
	w := newWorld(t)
	w.serve(apiAddr+":443", nil, "evil.example.com")
	status, body, _ := w.get(w.client(), "https://api.example.com/", "Authorization: Bearer "+w.placeholder("API_KEY"))
	if status != http.StatusBadGateway || !strings.Contains(body, "certificate") {
		t.Errorf("%d %q", status, body)
	}
	if w.got() != "" {
		t.Errorf("it has got %s", w.got())
	}
	if e := w.told(); len(e) != 1 || e[0].Sent || e[0].Secret != "API_KEY" || e[0].Status != http.StatusBadGateway {
		t.Errorf("events: %+v", e)
	}
}

func TestServer_secret_that_is_not_there_is_waited_for(t *testing.T) {
	w := newWorld(t)
	w.serve(apiAddr+":443", nil, "api.example.com")
	w.mu.Lock()
	delete(w.values, "API_KEY")
	w.mu.Unlock()
	c := w.client()
	holder := "Authorization: Bearer " + w.placeholder("API_KEY")
	status, body, _ := w.get(c, "https://api.example.com/", holder)
	if status != http.StatusServiceUnavailable || !strings.Contains(body, "its owner has to hand it in") || w.got() != "" {
		t.Errorf("%d %q, the server has got %q", status, body, w.got())
	}
	if e := w.told(); len(e) != 1 || e[0].Sent || e[0].Secret != "API_KEY" || e[0].Status != http.StatusServiceUnavailable {
		t.Errorf("events: %+v", e)
	}
	// A request without the placeholder need not wait.
	if status, _, _ := w.get(c, "https://api.example.com/", "Authorization: Bearer own"); status != http.StatusOK {
		t.Errorf("a request without a placeholder: %d", status)
	}
	w.srv.cfg.SecretTimeout = time.Hour
	done := make(chan int, 1)
	go func() {
		status, _, _ := w.get(c, "https://api.example.com/", holder)
		done <- status
	}()
	w.setSecret("UNRELATED", "unrelated") // wakes it in vain
	w.setSecret("API_KEY", apiKey)
	if status := <-done; status != http.StatusOK || !strings.Contains(w.got(), apiKey) {
		t.Errorf("%d, the server has got %q", status, w.got())
	}
	w.setSecret("API_KEY", "no\r\nX-More: header")
	if status, _, _ := w.get(c, "https://api.example.com/", holder); status != http.StatusServiceUnavailable {
		t.Errorf("a value with a line break: %d", status)
	}
}

func TestServer_refuses_what_the_policy_does_not_open(t *testing.T) {
	w := newWorld(t)
	c := w.client()
	for name, x := range map[string]struct {
		url    string
		status int
	}{
		"name of no rule":                     {"http://other.example.com/", 403},
		"name at another port":                {"http://web.example.com:81/", 403},
		"name that a rule denies":             {"http://never.example.com/", 403},
		"name that leads inside":              {"http://inside.example.com/", 403},
		"TLS port without TLS":                {"http://api.example.com:443/", 403},
		"public address":                      {"http://93.184.216.60/", 403},
		"metadata":                            {"http://169.254.169.254/latest/", 403},
		"loopback":                            {"http://127.0.0.1/", 403},
		"any address":                         {"http://0.0.0.0/", 403},
		"private address":                     {"http://10.8.0.1/", 403},
		"address of the host":                 {"http://192.168.1.1/", 403},
		"public address of the host":          {"http://93.184.216.77/", 403},
		"the gateway":                         {"http://172.31.255.1/", 403},
		"the proxy itself":                    {"http://172.31.255.1:3128/", 403},
		"the endpoint's own address":          {"http://10.200.0.7/", 403},
		"another endpoint, though by its tag": {"http://10.200.0.8/", 403},
		"multicast":                           {"http://224.0.0.1/", 403},
		"loopback in one number":              {"http://2130706433/", 400},
		"loopback in octal":                   {"http://0177.0.0.1/", 400},
		"loopback in two numbers":             {"http://127.1/", 400},
		"loopback over IPv6":                  {"http://[::1]/", 400},
		"loopback by a mapped address":        {"http://[::ffff:127.0.0.1]/", 400},
		"name with a final dot":               {"http://web.example.com./", 400},
		"name with a user":                    {"http://user@other.example.com/", 403},
		"private address that is not there":   {"http://10.9.0.1/", 502},
	} {
		status, body, _ := w.get(c, x.url)
		if status != x.status || !strings.Contains(body, "drowse proxy: ") && x.url != "http://user@other.example.com/" {
			// With a user in the URL, the client sends the name and Authorization.
			t.Errorf("%s: %d %q, want %d", name, status, body, x.status)
		}
		if x.status == 502 {
			<-w.dialled
		}
		w.neverDialled(name)
		if name == "TLS port without TLS" {
			continue // this port is for tunnels
		}
		_, answer := w.tunnel(strings.TrimSuffix(strings.TrimPrefix(x.url, "http://"), "/") + map[bool]string{true: ":80"}[strings.Count(x.url, ":") == 1 || strings.HasSuffix(x.url, "]/")])
		if answer == "" || strings.HasPrefix(answer, "2") {
			t.Errorf("%s: CONNECT is answered %q", name, answer)
		}
		if x.status == 502 {
			<-w.dialled
		}
		w.neverDialled(name + ", by CONNECT")
	}
	refused := 0
	for _, e := range w.told() {
		if e.Reason == netpolicy.ReasonProxy && e.Host != "" {
			refused++
		}
	}
	if refused < 20 || w.srv.Stats().Refused < 20 {
		t.Errorf("%d events, %+v", refused, w.srv.Stats())
	}
}

func TestServer_private_address_that_a_rule_names_is_reached(t *testing.T) {
	w := newWorld(t)
	w.serve("10.9.0.1:80", nil)
	if status, body, _ := w.get(w.client(), "http://10.9.0.1/"); status != http.StatusOK {
		t.Errorf("%d %q", status, body)
	}
}

// Whatever a name server answers the second time, the proxy connects to the address that it judged.
func TestServer_rebinding_is_judged_by_the_address(t *testing.T) {
	w := newWorld(t)
	w.serve(webAddr+":80", nil)
	for _, zone := range []string{"127.0.0.1", "169.254.169.254", "10.9.0.1", "192.168.1.1", "93.184.216.99"} {
		w.mu.Lock()
		w.zone["web.example.com"] = zone
		w.mu.Unlock()
		if status, body, _ := w.get(w.client(), "http://web.example.com/"); status != http.StatusForbidden {
			t.Errorf("%s: %d %q", zone, status, body)
		}
		w.neverDialled(zone)
	}
	// The proxy tries the allowed ones of several addresses. It looks the name up once.
	w.mu.Lock()
	w.zone["web.example.com"] = "127.0.0.1 93.184.216.99 93.184.216.40 " + webAddr
	w.lookups = 0
	w.mu.Unlock()
	if status, body, _ := w.get(w.client(), "http://web.example.com/"); status != http.StatusOK {
		t.Errorf("%d %q", status, body)
	}
	if a, b := <-w.dialled, <-w.dialled; a.String() != "93.184.216.40:80" || b.String() != webAddr+":80" {
		t.Errorf("%v and %v were connected to", a, b)
	}
	if w.lookups != 1 {
		t.Errorf("the name was asked for %d times", w.lookups)
	}
}

func TestServer_redirect_is_not_followed(t *testing.T) {
	w := newWorld(t)
	w.serve(webAddr+":80", func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, "http://169.254.169.254/latest/meta-data/", http.StatusFound)
	})
	c := w.client()
	if status, _, h := w.get(c, "http://web.example.com/"); status != http.StatusFound || h.Get("Location") != "http://169.254.169.254/latest/meta-data/" {
		t.Errorf("%d %v", status, h)
	}
	<-w.dialled
	c.CheckRedirect = nil // the client follows it, and is refused
	if status, _, _ := w.get(c, "http://web.example.com/"); status != http.StatusForbidden {
		t.Errorf("the redirect is answered with %d", status)
	}
	w.neverDialled("the redirect")
}

// handshake starts TLS in a tunnel.
func (w *world) handshake(c net.Conn, cfg *tls.Config) (*tls.Conn, error) {
	if cfg.RootCAs == nil {
		cfg.RootCAs = x509.NewCertPool()
		cfg.RootCAs.AppendCertsFromPEM(w.id.Root())
		cfg.RootCAs.AddCert(w.ca)
	}
	s := tls.Client(c, cfg)
	return s, s.HandshakeContext(w.t.Context())
}

func TestServer_tunnel_is_for_the_name_that_was_asked_for(t *testing.T) {
	w := newWorld(t)
	w.serve(apiAddr+":443", nil, "api.example.com")
	w.serve(blindAddr+":443", nil, "blind.example.com", "evil.example.com", "api.example.com")
	open := func(target string) net.Conn {
		t.Helper()
		c, answer := w.tunnel(target)
		if c == nil {
			t.Fatalf("%s: %s", target, answer)
		}
		return c
	}
	// A blind tunnel takes only the tunnel's own name, even if a rule has the other one.
	if _, err := w.handshake(open("blind.example.com:443"), &tls.Config{ServerName: "blind.example.com"}); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"evil.example.com", "api.example.com", ""} {
		if _, err := w.handshake(open("blind.example.com:443"), &tls.Config{ServerName: name, InsecureSkipVerify: true}); err == nil {
			t.Errorf("a tunnel to blind.example.com takes a hello for %q", name)
		}
	}
	c := open("blind.example.com:443")
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: blind.example.com\r\n\r\n"); err != nil {
		t.Error(err)
	}
	if b, err := io.ReadAll(c); len(b) > 0 || err == nil {
		t.Errorf("what is no TLS is answered with %q, %v", b, err)
	}
	// The same holds for a tunnel that ends at the proxy.
	for _, name := range []string{"evil.example.com", "blind.example.com", "api2.example.com", ""} {
		if _, err := w.handshake(open("api.example.com:443"), &tls.Config{ServerName: name, InsecureSkipVerify: true}); err == nil {
			t.Errorf("a tunnel to api.example.com takes a hello for %q", name)
		}
	}
	reasons := map[netpolicy.Reason]int{}
	for len(w.told()) < 8 { // or the test does not end: the proxy cuts a refused tunnel first, and then reports it
		time.Sleep(time.Millisecond)
	}
	for _, e := range w.told() {
		reasons[e.Reason]++
	}
	if reasons[netpolicy.ReasonTLSName] != 6 || reasons[netpolicy.ReasonTLSNoName] != 1 || reasons[netpolicy.ReasonTLSHello] != 1 {
		t.Errorf("reasons: %v", reasons)
	}

	// In such a tunnel, each request must be for the tunnel's host.
	s, err := w.handshake(open("API.example.com:443"), &tls.Config{ServerName: "api.example.com", NextProtos: []string{"h2", "http/1.1"}})
	if err != nil {
		t.Fatal(err)
	}
	if p := s.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		t.Errorf("the protocol is %q", p)
	}
	holder := w.placeholder("API_KEY")
	in := bufio.NewReader(s)
	ask := func(line, host string) int {
		t.Helper()
		fmt.Fprintf(s, "%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", line, host, holder)
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode
	}
	if got := ask("GET /1", "api.example.com"); got != 200 {
		t.Errorf("%d", got)
	}
	if got := ask("GET https://api.example.com/2", "evil.example.com"); got != 200 {
		t.Errorf("%d for an absolute target, which counts (RFC 9112, 3.2.2)", got)
	}
	if got := ask("GET /3", "evil.example.com"); got != http.StatusMisdirectedRequest {
		t.Errorf("%d for another host", got)
	}
	for line, host := range map[string]string{
		"GET https://evil.example.com/": "api.example.com", "GET http://api.example.com/": "api.example.com", "CONNECT evil.example.com:443": "evil.example.com:443",
		"GET /": "api.example.com:80", "OPTIONS *": "api.example.com", "GET https://x@api.example.com/": "api.example.com", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "api.example.com",
	} {
		if s, err = w.handshake(open("api.example.com:443"), &tls.Config{ServerName: "api.example.com"}); err != nil {
			t.Fatal(err)
		}
		in = bufio.NewReader(s)
		if got := ask(line, host); got < 400 {
			t.Errorf("%s for %s: %d", line, host, got)
		}
	}
	if got := w.got(); strings.Count(got, apiKey) != 2 || strings.Contains(got, "evil") || strings.Contains(got, "/3") {
		t.Errorf("the servers have got\n%s", got)
	}
}

func TestServer_tunnel_where_no_name_is_checked_carries_anything(t *testing.T) {
	w := newWorld(t)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	w.mu.Lock()
	w.routes["93.184.216.50:443"] = ln.Addr().String()
	w.mu.Unlock()
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c) // until the other half is closed
		_, _ = c.Write(append([]byte("got "), b...))
	}()
	// The first bytes come with CONNECT, before its answer.
	c, err := net.Dial("tcp4", w.at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "CONNECT 93.184.216.50:443 HTTP/1.1\r\nHost: x\r\n\r\nearly ")
	_, _ = io.WriteString(c, "and late")
	_ = c.(*net.TCPConn).CloseWrite()
	if b, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(b), "\r\n\r\ngot early and late") {
		t.Errorf("%q, %v", b, err)
	}
}

// The server gets one message. What looks like another one is in its body, or is never read.
func TestServer_smuggled_requests_do_not_get_out(t *testing.T) {
	w := newWorld(t)
	w.serve(webAddr+":80", nil)
	const evil = "GET /smuggled HTTP/1.1\r\nHost: web.example.com\r\n\r\n"
	head := "POST http://web.example.com/%s HTTP/1.1\r\nHost: web.example.com\r\n"
	for name, x := range map[string]struct {
		text   string
		status string
	}{
		"length and chunks":             {"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + evil, "HTTP/1.1 200"},
		"chunks and length":             {"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + evil, "HTTP/1.1 200"},
		"two lengths":                   {"Content-Length: 0\r\nContent-Length: 50\r\n\r\n" + evil, "HTTP/1.1 400"},
		"a list of lengths":             {"Content-Length: 0, 50\r\n\r\n" + evil, "HTTP/1.1 400"},
		"a negative length":             {"Content-Length: -1\r\n\r\n" + evil, "HTTP/1.1 400"},
		"a length with a sign":          {"Content-Length: +4\r\n\r\n" + evil, "HTTP/1.1 400"},
		"unknown coding":                {"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + evil, "HTTP/1.1 501"},
		"two codings":                   {"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + evil, "HTTP/1.1 501"},
		"coding with a space":           {"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + evil, "HTTP/1.1 400"},
		"a folded field":                {"Connection: close\r\nX: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200"},
		"a field with a zero":           {"X: a\x00b\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 400"},
		"a bare carriage return":        {"X: a\rTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 400"},
		"two hosts":                     {"Host: evil.example.com\r\n\r\n", "HTTP/1.1 400"},
		"connection takes a field away": {"Connection: Content-Length, close\r\nContent-Length: 3\r\n\r\nabc", "HTTP/1.1 200"},
	} {
		path := strings.ReplaceAll(name, " ", "-")
		answer := w.raw(fmt.Sprintf(head, path) + x.text)
		if !strings.HasPrefix(answer, x.status) || strings.Count(answer, "HTTP/1.1 ") != 1 {
			t.Errorf("%s: %q, want one %s", name, answer, x.status)
		}
	}
	if got := w.got(); strings.Contains(got, "GET web.example.com") || strings.Contains(got, "evil.example.com ") {
		t.Errorf("the server has got\n%s", got)
	}
	// The proxy judges each of several requests in a row.
	answer := w.raw("GET http://web.example.com/first HTTP/1.1\r\nHost: a\r\n\r\nGET http://169.254.169.254/ HTTP/1.1\r\nHost: web.example.com\r\n\r\nGET http://web.example.com/third HTTP/1.1\r\nHost: a\r\n\r\n")
	if !strings.HasPrefix(answer, "HTTP/1.1 200") || strings.Count(answer, "HTTP/1.1 ") != 2 || !strings.Contains(answer, "HTTP/1.1 403") {
		t.Errorf("%q", answer)
	}
	if got := w.got(); !strings.Contains(got, "GET web.example.com /first") || strings.Contains(got, "/third") {
		t.Errorf("the server has got\n%s", got)
	}
}

func TestServer_fields_of_one_connection_are_not_passed_on(t *testing.T) {
	w := newWorld(t)
	var seen http.Header
	w.serve(webAddr+":80", func(rw http.ResponseWriter, r *http.Request) {
		seen = r.Header.Clone()
		rw.Header().Set("Connection", "Upgrade, X-Mine")
		rw.Header().Set("Upgrade", "websocket")
		rw.Header().Set("X-Mine", "1")
		rw.Header().Set("X-Stays", "1")
	})
	status, _, h := w.get(w.client(), "http://web.example.com/", "Connection: X-Private", "X-Private: 1", "Proxy-Authorization: Basic x", "Te: trailers", "Upgrade: websocket", "Keep-Alive: 5", "X-Public: 1")
	if status != http.StatusOK || h.Get("X-Mine") != "" || h.Get("Upgrade") != "" || h.Get("X-Stays") != "1" {
		t.Errorf("%d %v", status, h)
	}
	for _, name := range []string{"X-Private", "Proxy-Authorization", "Te", "Upgrade", "Keep-Alive", "Connection", "Proxy-Connection", "X-Forwarded-For", "Via"} {
		if seen.Get(name) != "" {
			t.Errorf("the server gets %s: %s", name, seen.Get(name))
		}
	}
	if seen.Get("X-Public") != "1" {
		t.Errorf("the server gets %v", seen)
	}
}

// strange answers each connection at a peer's address with these bytes.
func (w *world) strange(peer, answer string) {
	w.t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { ln.Close() })
	w.mu.Lock()
	w.routes[peer] = ln.Addr().String()
	w.mu.Unlock()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					_, _ = io.WriteString(c, answer)
				}
			}()
		}
	}()
}

func TestServer_strange_answers_are_errors(t *testing.T) {
	w := newWorld(t)
	for name, x := range map[string]struct {
		answer, want string
		status       int
	}{
		"nothing":                        {"", "502", 502},
		"no HTTP":                        {"SSH-2.0-x\r\n", "502", 502},
		"a status below all":             {"HTTP/1.1 099 x\r\n\r\n", "502", 502},
		"another protocol":               {"HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "502", 502},
		"an upgrade with 200":            {"HTTP/1.1 200 x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\nok", "ok", 200},
		"endless header":                 {"HTTP/1.1 200 x\r\nX: " + strings.Repeat("x", 2*MaxAnswerBytes), "502", 502},
		"a body that breaks off":         {"HTTP/1.1 200 x\r\nContent-Length: 10\r\n\r\nhalf", "broken", 200},
		"chunks that break off":          {"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", "broken", 200},
		"a body that ends by closing":    {"HTTP/1.1 200 x\r\n\r\nall of it", "all of it", 200},
		"a body with its length":         {"HTTP/1.1 200 x\r\nContent-Length: 4\r\n\r\nfour", "four", 200},
		"trailers that nobody asked for": {"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2\r\nok\r\n0\r\nX-T: 1\r\n\r\n", "ok", 200},
	} {
		w.strange(webAddr+":80", x.answer)
		w.srv.transport.CloseIdleConnections()
		status, body, _ := w.get(w.client(), "http://web.example.com/")
		if x.want == "broken" && status == 0 {
			continue // broken off before its head was sent
		}
		if status != x.status || x.want != "502" && !strings.Contains(body, x.want) {
			t.Errorf("%s: %d %q, want %d %q", name, status, body, x.status, x.want)
		}
	}
}

func TestServer_bounds_of_requests(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.HeaderTimeout = 300 * time.Millisecond })
	for name, x := range map[string]struct{ text, want string }{
		"endless line":          {"GET http://web.example.com/" + strings.Repeat("x", 4*MaxHeaderBytes), "HTTP/1.1 431"},
		"endless field":         {"GET http://web.example.com/ HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 4*MaxHeaderBytes), "HTTP/1.1 431"},
		"too many fields":       {"GET http://web.example.com/ HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("X: y\r\n", MaxHeaders+1) + "\r\n", "HTTP/1.1 431"},
		"no target":             {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 400"},
		"options of a server":   {"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 400"},
		"https without CONNECT": {"GET https://api.example.com/ HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 400"},
		"ftp":                   {"GET ftp://web.example.com/ HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 400"},
		"CONNECT without port":  {"CONNECT api.example.com HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 400"},
		"CONNECT to a path":     {"CONNECT /x HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 400"},
		"CONNECT with a body":   {"CONNECT api.example.com:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", "HTTP/1.1 400"},
		"HTTP/2":                {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1 "},
		"TLS":                   {"\x16\x03\x01\x02\x00\x01\r\n\r\n", "HTTP/1.1 400"},
		"nonsense":              {"\x00\x00\x00\x00\r\n\r\n", "HTTP/1.1 400"},
	} {
		if got := w.raw(x.text); !strings.HasPrefix(got, x.want) || strings.HasPrefix(got, "HTTP/1.1 200") {
			t.Errorf("%s: %.200q, want %s", name, got, x.want)
		}
	}
	w.neverDialled("a request that is none")
	// A request that never ends is given up; else this test would not end.
	for _, begin := range []string{"", "GET http://web.example.com/ HTTP/1.1\r\nX: ", "CONNECT api.example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n"} {
		c, err := net.Dial("tcp4", w.at)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, begin)
		_, _ = io.Copy(io.Discard, c)
		c.Close()
	}
}

func TestServer_connections_beyond_the_bound_are_reset(t *testing.T) {
	w := newWorld(t)
	w.serve(webAddr+":80", nil)
	var open []net.Conn
	for range MaxConnections {
		c, err := net.Dial("tcp4", w.at)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	for range 20 {
		c, err := net.Dial("tcp4", w.at)
		if err != nil {
			continue
		}
		if b, err := io.ReadAll(c); len(b) > 0 || err == nil {
			t.Errorf("%q, %v, want a reset", b, err)
		}
		c.Close()
	}
	st := w.srv.Stats()
	if st.Open != MaxConnections || st.Busy == 0 {
		t.Errorf("%+v", st)
	}
	for _, c := range open {
		c.Close()
	}
	for w.srv.Stats().Open > 0 { // or the test does not end
		time.Sleep(time.Millisecond)
	}
	if status, body, _ := w.get(w.client(), "http://web.example.com/"); status != http.StatusOK {
		t.Errorf("afterwards: %d %q", status, body)
	}
}

func TestServer_idle_connections_are_cut(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.IdleTimeout, c.sweepInterval = time.Millisecond, time.Millisecond })
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	w.mu.Lock()
	w.routes["93.184.216.50:443"] = ln.Addr().String()
	w.mu.Unlock()
	for w.srv.Stats().Cut == 0 { // or the test does not end
		c, err := net.Dial("tcp4", w.at)
		if errors.Is(err, unix.ECONNRESET) {
			continue // it was cut before the dial returned
		}
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "CONNECT 93.184.216.50:443 HTTP/1.1\r\nHost: x\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
		c.Close()
	}
}

func TestServer_new_policy_cuts_what_it_does_not_open(t *testing.T) {
	w := newWorld(t)
	block := make(chan struct{})
	w.serve(apiAddr+":443", nil, "api.example.com")
	w.serve(blindAddr+":443", nil, "blind.example.com")
	w.serve(webAddr+":80", func(http.ResponseWriter, *http.Request) { <-block })
	defer close(block)
	c, _ := w.tunnel("blind.example.com:443")
	blind, err := w.handshake(c, &tls.Config{ServerName: "blind.example.com"})
	if err != nil {
		t.Fatal(err)
	}
	if c, _ = w.tunnel("api.example.com:443"); c == nil {
		t.Fatal("no tunnel")
	}
	ends, err := w.handshake(c, &tls.Config{ServerName: "api.example.com"})
	if err != nil {
		t.Fatal(err)
	}
	request := func(s net.Conn, host string) error {
		fmt.Fprintf(s, "GET / HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", host, w.placeholder("API_KEY"))
		resp, err := http.ReadResponse(bufio.NewReader(s), nil)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				err = errors.New(resp.Status)
			}
		}
		return err
	}
	for s, host := range map[net.Conn]string{blind: "blind.example.com", ends: "api.example.com"} {
		if err := request(s, host); err != nil {
			t.Fatalf("%s: %v", host, err)
		}
	}
	held := make(chan int, 1)
	go func() {
		status, _, _ := w.get(w.client(), "http://web.example.com/")
		held <- status
	}()
	for !strings.Contains(w.got(), "web.example.com") { // or the test does not end
		time.Sleep(time.Millisecond)
	}
	// The same policy changes nothing.
	w.setPolicy(nil, policyText)
	for s, host := range map[net.Conn]string{blind: "blind.example.com", ends: "api.example.com"} {
		if err := request(s, host); err != nil {
			t.Errorf("after a swap to the same policy: %s: %v", host, err)
		}
	}
	before := strings.Count(w.got(), apiKey)
	// Without the injection, the proxy cuts the tunnel that ends here, though its host stays allowed.
	without := strings.Replace(policyText, "{secret: API_KEY", "{secret: OTHER", 1)
	without = strings.Replace(without, "hosts: [api.example.com]", "hosts: [api2.example.com]", 1)
	w.setPolicy(nil, without)
	if err := request(ends, "api.example.com"); err == nil {
		t.Error("a tunnel that ended here goes on without an injection for its host")
	}
	if err := request(blind, "blind.example.com"); err != nil {
		t.Errorf("what is still allowed was cut: %v", err)
	}
	w.setPolicy(nil, "proxy: {enabled: true}")
	if err := request(blind, "blind.example.com"); err == nil {
		t.Error("a tunnel goes on that no rule opens any more")
	}
	if status := <-held; status == http.StatusOK {
		t.Error("a request is answered whose peer no rule opens any more")
	}
	if n := strings.Count(w.got(), apiKey); n != before {
		t.Errorf("the secret was sent %d times more", n-before)
	}
	if w.srv.Stats().Cut == 0 {
		t.Errorf("%+v", w.srv.Stats())
	}
}

func TestServer_connections_count_against_the_limit_of_the_policy(t *testing.T) {
	w := newWorld(t)
	w.serve(webAddr+":80", func(rw http.ResponseWriter, _ *http.Request) { rw.Header().Set("Connection", "close") })
	w.setPolicy(nil, policyText+"limits: {egress: {connections: {per_second: 1, burst: 3}}}\n")
	begin := time.Now()
	passed, limited := 0, 0
	c := w.client()
	for range 20 {
		switch status, body, _ := w.get(c, "http://web.example.com/"); status {
		case http.StatusOK:
			passed++
		case http.StatusTooManyRequests:
			limited++
		default:
			t.Fatalf("%d %q", status, body)
		}
	}
	if most := 3 + int(time.Since(begin)/time.Second) + 1; passed < 3 || passed > most || limited == 0 {
		t.Errorf("%d connections were made, %d not; want 3 to %d", passed, limited, most)
	}
}

func TestServer_events_are_bounded(t *testing.T) {
	w := newWorld(t)
	begin := time.Now()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				w.raw("GET http://127.0.0.1/ HTTP/1.1\r\nHost: x\r\n\r\n")
			}
		})
	}
	wg.Wait()
	seconds := int(time.Since(begin)/time.Second) + 2
	if n := len(w.told()); n == 0 || n > seconds*100 {
		t.Errorf("%d events in %d s", n, seconds)
	}
	if w.srv.Stats().Refused != 800 {
		t.Errorf("%+v", w.srv.Stats())
	}
}

// A large body streams in both directions, and is not kept.
func TestServer_streams(t *testing.T) {
	w := newWorld(t)
	const size = 8 << 20
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(rw).EnableFullDuplex()
		_, _ = io.Copy(rw, r.Body)
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{w.certificate("api.example.com")}}
	s.StartTLS()
	defer s.Close()
	w.mu.Lock()
	w.routes[apiAddr+":443"] = s.Listener.Addr().String()
	w.mu.Unlock()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://api.example.com/", io.LimitReader(zeros{}, size))
	if err != nil {
		t.Fatal(err)
	}
	r.ContentLength = size
	resp, err := w.client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, resp.Body)
	if err != nil || n != size {
		t.Errorf("%d bytes came back, %v", n, err)
	}
}

// Requests smaller and larger than what net/http reads ahead, 256 KiB.
func TestServer_request_that_is_answered_before_its_end_arrives_whole(t *testing.T) {
	const first = 64 << 10 // more than clients hold back
	w := newWorld(t)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(rw)
		_ = c.EnableFullDuplex()
		_, _ = io.ReadFull(r.Body, make([]byte, first/2))
		rw.WriteHeader(http.StatusOK)
		_ = c.Flush()
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(rw, "%d %v", n, err)
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{w.certificate("api.example.com")}}
	s.StartTLS()
	defer s.Close()
	w.mu.Lock()
	w.routes[apiAddr+":443"] = s.Listener.Addr().String()
	w.mu.Unlock()
	for _, size := range []int{100 << 10, 1 << 20} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // it hangs without the rest
		defer cancel()
		body, rest := io.Pipe()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://api.example.com/", body)
		if err != nil {
			t.Fatal(err)
		}
		r.ContentLength = int64(size)
		go rest.Write(make([]byte, first))
		resp, err := w.client().Do(r)
		if err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if _, err := rest.Write(make([]byte, size-first)); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
		rest.Close()
		got, err := io.ReadAll(resp.Body)
		if want := fmt.Sprintf("%d <nil>", size-first/2); err != nil || string(got) != want {
			t.Errorf("%d bytes: after the first ones the server has got %q (%v), want %q", size, got, err, want)
		}
		resp.Body.Close()
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// The proxy does not use the proxies that the host's environment names.
func TestServer_does_not_use_the_hosts_own_proxy(t *testing.T) {
	for _, name := range []string{"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"} {
		t.Setenv(name, "http://127.0.0.1:1")
	}
	w := newWorld(t)
	w.serve(apiAddr+":443", nil, "api.example.com")
	w.serve(webAddr+":80", nil)
	for _, u := range []string{"https://api.example.com/", "http://web.example.com/"} {
		if status, body, _ := w.get(w.client(), u); status != http.StatusOK {
			t.Errorf("%s: %d %q", u, status, body)
		}
	}
	if os.Getenv("HTTPS_PROXY") == "" {
		t.Fatal("the environment has none")
	}
}
