package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	virtionet "github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Config describes the network of a VM.
type Config struct {
	// Name is the VM's name. ID is its id, which pins and the TAP device are called by, unless they are prebuilt; empty
	// for any.
	Name, ID string
	// IPv6 gives the VM an address of IPv6 too.
	IPv6 bool
	// Policy is in force first; nil denies everything. Tags are those by which others know the VM.
	Policy *netpolicy.Policy
	Tags   []string
	// Identity returns the identity that the guest trusts its proxy by, and Secrets are what the proxy puts into
	// requests. Only a policy with a proxy needs them. Identity may be called repeatedly.
	Identity func() (*proxy.Identity, error)
	Secrets  proxy.Secrets
	// Start starts the network process, whose program calls Main, confined and with these files, which stay the
	// caller's. It returns nil, as a nil Start does, if the work is to be done in this process.
	Start func(context.Context, []*os.File) (Process, error)
	// Prebuilt, if not nil, may have a link that was made ahead.
	Prebuilt *Prebuilt
	// Log gets the log records; nil discards them.
	Log *slog.Logger
}

// Network is the host's end of a VM's link, with its policy. Nothing passes before the policy is in place: until
// then the TAP device is down and has no address, and only TAP, Wait and Close may be called.
type Network struct {
	log     *slog.Logger
	agent   string       // the name of its pins: the VM's id, or the prebuilt network's
	agents  netip.Prefix // and agents6 are the ranges of all VMs of the host
	agents6 netip.Prefix
	address netip.Addr
	lock    *hostnet.Address // of the address; nil if this process does not hold it
	own6    netip.Addr       // not valid without IPv6
	tap     *tap.Device
	keeper  *keeper
	queries atomic.Pointer[net.PacketConn] // the socket of the guest's queries, once it listens
	config  Config
	events  *eventLog
	flows   flowLog // nil until the policy is on the device
	// remote has the rights that this process lacks; nil if it has them itself. maximum is what an administrator
	// denies its users, before their policies.
	remote  *remote
	maximum []netpolicy.Rule
	// lent is set in a helper: the other half of this network is in a user's process.
	lent bool
	root string // of pins; empty is link.DefaultRoot

	// attached is closed when the policy is on the device, or err says why not.
	attached chan struct{}
	err      error
	link     policed
	took     time.Duration // from the beginning until attached

	cancel context.CancelFunc
	ctx    context.Context // ends with the network
	wg     sync.WaitGroup

	mu      sync.Mutex // guards what follows
	policy  *netpolicy.Policy
	host    []netip.Addr
	onLink  []netip.Prefix // where the host has neighbours
	history []installed
	stopDNS func() // nil while the resolver does not listen
	tlsPort uint16 // where names are checked; 0 until a policy has names to check
	// stopProxy is nil while the policy has no proxy.
	stopProxy func()
	warnings  []string
	closed    bool
}

