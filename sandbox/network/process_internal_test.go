package network

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
)

// nameServer answers each question for an address, and counts.
func nameServer(t *testing.T) (at netip.AddrPort, asked *atomic.Int32) {
	t.Helper()
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	asked = new(atomic.Int32)
	s := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		asked.Add(1)
		m := new(dns.Msg)
		m.SetReply(q)
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(93, 184, 216, 34)}}
		_ = w.WriteMsg(m)
	})}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = s.ActivateAndServe() }()
	t.Cleanup(func() { pc.Close(); <-ended })
	return netip.MustParseAddrPort(pc.LocalAddr().String()), asked
}

type secretsOf map[string]string

func (s secretsOf) Secret(name string) (string, bool, <-chan struct{}) {
	v, ok := s[name]
	return v, ok, make(chan struct{})
}

// newNetwork makes a VM's network with names, for root.
func newNetwork(t *testing.T, upstream netip.AddrPort, start func(context.Context, []*os.File) (Process, error)) *Network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes TAP devices: needs root")
	}
	p := policyFrom(t, fmt.Sprintf(`
dns: {upstreams: ["%v"]}
proxy: {enabled: true, inject: [{secret: KEY, hosts: [www.example.com], header: Authorization}]}
rules:
  - {name: web, direction: egress, verdict: allow, names: [www.example.com, plain.example.com], protocols: [tcp], ports: [443]}
`, upstream))
	id, err := proxy.NewIdentity(make([]byte, proxy.KeyBytes), "lineage")
	if err != nil {
		t.Fatal(err)
	}
	n, err := New(Config{Name: "a", Policy: p, Start: start, Identity: func() (*proxy.Identity, error) { return id, nil },
		Secrets: secretsOf{"KEY": "the-secret-of-the-owner", "OTHER": "of another VM"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := n.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	return n
}

// query sends a query by the TAP device, as the guest does, until the answer comes or tries are used up.
func query(t *testing.T, n *Network, name string, tries int) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeA)
	body, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	const virtio, eth, ip, udp = 12, 14, 20, 8
	f := make([]byte, virtio+eth+ip+udp, virtio+eth+ip+udp+len(body))
	e := f[virtio:]
	copy(e, netpolicy.TheWire.GatewayMAC[:])
	copy(e[6:], netpolicy.TheWire.GuestMAC[:])
	binary.BigEndian.PutUint16(e[12:], unix.ETH_P_IP)
	h := e[eth:]
	h[0], h[8], h[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(h[2:], uint16(ip+udp+len(body)))
	from, to := netpolicy.TheWire.Guest4.As4(), netpolicy.TheWire.Gateway4.As4()
	copy(h[12:], from[:])
	copy(h[16:], to[:])
	var sum uint32
	for i := 0; i < ip; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum+sum>>16))
	binary.BigEndian.PutUint16(h[ip:], 40000)
	binary.BigEndian.PutUint16(h[ip+2:], 53)
	binary.BigEndian.PutUint16(h[ip+4:], uint16(udp+len(body)))
	f = append(f, body...)
	fd := n.TAP().FD()
	b := make([]byte, 4096)
	for range tries {
		if _, err := unix.Write(fd, f); err != nil {
			t.Fatal(err)
		}
		for range 50 {
			k, err := unix.Read(fd, b)
			if errors.Is(err, unix.EAGAIN) {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			at := virtio + eth + ip + udp
			if k > at && b[virtio+eth+9] == unix.IPPROTO_UDP {
				if a := new(dns.Msg); a.Unpack(b[at:k]) == nil && a.Id == m.Id {
					return a
				}
			}
		}
	}
	return nil
}

// starter starts this program as a network process.
type starter struct {
	mu    sync.Mutex
	procs []*confine.Process
}

func (s *starter) start(ctx context.Context, files []*os.File) (Process, error) {
	p, err := confine.Start(ctx, confine.Profile{Program: []string{"/proc/self/exe", Argument}, Files: files, Network: true, Output: os.Stderr})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.procs = append(s.procs, p)
	return p, nil
}

