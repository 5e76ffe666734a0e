package gateway_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// domain is the gateway's.
const domain = "boxes.test"

// world is a host with VMs in memory whose guests have servers, and a gateway that serves.
type world struct {
	t    testing.TB
	vms  *sandboxtest.VMs
	host *sandbox.Host
	gate *gateway.Gateway
	addr string // of the gateway
	raw  string // of its raw listener
	tls  bool   // servers of guests speak HTTPS

	mu      sync.Mutex
	servers map[string]string // addresses of guests' servers by "name address"
}

// begin makes a world. change, if not nil, changes options and listeners.
func begin(t testing.TB, change func(*gateway.Options, *gateway.Listeners)) *world {
	t.Helper()
	w := &world{t: t, servers: map[string]string{}}
	w.vms = &sandboxtest.VMs{Dial: func(ctx context.Context, name, network, address string) (net.Conn, error) {
		w.mu.Lock()
		at := w.servers[name+" "+address]
		w.mu.Unlock()
		if at == "" {
			return nil, syscall.ECONNREFUSED
		}
		return new(net.Dialer).DialContext(ctx, network, at)
	}}
	w.host = w.vms.Host(t)
	o := gateway.Options{Resolver: gateway.Names{Domain: domain}}
	l := gateway.Listeners{HTTP: listen(t), Raw: listen(t)}
	w.addr, w.raw = l.HTTP.Addr().String(), l.Raw.Addr().String()
	if change != nil {
		change(&o, &l)
	}
	var err error
	if w.gate, err = gateway.New(w.host, o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- w.gate.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return w
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// create makes a sandbox whose ports are open to anyone, unless g says otherwise.
func (w *world) create(name string, g *spec.Gateway, idle spec.Idle) *sandbox.Sandbox {
	w.t.Helper()
	if g == nil {
		g = &spec.Gateway{AllPublic: true}
	}
	return w.createFor("", name, g, idle)
}

// createFor is create for an owner.
func (w *world) createFor(owner, name string, g *spec.Gateway, idle spec.Idle) *sandbox.Sandbox {
	w.t.Helper()
	b, err := w.host.Create(w.t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image, Idle: idle},
		sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: owner, Gateway: *g}})
	if err != nil {
		w.t.Fatal(err)
	}
	return b
}

// listens has a server of the guest at an address.
func (w *world) listens(name, address, at string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.servers[name+" "+address] = at
}

// serves has a HTTP server in a guest at 127.0.0.1.
func (w *world) serves(name string, port int, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	s.Config.Protocols = &p
	if w.tls {
		s.StartTLS()
	} else {
		s.Start()
	}
	w.t.Cleanup(s.Close)
	w.listens(name, fmt.Sprintf("127.0.0.1:%d", port), s.Listener.Addr().String())
	return s
}

// answers has a server in a guest that answers each connection with do.
func (w *world) answers(name string, port int, do func(net.Conn)) {
	l := listen(w.t)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				do(c)
			})
		}
	})
	w.t.Cleanup(func() {
		l.Close()
		all.Wait()
	})
	w.listens(name, fmt.Sprintf("127.0.0.1:%d", port), l.Addr().String())
}

// beginHTTPS makes a world whose guests' servers speak HTTPS, with a certificate of nobody's.
func beginHTTPS(t testing.TB) *world {
	t.Helper()
	w := begin(t, func(o *gateway.Options, _ *gateway.Listeners) {
		o.Authorizer = authorizer(func(http.Header) (gateway.Grant, error) { return gateway.Grant{Wake: true, HTTPS: true}, nil })
	})
	w.tls = true
	return w
}

// client returns a client for which every host is the gateway.
func (w *world) client(c *tls.Config) *http.Client {
	tr := &http.Transport{TLSClientConfig: c, ForceAttemptHTTP2: c != nil, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", w.addr)
	}}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// get asks once, and returns the answer with its body.
func (w *world) get(host string, header ...string) (*http.Response, string) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), "GET", "http://"+host+"/", nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	c := w.client(nil)
	defer c.CloseIdleConnections()
	a, err := c.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return a, string(b)
}

// say sends bytes to the gateway, and returns the connection.
func (w *world) say(text string) (net.Conn, *bufio.Reader) {
	w.t.Helper()
	c, err := net.Dial("tcp", w.addr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, text); err != nil {
		w.t.Fatal(err)
	}
	return c, bufio.NewReader(c)
}

// upgrade opens a WebSocket as far as its handshake.
func (w *world) upgrade(host string, header ...string) (net.Conn, *bufio.Reader) {
	w.t.Helper()
	c, r := w.say("GET /ws HTTP/1.1\r\nHost: " + strings.Join(append([]string{host}, header...), "\r\n") + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	a, err := http.ReadResponse(r, nil)
	if err != nil || a.StatusCode != http.StatusSwitchingProtocols {
		w.t.Fatal(a, err)
	}
	return c, r
}

// echoes is a handler that upgrades, and sends back what comes.
func echoes(rw http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "websocket" {
		http.Error(rw, "no upgrade", http.StatusBadRequest)
		return
	}
	c, b, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	_, _ = io.Copy(c, b)
}

func (w *world) token(name string) string {
	w.t.Helper()
	m, err := w.host.State.Metadata(name)
	if err != nil {
		w.t.Fatal(err)
	}
	token, err := w.host.State.GatewayToken(name, m.Gateway)
	if err != nil {
		w.t.Fatal(err)
	}
	return token
}

func (w *world) sleep(name string) {
	w.t.Helper()
	if _, err := w.host.Sandbox(name).Sleep(w.t.Context(), sandbox.SleepOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) phase(name string) state.Phase {
	w.t.Helper()
	r, err := w.host.State.Get(name)
	if err != nil {
		w.t.Fatal(err)
	}
	return r.Phase
}

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for begun := time.Now(); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > time.Minute {
			t.Fatal("never: " + what)
		}
	}
}

// certificate writes a new certificate for names to files.
func certificate(t testing.TB, dir string, serial int64, names ...string) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	is := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: names[0]}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), DNSNames: names, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, is, is, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, b := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pool = x509.NewCertPool()
	made, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool.AddCert(made)
	return cert, key, pool
}

// authorizer judges by the header alone.
type authorizer func(http.Header) (gateway.Grant, error)

// Authorize implements gateway.Authorizer.
func (f authorizer) Authorize(_ context.Context, _ gateway.Route, h http.Header) (gateway.Grant, error) {
	return f(h)
}
