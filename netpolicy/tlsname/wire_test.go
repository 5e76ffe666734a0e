package tlsname_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
)

// waitMost bounds a test's wait for an event that is immediate on any working machine.
const waitMost = 60 * time.Second

var own = netpolicy.Identity{Address4: netip.MustParseAddr("10.200.3.7")}

// lab is a host with an endpoint's TAP device, its policy and its server. It stands between two namespaces: the
// outside, and a guest that uses this kernel too.
type lab struct {
	t                    *testing.T
	host, outside, guest netns.NsHandle
	tap                  *os.File // the guest's end of the host's device
	link                 *link.Link
	server               *tlsname.Server
	flows                *flow.Log
	port                 uint16
	stop                 func()
	dialed               atomic.Int32

	mu      sync.Mutex // guards what follows
	refused []tlsname.Refusal
	named   []string
}

const labPolicy = `
rules:
  - {name: good, direction: egress, verdict: allow, names: [good.example, "*.good.example"], protocols: [tcp, udp], ports: [443, 8443], tls: [443, 8443]}
  - {name: plain, direction: egress, verdict: allow, names: [good.example], protocols: [tcp], ports: [8080]}
dns: {upstreams: ["192.0.2.53:53"]}
`

// Addresses outside.
var (
	peerA = netip.MustParseAddr("93.184.216.34")
	peerB = netip.MustParseAddr("93.184.216.35")
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newLab makes a lab whose guest has a kernel, or whose guest is frames that the test sends.
func newLab(t *testing.T, kernel bool, helloTimeout time.Duration) *lab {
	t.Helper()
	l := newWires(t)
	l.start(helloTimeout)
	if kernel {
		l.startGuest()
	}
	return l
}

// newWires makes a lab without its process and guest.
func newWires(t *testing.T) *lab {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces and eBPF programs need root")
	}
	// Never unlocked: the thread, and with it the namespace, ends with the test.
	runtime.LockOSThread()
	l := &lab{t: t, stop: func() {}}
	for _, ns := range []*netns.NsHandle{&l.outside, &l.guest, &l.host} {
		var err error
		*ns, err = netns.New()
		must(t, err)
		t.Cleanup(func() { ns.Close() })
	}
	up(t, "lo")
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0"}, PeerName: "up1", PeerNamespace: netlink.NsFd(l.outside)}))
	up(t, "up0", "192.0.2.1/24")
	l.in(l.outside, func() {
		up(t, "lo", peerA.String()+"/32", peerB.String()+"/32")
		up(t, "up1", "192.0.2.2/24")
	})
	must(t, netlink.RouteAdd(&netlink.Route{Gw: net.IPv4(192, 0, 2, 2)}))
	l.tap = openTAP(t, "tap0")
	return l
}

// up raises a device.
func up(t *testing.T, name string, addrs ...string) {
	t.Helper()
	nl, err := netlink.LinkByName(name)
	must(t, err)
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a)
		must(t, err)
		must(t, netlink.AddrAdd(nl, addr))
	}
	must(t, netlink.LinkSetUp(nl))
}