func (s *starter) all() []*confine.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*confine.Process(nil), s.procs...)
}

func confinable(t *testing.T) {
	t.Helper()
	if missing := confine.Probe().Missing(true); len(missing) > 0 {
		t.Skipf("this needs %s: %s", missing[0].Name, missing[0].Detail)
	}
}

func TestProcess_starts_with_the_first_query_and_another_follows_one_that_is_killed(t *testing.T) {
	confinable(t)
	at, asked := nameServer(t)
	s := &starter{}
	n := newNetwork(t, at, s.start)
	if len(s.all()) > 0 {
		t.Error("there is a process before the first query")
	}
	a := query(t, n, "www.example.com.", 20)
	if a == nil || a.Rcode != dns.RcodeSuccess || len(a.Answer) != 1 || len(s.all()) != 1 {
		t.Fatalf("the answer is %v, of %d processes", a, len(s.all()))
	}
	if _, ok := n.link.Opens(netip.MustParseAddrPort("93.184.216.34:443"), "www.example.com"); !ok {
		t.Error("the guest has an address that the rules do not know")
	}
	before := asked.Load() // a slow machine has made the guest ask again
	if a := query(t, n, "other.example.com.", 20); a == nil || a.Rcode != dns.RcodeRefused || asked.Load() != before {
		t.Errorf("another name: %v, %d questions", a, asked.Load())
	}
	if st, err := n.Stats(); err != nil || st.DNS.Answered == 0 || st.DNS.Refused == 0 || st.Proxy == nil {
		t.Errorf("%+v, %v", st, err)
	}
	seen, err := n.Stats()
	if err != nil {
		t.Fatal(err)
	}
	first := s.all()[0]
	used := n.CPU()
	if st, err := n.Stats(); err != nil || st.Process.Starts != 1 || st.Process.Failed+st.Process.Refused != 0 || used <= 0 || st.Process.CPUSeconds < used.Seconds() {
		t.Errorf("%+v, %v, and %v of CPU time", st.Process, err, used)
	}
	if err := unix.Kill(first.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-first.Done()
	if a := query(t, n, "www.example.com.", 1); a != nil {
		t.Errorf("without a process there is an answer: %v", a)
	}
	n.keeper.mu.Lock()
	n.keeper.begun = n.keeper.begun.Add(-restartPause)
	n.keeper.mu.Unlock()
	if a := query(t, n, "www.example.com.", 20); a == nil || len(s.all()) != 2 {
		t.Errorf("after the pause: %v, %d processes", a, len(s.all()))
	}
	if st, err := n.Stats(); err != nil || st.DNS.Answered <= seen.DNS.Answered || st.DNS.Refused != seen.DNS.Refused {
		t.Errorf("the counts are %+v after %+v, %v: they begin anew with the process", st.DNS, seen.DNS, err)
	}
	both := first.CPU() + s.all()[1].CPU()
	if st, err := n.Stats(); err != nil || st.Process.Starts != 2 || st.Process.Failed != 1 || n.CPU() < both || both <= used {
		t.Errorf("%+v, %v, and %v of CPU time, of both %v, before %v", st.Process, err, n.CPU(), both, used)
	}
}

// The DNS server sets a deadline of two seconds for each read, and reads on after it.
func TestQuery_after_a_pause_is_answered_by_the_same_process(t *testing.T) {
	confinable(t)
	at, _ := nameServer(t)
	s := &starter{}
	n := newNetwork(t, at, s.start)
	for i := range 2 {
		if i > 0 {
			time.Sleep(2500 * time.Millisecond)
		}
		if a := query(t, n, "www.example.com.", 20); a == nil || a.Rcode != dns.RcodeSuccess || len(s.all()) != 1 {
			t.Fatalf("query %d: %v, of %d processes", i+1, a, len(s.all()))
		}
	}
}

// A socket that breaks ends the resolver. A process without one would leave the guest without names until its next
// wake.
func TestWorker_ends_with_its_first_service(t *testing.T) {
	mine, its, err := rpc.Pair()
	if err != nil {
		t.Fatal(err)
	}
	queries, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- newWorker().run(its, queries[1]) }()
	conn, err := rpc.New(mine, options(func(context.Context, string, []byte, []*os.File) (any, []*os.File, error) {
		return nil, nil, errRefused
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	order := prepareOrder{Policy: policyOrder{Policy: &netpolicy.Policy{}, Identity: netpolicy.Identity{Address4: netpolicy.TheWire.Guest4}}}
	if _, err := conn.Call(t.Context(), callPrepare, order, nil); err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(queries[0]); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A network process that starts is sent the list while the host's addresses are looked at.
func TestRefresh_changes_no_list_that_the_policy_in_force_has(t *testing.T) {
	at, _ := nameServer(t)
	n := newNetwork(t, at, nil)
	n.mu.Lock()
	slices.Reverse(n.host) // nobody else has it before the first query
	shared := n.host
	before := slices.Clone(shared)
	n.mu.Unlock()
	if len(before) < 2 {
		t.Fatalf("a host with the addresses %v shows nothing", before)
	}
	if err := n.refresh(); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(shared, before) {
		t.Errorf("%v became %v", before, shared)
	}
}

// refusedProcess is one that the filter kills: a signal from outside would meet Go's handler.
type refusedProcess struct{ *confine.Process }

func (p refusedProcess) Wait() error {
	return fmt.Errorf("%w: %w", confine.ErrRefused, p.Process.Wait())
}

func TestProcess_that_makes_a_forbidden_system_call_is_counted_and_has_no_successor(t *testing.T) {
	confinable(t)
	at, _ := nameServer(t)
	s := &starter{}
	n := newNetwork(t, at, func(ctx context.Context, files []*os.File) (Process, error) {
		p, err := s.start(ctx, files)
		if err != nil {
			return nil, err
		}
		return refusedProcess{p.(*confine.Process)}, nil
	})
	r, err := n.keeper.get()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.all()[0].Kill(); err != nil {
		t.Fatal(err)
	}
	<-r.conn.Done()
	// watch clears the process last.
	for barred := false; !barred; time.Sleep(time.Millisecond) {
		n.keeper.mu.Lock()
		barred = n.keeper.barred != nil
		n.keeper.mu.Unlock()
	}
	if st, err := n.Stats(); err != nil || st.Process.Starts != 1 || st.Process.Refused != 1 || st.Process.Failed != 0 {
		t.Errorf("%+v, %v", st.Process, err)
	}
	if _, err := n.keeper.get(); !errors.Is(err, confine.ErrRefused) || len(s.all()) != 1 {
		t.Errorf("%v, %d processes", err, len(s.all()))
	}
}

func TestProbe_confines_a_process_and_says_why_one_is_not(t *testing.T) {
	confinable(t)
	if err := Probe(t.Context(), "/proc/self/exe"); err != nil {
		t.Error(err)
	}
	if err := Probe(t.Context(), "/bin/true"); err == nil {
		t.Error("a program that ends at once was confined")
	}
	if err := Probe(t.Context(), "/nowhere"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a program that is not there: %v", err)
	}
}

func TestKilled_keeper_takes_its_network_process_along(t *testing.T) {
	confinable(t)
	if os.Geteuid() != 0 {
		t.Skip("makes TAP devices: needs root")
	}
	cmd := exec.Command("/proc/self/exe", asKeeper)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	var tap string
	_, err = fmt.Fscan(out, &pid, &tap)
	process, oerr := unix.PidfdOpen(pid, 0) // it is not our child
	text, rerr := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	_, ierr := net.InterfaceByName(tap)
	kerr := cmd.Process.Kill()
	_ = cmd.Wait()
	if err := errors.Join(err, oerr, rerr, ierr, kerr); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(process)
	if !strings.HasSuffix(strings.TrimRight(string(text), "\x00"), Argument) {
		t.Errorf("%d is %q", pid, text)
	}
	// A pidfd becomes readable when its process ends.
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, int(time.Minute/time.Millisecond))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 || err != nil {
			_ = unix.Kill(pid, unix.SIGKILL)
			t.Errorf("the network process %d has outlived its keeper, %v", pid, err)
		}
		break
	}
	if _, err := net.InterfaceByName(tap); err == nil {
		t.Errorf("the device %s is left", tap)
	}
	if err := confine.Sweep(); err != nil {
		t.Error(err)
	}
}

// keepUntilKilled makes a network with a network process, and prints that one's id and the TAP device.
func keepUntilKilled() error {
	s := &starter{}
	n, err := New(Config{Name: "a", Start: s.start})
	if err != nil {
		return err
	}
	if err := n.Wait(context.Background()); err != nil {
		return err
	}
	if _, err := n.keeper.get(); err != nil {
		return err
	}
	fmt.Println(s.all()[0].PID(), n.TAP().(interface{ Name() string }).Name())
	select {}
}

func TestProcess_follows_the_policy_and_goes_with_the_network(t *testing.T) {
	confinable(t)
	at, _ := nameServer(t)
	s := &starter{}
	n := newNetwork(t, at, s.start)
	if a := query(t, n, "www.example.com.", 20); a == nil || a.Rcode != dns.RcodeSuccess {
		t.Fatalf("%v", a)
	}
	p := policyFrom(t, fmt.Sprintf(`
dns: {upstreams: ["%v"]}
rules: [{name: b, direction: egress, verdict: allow, names: [b.example.com], protocols: [tcp], ports: [443]}]`, at))
	if err := n.SetPolicy(p); err != nil {
		t.Fatal(err)
	}
	if a := query(t, n, "www.example.com.", 20); a == nil || a.Rcode != dns.RcodeRefused {
		t.Errorf("a name of the old policy: %v", a)
	}
	if a := query(t, n, "b.example.com.", 20); a == nil || a.Rcode != dns.RcodeSuccess || len(s.all()) != 1 {
		t.Errorf("a name of the new policy: %v, %d processes", a, len(s.all()))
	}
	if err := n.SetPolicy(&netpolicy.Policy{}); err != nil {
		t.Fatal(err)
	}
	if a := query(t, n, "b.example.com.", 1); a != nil {
		t.Errorf("without a resolver: %v", a)
	}
}

func TestNetwork_of_a_host_that_cannot_confine_answers_as_well(t *testing.T) {
	at, _ := nameServer(t)
	n := newNetwork(t, at, nil)
	if a := query(t, n, "www.example.com.", 20); a == nil || a.Rcode != dns.RcodeSuccess {
		t.Errorf("%v", a)
	}
}

// authority makes a certificate for all names of example.com, and writes its authority to the file of proxy.RootsEnv.
func authority(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, DNSNames: []string{"*.example.com"}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	path := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(proxy.RootsEnv, path)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func TestProcess_is_the_proxy_with_secrets_and_the_relay_of_tunnels(t *testing.T) {
	confinable(t)
	cert, pool := authority(t)
	long := strings.Repeat("0123456789abcdef", 1<<16)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "www.example.com" {
			fmt.Fprintf(w, "%t and %s", r.Header.Get("Authorization") == "the-secret-of-the-owner", r.Header.Get("Authorization"))
			return
		}
		_, _ = io.WriteString(w, long)
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	server.StartTLS()
	defer server.Close()
	at, _ := nameServer(t)
	n := newNetwork(t, at, (&starter{}).start)
	n.keeper.dial = func(ctx context.Context, peer netip.AddrPort) (*net.TCPConn, error) {
		if peer.String() != "93.184.216.34:443" {
			return nil, fmt.Errorf("to %v", peer)
		}
		c, err := new(net.Dialer).DialContext(ctx, "tcp4", server.Listener.Addr().String())
		if err != nil {
			return nil, err
		}
		return c.(*net.TCPConn), nil
	}
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	id, err := n.config.Identity()
	if err != nil {
		t.Fatal(err)
	}
	pool.AppendCertsFromPEM(id.Root())
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy"}),
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			c, err := net.Dial("tcp4", ln.Addr().String())
			if err != nil {
				return nil, err
			}
			its, err := ln.AcceptTCP()
			if err == nil {
				err = n.keeper.pass(t.Context(), its, arrivesProxy)
			}
			return c, err
		}}
	defer tr.CloseIdleConnections()
	get := func(host string) string {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), "GET", "https://"+host+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		placeholder, err := id.Placeholder("KEY")
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", placeholder)
		resp, err := tr.RoundTrip(r)
		if err != nil {
			t.Fatalf("%s: %v", host, err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Errorf("%s: %v", host, err)
		}
		return string(body)
	}
	if got := get("www.example.com"); !strings.HasPrefix(got, "true and ***") {
		t.Errorf("with a secret: %q", got)
	}
	if got := get("plain.example.com"); got != long {
		t.Errorf("by a tunnel: %d bytes", len(got))
	}
	st, err := n.Stats()
	if err != nil || st.Proxy.Injected != 1 || st.Proxy.Tunnels != 2 {
		t.Errorf("%+v, %v", st.Proxy, err)
	}
	events, _, _ := n.RecentEvents(false)
	if len(events) != 1 || events[0].Secret != "KEY" || events[0].Rule != "web" || events[0].Status != http.StatusOK {
		t.Errorf("%+v", events)
	}
	// A policy without the names cuts what is open.
	if err := n.SetPolicy(&netpolicy.Policy{}); err != nil {
		t.Fatal(err)
	}
}

// taken is a network process in the hands of its guest.
type taken struct{ done chan struct{} }

func (taken) CPU() time.Duration { return 0 }
func (taken) Wait() error        { return nil }
func (taken) Close() error       { return nil }

func TestAttack_network_process_in_the_hands_of_its_guest_gains_nothing_that_its_policy_does_not_open(t *testing.T) {
	at, asked := nameServer(t)
	loopback, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer loopback.Close()
	var conn *rpc.Conn
	n := newNetwork(t, at, func(_ context.Context, files []*os.File) (Process, error) {
		f, err := rpc.Dup(files[0])
		if err != nil {
			return nil, err
		}
		conn, err = rpc.New(f, options(func(context.Context, string, []byte, []*os.File) (any, []*os.File, error) { return nil, nil, nil }))
		return taken{}, err
	})
	if _, err := n.keeper.get(); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	here := netip.MustParseAddrPort(loopback.Addr().String())
	public := netip.MustParseAddrPort("93.184.216.34:443")
	for name, c := range map[string]struct {
		method string
		arg    any
	}{
		"pin a name of no rule":              {callPin, pin{"evil.example.com", public.Addr(), time.Hour}},
		"pin the host":                       {callPin, pin{"www.example.com", here.Addr(), time.Hour}},
		"pin the gateway":                    {callPin, pin{"www.example.com", netpolicy.TheWire.Gateway4, time.Hour}},
		"pin another VM":                     {callPin, pin{"www.example.com", n.address.Next(), time.Hour}},
		"pin a private address":              {callPin, pin{"www.example.com", netip.MustParseAddr("192.168.7.7"), time.Hour}},
		"pin the metadata service":           {callPin, pin{"www.example.com", netip.MustParseAddr("169.254.169.254"), time.Hour}},
		"pin a private address as IPv6":      {callPin, pin{"www.example.com", netip.MustParseAddr("::ffff:10.0.0.1"), time.Hour}},
		"pin nothing":                        {callPin, pin{"www.example.com", netip.Addr{}, time.Hour}},
		"connect to the host":                {callDial, opening{here, ""}},
		"connect to the host by a name":      {callDial, opening{here, "www.example.com"}},
		"connect to an address of no name":   {callDial, opening{public, ""}},
		"connect before the name is known":   {callDial, opening{public, "www.example.com"}},
		"connect a flow that is not there":   {callDialName, named{1, "www.example.com"}},
		"ask for a name of no rule":          {callAsk, resolver.Question{Name: "evil.example.com", Type: 1, Server: at}},
		"ask for a transfer":                 {callAsk, resolver.Question{Name: "www.example.com", Type: 252, Server: at}},
		"ask a server of its own":            {callAsk, resolver.Question{Name: "www.example.com", Type: 1, Server: here, TCP: true}},
		"a secret that no rule injects":      {callSecret, "OTHER"},
		"refuse a flow that is not there":    {callRefused, refusal{7, netpolicy.ReasonTLSName, "a.example.com"}},
		"an event of a reason of the kernel": {callProxied, proxy.Event{Reason: netpolicy.ReasonRule, Host: "a.example.com", Port: 1}},
		"an event with a host of two lines":  {callProxied, proxy.Event{Reason: netpolicy.ReasonProxy, Host: "a\nb", Port: 1}},
		"an event with an unknown secret":    {callProxied, proxy.Event{Reason: netpolicy.ReasonInject, Host: "a.b", Secret: "OTHER"}},
		"a call of the keeper":               {callPolicy, policyOrder{}},
	} {
		var reply any
		files, err := conn.Call(t.Context(), c.method, c.arg, &reply)
		if err == nil || len(files) > 0 {
			t.Errorf("%s: it has succeeded: %v, %d descriptors", name, reply, len(files))
		}
	}
	var is opened
	if _, err := conn.Call(t.Context(), callOpens, opening{here, "www.example.com"}, &is); err != nil || is.OK {
		t.Errorf("the host is open: %+v, %v", is, err)
	}
	if asked.Load() != 0 {
		t.Errorf("%d questions were asked", asked.Load())
	}
	if events, _, _ := n.RecentEvents(false); len(events) > 0 {
		t.Errorf("there are events: %+v", events)
	}
	// What it may do has a rate.
	for i := 0; ; i++ {
		if _, err := conn.Call(t.Context(), callAsk, resolver.Question{Name: "www.example.com", Type: 1, Server: at}, nil); err != nil {
			if !strings.Contains(err.Error(), errBusy.Error()) {
				t.Error(err)
			}
			break
		}
		if i > 10_000 {
			t.Fatal("questions have no bound")
		}
	}
	// So has all that it asks: its keeper's work does not count for it.
	k, begin, slept := newKeeper(n), time.Now(), time.Duration(0)
	k.current.Store(n.keeper.current.Load())
	k.pace.Now, k.pace.Sleep = func() time.Time { return begin.Add(slept) }, func(d time.Duration) { slept += d }
	for range 2*callBurst + 3*callsPerSecond {
		if _, _, err := k.serve(t.Context(), callLives, []byte("1"), nil); err != nil {
			t.Fatal(err)
		}
	}
	if slept < 3*time.Second {
		t.Errorf("with %d calls it has waited for %v", 2*callBurst+3*callsPerSecond, slept)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	its, relayed := os.NewFile(uintptr(pair[1]), "its end"), make(chan bool)
	flooded := &running{queries: os.NewFile(uintptr(pair[0]), "queries")}
	before := slept // of what it had at once, nothing is left
	go func() { k.relayAnswers(flooded); close(relayed) }()
	for range 2 * callsPerSecond {
		if _, err := its.Write(make([]byte, queryHeader)); err != nil {
			t.Fatal(err)
		}
	}
	its.Close()
	<-relayed
	flooded.queries.Close()
	if slept-before < time.Second {
		t.Errorf("with %d answers to nobody it has waited for %v", 2*callsPerSecond, slept-before)
	}
	// Nor can it answer somebody else.
	r, _ := n.keeper.get()
	if r == nil {
		t.Fatal("it has ended")
	}
	if n.keeper.isGuest(netip.MustParseAddr("127.0.0.1")) || n.keeper.isGuest(netpolicy.TheWire.Gateway4) || !n.keeper.isGuest(n.address) {
		t.Error("answers go to others than the guest")
	}
}
