package sandbox_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// prober runs in a guest. It executes orders, line by line, and prints their results. The servers echo what it
// sends. Each order begins with a number, and so does its answer. The prober starts once, and then sleeps, wakes
// and is cloned with its guest.
const prober = `
import errno, socket, sys
held = {}
def connect(w):
    s = socket.socket(socket.AF_INET6 if ':' in w[0] else socket.AF_INET)
    s.settimeout(float(w[2]))
    s.connect((w[0], int(w[1])))
    return s
for line in sys.stdin:
    number, *w = line.split()
    try:
        if w[0] == 'tcp':
            s = connect(w[1:])
            s.sendall(b'ping\n')
            r = s.recv(16).decode().strip()
            s.close()
        elif w[0] == 'hello':
            s = connect(w[1:])
            s.sendall(bytes.fromhex(w[4]))
            r = 'record %d' % s.recv(1)[0]
            s.close()
        elif w[0] == 'hold':
            s = held['s'] = connect(w[1:])
            s.sendall(b'held\n')
            r = s.recv(16).decode().strip()
        elif w[0] == 'send':
            held['s'].sendall(w[1].encode() + b'\n')
            r = 'sent'
        elif w[0] == 'name':
            r = ' '.join(sorted({x[4][0] for x in socket.getaddrinfo(w[1], 80, socket.AF_INET, socket.SOCK_STREAM)}))
    except socket.gaierror:
        r = 'not found'
    except socket.timeout:
        r = 'timeout'
    except OSError as e:
        r = errno.errorcode.get(e.errno, str(e))
    print(number, r, flush=True)
`

// How long a guest waits for an answer, in seconds, if none may come and if one must.
const (
	inVain  = "3"
	forSure = "200"
)

// outside is a network namespace that plays the Internet. The test's own namespace is the host.
type outside struct {
	t    *testing.T
	host netns.NsHandle
	ns   netns.NsHandle

	mu  sync.Mutex // guards got, names and config
	got []string   // what servers received, and from where
	// names are the server names that clients asked the TLS server for. config is its configuration.
	names  []string
	config *tls.Config
	// asked counts the queries to the name server.
	asked atomic.Int64
}

// newOutside moves the test's thread into a new namespace, a host that forwards to another one. Processes that the
// test starts from this goroutine are on that host.
func newOutside(t *testing.T, addresses ...string) *outside {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// The thread is never unlocked, so it and its namespace end with the test.
	runtime.LockOSThread()
	o := &outside{t: t}
	var err error
	o.ns, err = netns.New()
	must(err)
	t.Cleanup(func() { o.ns.Close() })
	up := func(name string, addrs ...string) {
		t.Helper()
		l, err := netlink.LinkByName(name)
		must(err)
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			must(err)
			if addr.IP.To4() == nil {
				addr.Flags = unix.IFA_F_NODAD
			}
			must(netlink.AddrAdd(l, addr))
		}
		must(netlink.LinkSetUp(l))
	}
	up("lo", addresses...)
	o.host, err = netns.New()
	must(err)
	t.Cleanup(func() { o.host.Close() })
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0"}, PeerName: "up1", PeerNamespace: netlink.NsFd(o.ns)}))
	up("lo")
	up("up0", "192.0.2.1/24", "2001:db8:99::1/64")
	must(netns.Set(o.ns))
	up("up1", "192.0.2.2/24", "2001:db8:99::2/64")
	must(netns.Set(o.host))
	must(netlink.RouteAdd(&netlink.Route{Gw: net.IPv4(192, 0, 2, 2)}))
	must(netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("2001:db8:99::2")}))
	return o
}

// there calls do in the outer namespace.
func (o *outside) there(do func()) {
	o.t.Helper()
	if err := netns.Set(o.ns); err != nil {
		o.t.Fatal(err)
	}
	do()
	if err := netns.Set(o.host); err != nil {
		o.t.Fatal(err)
	}
}

