package e2btest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// world is a host with VMs in memory, and a server on it.
type world struct {
	t      testing.TB
	vms    *sandboxtest.VMs
	host   *sandbox.Host
	server *e2b.Server
	url    string // of the server
	port   string
	tokens *tokens.Store
	key    string // that may write
	tls    *tls.Config
	ca     string // file with its certificate
}

// domain is that of hosts of ports. The resolver of the C library may know names below localhost.
const domain = "sandboxes.localhost"

// begin makes a world. Its guests are real with g.
func begin(t testing.TB, g *guests, change func(*e2b.Options)) *world {
	return beginWith(t, g, false, change)
}

// beginWith is begin, with TLS if it is to be secure.
func beginWith(t testing.TB, g *guests, secure bool, change func(*e2b.Options)) *world {
	t.Helper()
	w := &world{t: t, vms: &sandboxtest.VMs{}}
	if g != nil {
		w.vms.Guests = g.start
	}
	w.host = w.vms.Host(t)
	w.tokens = tokens.Open(filepath.Join(t.TempDir(), "tokens"))
	var err error
	if w.key, err = w.tokens.CreateE2B(tokens.Token{Name: "test", Scopes: tokens.All()}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.url = "http://" + l.Addr().String()
	if secure {
		w.tls, w.ca = certificate(t)
		w.url = "https://" + l.Addr().String()
	}
	_, w.port, _ = net.SplitHostPort(l.Addr().String())
	// What the server logged is the reason of an error 500, which its clients do not see.
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
	o := e2b.Options{
		Host: w.host, Tokens: w.tokens, Domain: domain + ":" + w.port, Templates: map[string]string{"base": sandboxtest.Image}, Network: true, Log: log,
		Spec: sandbox.Spec{DiskMiB: 64},
	}
	if change != nil {
		change(&o)
	}
	if w.server, err = e2b.New(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- w.server.Serve(ctx, l, w.tls) }()
	launcher, err := w.vms.Launcher(w.host)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		ended <- supervisor.Run(ctx, w.host, launcher, supervisor.Options{PruneEvery: 200 * time.Millisecond, Log: log})
	}()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
	return w
}

// pause pauses a sandbox, and returns the snapshot that it sleeps in.
func (w *world) pause(m made) string {
	w.t.Helper()
	if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/pause", nil); a.status != http.StatusNoContent {
		w.t.Fatal(a)
	}
	r, err := w.host.State.Get(m.SandboxID)
	if err != nil {
		w.t.Fatal(err)
	}
	return r.Snapshot
}

// cloneAs are options of a sandbox that is not one of the wire.
func cloneAs(name string) sandbox.CloneOptions { return sandbox.CloneOptions{Name: name} }

// until waits for a condition.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatal("not in time: ", what)
		}
	}
}

// certificate returns a certificate of the domain and this machine, and a file with it.
func certificate(t testing.TB) (*tls.Config, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		DNSNames: []string{domain, "*." + domain}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, file
}