// start does the work of the VM's process.
func (l *lab) start(helloTimeout time.Duration) {
	t := l.t
	t.Helper()
	ln, err := tlsname.Listen(t.Context(), "tap0")
	must(t, err)
	l.port = uint16(ln.Addr().(*net.TCPAddr).Port)
	root := fmt.Sprintf("%s-test-tlsname-%d", link.DefaultRoot, os.Getpid())
	l.link, err = link.Attach(link.Config{Endpoint: "a1", Interface: "tap0", Root: root}, l.compile(labPolicy))
	must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(l.link.Remove(), link.Sweep(root), os.Remove(root)); err != nil {
			t.Error(err)
		}
	})
	must(t, l.link.Up(own))
	for _, a := range []netip.Addr{peerA, peerB} {
		must(t, l.link.Pin("www.good.example", a, time.Hour))
		must(t, l.link.Pin("good.example", a, time.Hour))
	}
	l.flows, err = l.link.FlowLog(own)
	must(t, err)
	l.server = tlsname.New(tlsname.Config{
		Flows: l.link, HelloTimeout: helloTimeout,
		Dial: func(ctx context.Context, f flow.Checked, _ string) (c *net.TCPConn, err error) {
			l.dialed.Add(1)
			l.away(l.host, func() { c, err = tlsname.Dial(ctx, f.Peer) })
			return c, err
		},
		Refused: func(r tlsname.Refusal) {
			l.flows.Refused(r.Flow, r.Reason, r.Name)
			l.mu.Lock()
			defer l.mu.Unlock()
			l.refused = append(l.refused, r)
		},
		Named: func(c flow.Checked, name string) {
			l.flows.Named(c, name)
			l.mu.Lock()
			defer l.mu.Unlock()
			l.named = append(l.named, name)
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.server.Serve(ctx, ln) }()
	l.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(l.stop)
}

// startGuest adds a guest with a kernel.
func (l *lab) startGuest() {
	t := l.t
	t.Helper()
	l.in(l.guest, func() {
		other := openTAP(t, "eth0")
		nl, err := netlink.LinkByName("eth0")
		must(t, err)
		must(t, netlink.LinkSetHardwareAddr(nl, netpolicy.TheWire.GuestMAC[:]))
		up(t, "eth0", "172.31.255.2/30")
		must(t, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: nl.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.IPv4(172, 31, 255, 1), HardwareAddr: netpolicy.TheWire.GatewayMAC[:],
		}))
		must(t, netlink.RouteAdd(&netlink.Route{Gw: net.IPv4(172, 31, 255, 1)}))
		pump(t, l.tap, other)
	})
}

func (l *lab) compile(policy string) *netpolicy.Spec {
	l.t.Helper()
	s, err := compile(policy, l.port)
	must(l.t, err)
	return s
}

func compile(policy string, port uint16) (*netpolicy.Spec, error) {
	p, err := netpolicy.Parse([]byte(policy))
	if err != nil {
		return nil, err
	}
	return netpolicy.Compile(p, own, netpolicy.Environment{Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")}, TLSPort: port})
}

// in runs do in a namespace, on the test's own thread, which is otherwise in the host's.
func (l *lab) in(ns netns.NsHandle, do func()) {
	l.t.Helper()
	must(l.t, netns.Set(ns))
	do()
	must(l.t, netns.Set(l.host))
}

// away runs do in a namespace on another thread, from any goroutine.
func (l *lab) away(ns netns.NsHandle, do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := netns.Set(ns); err != nil {
			l.t.Error(err)
			return
		}
		do()
	}()
	<-done
}

const vnetHeader = 12

// openTAP makes a TAP device that leaves checksums and segmentation to the other end, as a VM's does.
func openTAP(t *testing.T, name string) *os.File {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(t, err)
	req, err := unix.NewIfreq(name)
	must(t, err)
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	must(t, unix.IoctlIfreq(fd, unix.TUNSETIFF, req))
	must(t, unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, vnetHeader))
	const csum, tso4, tso6 = 1, 2, 4 // linux/if_tun.h
	must(t, unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, csum|tso4|tso6))
	f := os.NewFile(uintptr(fd), name)
	t.Cleanup(func() { f.Close() })
	return f
}

// pump connects two TAP devices.
func pump(t *testing.T, a, b *os.File) {
	var wg sync.WaitGroup
	one := func(to, from *os.File) {
		buf := make([]byte, 70000)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			_, _ = to.Write(buf[:n]) // a device that is down drops frames
		}
	}
	wg.Go(func() { one(a, b) })
	wg.Go(func() { one(b, a) })
	t.Cleanup(func() {
		a.Close()
		b.Close()
		wg.Wait()
	})
}

// dial connects from the guest.
func (l *lab) dial(at netip.AddrPort, localPort int) (c *net.TCPConn, err error) {
	l.away(l.guest, func() {
		d := net.Dialer{Timeout: waitMost}
		if localPort != 0 {
			d.LocalAddr = &net.TCPAddr{IP: net.IPv4(172, 31, 255, 2), Port: localPort}
			d.Control = func(_, _ string, c syscall.RawConn) error {
				return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			}
		}
		var conn net.Conn
		if conn, err = d.Dial("tcp4", at.String()); err == nil {
			c = conn.(*net.TCPConn)
			err = c.SetDeadline(time.Now().Add(waitMost))
		}
	})
	return c, err
}