// echo echoes each line of a connection, and notes it.
func (o *outside) echo(lc net.ListenConfig, at string) {
	o.t.Helper()
	l, err := lc.Listen(o.t.Context(), "tcp", at)
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for {
					line, err := in.ReadString('\n')
					if err != nil {
						return
					}
					from, _, _ := net.SplitHostPort(c.RemoteAddr().String())
					o.mu.Lock()
					o.got = append(o.got, strings.TrimSpace(line)+" from "+from)
					o.mu.Unlock()
					if _, err := io.WriteString(c, line); err != nil {
						return
					}
				}
			}()
		}
	}()
}

// tls starts a TLS server that notes the server names that clients ask for. Its certificate is self-signed.
func (o *outside) tls(at string) {
	o.t.Helper()
	l, err := net.Listen("tcp4", at)
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { l.Close() })
	cfg := &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.names = append(o.names, h.ServerName)
		return o.config, nil
	}}
	if o.config, err = selfSigned(); err != nil {
		o.t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = tls.Server(c, cfg).Handshake()
			}()
		}
	}()
}

func selfSigned() (*tls.Config, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"good.example"}, NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, nil
}

func (o *outside) serverNames() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.names)
}

// clientHello returns the first message of crypto/tls, in hexadecimal digits.
func clientHello(t *testing.T, name string) string {
	t.Helper()
	a, b := net.Pipe()
	go func() {
		_ = tls.Client(a, &tls.Config{ServerName: name, InsecureSkipVerify: true, CurvePreferences: []tls.CurveID{tls.X25519}}).Handshake()
		a.Close()
	}()
	defer b.Close()
	hello := make([]byte, 4096)
	n, err := b.Read(hello)
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(hello[:n])
}

func (o *outside) hasGot(prefix string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, g := range o.got {
		if strings.HasPrefix(g, prefix) {
			return true
		}
	}
	return false
}

// nameServer starts a DNS server that answers from zone.
func (o *outside) nameServer(at string, zone map[string]string) {
	o.t.Helper()
	pc, err := net.ListenPacket("udp4", at)
	if err != nil {
		o.t.Fatal(err)
	}
	s := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		o.asked.Add(1)
		a := new(dns.Msg)
		a.SetReply(q)
		if ip := zone[strings.TrimSuffix(q.Question[0].Name, ".")]; ip != "" && q.Question[0].Qtype == dns.TypeA {
			a.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 3600}, A: net.ParseIP(ip)}}
		}
		_ = w.WriteMsg(a)
	})}
	go func() { _ = s.ActivateAndServe() }()
	o.t.Cleanup(func() { pc.Close() })
}

// A probe talks to a prober in a guest.
type probe struct {
	t      *testing.T
	in     *io.PipeWriter
	out    *bufio.Reader
	number int
}

const proberID = "prober"

// startProbe starts the prober in a guest.
func startProbe(t *testing.T, e *guesttest.Env, name string) *probe {
	t.Helper()
	return probeBy(t, e, name, func(ctx context.Context, c *guest.Client, streams guest.IO) (*guest.Session, error) {
		return c.Start(ctx, guest.Cmd{Argv: []string{"python3", "-S", "-E", "/root/prober.py"}, Detach: true, ID: proberID, IO: streams})
	})
}

// after returns a probe of the same prober after a sleep, or in a clone.
func (p *probe) after(e *guesttest.Env, name string) *probe {
	p.t.Helper()
	again := probeBy(p.t, e, name, func(ctx context.Context, c *guest.Client, streams guest.IO) (*guest.Session, error) {
		return c.Attach(ctx, proberID, 0, streams)
	})
	again.number = p.number
	return again
}

func probeBy(t *testing.T, e *guesttest.Env, name string, begin func(context.Context, *guest.Client, guest.IO) (*guest.Session, error)) *probe {
	t.Helper()
	c, err := e.Store.Sandbox(name).Agent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	s, err := begin(t.Context(), c, guest.IO{Stdin: inR, Stdout: outW})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, err := s.Wait()
		outW.CloseWithError(fmt.Errorf("the prober has ended: %w", errors.Join(err, io.EOF)))
	}()
	t.Cleanup(func() {
		outR.Close() // or the session waits until all output is read
		s.Close()
		inW.Close()
		<-ended
		c.Close()
	})
	return &probe{t: t, in: inW, out: bufio.NewReader(outR)}
}

