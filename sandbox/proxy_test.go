package sandbox_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// caller asks an API when ordered, with the key that it believes it has.
const caller = `
import os, socket, ssl
trust = ssl.create_default_context() # by SSL_CERT_FILE
def ask():
    host, port = os.environ['https_proxy'].removeprefix('http://').split(':')
    s = socket.create_connection((host, int(port)), timeout=250)
    s.sendall(b'CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n\r\n')
    got = b''
    while b'\r\n\r\n' not in got:
        got += s.recv(1)
    s = trust.wrap_socket(s, server_hostname='api.example')
    s.sendall(('GET /v1 HTTP/1.1\r\nHost: api.example\r\nConnection: close\r\nAuthorization: Bearer %s\r\n\r\n' % os.environ['API_KEY']).encode())
    got = b''
    while p := s.recv(4096):
        got += p
    return got.split(b'\r\n\r\n')[1].decode().strip()
while True:
    open('/run/call').read()
    try:
        out = ask()
    except Exception as e:
        out = repr(e)
    with open('/run/called', 'w') as f:
        f.write('%d %s\n' % (os.getpid(), out))
`

// apiServer answers over TLS, and notes the keys of requests.
type apiServer struct {
	roots string // a file with the certificate of its authority

	mu   sync.Mutex // guards keys
	keys []string
}

func (s *apiServer) got() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.keys)
}

// api starts a server for api.example, with a certificate.
func (o *outside) api(at string) *apiServer {
	o.t.Helper()
	s := &apiServer{roots: filepath.Join(o.t.TempDir(), "roots.pem")}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		o.t.Fatal(err)
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"api.example"}, NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		o.t.Fatal(err)
	}
	if err := os.WriteFile(s.roots, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		o.t.Fatal(err)
	}
	l, err := net.Listen("tcp4", at)
	if err != nil {
		o.t.Fatal(err)
	}
	srv := &http.Server{
		ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			auth := r.Header.Get("Authorization")
			s.mu.Lock()
			s.keys = append(s.keys, auth)
			s.mu.Unlock()
			_, _ = io.WriteString(w, "hello, you have "+auth)
		}),
	}
	go func() {
		_ = srv.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}))
	}()
	o.t.Cleanup(func() { srv.Close() })
	return s
}

// startCaller starts caller in a VM, and returns the placeholder that it has in place of the key.
func startCaller(t *testing.T, e *guesttest.Env, vm string) (holder string) {
	t.Helper()
	c := e.Agent(vm)
	if err := c.WriteFile(t.Context(), "/root/caller.py", strings.NewReader(caller), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	e.Do(vm, "mkfifo", "/run/call", "/run/called")
	cmd, err := e.Store.Sandbox(vm).Command(guest.Cmd{Argv: []string{"python3", "-S", "/root/caller.py"}, Detach: true})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(cmd.Env, func(v string) bool { return strings.HasPrefix(v, "API_KEY="+proxy.PlaceholderPrefix) })
	if i < 0 {
		t.Fatalf("the command has the environment %q", cmd.Env)
	}
	p, err := c.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	return strings.TrimPrefix(cmd.Env[i], "API_KEY=")
}

// keysOfAGuest has a program use an API key that its VM never has. The VM is a clone of the one in which the
// program started, so all that the program knows of the proxy comes from there.
func keysOfAGuest(t *testing.T, e *guesttest.Env, vm, holder string, api *apiServer) {
	t.Helper()
	begin := time.Now()
	defer func() { t.Logf("all about keys took %v", time.Since(begin)) }()
	if list, err := e.Store.Sandbox(vm).Secrets(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("a clone has %+v, %v", list, err)
	}
	key := randomText(t, "sk-")
	// The value ends like a line of a file. The caller does not mark it for the proxy: the policy does.
	if err := e.Store.Sandbox(vm).SetSecrets(t.Context(), spec.Secret{SecretFile: spec.SecretFile{Name: "API_KEY"}, Value: []byte(key + "\n")}); err != nil {
		t.Fatal(err)
	}
	// The proxy hides the key in the answer.
	want := "hello, you have Bearer " + strings.Repeat("*", len(key))
	asked := 0
	works := func(when string) (pid string) {
		t.Helper()
		if e.Exists(vm, "/run/secrets/API_KEY") {
			t.Fatalf("%s: the key is a file in the guest", when)
		}
		said := order(e, vm, "", "/run/call", "/run/called")
		asked++
		if got := api.got(); len(got) != asked || got[asked-1] != "Bearer "+key {
			t.Fatalf("%s: the server has got %q, want the key for the %dth time; the program says %q", when, got, asked, said)
		}
		pid, rest, _ := strings.Cut(said, " ")
		if rest != want {
			t.Errorf("%s: the program says %q, want %q", when, said, want)
		}
		return pid
	}
	pid := works("at first")
	var injected int
	err := e.Store.Sandbox(vm).NetworkEvents(t.Context(), false, func(ev spec.NetEvent) error {
		if ev.Reason == netpolicy.ReasonInject && ev.Verdict == netpolicy.Allow && ev.Host == "api.example" && ev.Secret == "API_KEY" && ev.Status == 200 && ev.Rule == "api" && ev.PeerPort == 443 {
			injected++
		}
		return nil
	})
	if err != nil || injected != 1 {
		t.Errorf("%d events of requests with a secret, %v", injected, err)
	}
	search := func(what, snap string) {
		t.Helper()
		dir := filepath.Join(e.Store.State.Dir(), "snapshots", snap)
		memory, states := copies(t, dir, key)
		if files := inFiles(t, e.Store, key); memory+states+files > 0 {
			t.Errorf("%s: the key is %d times in memory, %d in states of devices, %d in files", what, memory, states, files)
		}
		if seen, _ := copies(t, dir, holder); seen == 0 {
			t.Errorf("%s: the placeholder is not in memory: the search does not work", what)
		}
	}
	search("a sleep", e.Sleep(vm).Snapshot)

	// The program continues with what it has in memory. The wake gets the key from Secrets.
	l := e.Launcher
	l.Secrets = func(_ context.Context, _ string, awaited []spec.SecretFile) ([]spec.Secret, error) {
		if len(awaited) != 1 || awaited[0] != (spec.SecretFile{Name: "API_KEY", Proxy: true}) {
			t.Errorf("asked for %+v", awaited)
		}
		return []spec.Secret{{SecretFile: awaited[0], Value: []byte(key)}}, nil
	}
	if _, err := e.Store.With(l).Sandbox(vm).Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := works("after a wake"); again != pid {
		t.Errorf("it is process %s, and was %s", again, pid)
	}
	search("a second sleep", e.Sleep(vm).Snapshot)
}
