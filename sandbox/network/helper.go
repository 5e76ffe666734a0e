package network

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Calls of a user's process to a Helper. Each connection has one link, and none can name another's.
const (
	helperOpen      = "open"      // openOrder -> name of the TAP device, with its descriptor
	helperAddress   = "address"   // nothing -> addressReply
	helperListen    = "listen"    // kind of arrivals -> nothing, with descriptors
	helperAttach    = "attach"    // attachOrder -> nothing
	helperUp        = "up"        // nothing -> warnings
	helperSwap      = "swap"      // policy -> warnings
	helperTags      = "tags"      // tags -> nothing
	helperPin       = "pin"       // pin -> nothing
	helperName      = "name"      // address -> name
	helperRuleName  = "rule-name" // ruleOf -> name
	helperCounters  = "counters"  // nothing -> []netpolicy.Counter
	helperUsage     = "usage"     // direction -> netpolicy.Usage
	helperChecked   = "checked"   // port -> flow.Checked
	helperLives     = "lives"     // number of a flow -> bool
	helperOpensName = "opens-name"
	helperOpens     = "opens"
	helperNamed     = "named"   // named -> nothing
	helperRefused   = "refused" // refusal -> nothing
	helperFlows     = "flows"   // flowsOrder -> nothing, at the end of the log
	helperClose     = "close"   // nothing -> nothing: all is removed

	postEvent   = "event"   // to the user's process: netpolicy.Event
	callRecords = "records" // recordBatch -> nothing
)

type openOrder struct {
	ID   string `json:"id"`
	IPv6 bool   `json:"ipv6,omitempty"`
}

type addressReply struct {
	Address  netip.Addr       `json:"address"`
	Address6 netip.Addr       `json:"address6"`
	Range    netip.Prefix     `json:"range"`
	Range6   netip.Prefix     `json:"range6"`
	Maximum  []netpolicy.Rule `json:"maximum"`
}

type attachOrder struct {
	Policy *netpolicy.Policy `json:"policy"`
	Tags   []string          `json:"tags"`
}

type ruleOf struct {
	Generation uint32 `json:"generation"`
	Rule       int    `json:"rule"`
}

type flowsOrder struct {
	Stream uint64 `json:"stream"`
	Follow bool   `json:"follow,omitempty"`
}

type recordBatch struct {
	Stream  uint64                 `json:"stream"`
	Records []netpolicy.FlowRecord `json:"records"`
}

// Bounds of what a user may have a helper do.
const (
	helperCalls  = 32 // in progress, of one connection
	helperFlowsN = 16384
	helperReads  = 8               // readers of flows of one connection
	helperBegin  = 5 * time.Second // from a connection to its first call
	// The changes of one link in a second, and at once: each may have the kernel wait for all processors.
	changesPerSecond, changesBurst = 20, 100
	// MaxHelperLinks is how many links all users have, and DefaultUserLinks how many one has.
	MaxHelperLinks   = 512
	DefaultUserLinks = 16
)

func helperOptions(h rpc.Handler) rpc.Options {
	return rpc.Options{Handler: h, MaxCalls: helperCalls, MaxMessage: 2 * netpolicy.MaxFileBytes, Sentinels: map[string]error{
		"no-flow": flow.ErrNoFlow, "policy": netpolicy.ErrPolicy, "pins": link.ErrPinsFull, "full": hostnet.ErrFull,
		"range": hostnet.ErrRange, "gone": link.ErrGone, "kernel": link.ErrKernel, "links": ErrLinks,
	}}
}

// ErrLinks means that a user, or all of them, have as many links as they may.
var ErrLinks = errors.New("too many networks of VMs at once")

// helperPrefix begins the names of TAP devices of a helper. No id of 32 hexadecimal digits makes such a name.
const helperPrefix = hostnet.InterfacePrefix + "u"