// count returns how many of the guest's packets got this verdict for this reason.
func (l *lab) count(v netpolicy.Verdict, reason netpolicy.Reason) uint64 {
	all, err := l.link.Counters()
	if err != nil {
		l.t.Error(err)
	}
	for _, c := range all {
		if c.Direction == netpolicy.Egress && c.Verdict == v && c.Reason == reason {
			return c.Packets
		}
	}
	return 0
}

func (l *lab) mustDial(at netip.AddrPort) *net.TCPConn {
	l.t.Helper()
	c, err := l.dial(at, 0)
	must(l.t, err)
	l.t.Cleanup(func() { c.Close() })
	return c
}

// peer is a server outside.
type peer struct {
	accepted atomic.Int32
	at       netip.AddrPort
}

func (l *lab) serve(at netip.AddrPort, do func(*net.TCPConn)) *peer {
	l.t.Helper()
	p := &peer{at: at}
	l.in(l.outside, func() {
		ln, err := net.Listen("tcp4", at.String())
		must(l.t, err)
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				p.accepted.Add(1)
				wg.Go(func() {
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(2 * waitMost))
					do(c.(*net.TCPConn))
				})
			}
		})
		l.t.Cleanup(func() {
			ln.Close()
			l.stop()
			wg.Wait()
		})
	})
	return p
}

// tlsConfig returns the configuration of a server, for any name.
func tlsConfig(t *testing.T, curves ...tls.CurveID) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"good.example"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	must(t, err)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, CurvePreferences: curves}
}

func clientConfig(name string) *tls.Config {
	return &tls.Config{ServerName: name, InsecureSkipVerify: true}
}

// sums reads until the end of the stream, sends it all back, and closes.
func sums(cfg *tls.Config) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		s := tls.Server(c, cfg)
		b, err := io.ReadAll(s)
		if err != nil {
			return
		}
		if _, err := s.Write(b); err != nil {
			return
		}
		_ = s.Close()
	}
}

// records returns the TCP flows of the log.
func (l *lab) records() (out []netpolicy.FlowRecord) {
	l.t.Helper()
	err := l.flows.Records(l.t.Context(), false, func(recs []netpolicy.FlowRecord) error {
		for _, r := range recs {
			if r.FlowInfo != nil && r.Protocol == "tcp" {
				out = append(out, r)
			}
		}
		return nil
	})
	must(l.t, err)
	return out
}

// wait waits for a refusal, and returns all refusals so far.
func (l *lab) wait() []tlsname.Refusal {
	l.t.Helper()
	for end := time.Now().Add(waitMost); ; time.Sleep(time.Millisecond) {
		l.mu.Lock()
		out := l.refused
		l.refused = nil
		l.mu.Unlock()
		if len(out) > 0 {
			return out
		}
		if time.Now().After(end) {
			l.t.Fatalf("nothing was refused: %+v", l.server.Stats())
		}
	}
}

// refusedFor checks that a connection of the guest is reset, and for which reason.
func (l *lab) refusedFor(c *net.TCPConn, reason netpolicy.Reason, name string) {
	l.t.Helper()
	_, err := io.ReadAll(c)
	if !errors.Is(err, unix.ECONNRESET) {
		l.t.Errorf("the guest got %v, not a reset", err)
	}
	got := l.wait()
	if len(got) != 1 || got[0].Reason != reason || got[0].Name != name || got[0].Quiet || got[0].Flow.Peer.Addr() != peerA {
		l.t.Errorf("refused: %+v, want %v of %q", got, reason, name)
	}
}

var at443 = netip.AddrPortFrom(peerA, 443)

