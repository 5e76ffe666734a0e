package bench

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptrace"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// webServer is a HTTP server that answers each request with two bytes. Its requests have no bodies.
const webServer = `
import socket, threading
def serve(c):
    got = b''
    try:
        while d := c.recv(65536):
            got += d
            if b'\r\n\r\n' in got:
                got = b''
                c.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
    except OSError:
        pass
    c.close()
s = socket.create_server(('127.0.0.1', 8000), backlog=64)
open('` + busyFile + `', 'w').close()
while True:
    threading.Thread(target=serve, args=(s.accept()[0],), daemon=True).start()
`

const (
	webPort       = 8000
	gatewayDomain = "gateway.test"
)

// How a request reaches the guest's server, and over what connection of the client.
const (
	byDirect, byHTTP, byHTTPS    = "direct", "http", "https"
	connFirst, connNew, connKept = "first", "new", "kept"
)

// Gateway measures a request of HTTP/1.1 to a python3 server in a guest, until its answer has come:
//
//   - gateway, by "direct" (Sandbox.Dial), "http" and "https" through a gateway in this process, to the sandbox
//     "asleep" and "awake". Its connection is "new" or "kept" from the request before. "first" is a new one after the
//     gateway has let go of the sandbox, as it does in gateway.Limits.Linger. A direct one ends with a sleep, so none
//     is kept then. Stages are come, until the gateway has the request, hold, until the sandbox is held awake for it,
//     and answer.
//   - gateway_added: the same less the direct request of the same round, with a connection as like as there is; 0 if it
//     took less, since the gateway keeps connections to the guest for new clients.
//
// All are measured in turn.
func Gateway(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	host, name := e.Store.With(e.Launcher), vmName()
	if _, err := e.bootSpec(ctx, sandbox.Spec{Name: name, MemoryMiB: o.mib()}); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	if err := e.startLive(ctx, name, "web.py", webServer); err != nil {
		return nil, err
	}
	for range o.Depth {
		if _, err := e.sleepAndWake(ctx, name); err != nil {
			return nil, err
		}
	}
	g := &gateways{Env: e, o: o, box: host.Sandbox(name), name: name, all: map[string]*series{}, took: map[string]time.Duration{}}
	defer func() { err = errors.Join(err, g.close()) }()
	for _, by := range []string{byDirect, byHTTP, byHTTPS} {
		if err := g.open(ctx, host, by); err != nil {
			return nil, err
		}
	}
	turn := slices.Clone(g.doors)
	for i := range o.Warmup + o.N {
		e.say("gateway: round %d of %d", i, o.Warmup+o.N)
		clear(g.took)
		for _, d := range turn {
			if err := g.round(ctx, d, i >= o.Warmup); err != nil {
				return nil, fmt.Errorf("%s: %w", d.by, err)
			}
		}
		slices.Reverse(turn)
		if i >= o.Warmup {
			g.compare()
		}
	}
	return g.rows(), nil
}

// gateways are the ways to the server of one sandbox.
type gateways struct {
	Env
	o     Options
	box   *sandbox.Sandbox
	name  string
	doors []*door
	all   map[string]*series
	took  map[string]time.Duration // of this round, by case
}

// door is one way.
type door struct {
	by      string
	client  *http.Client
	url     string
	token   string
	gate    *gateway.Gateway // nil if it is direct
	carried chan gateway.Carried
	end     func() error
}

// open opens a way.
func (g *gateways) open(ctx context.Context, host *sandbox.Host, by string) error {
	t := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return g.box.Dial(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", webPort))
	}}
	names := gateway.Names{Domain: gatewayDomain}
	d := &door{by: by, client: &http.Client{Transport: t, Timeout: touchTime}, end: func() error { t.CloseIdleConnections(); return nil }}
	d.url = "http://" + names.Host(gateway.Route{Sandbox: g.name, Port: webPort})
	g.doors = append(g.doors, d)
	if by == byDirect {
		return nil
	}
	m, err := host.State.Metadata(g.name)
	if err != nil {
		return err
	}
	if d.token, err = host.State.GatewayToken(g.name, m.Gateway); err != nil {
		return err
	}
	d.carried = make(chan gateway.Carried, 1)
	if d.gate, err = gateway.New(host, gateway.Options{Resolver: names, Carried: func(c gateway.Carried) { d.carried <- c }}); err != nil {
		return err
	}
	l := gateway.Listeners{}
	if by == byHTTPS {
		pair, err := selfSigned(gatewayDomain)
		if err != nil {
			return err
		}
		l.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
		// The certificate is this process's own.
		t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}
		d.url = "https" + d.url[len("http"):]
	}
	if l.HTTP, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return err
	}
	at := l.HTTP.Addr().String()
	t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", at)
	}
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- d.gate.Serve(serving, l) }()
	d.end = func() error {
		t.CloseIdleConnections()
		stop()
		return <-ended
	}
	return nil
}