// HelperRoot is the directory of pins of a helper, by user. Each user has programs of his own, so his VMs know those
// of other users as little as other hosts' (see Config.Tags).
const HelperRoot = "/sys/fs/bpf/drowse-net"

// Helper makes links for the VMs of users without rights: the TAP device, an address, and the programs with a policy,
// which the user chooses within a maximum. It reads no packet. A link ends with its connection.
type Helper struct {
	// Maximum are rules that deny, before those of each policy: see Maximum.
	Maximum []netpolicy.Rule
	// UserLinks bounds the links of one user; 0 is DefaultUserLinks.
	UserLinks int
	// Log gets the log records; nil discards them.
	Log *slog.Logger

	mu    sync.Mutex // guards what follows
	users map[uint32]int
	all   int
	wg    sync.WaitGroup
}

// Maximum reads what an administrator denies all users' VMs: a policy file whose rules deny addresses or groups. No
// file denies the metadata services of clouds.
func Maximum(path string) ([]netpolicy.Rule, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return []netpolicy.Rule{{Name: "maximum", Direction: netpolicy.Egress, Verdict: netpolicy.Deny,
			Groups: []netpolicy.Group{netpolicy.Metadata}, Protocols: []netpolicy.Protocol{netpolicy.AnyProtocol}}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the maximum of users' policies: %w", err)
	}
	p, err := netpolicy.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("reading the maximum of users' policies: %s: %w", path, err)
	}
	for i, r := range p.Rules {
		if r.Verdict == netpolicy.Allow || len(r.Names)+len(r.Endpoints) > 0 {
			return nil, fmt.Errorf("reading the maximum of users' policies: %s: %w: rule %d: use rules that deny cidrs or groups", path, netpolicy.ErrPolicy, i)
		}
	}
	return p.Rules, nil
}

// Serve serves users until the context ends. It first removes what a killed helper has left. ln has sockets of
// SOCK_SEQPACKET, whose mode says who may connect. One helper at a time may serve a host. Serve calls ready before it
// accepts the first user.
func (h *Helper) Serve(ctx context.Context, ln *net.UnixListener, ready func()) error {
	if h.Log == nil {
		h.Log = slog.New(slog.DiscardHandler)
	}
	h.users = map[uint32]int{}
	if err := sweepHelper(); err != nil {
		return err
	}
	ready()
	defer h.wg.Wait()
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	for {
		c, err := ln.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				c.Close()
			}
			return nil
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ECONNABORTED):
			time.Sleep(100 * time.Millisecond)
			continue
		case err != nil:
			return fmt.Errorf("accepting users: %w", err)
		}
		f, uid, err := peerOf(c)
		if err == nil {
			if err = h.take(uid); err == nil {
				h.wg.Go(func() { defer h.give(uid); h.serve(ctx, f, uid) })
				continue
			}
			err = errors.Join(err, f.Close())
		}
		h.Log.Warn("a connection is refused", "uid", uid, "error", err)
	}
}

// peerOf returns the socket of a connection, and its user's id.
func peerOf(c *net.UnixConn) (f *os.File, uid uint32, err error) {
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, 0, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, cerr); err != nil {
		return nil, 0, fmt.Errorf("asking for a user: %w", err)
	}
	if err := subordinate("/etc/subuid", cred.Uid); err != nil {
		return nil, cred.Uid, err
	}
	f, err = c.File()
	return f, cred.Uid, err
}

// subordinate refuses ids that users have in user namespaces: with them, one user would be many.
func subordinate(path string, uid uint32) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil // there are none
	}
	for line := range bytes.Lines(text) {
		f := strings.Split(string(bytes.TrimSpace(line)), ":")
		if len(f) != 3 {
			continue
		}
		first, err1 := strconv.ParseUint(f[1], 10, 32)
		count, err2 := strconv.ParseUint(f[2], 10, 32)
		if err1 == nil && err2 == nil && uint64(uid) >= first && uint64(uid) < first+count {
			return fmt.Errorf("user id %d is a subordinate one of %s's (subuid(5)): connect as that user", uid, f[0])
		}
	}
	return nil
}