func TestServer_connection_with_an_allowed_name_is_the_peers(t *testing.T) {
	l := newLab(t, true, waitMost)
	p := l.serve(at443, sums(tlsConfig(t)))
	for _, name := range []string{"good.example", "A.Good.example"} {
		c := tls.Client(l.mustDial(p.at), clientConfig(name))
		data := make([]byte, 3<<20)
		_, _ = rand.Read(data)
		if _, err := c.Write(data); err != nil {
			t.Fatal(err)
		}
		must(t, c.CloseWrite()) // the end of TLS and of TCP in one direction, and the answer in the other
		must(t, c.NetConn().(*net.TCPConn).CloseWrite())
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%s: %d bytes back, %v", name, len(got), err)
		}
		c.Close()
	}
	l.mu.Lock()
	named := slices.Clone(l.named)
	l.mu.Unlock()
	if !slices.Equal(named, []string{"good.example", "a.good.example"}) {
		t.Errorf("names %v", named)
	}
	for i, r := range l.records() {
		if r.Verdict != netpolicy.Allow || r.Rule != "good" || r.Name != "good.example" || r.ServerName != []string{"good.example", "a.good.example"}[i] ||
			r.Peer != peerA || r.PeerPort != 443 || r.Egress.Bytes < 3<<20 || r.Ingress.Bytes < 3<<20 {
			t.Errorf("flow %d: %+v", i, r.FlowInfo)
		}
	}
	if u, err := l.link.Usage(netpolicy.Egress); err != nil || u.Bytes < 6<<20 {
		t.Errorf("%d bytes sent are counted, %v", u.Bytes, err)
	}
	// There is no other way: neither straight from the guest to the server, nor by UDP.
	l.away(l.guest, func() {
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			defer cancel()
			for end := time.Now().Add(waitMost); l.count(netpolicy.Deny, netpolicy.ReasonRule) == 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Error("its packets are not denied")
					return
				}
			}
		}()
		var d net.Dialer
		if c, err := d.DialContext(ctx, "tcp4", netip.AddrPortFrom(netpolicy.TheWire.Gateway4, l.port).String()); err == nil {
			c.Close()
			t.Error("the guest has reached the port by itself")
		}
		<-ctx.Done()
		before := l.count(netpolicy.Deny, netpolicy.ReasonDefault)
		u, err := net.Dial("udp4", at443.String())
		if err != nil {
			t.Error(err)
			return
		}
		defer u.Close()
		if _, err := u.Write([]byte("quic")); err != nil {
			t.Error(err)
		}
		for end := time.Now().Add(waitMost); l.count(netpolicy.Deny, netpolicy.ReasonDefault) == before; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Error("UDP is not denied")
				return
			}
		}
	})
	if st := l.server.Stats(); st.Passed != 2 || st.Refused != 0 || st.Failed != 0 {
		t.Errorf("%+v", st)
	}
}

func TestServer_what_is_refused_never_reaches_the_peer(t *testing.T) {
	l := newLab(t, true, 5*time.Second)
	p := l.serve(at443, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
	hello := func(name string) []byte { return clientHello(t, name) }
	ech := appendExtension(hello("good.example"), 0xfe0d, make([]byte, 100))
	for what, c := range map[string]struct {
		sent   []byte
		reason netpolicy.Reason
		name   string
	}{
		"a foreign name":    {hello("evil.example"), netpolicy.ReasonTLSName, "evil.example"},
		"a name above":      {hello("example"), netpolicy.ReasonTLSName, "example"},
		"no name":           {hello(""), netpolicy.ReasonTLSNoName, ""},
		"an encrypted one":  {ech, netpolicy.ReasonTLSECH, ""},
		"HTTP":              {[]byte("GET / HTTP/1.1\r\nHost: good.example\r\n\r\n"), netpolicy.ReasonTLSHello, ""},
		"part of a hello":   {hello("good.example")[:40], netpolicy.ReasonTLSTimeout, ""},
		"nothing":           {nil, netpolicy.ReasonTLSTimeout, ""},
		"a damaged version": {append([]byte{22, 3, 9}, hello("good.example")[3:]...), netpolicy.ReasonTLSHello, ""},
	} {
		conn := l.mustDial(p.at)
		if _, err := conn.Write(c.sent); err != nil {
			t.Fatal(err)
		}
		t.Log(what)
		l.refusedFor(conn, c.reason, c.name)
	}
	if n := p.accepted.Load() + l.dialed.Load(); n != 0 {
		t.Errorf("the peer was called %d times", n)
	}
	// The log has a refusal for each, and no record that one was allowed.
	logged := map[string]int{}
	for _, r := range l.records() {
		if r.Verdict != netpolicy.Reject || r.End != netpolicy.FlowRefused || r.Rule != "good" || r.Egress.Packets == 0 || r.Peer != peerA {
			t.Errorf("a record %+v", r.FlowInfo)
		}
		logged[r.Reason.String()+" "+r.ServerName]++
	}
	want := map[string]int{"tls-name evil.example": 1, "tls-name example": 1, "tls-no-name ": 1, "tls-ech ": 1, "tls-hello ": 2, "tls-timeout ": 2}
	if !maps.Equal(logged, want) {
		t.Errorf("the log has %v, want %v", logged, want)
	}
}

// record reads until the end, and sends what it read to got.
func record(got chan<- []byte) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		b := make([]byte, 64<<10)
		n := 0
		for n < len(b) {
			m, err := c.Read(b[n:])
			n += m
			if err != nil {
				break
			}
			// An alert, so that the client sends its next bytes.
			if n == m {
				_, _ = c.Write([]byte{21, 3, 3, 0, 2, 1, 0})
			}
		}
		got <- b[:n]
	}
}