// ask gives the prober an order, and returns the result.
func (p *probe) ask(what string) string {
	p.t.Helper()
	begin := time.Now()
	p.number++
	if _, err := fmt.Fprintln(p.in, p.number, what); err != nil {
		p.t.Fatal(err)
	}
	for {
		line, err := p.out.ReadString('\n')
		if err != nil {
			p.t.Fatalf("%s: %v", what, err)
		}
		// An attached session first gets the earlier answers again.
		if got, ok := strings.CutPrefix(strings.TrimSpace(line), fmt.Sprint(p.number)+" "); ok {
			p.t.Logf("%s: %s (%v)", what, got, time.Since(begin).Round(time.Millisecond))
			return got
		}
	}
}

func (p *probe) expect(what, want string) {
	p.t.Helper()
	if got := p.ask(what); got != want {
		p.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// event waits for a network event.
func event(t *testing.T, e *guesttest.Env, name, what string, is func(spec.NetEvent) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	found := errors.New("found")
	var seen []string
	err := e.Store.Sandbox(name).NetworkEvents(ctx, true, func(ev spec.NetEvent) error {
		seen = append(seen, fmt.Sprintf("%+v", ev))
		if is(ev) {
			return found
		}
		return nil
	})
	if !errors.Is(err, found) {
		t.Errorf("no event of %s (%v); there are:\n%s", what, err, strings.Join(seen, "\n"))
	}
}

const probePolicy = `
rules:
  - {name: web, direction: egress, verdict: allow, cidrs: [93.184.216.34], protocols: [tcp], ports: [80]}
  - {name: web by IPv6, direction: egress, verdict: allow, cidrs: ["2001:db8:1::34"], protocols: [tcp], ports: [80]}
  - {name: never, direction: egress, verdict: reject, cidrs: [93.184.216.99, "2001:db8:1::99"], protocols: [tcp], ports: [any]}
  - {name: soon the host, direction: egress, verdict: allow, cidrs: [93.184.216.36], protocols: [tcp], ports: [80]}
  - {name: local, direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [7000]}
  - {name: named, direction: egress, verdict: allow, names: [good.example, evil.example], protocols: [tcp], ports: [8080]}
  - {name: checked, direction: egress, verdict: allow, names: [good.example], protocols: [tcp], ports: [443]}
  - {name: to others, direction: egress, verdict: allow, agents: [probe], protocols: [tcp], ports: [9000, 9001]}
  - {name: from others, direction: ingress, verdict: allow, agents: [probe], protocols: [tcp], ports: [9000]}
  - {name: from none, direction: ingress, verdict: allow, agents: [other], protocols: [tcp], ports: [9001]}
  - {name: api, direction: egress, verdict: allow, names: [api.example], protocols: [tcp], ports: [443]}
dns: {upstreams: ["93.184.216.53:53"]}
proxy: {enabled: true, inject: [{secret: API_KEY, hosts: [api.example], header: Authorization, prefix: "Bearer "}]}
`

func TestNetwork_policy_of_a_guest(t *testing.T) {
	t.Parallel()
	e := guesttest.New(t)
	o := newOutside(t, "93.184.216.34/32", "93.184.216.35/32", "93.184.216.36/32", "93.184.216.37/32", "93.184.216.53/32", "93.184.216.99/32", "10.99.0.1/32", "2001:db8:1::34/128", "2001:db8:1::99/128")
	var api *apiServer
	o.there(func() {
		api = o.api("93.184.216.37:443")
		for _, at := range []string{"93.184.216.34:80", "93.184.216.34:81", "93.184.216.35:8080", "93.184.216.36:80", "93.184.216.99:80", "10.99.0.1:8080", "[2001:db8:1::34]:80", "[2001:db8:1::34]:81"} {
			o.echo(net.ListenConfig{}, at)
		}
		o.tls("93.184.216.35:443")
		o.nameServer("93.184.216.53:53", map[string]string{"good.example": "93.184.216.35", "evil.example": "10.99.0.1", "other.example": "93.184.216.34", "api.example": "93.184.216.37"})
	})
	e.Launcher.Command = slices.Concat([]string{"/usr/bin/env", proxy.RootsEnv + "=" + api.roots}, e.Launcher.Command)
	policy := mustPolicy(t, probePolicy)

	rep := e.Run(sandbox.Spec{Name: "pol", Network: spec.NetworkTAP, IPv6: true, Policy: policy, Tags: []string{"probe"}})
	if rep.Network == nil {
		t.Fatal("the report has no network")
	}
	// A host without nftables gives other warnings as well.
	for _, want := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
		if !slices.ContainsFunc(rep.Network.Warnings, func(w string) bool { return strings.Contains(w, want) }) {
			t.Fatalf("no warning of a host that does not forward has %s: %q", want, rep.Network.Warnings)
		}
	}
	if s, err := hostnet.Look(); err != nil || len(s.Ranges) != 2 || s.Forwarding || s.Forwarding6 {
		t.Errorf("the host after a start: %+v, %v", s, err)
	}
	if changed, err := hostnet.Forward(); err != nil || !changed {
		t.Fatal(changed, err)
	}
	if changed, err := hostnet.Forward6(); err != nil || !changed {
		t.Fatal(changed, err)
	}
	own, own6, device := rep.Network.Address, rep.Network.Address6, rep.Network.TAP
	t.Logf("stages: %v", rep.Stages)
	o.echo(net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var bound error
		err := c.Control(func(fd uintptr) { bound = unix.BindToDevice(int(fd), device) })
		return errors.Join(err, bound)
	}}, "172.31.255.1:7000")
	if err := e.Agent("pol").WriteFile(t.Context(), "/root/prober.py", strings.NewReader(prober), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	p := startProbe(t, e, "pol")

	// Allowed and denied connections.
	p.expect("tcp 93.184.216.34 80 "+forSure, "ping")
	if !o.hasGot("ping from 192.0.2.1") {
		t.Errorf("the server has got %q, not from the host's own address", o.got)
	}
	holder := startCaller(t, e, "pol") // it starts while others wait
	p.expect("tcp 172.31.255.1 7000 "+forSure, "ping")
	if !o.hasGot("ping from " + own.String()) {
		t.Errorf("the host has got %q, not from the VM's own address %v", o.got, own)
	}
	p.expect("tcp 93.184.216.34 81 "+inVain, "timeout")
	event(t, e, "pol", "a port that no rule names", func(ev spec.NetEvent) bool {
		return ev.Direction == netpolicy.Egress && ev.Verdict == netpolicy.Deny && ev.Reason == netpolicy.ReasonDefault && ev.Protocol == "tcp" &&
			ev.Peer == netip.MustParseAddr("93.184.216.34") && ev.PeerPort == 81 && ev.Guest == own && ev.GuestPort != 0 && ev.Bytes > 0 && time.Since(ev.Time) < 10*time.Minute
	})
	p.expect("tcp 93.184.216.99 80 "+forSure, "ECONNREFUSED")
	event(t, e, "pol", "a rejected connection", func(ev spec.NetEvent) bool {
		return ev.Verdict == netpolicy.Reject && ev.Reason == netpolicy.ReasonRule && ev.Rule == "never" && ev.Peer == netip.MustParseAddr("93.184.216.99")
	})

	// The same with IPv6: from the host's own address, without a wait.
	p.expect("tcp 2001:db8:1::34 80 "+forSure, "ping")
	if !o.hasGot("ping from 2001:db8:99::1") {
		t.Errorf("the server has got %q, not from the host's own IPv6 address", o.got)
	}
	p.expect("tcp 2001:db8:1::34 81 "+inVain, "timeout")
	event(t, e, "pol", "a port that no rule names, by IPv6", func(ev spec.NetEvent) bool {
		return ev.Direction == netpolicy.Egress && ev.Verdict == netpolicy.Deny && ev.Reason == netpolicy.ReasonDefault && ev.Protocol == "tcp" &&
			ev.Peer == netip.MustParseAddr("2001:db8:1::34") && ev.PeerPort == 81 && ev.Guest == own6
	})
	p.expect("tcp 2001:db8:1::99 80 "+forSure, "ECONNREFUSED")

	// A new address of the host belongs to the group host at once. The rule for it is not about the host.
	p.expect("tcp 93.184.216.36 80 "+forSure, "ping")
	up, err := netlink.LinkByName("up0")
	if err != nil {
		t.Fatal(err)
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(93, 184, 216, 36), Mask: net.CIDRMask(32, 32)}}
	if err := netlink.AddrAdd(up, addr); err != nil {
		t.Fatal(err)
	}
	for deadline, denied := time.Now().Add(2*time.Minute), false; !denied; {
		// Until then the host refuses the connection, since no server listens there.
		got := p.ask("tcp 93.184.216.36 80 " + inVain)
		if got == "ping" || time.Now().After(deadline) {
			t.Fatalf("a new address of the host: %s", got)
		}
		err := e.Store.Sandbox("pol").NetworkEvents(t.Context(), false, func(ev spec.NetEvent) error {
			denied = denied || ev.Peer == netip.MustParseAddr("93.184.216.36") && ev.Verdict == netpolicy.Deny && ev.Reason == netpolicy.ReasonDefault
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := netlink.AddrDel(up, addr); err != nil {
		t.Fatal(err)
	}

	// Names.
	p.expect("tcp 93.184.216.35 8080 "+inVain, "timeout")
	p.expect("name good.example", "93.184.216.35")
	p.expect("tcp 93.184.216.35 8080 "+forSure, "ping")
	p.expect("tcp 93.184.216.35 8081 "+inVain, "timeout")
	event(t, e, "pol", "an address with a name", func(ev spec.NetEvent) bool { return ev.PeerPort == 8081 && ev.Name == "good.example" })

	// Where the policy checks it, TLS must have the same name. The peer never sees a connection with another.
	p.expect("hello 93.184.216.35 443 "+forSure+" "+clientHello(t, "good.example"), "record 22")
	p.expect("hello 93.184.216.35 443 "+forSure+" "+clientHello(t, "evil.example"), "ECONNRESET")
	event(t, e, "pol", "another name in TLS", func(ev spec.NetEvent) bool {
		return ev.Reason == netpolicy.ReasonTLSName && ev.Verdict == netpolicy.Reject && ev.Rule == "checked" && ev.ServerName == "evil.example" &&
			ev.Peer == netip.MustParseAddr("93.184.216.35") && ev.PeerPort == 443 && ev.GuestPort != 0
	})
	if !slices.Equal(o.serverNames(), []string{"good.example"}) {
		t.Errorf("the server was asked for %v", o.serverNames())
	}
	before := o.asked.Load()
	p.expect("name other.example", "not found")
	if o.asked.Load() != before {
		t.Error("a name that no rule names was passed on")
	}
	p.expect("name evil.example", "not found")
	p.expect("tcp 10.99.0.1 8080 "+inVain, "timeout")
	st, err := e.Store.Sandbox("pol").NetworkStats(t.Context())
	if err != nil || st.DNS.Rebound == 0 || st.DNS.Refused == 0 || st.DNS.Answered == 0 || st.Address != own || st.Egress.Bytes == 0 || len(st.Counters) == 0 || st.TLS.Passed != 1 || st.TLS.Refused != 1 {
		t.Errorf("%+v, %v", st, err)
	}

	// Flows of the connections above.
	flows := map[string]netpolicy.FlowRecord{}
	err = e.Store.Sandbox("pol").NetworkFlows(t.Context(), false, func(r netpolicy.FlowRecord) error {
		if r.FlowInfo != nil && r.Guest == own {
			flows[fmt.Sprintf("%s %s %v %d %s %q", r.Verdict, r.Protocol, r.Peer, r.PeerPort, r.Rule, r.Name)] = r
		}
		return nil
	})
	for _, want := range []string{
		`allow tcp 93.184.216.34 80 web ""`, `deny tcp 93.184.216.34 81  ""`, `reject tcp 93.184.216.99 80 never ""`,
		`allow tcp 172.31.255.1 7000 local ""`, `allow tcp 93.184.216.35 8080 named "good.example"`, `allow udp 172.31.255.1 53 (resolver) ""`,
		`allow tcp 93.184.216.35 443 checked "good.example"`, `reject tcp 93.184.216.35 443 checked "good.example"`,
	} {
		r, ok := flows[want]
		if !ok || r.Egress.Packets == 0 || r.Verdict == netpolicy.Allow && r.Ingress.Bytes == 0 || time.Since(r.First) > time.Hour {
			t.Errorf("flow %s: %+v, %+v, %v; there are %v", want, r, r.FlowInfo, err, slices.Collect(maps.Keys(flows)))
		}
	}
	var followed []netpolicy.FlowRecord
	follower := make(chan error, 1)
	go func() {
		follower <- e.Store.Sandbox("pol").NetworkFlows(context.Background(), true, func(r netpolicy.FlowRecord) error {
			followed = append(followed, r)
			return nil
		})
	}()

	// A live policy change cuts the flows that it does not allow.
	p.expect("hold 93.184.216.34 80 "+forSure, "held")
	res, err := e.Store.Sandbox("pol").SetPolicy(t.Context(), nil)
	if err != nil || !res.Live || res.Network.Address != own {
		t.Fatalf("%+v, %v", res, err)
	}
	swapped := time.Now()
	p.expect("send after-the-swap", "sent")
	event(t, e, "pol", "the flow that was cut", func(ev spec.NetEvent) bool {
		return ev.Time.After(swapped.Add(-time.Second)) && ev.Peer == netip.MustParseAddr("93.184.216.34") && ev.PeerPort == 80
	})
	p.expect("tcp 93.184.216.34 80 "+inVain, "timeout")
	if o.hasGot("after-the-swap") {
		t.Error("what was sent after the swap has arrived")
	}
	if got, err := e.Store.Sandbox("pol").Policy(); err != nil || len(got.Rules) != 0 || got.DNS != nil {
		t.Errorf("%+v, %v", got, err)
	}
	// An invalid policy is refused, and changes nothing.
	if _, err := e.Store.Sandbox("pol").SetPolicy(t.Context(), &netpolicy.Policy{Flows: -1}); !errors.Is(err, netpolicy.ErrPolicy) {
		t.Errorf("an impossible policy: %v", err)
	}

	// The sleeping VM gets another policy, and wakes with it.
	e.Sleep("pol")
	gone(t, device, own, own6)
	// The follower has received all flows, and the cut one with all its packets.
	if err := <-follower; err != nil {
		t.Error(err)
	}
	if !slices.ContainsFunc(followed, func(r netpolicy.FlowRecord) bool {
		return r.FlowInfo != nil && r.End == netpolicy.FlowCut && r.Rule == "web" && r.State == "established" && r.Egress.Packets >= 3 && r.Ingress.Packets >= 2
	}) {
		for _, r := range followed {
			t.Logf("%v %+v %+v", r.First, r.FlowInfo, r.FlowsLost)
		}
		t.Error("no record of the flow that was cut")
	}
	if res, err := e.Store.Sandbox("pol").SetPolicy(t.Context(), policy); err != nil || res.Live {
		t.Fatalf("%+v, %v", res, err)
	}
	rep = e.Wake("pol")
	t.Logf("stages of the wake: %v", rep.Stages)
	if len(rep.Network.Warnings) != 0 {
		t.Errorf("the host forwards, and yet: %v", rep.Network.Warnings)
	}
	own, own6 = rep.Network.Address, rep.Network.Address6
	p = p.after(e, "pol")
	p.expect("tcp 93.184.216.34 80 "+forSure, "ping")
	p.expect("tcp 93.184.216.34 81 "+inVain, "timeout")
	p.expect("tcp 2001:db8:1::34 80 "+forSure, "ping")
	p.expect("tcp 93.184.216.35 8080 "+inVain, "timeout") // the resolved name does not survive the sleep
	p.expect("name good.example", "93.184.216.35")

	// A clone has the same policy, and its own address.
	snap, err := e.Store.Sandbox("pol").Snapshot(t.Context(), sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var clone control.Report
	_, err = e.Store.With(e.Launcher).Clone(t.Context(), snap.Snapshot, sandbox.CloneOptions{Name: "pol2", Report: &clone})
	if err != nil {
		t.Fatal(err)
	}
	if clone.Network.Address == own || clone.Network.Address6 == own6 || !clone.Network.Address6.IsValid() || clone.Network.TAP == rep.Network.TAP {
		t.Errorf("the clone has %+v, its source %+v", clone.Network, rep.Network)
	}
	p2 := p.after(e, "pol2")
	p2.expect("tcp 93.184.216.34 80 "+forSure, "ping")
	p2.expect("tcp 93.184.216.34 81 "+inVain, "timeout")
	event(t, e, "pol2", "a denied packet of the clone", func(ev spec.NetEvent) bool { return ev.PeerPort == 81 && ev.Guest == clone.Network.Address })
	p.expect("tcp 93.184.216.34 80 "+forSure, "ping") // beside it

	// The VMs reach each other by their tag, which the clone has too. No server listens, so the guest refuses.
	if r, err := e.Store.State.Get("pol2"); err != nil || !slices.Equal(r.Spec.Tags, []string{"probe"}) {
		t.Errorf("the clone has tags %q, %v", r.Spec.Tags, err)
	}
	p.expect("tcp "+clone.Network.Address.String()+" 9000 "+forSure, "ECONNREFUSED")
	p2.expect("tcp "+own.String()+" 9000 "+forSure, "ECONNREFUSED")
	p2.expect("tcp "+own6.String()+" 9000 "+forSure, "ECONNREFUSED")
	// Without the tag neither direction works. With it both work again.
	if res, err := e.Store.Sandbox("pol2").SetTags(t.Context(), []string{"other"}, []string{"probe"}); err != nil || !res.Live || !slices.Equal(res.Tags, []string{"other"}) {
		t.Fatalf("%+v, %v", res, err)
	}
	p.expect("tcp "+clone.Network.Address.String()+" 9000 "+inVain, "timeout")
	p2.expect("tcp "+own.String()+" 9000 "+inVain, "timeout")
	if res, err := e.Store.Sandbox("pol2").SetTags(t.Context(), []string{"probe"}, nil); err != nil || !slices.Equal(res.Tags, []string{"other", "probe"}) {
		t.Fatalf("%+v, %v", res, err)
	}
	p.expect("tcp "+clone.Network.Address.String()+" 9000 "+forSure, "ECONNREFUSED")
	p.expect("tcp "+clone.Network.Address.String()+" 9001 "+inVain, "timeout")
	event(t, e, "pol2", "a packet of a VM with another tag", func(ev spec.NetEvent) bool {
		return ev.Direction == netpolicy.Ingress && ev.Peer == own && ev.GuestPort == 9001
	})

	// A killed process leaves nothing.
	r, err := e.Store.State.Get("pol")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.WaitPhase("pol", state.Crashed, time.Minute)
	gone(t, device, own, own6)
	if _, err := os.Stat(filepath.Join(link.DefaultRoot, r.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the killed VM has left pins: %v", err)
	}
	p2.expect("tcp 93.184.216.34 80 "+forSure, "ping") // the clone is not affected

	keysOfAGuest(t, e, "pol2", holder, api)
	if err := hostnet.Remove(); err != nil {
		t.Error(err)
	}
}

// gone checks that the TAP device and the routes no longer exist. The confined process of a killed one has the device
// too, and ends a moment later.
func gone(t *testing.T, device string, addresses ...netip.Addr) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		_, err := netlink.LinkByName(device)
		if err != nil {
			break
		}
		if time.Now().After(end) {
			t.Errorf("%s is left", device)
			break
		}
	}
	for _, own := range addresses {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Dst: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(own.BitLen(), own.BitLen())}}, netlink.RT_FILTER_DST)
		if err != nil || len(routes) != 0 {
			t.Errorf("routes to %v: %v, %v", own, routes, err)
		}
	}
}