func (h *Helper) take(uid uint32) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if most := cmp.Or(h.UserLinks, DefaultUserLinks); h.users[uid] >= most {
		return fmt.Errorf("%w: the user has %d", ErrLinks, most)
	}
	if h.all >= MaxHelperLinks {
		return fmt.Errorf("%w: all users together have %d", ErrLinks, MaxHelperLinks)
	}
	h.users[uid]++
	h.all++
	return nil
}

func (h *Helper) give(uid uint32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all--
	if h.users[uid]--; h.users[uid] == 0 {
		delete(h.users, uid)
	}
}

// serve serves one connection, until it or the context ends.
func (h *Helper) serve(ctx context.Context, f *os.File, uid uint32) {
	l := &lent{h: h, uid: uid, reads: make(chan struct{}, helperReads), begun: make(chan struct{}), connected: make(chan struct{}),
		pace: rpc.NewPace(callBurst, callsPerSecond)}
	conn, err := rpc.New(f, helperOptions(l.serve))
	if err != nil {
		h.Log.Warn("serving a user", "uid", uid, "error", err)
		return
	}
	l.conn = conn
	close(l.connected)
	begin := time.NewTimer(helperBegin)
	defer begin.Stop()
	select {
	case <-l.begun:
		select {
		case <-conn.Done():
		case <-ctx.Done():
		}
	case <-begin.C:
	case <-conn.Done():
	case <-ctx.Done():
	}
	if err := errors.Join(conn.Close(), l.close()); err != nil {
		h.Log.Error("removing a user's network", "uid", uid, "error", err)
	}
}

// lent is one user's link.
type lent struct {
	h         *Helper
	uid       uint32
	connected chan struct{} // closed when there is conn
	conn      *rpc.Conn
	begun     chan struct{} // closed at the first call
	once      sync.Once
	reads     chan struct{}
	pace      *rpc.Pace // of all calls
	changes   bucket
	use       sync.RWMutex // held while the link's maps are read

	mu     sync.Mutex // guards what follows, and is held while the link changes
	n      *Network   // nil until it is open
	up     bool
	closed bool
}

var (
	errOrder = errors.New("this call does not come now")
	errText  = errors.New("unusable text")
)