func TestServer_hello_in_pieces_arrives_unchanged(t *testing.T) {
	l := newLab(t, true, waitMost)
	got := make(chan []byte, 1)
	p := l.serve(netip.AddrPortFrom(peerA, 8443), record(got))
	hello := clientHello(t, "good.example")
	tail := []byte("and more that is not looked at")
	for _, c := range []struct {
		what   string
		pieces [][]byte
	}{
		{"a byte each", slices.Collect(slices.Chunk(hello, 1))},
		{"split in the name", [][]byte{hello[:bytes.Index(hello, []byte("good"))+2], hello[bytes.Index(hello, []byte("good"))+2:]}},
		{"records of 3 bytes", [][]byte{inRecords(hello[5:], 3)}},
		{"records of a byte, a byte each, and the rest", append(slices.Collect(slices.Chunk(inRecords(hello[5:30], 1), 1)), inRecords(hello[30:], 1000))},
		{"with what follows", [][]byte{append(bytes.Clone(hello), tail...)}},
	} {
		conn := l.mustDial(p.at)
		for _, b := range c.pieces {
			if _, err := conn.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		must(t, conn.CloseWrite())
		if _, err := io.ReadAll(conn); err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
		if b := <-got; !bytes.Equal(b, bytes.Join(c.pieces, nil)) {
			t.Errorf("%s: the peer has got %d bytes, not what was sent", c.what, len(b))
		}
	}
}

func TestServer_second_hello_has_to_have_the_same_name(t *testing.T) {
	l := newLab(t, true, waitMost)
	p := l.serve(at443, sums(tlsConfig(t, tls.CurveP384)))
	c := tls.Client(l.mustDial(p.at), &tls.Config{ServerName: "good.example", InsecureSkipVerify: true, CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP384}})
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	if !c.ConnectionState().HelloRetryRequest {
		t.Fatal("the server has not asked for a second hello: this tests nothing")
	}
	c.Close()

	first := clientHello(t, "good.example", tls.X25519, tls.CurveP384)
	second := clientHello(t, "www.good.example", tls.CurveP384) // allowed, but another name
	conn := l.mustDial(p.at)
	if _, err := conn.Write(append(bytes.Clone(first), second...)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the guest got %v, not a reset", err)
	}
	if r := l.wait(); len(r) != 1 || r[0].Reason != netpolicy.ReasonTLSName {
		t.Errorf("refused %+v", r)
	}
	conn = l.mustDial(p.at)
	if _, err := conn.Write(append(bytes.Clone(first), 20, 3, 3, 0, 1, 1, 99, 3, 3, 0, 1, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the guest got %v, not a reset", err)
	}
	if r := l.wait(); len(r) != 1 || r[0].Reason != netpolicy.ReasonTLSHello {
		t.Errorf("refused %+v", r)
	}
}

func TestServer_new_policy_cuts_what_it_does_not_allow(t *testing.T) {
	l := newLab(t, true, waitMost)
	ended := make(chan error, 4)
	hold := func(cfg *tls.Config) func(*net.TCPConn) {
		return func(c *net.TCPConn) {
			s := tls.Server(c, cfg)
			_, err := io.Copy(s, s)
			ended <- err
		}
	}
	p := l.serve(at443, hold(tlsConfig(t)))
	talk := func(c *tls.Conn) {
		t.Helper()
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
	a, b := tls.Client(l.mustDial(p.at), clientConfig("good.example")), tls.Client(l.mustDial(p.at), clientConfig("www.good.example"))
	talk(a)
	talk(b)
	// The address stays open under one of the two names.
	must(t, l.link.Swap(l.compile(`
rules: [{direction: egress, verdict: allow, names: [good.example], protocols: [tcp], ports: [443]}]
dns: {upstreams: ["192.0.2.53:53"]}
`)))
	l.server.Recheck()
	if err := <-ended; err == nil {
		t.Error("the peer has seen an end of the stream, not a reset")
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the guest got %v", err)
	}
	talk(a)
	// Now it is closed: no packet of the guest reaches the host any more.
	must(t, l.link.Swap(l.compile("")))
	l.server.Recheck()
	if err := <-ended; err == nil {
		t.Error("the peer has seen an end of the stream, not a reset")
	}
	if st := l.server.Stats(); st.Cut != 2 {
		t.Errorf("%+v", st)
	}
}

func TestServer_same_port_of_the_guest_to_two_peers(t *testing.T) {
	l := newLab(t, true, waitMost)
	cfg := tlsConfig(t)
	where := func(at netip.AddrPort) func(*net.TCPConn) {
		return func(c *net.TCPConn) {
			s := tls.Server(c, cfg)
			_, _ = io.WriteString(s, at.Addr().String())
			_, _ = io.Copy(io.Discard, s)
		}
	}
	for _, a := range []netip.Addr{peerA, peerB} {
		l.serve(netip.AddrPortFrom(a, 443), where(netip.AddrPortFrom(a, 443)))
		l.serve(netip.AddrPortFrom(a, 8443), where(netip.AddrPortFrom(a, 8443)))
	}
	var open []*tls.Conn
	for _, at := range []netip.AddrPort{at443, netip.AddrPortFrom(peerB, 443), netip.AddrPortFrom(peerA, 8443), netip.AddrPortFrom(peerB, 8443)} {
		c, err := l.dial(at, 40000)
		must(t, err)
		defer c.Close()
		s := tls.Client(c, clientConfig("good.example"))
		b := make([]byte, len(peerA.String()))
		if _, err := io.ReadFull(s, b); err != nil || string(b) != at.Addr().String() {
			t.Fatalf("to %v: %q, %v", at, b, err)
		}
		open = append(open, s)
	}
	if st := l.server.Stats(); st.Open != uint64(len(open)) || st.Passed != uint64(len(open)) {
		t.Errorf("%+v", st)
	}
}

// The process of a VM. The test keeps the device, so that it outlives the killed process.
func init() {
	tlsname.Child = func() error {
		ctx := context.Background()
		ln, err := tlsname.Listen(ctx, "tap0")
		if err != nil {
			return err
		}
		spec, err := compile(labPolicy, uint16(ln.Addr().(*net.TCPAddr).Port))
		if err != nil {
			return err
		}
		link, err := link.Attach(link.Config{Endpoint: "a1", Interface: "tap0", Root: os.Getenv(tlsname.ChildEnv)}, spec)
		if err != nil {
			return err
		}
		if err := errors.Join(link.Up(own), link.Pin("good.example", peerA, time.Hour)); err != nil {
			return err
		}
		go func() {
			fmt.Println("ready")
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(0) // the test has gone
		}()
		return tlsname.New(tlsname.Config{Flows: link}).Serve(ctx, ln)
	}
}

func TestServer_killed_in_the_midst_lets_nothing_pass(t *testing.T) {
	l := newWires(t)
	root := fmt.Sprintf("%s-test-tlsname-%d", link.DefaultRoot, os.Getpid())
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), tlsname.ChildEnv+"="+root)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	defer in.Close()
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	kill := sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	t.Cleanup(func() {
		kill()
		if err := errors.Join(link.Remove(link.Config{Endpoint: "a1", Interface: "tap0", Root: root}), link.Sweep(root), os.Remove(root)); err != nil {
			t.Error(err)
		}
	})
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Fatal(err)
	}
	l.startGuest()
	got := make(chan int64, 8)
	cfg := tlsConfig(t)
	p := l.serve(at443, func(c *net.TCPConn) {
		s := tls.Server(c, cfg)
		_, _ = io.CopyN(s, s, 5)
		n, err := io.Copy(io.Discard, c)
		if !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("the peer has got %v, not a reset", err)
		}
		got <- n
	})
	c := tls.Client(l.mustDial(p.at), clientConfig("good.example"))
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	half := l.mustDial(p.at) // its hello has not come
	kill()
	// A socket reports a reset once, to the first write or read.
	_, wrote := c.NetConn().Write([]byte("after the end"))
	_, wroteHalf := half.Write(clientHello(t, "good.example"))
	if n := <-got; n != 0 {
		t.Errorf("%d bytes have passed", n)
	}
	if _, err := io.ReadAll(half); !errors.Is(errors.Join(wroteHalf, err), unix.ECONNRESET) {
		t.Errorf("a connection that was not judged: %v, %v, not a reset", wroteHalf, err)
	}
	if _, err := io.ReadAll(c.NetConn()); !errors.Is(errors.Join(wrote, err), unix.ECONNRESET) {
		t.Errorf("one that was: %v, %v, not a reset", wrote, err)
	}
	for range 3 {
		if _, err := l.dial(p.at, 0); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a new connection: %v", err)
		}
	}
	if n := p.accepted.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