// New makes a VM's TAP device, or takes the one that was made ahead. All else is made in the background, because the
// kernel takes long to verify programs: see Wait.
func New(c Config) (*Network, error) {
	if c.Policy == nil {
		c.Policy = &netpolicy.Policy{}
	}
	if c.ID == "" {
		c.ID = spec.NewID()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	n := &Network{
		log: c.Log, agent: c.ID, config: c, policy: c.Policy, attached: make(chan struct{}), events: newEventLog(),
	}
	var ahead *link.Reserved
	made, err := c.Prebuilt.take()
	if err != nil {
		n.log.Warn("the VM's network was not made ahead", "error", err)
	}
	if made != nil {
		n.agent, n.tap, ahead = made.id, made.tap, made.link
	} else if n.tap, err = tap.Create(hostnet.InterfaceName(c.ID)); errors.Is(err, os.ErrPermission) {
		if n.remote, n.tap, err = borrow(n); err != nil {
			return nil, fmt.Errorf("setting up the VM's network: %w", err)
		}
	} else if err != nil {
		return nil, fmt.Errorf("setting up the VM's network: %w", err)
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.keeper = newKeeper(n)
	begin := time.Now()
	n.wg.Go(func() {
		defer close(n.attached)
		n.err = n.setUp(ahead)
		n.took = time.Since(begin)
	})
	return n, nil
}

// setUp puts the policy on the device and brings it up.
func (n *Network) setUp(ahead *link.Reserved) error {
	spec, ln, err := n.prepare()
	if err == nil {
		return n.attach(ahead, spec, ln)
	}
	if ahead != nil {
		err = errors.Join(err, ahead.Remove())
	}
	return err
}

// prepare takes an address and compiles the policy for this host. ln is the listener that checks names, if the policy
// has names to check.
func (n *Network) prepare() (_ *netpolicy.Spec, ln *net.TCPListener, err error) {
	take := n.takeAddress
	if n.remote != nil {
		take = n.remote.takeAddress
	}
	if err := take(); err != nil {
		return nil, nil, err
	}
	if err := n.lookAtHost(); err != nil {
		return nil, nil, err
	}
	if ln, err = n.listenTLS(n.policy); err != nil {
		return nil, nil, err
	}
	spec, err := n.compile(n.policy, n.host, n.onLink)
	if err != nil && ln != nil {
		err = errors.Join(err, ln.Close())
	}
	return spec, ln, err
}

// takeAddress takes an address in the host's range of endpoints.
func (n *Network) takeAddress() (err error) {
	if n.agents, err = hostnet.Range(); err != nil {
		return err
	}
	if n.agents6, err = hostnet.Range6(); err != nil {
		return err
	}
	if n.lock, err = hostnet.Take("", n.agents, n.config.ID); err != nil {
		return err
	}
	n.address = n.lock.Addr()
	if n.config.IPv6 {
		n.own6, err = hostnet.Address6(n.agents6, n.address)
	}
	return err
}

// lookAtHost notes the addresses of the host and of its neighbours.
func (n *Network) lookAtHost() (err error) {
	n.host, n.onLink, err = hostNow()
	return err
}

// hostNow returns the addresses of the host, sorted, and of its neighbours. The lists do not change any more: the
// policy in force and the order to the network process have them too.
func hostNow() (host []netip.Addr, onLink []netip.Prefix, err error) {
	if host, err = netpolicy.HostAddresses(); err != nil {
		return nil, nil, err
	}
	slices.SortFunc(host, netip.Addr.Compare)
	onLink, err = hostnet.OnLink()
	return host, onLink, err
}

// tooManyAddresses reports whether a host has more addresses than a policy can know.
func tooManyAddresses(host []netip.Addr) (why string, is bool) {
	return fmt.Sprintf("the host has %d addresses, and a policy can know %d of them: all is denied until it has fewer", len(host), netpolicy.MaxHostAddresses),
		len(host) > netpolicy.MaxHostAddresses
}

// compile compiles a policy for the VM on a host with these addresses, and neighbours in these ranges. With too
// many addresses it denies everything: one that the policy does not know would be as open as a public one.
func (n *Network) compile(p *netpolicy.Policy, host []netip.Addr, onLink []netip.Prefix) (*netpolicy.Spec, error) {
	if why, is := tooManyAddresses(host); is {
		n.log.Error(why)
		p, host = &netpolicy.Policy{}, nil
	}
	if len(n.maximum) > 0 {
		within := *p
		within.Rules = slices.Concat(n.maximum, p.Rules)
		p = &within
	}
	return netpolicy.Compile(p, n.identity(), n.environment(host, onLink))
}

func (n *Network) identity() netpolicy.Identity {
	return netpolicy.Identity{Address4: n.address, Address6: n.own6}
}

func (n *Network) environment(host []netip.Addr, onLink []netip.Prefix) netpolicy.Environment {
	return netpolicy.Environment{Host: host, OnLink: onLink, Endpoints: []netip.Prefix{n.agents, n.agents6}, TLSPort: n.tlsPort}
}

// inForce returns what the keeper and the network process need of a policy.
func (n *Network) inForce(p *netpolicy.Policy, spec *netpolicy.Spec, host []netip.Addr, onLink []netip.Prefix) (*inForce, error) {
	if _, is := tooManyAddresses(host); is {
		p, host = &netpolicy.Policy{}, nil
	}
	o := policyOrder{Policy: p, Identity: n.identity(), Environment: n.environment(host, onLink)}
	if p.ProxyOn() {
		if n.config.Identity == nil {
			return nil, errNoIdentity
		}
		id, err := n.config.Identity()
		if err != nil {
			return nil, err
		}
		var names []string
		for _, i := range p.Proxy.Inject {
			names = append(names, i.Secret)
		}
		d, err := id.Delegate(names...)
		if err != nil {
			return nil, err
		}
		o.Proxy = &d
	}
	return &inForce{o, spec}, nil
}

// attach puts the policy on the device and brings it up. ln is the listener that checks names, if the policy has
// names to check.
func (n *Network) attach(ahead *link.Reserved, spec *netpolicy.Spec, ln *net.TCPListener) (err error) {
	serves := false
	if ln != nil {
		defer func() {
			if err != nil && !serves {
				err = errors.Join(err, ln.Close())
			}
		}()
	}
	begin := uptime()
	if n.link, err = n.enforce(ahead, spec); err != nil {
		return err
	}
	n.history = []installed{{spec, begin, begin}}
	if n.flows, err = n.logFlows(spec.Identity()); err != nil {
		return err
	}
	f, err := n.inForce(n.policy, spec, n.host, n.onLink)
	if err != nil {
		return err
	}
	n.keeper.setPolicy(f)
	if ln != nil {
		serves = true
		n.serveTLS(ln)
	}
	n.settle6()
	n.wg.Go(func() {
		if err := n.link.Events(n.ctx, n.event); n.ctx.Err() == nil {
			n.log.Error("denied packets are not told of any more", "error", err)
		}
	})
	n.wg.Go(func() {
		if err := n.flows.Run(n.ctx); err != nil {
			n.log.Error("the log of flows has ended", "error", err)
		}
	})
	if err := n.link.Up(spec.Identity()); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.listenDNS(); err != nil {
		return err
	}
	if err := n.listenProxy(); err != nil {
		return err
	}
	n.lookOutside()
	n.wg.Go(n.watchHost)
	n.log.Info("network", "tap", n.tapName(), "address", n.address)
	return nil
}

// logFlows starts the log of the endpoint's flows.
func (n *Network) logFlows(id netpolicy.Identity) (flowLog, error) {
	l, ok := n.link.(*link.Link)
	if !ok {
		return n.remote, nil
	}
	g, err := l.FlowLog(id)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// enforce puts the policy on the device.
func (n *Network) enforce(ahead *link.Reserved, spec *netpolicy.Spec) (policed, error) {
	if n.remote != nil {
		if err := n.remote.attach(n.policy, n.config.Tags); err != nil {
			return nil, err
		}
		return n.remote, nil
	}
	if ahead != nil {
		link, err := ahead.Attach(n.config.Tags, spec)
		if err == nil {
			return link, nil
		}
		// It has stood idle for long, and a sweep may have removed it.
		n.log.Warn("the network that was made ahead is of no use: another is made", "error", err)
	}
	l, err := link.Attach(link.Config{Endpoint: n.agent, Interface: n.tapName(), Root: n.root, Tags: n.config.Tags}, spec)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// settle6 silences the host's own IPv6 packets on a device that is not up yet: the policy would only deny and
// report them. The policy holds without this.
func (n *Network) settle6() {
	if n.remote != nil {
		return // the helper does it
	}
	settings := map[string]string{"disable_ipv6": "1"}
	if n.own6.IsValid() {
		// addr_gen_mode 1: no link-local address (IN6_ADDR_GEN_MODE_NONE). Only the guest asks for the other end's
		// MAC, and for the gateway's address.
		settings = map[string]string{"addr_gen_mode": "1", "accept_ra": "0", "autoconf": "0", "dad_transmits": "0", "accept_dad": "0", "router_solicitations": "0"}
	}
	for name, value := range settings {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+n.tapName()+"/"+name, []byte(value+"\n"), 0o644)
	}
}

func (n *Network) tapName() string {
	if n.remote != nil {
		return n.remote.name
	}
	return n.tap.Name()
}

// TAP returns the TAP device as the backend of the guest's device. The network closes it.
func (n *Network) TAP() virtionet.Backend { return n.tap }

// Wait returns when the policy is on the TAP device and that is up.
func (n *Network) Wait(ctx context.Context) error {
	select {
	case <-n.attached:
	case <-ctx.Done():
		return ctx.Err()
	}
	if n.err != nil {
		return fmt.Errorf("putting the VM behind its network policy: %w", n.err)
	}
	return nil
}

// drainFlows is how long a network that closes waits for the followers of its flows.
const drainFlows = time.Second

// Close removes the network, with its TAP device. The guest's device must not use that any more.
func (n *Network) Close() error {
	<-n.attached
	n.cancel()
	n.mu.Lock()
	n.closed = true
	n.policy = &netpolicy.Policy{}
	n.stopUnused()
	n.mu.Unlock()
	n.keeper.close()
	n.wg.Wait()
	if n.flows != nil {
		n.flows.Drain(drainFlows)
	}
	var errs []error
	if n.link != nil {
		errs = append(errs, n.link.Remove())
	}
	errs = append(errs, n.tap.Close())
	if n.lock != nil {
		errs = append(errs, n.lock.Release())
	}
	if n.remote != nil {
		errs = append(errs, n.remote.close())
	}
	return errors.Join(errs...)
}

// Info describes the network.
func (n *Network) Info() *spec.NetworkInfo {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &spec.NetworkInfo{TAP: n.tapName(), Address: n.address, Address6: n.own6, Warnings: slices.Clone(n.warnings)}
}

// SetPolicy replaces the policy while packets pass. If it fails, the old policy stays in force.
func (n *Network) SetPolicy(p *netpolicy.Policy) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	ln, err := n.listenTLS(p)
	if err != nil {
		return err
	}
	if ln != nil {
		n.serveTLS(ln)
	}
	spec, err := n.compile(p, n.host, n.onLink)
	if err != nil {
		return err
	}
	old := n.policy
	n.policy = p
	// Listen before guests learn of it: a listener refuses what the old policy does not name.
	err = n.listenDNS()
	if err == nil {
		err = n.listenProxy()
	}
	if err == nil {
		err = n.install(spec, n.host, n.onLink)
	}
	if err != nil {
		n.policy = old
		n.stopUnused()
		return err
	}
	n.stopUnused()
	n.lookOutside()
	return nil
}

// stopUnused stops the services that the policy does not have. The lock must be held.
func (n *Network) stopUnused() {
	if !n.policy.ProxyOn() && n.stopProxy != nil {
		n.stopProxy()
		n.stopProxy = nil
	}
	if n.policy.DNS == nil && n.stopDNS != nil {
		n.stopDNS()
		n.stopDNS = nil
	}
}

// installed is a policy that was put on the link. An earlier policy judged packets before from. Between from and
// settled it may have been either.
type installed struct {
	spec          *netpolicy.Spec
	from, settled time.Duration
}

// maxHistory is how many policies are kept to name the rules of late events.
const maxHistory = 4

func (n *Network) install(spec *netpolicy.Spec, host []netip.Addr, onLink []netip.Prefix) error {
	var f *inForce
	if !n.lent {
		var err error
		if f, err = n.inForce(n.policy, spec, host, onLink); err != nil {
			return err
		}
	}
	from := uptime()
	swap := n.link.Swap
	if n.remote != nil {
		swap = func(*netpolicy.Spec) error { return n.remote.swap(n.policy) }
	}
	if err := swap(spec); err != nil {
		return err
	}
	if f != nil {
		n.keeper.setPolicy(f)
	}
	n.history = append(n.history, installed{spec, from, uptime()})
	n.history = n.history[max(0, len(n.history)-maxHistory):]
	return nil
}

// ruleName returns the name of an event's rule, or "" if it is uncertain which policy the rule was in.
func (n *Network) ruleName(e netpolicy.Event) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, h := range slices.Backward(n.history) {
		switch {
		case e.Uptime >= h.settled:
			return h.spec.RuleName(e.Rule)
		case e.Uptime >= h.from:
			return ""
		}
	}
	return ""
}

// listenDNS starts the resolver if the policy has one.
func (n *Network) listenDNS() error {
	if n.policy.DNS == nil || n.stopDNS != nil {
		return nil
	}
	pc, ln, err := n.openDNS()
	if err != nil {
		return fmt.Errorf("%w: is there a name server of the host's on all addresses?", err)
	}
	n.stopDNS = n.serve("the VM's resolver has failed: names are not found any more", func(ctx context.Context) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ended := make(chan error, 1)
		go func() {
			defer cancel()
			ended <- n.keeper.accept(ctx, ln, arrivesDNS)
		}()
		err := n.keeper.relayQueries(ctx, pc)
		cancel()
		return errors.Join(err, <-ended)
	})
	return nil
}