// serve does what a user asks for. It takes no descriptors, and no names of files.
func (l *lent) serve(ctx context.Context, method string, body []byte, files []*os.File) (any, []*os.File, error) {
	closeAll(files)
	l.pace.Call(body)
	<-l.connected
	l.once.Do(func() { close(l.begun) })
	if reply, files, known, err := l.change(method, body); known {
		return reply, files, err
	}
	if method == helperFlows {
		return handle(body, func(o flowsOrder) (any, error) { return nil, l.flows(ctx, o) })
	}
	l.use.RLock() // its maps must not be closed meanwhile
	defer l.use.RUnlock()
	n, err := l.ready()
	if err != nil {
		return nil, nil, err
	}
	switch method {
	case helperPin:
		return handle(body, func(a pin) (any, error) {
			if !netpolicy.ValidName(a.Name) || !a.Address.IsValid() || a.Address.Zone() != "" {
				return nil, errText
			}
			return nil, n.link.Pin(a.Name, a.Address, min(max(a.TTL, resolver.MinPin), resolver.MaxPin))
		})
	case helperName:
		return handle(body, func(a netip.Addr) (any, error) { return n.link.Name(a), nil })
	case helperRuleName:
		return handle(body, func(a ruleOf) (any, error) { return n.link.RuleName(a.Generation, a.Rule), nil })
	case helperCounters:
		c, err := n.link.Counters()
		return c, nil, err
	case helperUsage:
		return handle(body, func(d netpolicy.Direction) (any, error) { return n.link.Usage(d) })
	case helperChecked:
		return handle(body, func(port uint16) (any, error) {
			c, err := n.link.Checked(port)
			if err == nil {
				err = n.keeper.register(&c)
			}
			return c, err
		})
	case helperLives:
		return handle(body, func(ref uint64) (any, error) {
			c, err := n.keeper.flow(ref)
			if err != nil {
				return false, nil
			}
			return n.link.Lives(c)
		})
	case helperOpensName:
		return handle(body, func(a named) (any, error) {
			c, err := n.keeper.flow(a.Flow)
			return err == nil && netpolicy.ValidName(a.Name) && n.link.OpensName(c, a.Name), nil
		})
	case helperOpens:
		return handle(body, func(a opening) (any, error) {
			if a.Name != "" && !netpolicy.ValidName(a.Name) {
				return opened{}, nil
			}
			rule, ok := n.link.Opens(a.Peer, a.Name)
			return opened{rule, ok}, nil
		})
	case helperNamed:
		return handle(body, func(a named) (any, error) {
			c, err := n.keeper.flow(a.Flow)
			if err != nil || !netpolicy.ValidName(a.Name) {
				return nil, errText
			}
			n.flows.Named(c, a.Name)
			return nil, nil
		})
	case helperRefused:
		return handle(body, func(a refusal) (any, error) {
			c, err := n.keeper.flow(a.Flow)
			if err != nil || a.Name != "" && !netpolicy.ValidName(a.Name) || int(a.Reason) >= netpolicy.Reasons {
				return nil, errText
			}
			n.flows.Refused(c, a.Reason, a.Name)
			return nil, nil
		})
	}
	return nil, nil, fmt.Errorf("a call of %q: there is no such", method)
}

// ready returns the network once it has a policy.
func (l *lent) ready() (*Network, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == nil || l.n.flows == nil || l.closed {
		return nil, errOrder
	}
	return l.n, nil
}

// flows passes records of flows to the user's process, which takes each batch before it gets the next.
func (l *lent) flows(ctx context.Context, o flowsOrder) error {
	if !o.Follow { // which looks at the maps
		l.use.RLock()
		defer l.use.RUnlock()
	}
	n, err := l.ready()
	if err != nil {
		return err
	}
	select {
	case l.reads <- struct{}{}:
		defer func() { <-l.reads }()
	default:
		return errBusy
	}
	return n.flows.Records(ctx, o.Follow, func(b []netpolicy.FlowRecord) error {
		files, err := l.conn.Call(ctx, callRecords, recordBatch{o.Stream, b}, nil)
		closeAll(files)
		return err
	})
}