// When the process ends, the kernel resets its connections and answers for its listener. No byte of the guest
// reaches the peer.
func TestServer_that_has_ended_lets_nothing_pass(t *testing.T) {
	l := newLab(t, true, waitMost)
	got := make(chan int64, 8)
	cfg := tlsConfig(t)
	p := l.serve(at443, func(c *net.TCPConn) {
		s := tls.Server(c, cfg)
		_, _ = io.CopyN(s, s, 5)
		n, _ := io.Copy(io.Discard, c)
		got <- n
	})
	c := tls.Client(l.mustDial(p.at), clientConfig("good.example"))
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	l.stop()
	_, _ = c.Write([]byte("after the end"))
	if n := <-got; n != 0 {
		t.Errorf("%d bytes have passed", n)
	}
	if _, err := l.dial(p.at, 0); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a new connection: %v", err)
	}
	if n := p.accepted.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

func TestServer_has_a_bound_of_connections(t *testing.T) {
	l := newLab(t, true, waitMost)
	var conns []*net.TCPConn
	for range tlsname.MaxConnections {
		conns = append(conns, l.mustDial(at443))
	}
	for end := time.Now().Add(waitMost); l.server.Stats().Open < tlsname.MaxConnections; time.Sleep(time.Millisecond) {
		if time.Now().After(end) || l.server.Stats().Refused > 0 {
			t.Fatalf("%+v", l.server.Stats())
		}
	}
	c, err := l.dial(at443, 0)
	if err == nil {
		_, err = io.ReadAll(c)
		c.Close()
	}
	if !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("one too many: %v", err)
	}
	if r := l.wait(); r[0].Reason != netpolicy.ReasonTLSBusy {
		t.Errorf("refused %+v", r[0])
	}
	for _, c := range conns {
		c.Close()
	}
}

