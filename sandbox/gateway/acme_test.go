//go:build pebble

package gateway_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// authority is Pebble, Let's Encrypt's ACME server for tests. Its certificates last lifetime.
type authority struct {
	t          *testing.T
	dir        string
	dns        string
	port, mgmt int
	trust      *x509.CertPool // of its own listeners
	stop       func()
}

const lifetime = 24 * time.Second // autocert renews after two thirds

func newAuthority(t *testing.T) *authority {
	t.Helper()
	if os.Getenv("DROWSE_TEST_PEBBLE") == "" {
		t.Fatal("there is no pebble: make test-acme")
	}
	a := &authority{t: t, dir: t.TempDir(), port: freePort(t), mgmt: freePort(t)}
	var cert string
	cert, _, a.trust = certificate(t, a.dir, 1, "localhost")
	t.Setenv("SSL_CERT_FILE", cert) // before anything of this process asks for the system's
	t.Setenv("SSL_CERT_DIR", a.dir)
	// Every name is this host's.
	up := make(chan struct{})
	l := listen(t)
	s := &dns.Server{Listener: l, NotifyStartedFunc: func() { close(up) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		if q.Question[0].Qtype == dns.TypeA {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(127, 0, 0, 1)})
		}
		_ = w.WriteMsg(m)
	})}
	ended := make(chan error, 1)
	go func() { ended <- s.ActivateAndServe() }()
	<-up
	t.Cleanup(func() {
		_ = s.Shutdown()
		<-ended
	})
	a.dns = l.Addr().String()
	return a
}

func freePort(t *testing.T) int {
	l := listen(t)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// url is its directory.
func (a *authority) url() string { return fmt.Sprintf("https://localhost:%d/dir", a.port) }

// start has it check names at a port of this host. It waits until it answers, and returns its root.
func (a *authority) start(tlsPort string) *x509.CertPool {
	a.t.Helper()
	var port int
	_, _ = fmt.Sscan(tlsPort, &port)
	config, err := json.Marshal(map[string]any{"pebble": map[string]any{
		"listenAddress": fmt.Sprintf("127.0.0.1:%d", a.port), "managementListenAddress": fmt.Sprintf("127.0.0.1:%d", a.mgmt),
		"certificate": filepath.Join(a.dir, "cert.pem"), "privateKey": filepath.Join(a.dir, "key.pem"), "tlsPort": port, "httpPort": 1,
		"profiles": map[string]any{"default": map[string]any{"description": "short", "validityPeriod": int(lifetime / time.Second)}},
	}})
	path := filepath.Join(a.dir, "pebble.json")
	if err == nil {
		err = os.WriteFile(path, config, 0o600)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := exec.CommandContext(ctx, os.Getenv("DROWSE_TEST_PEBBLE"), "-config", path, "-dnsserver", a.dns)
	c.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1")
	log, err := os.Create(filepath.Join(a.dir, "log"))
	if err != nil {
		a.t.Fatal(err)
	}
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		a.t.Fatal(err)
	}
	a.stop = func() {
		cancel()
		_ = c.Wait()
		log.Close()
		a.stop = func() {}
	}
	a.t.Cleanup(func() {
		a.stop()
		if a.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			a.t.Logf("pebble: %s", text[max(0, len(text)-4000):])
		}
	})
	ask := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: a.trust}, DisableKeepAlives: true}}
	roots := x509.NewCertPool()
	until(a.t, "pebble answers", func() bool {
		for _, where := range []string{a.url(), fmt.Sprintf("https://localhost:%d/roots/0", a.mgmt)} {
			r, err := ask.Get(where)
			if err != nil {
				return false
			}
			text, _ := io.ReadAll(r.Body)
			r.Body.Close()
			if where != a.url() && !roots.AppendCertsFromPEM(text) {
				return false
			}
		}
		return true
	})
	return roots
}