// openDNS opens the sockets of the resolver.
func (n *Network) openDNS() (net.PacketConn, *net.TCPListener, error) {
	if n.remote != nil {
		return n.remote.openDNS()
	}
	pc, ln, err := resolver.Listen(n.ctx, n.tapName())
	if err != nil {
		return nil, nil, err
	}
	return pc, ln.(*net.TCPListener), nil
}

// openTCP opens the socket of the check of names or of the proxy.
func (n *Network) openTCP(kind string) (*net.TCPListener, error) {
	switch {
	case n.remote != nil:
		return n.remote.openTCP(kind)
	case kind == arrivesProxy:
		return proxy.Listen(n.ctx, n.tapName())
	}
	return tlsname.Listen(n.ctx, n.tapName())
}

// serve runs do in the background until the network ends or stop is called. stop waits for it.
func (n *Network) serve(failed string, do func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(n.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := do(ctx); err != nil {
			n.log.Error(failed, "error", err)
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// listenTLS opens the socket that checks names, if the policy has names to check and no socket is open yet. It
// stays open as long as the network.
func (n *Network) listenTLS(p *netpolicy.Policy) (*net.TCPListener, error) {
	if n.tlsPort != 0 || !p.ChecksNames() {
		return nil, nil
	}
	ln, err := n.openTCP(arrivesTLS)
	if err != nil {
		return nil, err
	}
	at, err := netip.ParseAddrPort(ln.Addr().String())
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	n.tlsPort = at.Port()
	return ln, nil
}

// serveTLS has names checked from now on. If it fails, no socket listens, and the kernel resets connections that must
// be checked.
func (n *Network) serveTLS(ln *net.TCPListener) {
	n.wg.Go(func() {
		if err := n.keeper.accept(n.ctx, ln, arrivesTLS); err != nil {
			n.log.Error("connections whose names are checked are refused", "error", err)
		}
	})
}

// lookOutside makes the host translate what the policy lets out, and records what is missing.
func (n *Network) lookOutside() {
	n.warnings = nil
	warn := func(text string) { n.warnings = append(n.warnings, text); n.log.Warn(text) }
	if why, is := tooManyAddresses(n.host); is {
		warn(why)
	}
	if n.remote != nil {
		for _, text := range n.remote.warnings() {
			warn(text)
		}
		return
	}
	outside, others := opensOutside(n.policy), opensAgents(n.policy)
	if !outside && !others && !opensHost(n.policy) {
		return
	}
	what := "other VMs"
	ranges := []netip.Prefix{n.agents}
	if n.own6.IsValid() {
		ranges = append(ranges, n.agents6)
	}
	for _, r := range ranges {
		if err := hostnet.Own(r); err != nil {
			warn("the host does not drop packets of others that have a VM's address as their source: " + err.Error())
		}
		if err := hostnet.Contain(r); err != nil {
			warn("packets to a VM that has just ended can leave the host: " + err.Error())
		}
	}
	for i, own := range []netip.Addr{n.address, n.own6} {
		if !own.IsValid() {
			continue
		}
		if err := hostnet.Bound(ranges[i], own, hostnet.Connections(n.policy)); err != nil {
			warn("the VM can fill the host's connection tracking: " + err.Error())
		}
	}
	if !outside && !others {
		return
	}
	if outside {
		what = "addresses beyond the host"
		for _, r := range ranges {
			if err := hostnet.Translate(r); err != nil {
				warn("the policy allows addresses beyond the host, and their answers do not come back: " + err.Error())
			}
		}
	}
	if on, err := hostnet.Forwarding(); err == nil && !on {
		warn("the policy allows " + what + ", and the host does not forward packets (net.ipv4.ip_forward): `drowse net setup --forward`")
	}
	if !n.own6.IsValid() {
		return
	}
	if on, err := hostnet.Forwarding6(); err == nil && !on {
		warn("the policy allows " + what + ", and the host does not forward packets of IPv6 (net.ipv6.conf.all.forwarding): `drowse net setup --forward6`")
	}
}

// Warn records and logs a warning about what is missing.
func (n *Network) Warn(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.warnings = append(n.warnings, text)
	n.log.Warn(text)
}

// opensOutside reports whether a policy lets packets out to anything but the host and other VMs.
func opensOutside(p *netpolicy.Policy) bool {
	return p.Default.Egress == netpolicy.Allow || slices.ContainsFunc(p.Rules, func(r netpolicy.Rule) bool {
		return r.Direction == netpolicy.Egress && r.Verdict == netpolicy.Allow && len(r.Protocols) > 0 &&
			(len(r.CIDRs)+len(r.Names) > 0 || slices.ContainsFunc(r.Groups, func(g netpolicy.Group) bool { return g != netpolicy.Host }))
	})
}

// opensHost reports whether a policy lets packets out to the host.
func opensHost(p *netpolicy.Policy) bool {
	return slices.ContainsFunc(p.Rules, func(r netpolicy.Rule) bool {
		return r.Direction == netpolicy.Egress && r.Verdict == netpolicy.Allow && len(r.Protocols) > 0 && slices.Contains(r.Groups, netpolicy.Host)
	})
}

// opensAgents reports whether a policy allows packets to or from other VMs.
func opensAgents(p *netpolicy.Policy) bool {
	return slices.ContainsFunc(p.Rules, func(r netpolicy.Rule) bool {
		return r.Verdict == netpolicy.Allow && len(r.Protocols) > 0 && len(r.Endpoints) > 0
	})
}

// watchHost compiles the policy again when the host gets or loses an address, because only group host opens the
// host's addresses.
func (n *Network) watchHost() {
	hostnet.Watch(n.ctx, n.log, func() {
		if err := n.refresh(); err != nil {
			n.log.Error("the policy does not know the host's addresses", "error", err)
		}
	})
}

// refresh reinstalls the policy if the host's addresses, or the ranges of its neighbours, have changed.
func (n *Network) refresh() error {
	host, onLink, err := hostNow()
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Equal(host, n.host) && slices.Equal(onLink, n.onLink) {
		return nil
	}
	spec, err := n.compile(n.policy, host, onLink)
	if err != nil {
		return err
	}
	if err := n.install(spec, host, onLink); err != nil {
		return err
	}
	n.host, n.onLink = host, onLink
	if why, is := tooManyAddresses(host); is && !slices.Contains(n.warnings, why) {
		n.warnings = append(n.warnings, why)
	}
	return nil
}

// Stats returns the counts of the network since its beginning.
func (n *Network) Stats() (st spec.NetworkStats, err error) {
	c := n.keeper.stats()
	st = spec.NetworkStats{Name: n.config.Name, NetworkInfo: *n.Info(), DNS: c.DNS, TLS: c.TLS}
	st.Process, _ = n.keeper.usage.get()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return st, fmt.Errorf("%w: %s: its guest has ended", spec.ErrNotRunning, st.Name)
	}
	if n.policy.ProxyOn() {
		st.Proxy = cmp.Or(c.Proxy, &netpolicy.ProxyStats{})
	}
	var errs [3]error
	st.Egress, errs[0] = n.link.Usage(netpolicy.Egress)
	st.Ingress, errs[1] = n.link.Usage(netpolicy.Ingress)
	st.Counters, errs[2] = n.link.Counters()
	if st.Counters == nil {
		st.Counters = []netpolicy.Counter{}
	}
	return st, errors.Join(errs[:]...)
}

// CPU returns the processor time that the VM's network processes have used, except in this process.
func (n *Network) CPU() time.Duration {
	_, used := n.keeper.usage.get()
	return used
}

// Bytes returns how many bytes the policy has let pass to the guest and from it; zeros if that is unknown.
func (n *Network) Bytes() (in, out uint64) {
	select {
	case <-n.attached:
	default:
		return 0, 0
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || n.link == nil {
		return 0, 0
	}
	if use, err := n.link.Usage(netpolicy.Ingress); err == nil {
		in = use.Bytes
	}
	if use, err := n.link.Usage(netpolicy.Egress); err == nil {
		out = use.Bytes
	}
	return in, out
}

// LastPacket reports whether a packet has ever passed in either direction, and how long ago the last one did. An
// error counts as a packet that has just passed.
func (n *Network) LastPacket() (ever bool, ago time.Duration) {
	select {
	case <-n.attached:
	default:
		return true, 0 // it is being set up
	}
	if n.link == nil {
		return false, 0
	}
	for _, d := range []netpolicy.Direction{netpolicy.Egress, netpolicy.Ingress} {
		use, err := n.link.Usage(d)
		if err != nil {
			return true, 0
		}
		if use.Idle >= 0 && (!ever || use.Idle < ago) {
			ever, ago = true, use.Idle
		}
	}
	return ever, ago
}

// Flows passes the log's records of flows to f: see flow.Log.Records.
func (n *Network) Flows(ctx context.Context, follow bool, f func([]netpolicy.FlowRecord) error) error {
	return n.flows.Records(ctx, follow, f)
}

// RecentEvents returns the last packets that did not pass. If follow is set, f gets later ones until stop is
// called; otherwise f is nil.
func (n *Network) RecentEvents(follow bool) (events []spec.NetEvent, f <-chan spec.NetEvent, stop func()) {
	events, to, stop := n.events.recent(follow)
	if to != nil {
		f = to.ch
	}
	return events, f, stop
}

// Done is closed when the network has ended.
func (n *Network) Done() <-chan struct{} { return n.ctx.Done() }

// SetUp returns how long the policy took to be in force.
func (n *Network) SetUp() time.Duration { return n.took }

// SetTags changes the tags by which others know the VM.
func (n *Network) SetTags(tags []string) error {
	<-n.attached
	if n.err != nil {
		return n.err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return fmt.Errorf("%w: its guest has ended", spec.ErrNotRunning)
	}
	return n.link.SetTags(tags)
}