// change does a call that changes the link, if the method is of one. They are done one after the other.
func (l *lent) change(method string, body []byte) (reply any, files []*os.File, known bool, err error) {
	do := map[string]func() (any, []*os.File, error){
		helperOpen:    func() (any, []*os.File, error) { return l.open(body) },
		helperAddress: l.address,
		helperListen:  func() (any, []*os.File, error) { return l.listen(body) },
		helperAttach:  func() (any, []*os.File, error) { return handle(body, l.attach) },
		helperUp:      l.raise,
		helperSwap:    func() (any, []*os.File, error) { return handle(body, l.swap) },
		helperTags: func() (any, []*os.File, error) {
			return handle(body, func(tags []string) (any, error) {
				if l.n.flows == nil {
					return nil, errOrder
				}
				return nil, l.n.link.SetTags(tags)
			})
		},
	}[method]
	if method == helperClose {
		return nil, nil, true, l.close()
	}
	if do == nil {
		return nil, nil, false, nil
	}
	if !l.changes.take(changesPerSecond, changesBurst) {
		return nil, nil, true, errBusy
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || (l.n == nil) != (method == helperOpen) {
		return nil, nil, true, errOrder
	}
	reply, files, err = do()
	return reply, files, true, err
}

// open makes the TAP device, by a name of its own: a name of the user's could be that of another VM.
func (l *lent) open(body []byte) (any, []*os.File, error) {
	var o openOrder
	if err := json.Unmarshal(body, &o); err != nil {
		return nil, nil, err
	}
	if b, err := hex.DecodeString(o.ID); err != nil || len(b) != 16 {
		return nil, nil, fmt.Errorf("%w: the id of a VM has 32 hexadecimal digits", errText)
	}
	id := spec.NewID()
	n := &Network{
		log: l.h.Log.With("uid", l.uid), agent: id, policy: &netpolicy.Policy{}, events: newEventLog(), attached: make(chan struct{}),
		// So a VM has the same address again, and knows nothing of whether another user has its id.
		config: Config{Name: id, ID: fmt.Sprintf("%d/%s", l.uid, o.ID), IPv6: o.IPv6},
		lent:   true, maximum: l.h.Maximum, root: filepath.Join(HelperRoot, strconv.FormatUint(uint64(l.uid), 10)),
	}
	close(n.attached)
	var err error
	if n.tap, err = tap.Create(helperPrefix + id[:8]); err != nil {
		return nil, nil, err
	}
	f, err := n.tap.File()
	if err != nil {
		return nil, nil, errors.Join(err, n.tap.Close())
	}
	n.keeper = newKeeper(n)
	n.ctx, n.cancel = context.WithCancel(context.Background())
	l.n = n
	return n.tap.Name(), []*os.File{f}, nil
}

func (l *lent) address() (any, []*os.File, error) {
	n := l.n
	if n.lock != nil {
		return nil, nil, errOrder
	}
	if err := n.takeAddress(); err != nil {
		return nil, nil, err
	}
	return addressReply{n.address, n.own6, n.agents, n.agents6, n.maximum}, nil, n.lookAtHost()
}

// listen opens sockets on the user's own device.
func (l *lent) listen(body []byte) (_ any, files []*os.File, err error) {
	var kind string
	if err := json.Unmarshal(body, &kind); err != nil {
		return nil, nil, err
	}
	var open []interface {
		File() (*os.File, error)
		Close() error
	}
	switch kind {
	case arrivesDNS:
		pc, ln, err := l.n.openDNS()
		if err != nil {
			return nil, nil, err
		}
		open = append(open, pc.(*net.UDPConn), ln)
	case arrivesTLS:
		if l.n.tlsPort != 0 {
			return nil, nil, errOrder
		}
		ln, err := l.n.openTCP(kind)
		if err != nil {
			return nil, nil, err
		}
		l.n.mu.Lock()
		l.n.tlsPort = uint16(ln.Addr().(*net.TCPAddr).Port)
		l.n.mu.Unlock()
		open = append(open, ln)
	case arrivesProxy:
		ln, err := l.n.openTCP(kind)
		if err != nil {
			return nil, nil, err
		}
		open = append(open, ln)
	default:
		return nil, nil, errText
	}
	for _, o := range open {
		f, ferr := o.File()
		if ferr == nil {
			files = append(files, f)
		}
		err = errors.Join(err, ferr, o.Close())
	}
	return nil, files, err
}

// policy checks what a user asks for beyond what Compile does.
func (l *lent) policy(p *netpolicy.Policy) error {
	if p == nil || p.Flows > helperFlowsN {
		return fmt.Errorf("%w: flows: at most %d without root", netpolicy.ErrPolicy, helperFlowsN)
	}
	return p.Validate()
}

func (l *lent) attach(o attachOrder) (any, error) {
	n := l.n
	if n.lock == nil || n.link != nil {
		return nil, errOrder
	}
	if err := l.policy(o.Policy); err != nil {
		return nil, err
	}
	s, err := n.compile(o.Policy, n.host, n.onLink)
	if err != nil {
		return nil, err
	}
	n.policy, n.config.Tags = o.Policy, o.Tags
	made, err := n.enforce(nil, s)
	if err != nil {
		return nil, err
	}
	n.link = made
	begin := uptime()
	n.history = []installed{{s, begin, begin}}
	if n.flows, err = n.logFlows(n.identity()); err != nil {
		n.flows = nil
		return nil, err
	}
	n.settle6()
	return nil, nil
}

func (l *lent) raise() (any, []*os.File, error) {
	n := l.n
	if n.flows == nil || l.up {
		return nil, nil, errOrder
	}
	l.up = true
	n.wg.Go(func() {
		err := n.link.Events(n.ctx, func(e netpolicy.Event) {
			n.flows.Denied(e)
			_ = l.conn.Post(postEvent, e) // a user who does not read them loses events
		})
		if n.ctx.Err() == nil {
			n.log.Error("denied packets are not told of any more", "error", err)
		}
	})
	n.wg.Go(func() {
		if err := n.flows.Run(n.ctx); err != nil {
			n.log.Error("the log of flows has ended", "error", err)
		}
	})
	if err := n.link.Up(n.identity()); err != nil {
		return nil, nil, err
	}
	n.mu.Lock()
	n.lookOutside()
	warnings := n.warnings
	n.mu.Unlock()
	n.wg.Go(n.watchHost)
	return warnings, nil, nil
}

func (l *lent) swap(p netpolicy.Policy) (any, error) {
	n := l.n
	if !l.up {
		return nil, errOrder
	}
	if err := l.policy(&p); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s, err := n.compile(&p, n.host, n.onLink)
	if err != nil {
		return nil, err
	}
	before := n.policy
	n.policy = &p
	if err := n.install(s, n.host, n.onLink); err != nil {
		n.policy = before
		return nil, err
	}
	n.lookOutside()
	return n.warnings, nil
}

// close removes the link, once.
func (l *lent) close() error {
	l.use.Lock()
	defer l.use.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.n == nil {
		l.closed = true
		return nil
	}
	l.closed = true
	n := l.n
	name, policy := n.tap.Name(), n.policy
	err := n.Close()
	// The user has its descriptor, and may have made it persistent.
	err = errors.Join(err, removeDevice(name))
	if hostnet.Connections(policy) != netpolicy.DefaultFlows && n.address.IsValid() {
		err = errors.Join(err, hostnet.Bound(n.agents, n.address, netpolicy.DefaultFlows))
		if n.own6.IsValid() {
			err = errors.Join(err, hostnet.Bound(n.agents6, n.own6, netpolicy.DefaultFlows))
		}
	}
	return err
}

func removeDevice(name string) error {
	nl, err := netlink.LinkByName(name)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return nil
	}
	if err == nil {
		if err = netlink.LinkDel(nl); errors.Is(err, unix.ENODEV) {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("removing the TAP device %q: %w", name, err)
	}
	return nil
}

// sweepHelper removes what a killed helper has left: devices, pins, and files of addresses.
func sweepHelper() error {
	all, err := net.Interfaces()
	if err != nil {
		return fmt.Errorf("looking for devices of a killed helper: %w", err)
	}
	for _, i := range all {
		if strings.HasPrefix(i.Name, helperPrefix) {
			if err := removeDevice(i.Name); err != nil {
				return err
			}
		}
	}
	users, err := os.ReadDir(HelperRoot)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("looking for pins of a killed helper: %w", err)
	}
	for _, u := range users {
		root := filepath.Join(HelperRoot, u.Name())
		names, err := link.Endpoints(root)
		if err != nil {
			return err
		}
		for _, id := range names {
			if err := link.Remove(link.Config{Endpoint: id, Root: root, Interface: helperPrefix + id[:min(8, len(id))]}); err != nil {
				return err
			}
		}
		if err := errors.Join(link.Sweep(root), os.Remove(root)); err != nil {
			return err
		}
	}
	return hostnet.Sweep("")
}