func TestACME_issues_and_renews_certificates_and_outlives_an_authority_that_is_down(t *testing.T) {
	a := newAuthority(t)
	keep := t.TempDir()
	var config *tls.Config // of the world's host, which is made below
	w := begin(t, func(_ *gateway.Options, l *gateway.Listeners) {
		l.TLS = &tls.Config{NextProtos: []string{"acme-tls/1"}, MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			c := config.Clone()
			c.NextProtos = append([]string{"h2", "http/1.1"}, c.NextProtos...)
			return c, nil
		}}
	})
	options := gateway.ACMEOptions{Names: gateway.Names{Domain: domain}, Dir: keep, Directory: a.url()}
	config = gateway.ACME(w.host, options)
	w.create("a", &spec.Gateway{PublicPorts: []uint16{80}}, spec.Idle{})
	w.serves("a", 80, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/long" {
			_ = http.NewResponseController(rw).Flush()
			<-r.Context().Done()
		}
		fmt.Fprint(rw, "hello")
	})
	var roots *x509.CertPool
	// leaf connects for a name, and returns the certificate of a connection that is valid.
	leaf := func(name string) (*x509.Certificate, error) {
		d := tls.Dialer{Config: &tls.Config{ServerName: name, RootCAs: roots}}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		c, err := d.DialContext(ctx, "tcp", w.addr)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		return c.(*tls.Conn).ConnectionState().PeerCertificates[0], nil
	}
	const public = "80-a." + domain
	roots = x509.NewCertPool()
	if _, err := leaf(domain); err == nil {
		t.Error("there is a certificate, and no authority has run")
	}

	_, port, err := net.SplitHostPort(w.addr)
	if err != nil {
		t.Fatal(err)
	}
	roots = a.start(port)
	w.sleep("a")
	for _, name := range []string{"81-a." + domain, "80-none." + domain, "a." + domain, "80-a.other.test"} {
		if _, err := leaf(name); err == nil {
			t.Errorf("there is a certificate of %s", name)
		}
	}
	var first *x509.Certificate
	until(t, "a certificate", func() bool { first, err = leaf(public); return err == nil })
	if first.DNSNames[0] != public || len(first.DNSNames) != 1 {
		t.Errorf("it is for %v", first.DNSNames)
	}
	if w.phase("a") != state.Asleep {
		t.Error("the authority's check or a handshake has woken the sandbox")
	}
	client := w.client(&tls.Config{RootCAs: roots})
	r, err := client.Get("https://" + public + "/")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(r.Body); err != nil || string(text) != "hello" || r.ProtoMajor != 2 {
		t.Errorf("%q, %v, %s", text, err, r.Proto)
	}
	r.Body.Close()
	// What failed while the authority was down is tried again.
	begun := time.Now()
	for _, err := leaf(domain); err != nil; _, err = leaf(domain) {
		if time.Since(begun) > 3*time.Minute {
			t.Fatal("the name that was asked for without an authority has no certificate: ", err)
		}
		time.Sleep(time.Second)
	}
	t.Logf("a name that was refused has its certificate %v after the authority is up", time.Since(begun).Round(time.Second))

	// The renewal is another certificate, and what is open goes on.
	long, err := client.Get("https://" + public + "/long")
	if err != nil {
		t.Fatal(err)
	}
	defer long.Body.Close()
	second, err := leaf(public)
	if err != nil {
		t.Fatal(err)
	}
	var third *x509.Certificate
	until(t, "a renewal", func() bool {
		third, err = leaf(public)
		if err != nil {
			t.Fatal("between two certificates: ", err)
		}
		return third.SerialNumber.Cmp(second.SerialNumber) != 0
	})
	if !third.NotAfter.After(second.NotAfter) || long.StatusCode != http.StatusOK {
		t.Errorf("from %v to %v", second.NotAfter, third.NotAfter)
	}

	// Without the authority the certificate stays, also for a new process of the same directory.
	a.stop()
	config = gateway.ACME(w.host, options)
	kept, err := leaf(public)
	if err != nil || kept.NotAfter.Before(third.NotAfter) {
		t.Errorf("after a restart without the authority: %v", err)
	}
	if files, err := filepath.Glob(filepath.Join(keep, "*")); err != nil || len(files) == 0 {
		t.Errorf("%v, %v", files, err)
	} else {
		for _, path := range files {
			if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v", path, st.Mode(), err)
			}
		}
	}
}