func (g *gateways) close() (err error) {
	for _, d := range g.doors {
		err = errors.Join(err, d.end())
	}
	return err
}

// selfSigned returns a certificate for a name.
func selfSigned(name string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), DNSNames: []string{"*." + name}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// round makes the requests of one way.
func (g *gateways) round(ctx context.Context, d *door, timed bool) error {
	ask := func(state, conn string) error {
		if conn != connKept {
			d.client.CloseIdleConnections()
		}
		return g.ask(ctx, d, state, conn, timed)
	}
	for _, conn := range []string{connNew, connKept} {
		if conn == connKept && d.gate == nil {
			continue
		}
		if _, err := g.box.Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return err
		}
		if err := wait.For(ctx, g.o.Settle); err != nil {
			return err
		}
		if err := ask("asleep", conn); err != nil {
			return err
		}
	}
	for _, conn := range []string{connKept, connNew, connFirst} {
		if conn == connFirst {
			if d.gate == nil {
				continue
			}
			for d.gate.Stats().Sessions > 0 {
				if err := wait.For(ctx, 10*time.Millisecond); err != nil {
					return err
				}
			}
		}
		if err := ask("awake", conn); err != nil {
			return err
		}
	}
	return nil
}

// ask makes one request.
func (g *gateways) ask(ctx context.Context, d *door, state, conn string, timed bool) error {
	reused := false
	r, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(i httptrace.GotConnInfo) { reused = i.Reused },
	}), http.MethodGet, d.url, nil)
	if err != nil {
		return err
	}
	r.Header.Set(gateway.HeaderToken, d.token)
	begin := time.Now()
	a, err := d.client.Do(r)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(a.Body)
	end := time.Now()
	if err = errors.Join(err, a.Body.Close()); err != nil {
		return err
	}
	switch {
	case a.StatusCode != http.StatusOK || string(body) != "ok":
		return fmt.Errorf("%s, %s: it answers %s %.100q", state, conn, a.Status, body)
	case reused != (conn == connKept):
		return fmt.Errorf("%s, %s: the client used a kept connection: %v", state, conn, reused)
	}
	var carried gateway.Carried
	if d.gate != nil {
		carried = <-d.carried
	}
	if !timed {
		return nil
	}
	g.took[caseOf(d.by, state, conn)] = end.Sub(begin)
	s := g.series("gateway", d.by, state, conn)
	s.add(int64(end.Sub(begin)))
	if d.gate != nil {
		for stage, t := range map[string]time.Duration{"come": carried.Came.Sub(begin), "hold": carried.Ready.Sub(carried.Came), "answer": end.Sub(carried.Ready)} {
			s.stage(stage, int64(t))
		}
	}
	return nil
}

func caseOf(by, state, conn string) string { return by + " " + state + " " + conn }

func (g *gateways) series(row, by, state, conn string) *series {
	key := row + " " + caseOf(by, state, conn)
	if g.all[key] == nil {
		g.all[key] = newSeries(inMs)
	}
	return g.all[key]
}

// compare records what this round's requests took more than direct ones.
func (g *gateways) compare() {
	g.each(func(by, state, conn string) {
		like := conn
		if conn == connFirst || state == "asleep" {
			like = connNew
		}
		if by != byDirect {
			more := g.took[caseOf(by, state, conn)] - g.took[caseOf(byDirect, state, like)]
			g.series("gateway_added", by, state, conn).add(int64(max(more, 1)))
		}
	})
}

// each calls do with each case.
func (g *gateways) each(do func(by, state, conn string)) {
	for _, d := range g.doors {
		for _, state := range []string{"asleep", "awake"} {
			for _, conn := range []string{connFirst, connNew, connKept} {
				if _, ok := g.took[caseOf(d.by, state, conn)]; ok {
					do(d.by, state, conn)
				}
			}
		}
	}
}

func (g *gateways) rows() (rows []Row) {
	for _, row := range []string{"gateway", "gateway_added"} {
		g.each(func(by, state, conn string) {
			if s := g.all[row+" "+caseOf(by, state, conn)]; s != nil {
				rows = append(rows, s.row(row, map[string]any{
					"by": by, "state": state, "connection": conn, "memory_mib": g.o.mib(), "vcpus": spec.DefaultVCPUs, "depth": g.o.Depth,
				}))
			}
		})
	}
	return rows
}