// clientHello returns the first message of crypto/tls.
func clientHello(t *testing.T, name string, curves ...tls.CurveID) []byte {
	t.Helper()
	if len(curves) == 0 {
		curves = []tls.CurveID{tls.X25519}
	}
	a, b := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = tls.Client(a, &tls.Config{ServerName: name, InsecureSkipVerify: true, CurvePreferences: curves}).Handshake()
	}()
	head := make([]byte, 5)
	_, err := io.ReadFull(b, head)
	must(t, err)
	body := make([]byte, binary.BigEndian.Uint16(head[3:]))
	_, err = io.ReadFull(b, body)
	must(t, err)
	a.Close()
	b.Close()
	<-done
	return append(head, body...)
}

// inRecords splits a message into records of at most this many bytes.
func inRecords(msg []byte, each int) (out []byte) {
	for part := range slices.Chunk(msg, each) {
		out = append(append(out, 22, 3, 1, byte(len(part)>>8), byte(len(part))), part...)
	}
	return out
}

// appendExtension adds an extension to a hello in one record.
func appendExtension(hello []byte, typ uint16, body []byte) []byte {
	be := binary.BigEndian
	b := bytes.Clone(hello)
	at := 5 + 4 + 2 + 32
	at += 1 + int(b[at])
	at += 2 + int(be.Uint16(b[at:]))
	at += 1 + int(b[at])
	n := 4 + len(body)
	be.PutUint16(b[at:], be.Uint16(b[at:])+uint16(n))
	be.PutUint16(b[3:], be.Uint16(b[3:])+uint16(n))
	be.PutUint16(b[7:], be.Uint16(b[7:])+uint16(n))
	b = append(b, byte(typ>>8), byte(typ), byte(len(body)>>8), byte(len(body)))
	return append(b, body...)
}
