package network

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// HelperSocket is where a Helper listens, unless hostnet.HelperEnv names another place.
const HelperSocket = "/run/drowse-net.sock"

// HelperPath returns the socket of the helper that this process would use.
func HelperPath() string { return cmp.Or(os.Getenv(hostnet.HelperEnv), HelperSocket) }

// ErrNoHelper means that this process lacks the rights for a network, and that no helper lends them.
var ErrNoHelper = errors.New("only root may add a TAP device to the host and judge its packets by eBPF")

// policed is a TAP device with its policy: a *link.Link, or a remote one.
type policed interface {
	Up(netpolicy.Identity) error
	Swap(*netpolicy.Spec) error
	SetTags([]string) error
	Remove() error
	Pin(name string, a netip.Addr, ttl time.Duration) error
	Name(netip.Addr) string
	RuleName(generation uint32, rule int) string
	Counters() ([]netpolicy.Counter, error)
	Usage(netpolicy.Direction) (netpolicy.Usage, error)
	Events(context.Context, func(netpolicy.Event)) error
	Checked(port uint16) (flow.Checked, error)
	Lives(flow.Checked) (bool, error)
	OpensName(c flow.Checked, name string) bool
	Opens(peer netip.AddrPort, name string) (rule string, ok bool)
}

// flowLog is a *flow.Log, or a remote one.
type flowLog interface {
	Denied(netpolicy.Event)
	Refused(c flow.Checked, r netpolicy.Reason, name string)
	Named(c flow.Checked, name string)
	Run(context.Context) error
	Records(ctx context.Context, follow bool, fn func([]netpolicy.FlowRecord) error) error
	Drain(time.Duration)
}

// remote is a link whose rights a helper has. The helper removes it when the connection ends.
type remote struct {
	n    *Network
	name string // of the TAP device
	conn *rpc.Conn

	mu      sync.Mutex // guards what follows
	warned  []string
	closing bool
	event   func(netpolicy.Event)
	streams map[uint64]*stream
	last    uint64
}

// stream is a reader of records.
type stream struct {
	mu   sync.Mutex // guards what follows, and is held while fn runs
	fn   func([]netpolicy.FlowRecord) error
	err  error // of fn
	over bool
}

func (s *stream) add(b []netpolicy.FlowRecord) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over || s.err != nil {
		return errRefused
	}
	s.err = s.fn(b)
	return s.err
}

// end returns the error of the reader, which gets no more.
func (s *stream) end() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	return s.err
}

// borrow has a helper make a TAP device.
func borrow(n *Network) (_ *remote, _ *tap.Device, err error) {
	path := HelperPath()
	f, err := dialHelper(path)
	if err != nil {
		return nil, nil, fmt.Errorf("%w; its helper does not answer: %w: have the administrator start it (`drowse net helper --help`) "+
			"and let you use %s; the network %q needs neither", ErrNoHelper, err, path, spec.NetworkNone)
	}
	r := &remote{n: n, streams: map[uint64]*stream{}}
	if r.conn, err = rpc.New(f, helperOptions(r.serve)); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.conn.Close())
		}
	}()
	files, err := r.call(helperOpen, openOrder{ID: n.config.ID, IPv6: n.config.IPv6}, &r.name)
	if err != nil {
		return nil, nil, err
	}
	if len(files) != 1 {
		closeAll(files)
		return nil, nil, errors.New("the helper has passed no TAP device")
	}
	d, err := tap.Of(files[0])
	return r, d, err
}

func dialHelper(path string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, errors.Join(&os.PathError{Op: "connect", Path: path, Err: err}, f.Close())
	}
	return f, nil
}

// helperWait is how long a helper may take. Its kernel may have to verify programs first, which an emulated processor
// needs a minute for.
const helperWait = 5 * time.Minute

func (r *remote) call(method string, arg, reply any) ([]*os.File, error) {
	ctx, cancel := context.WithTimeout(context.Background(), helperWait)
	defer cancel()
	files, err := r.conn.Call(ctx, method, arg, reply)
	if err != nil && r.conn.Err() != nil {
		err = fmt.Errorf("%w: the helper has ended this network: let the VM sleep and wake it", err)
	}
	return files, err
}

// do is call without files.
func (r *remote) do(method string, arg, reply any) error {
	files, err := r.call(method, arg, reply)
	closeAll(files)
	return err
}

// serve gets what the helper tells.
func (r *remote) serve(_ context.Context, method string, body []byte, files []*os.File) (any, []*os.File, error) {
	closeAll(files)
	switch method {
	case postEvent:
		var e netpolicy.Event
		if err := json.Unmarshal(body, &e); err != nil {
			return nil, nil, err
		}
		r.mu.Lock()
		tell := r.event
		r.mu.Unlock()
		if tell != nil {
			tell(e)
		}
		return nil, nil, nil
	case callRecords:
		return handle(body, func(b recordBatch) (any, error) {
			r.mu.Lock()
			f := r.streams[b.Stream]
			r.mu.Unlock()
			if f == nil {
				return nil, errRefused
			}
			return nil, f.add(b.Records)
		})
	}
	return nil, nil, errRefused
}

func (r *remote) takeAddress() error {
	var a addressReply
	if err := r.do(helperAddress, none{}, &a); err != nil {
		return err
	}
	n := r.n
	n.address, n.own6, n.agents, n.agents6, n.maximum = a.Address, a.Address6, a.Range, a.Range6, a.Maximum
	return nil
}

func (r *remote) openDNS() (_ net.PacketConn, _ *net.TCPListener, err error) {
	files, err := r.call(helperListen, arrivesDNS, nil)
	defer closeAll(files)
	if err != nil {
		return nil, nil, err
	}
	if len(files) != 2 {
		return nil, nil, errors.New("the helper has passed no sockets")
	}
	pc, err := net.FilePacketConn(files[0])
	if err != nil {
		return nil, nil, err
	}
	ln, err := listenerOf(files[1])
	if err != nil {
		return nil, nil, errors.Join(err, pc.Close())
	}
	return pc, ln, nil
}

func (r *remote) openTCP(kind string) (*net.TCPListener, error) {
	files, err := r.call(helperListen, kind, nil)
	defer closeAll(files)
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		return nil, errors.New("the helper has passed no socket")
	}
	return listenerOf(files[0])
}

func listenerOf(f *os.File) (*net.TCPListener, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	t, ok := l.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(errors.New("the helper has passed no listener"), l.Close())
	}
	return t, nil
}

func (r *remote) attach(p *netpolicy.Policy, tags []string) error {
	return r.do(helperAttach, attachOrder{p, tags}, nil)
}

// swap has the helper compile a policy and put it into force.
func (r *remote) swap(p *netpolicy.Policy) error {
	var warnings []string
	err := r.do(helperSwap, p, &warnings)
	if err == nil {
		r.warn(warnings)
	}
	return err
}

func (r *remote) warn(texts []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.warned = texts
}

func (r *remote) warnings() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.warned
}

// close ends the connection after Remove.
func (r *remote) close() error { return r.conn.Close() }

// Swap is not used: see swap.
func (r *remote) Swap(*netpolicy.Spec) error { return errRefused }

func (r *remote) Up(netpolicy.Identity) error {
	var warnings []string
	err := r.do(helperUp, none{}, &warnings)
	if err == nil {
		r.warn(warnings)
	}
	return err
}

func (r *remote) SetTags(tags []string) error { return r.do(helperTags, tags, nil) }

// Remove has the helper remove the link.
func (r *remote) Remove() error {
	r.mu.Lock()
	r.closing = true
	r.mu.Unlock()
	if r.conn.Err() != nil {
		return nil // which is what ends it
	}
	return r.do(helperClose, none{}, nil)
}

func (r *remote) Pin(name string, a netip.Addr, ttl time.Duration) error {
	return r.do(helperPin, pin{name, a, ttl}, nil)
}

func (r *remote) Name(a netip.Addr) (name string) {
	_ = r.do(helperName, a, &name)
	return name
}

func (r *remote) RuleName(generation uint32, rule int) (name string) {
	_ = r.do(helperRuleName, ruleOf{generation, rule}, &name)
	return name
}

func (r *remote) Counters() (c []netpolicy.Counter, err error) {
	err = r.do(helperCounters, none{}, &c)
	return c, err
}

func (r *remote) Usage(d netpolicy.Direction) (u netpolicy.Usage, err error) {
	err = r.do(helperUsage, d, &u)
	return u, err
}

// Events calls fn until the context ends, as link.Link.Events does.
func (r *remote) Events(ctx context.Context, fn func(netpolicy.Event)) error {
	r.mu.Lock()
	r.event = fn
	r.mu.Unlock()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-r.conn.Done():
		r.mu.Lock()
		closing := r.closing
		r.mu.Unlock()
		if closing {
			<-ctx.Done()
			return ctx.Err()
		}
		return fmt.Errorf("the helper has ended this VM's network, which is of no more use: let the VM sleep and wake it: %w", r.conn.Err())
	}
}

func (r *remote) Checked(port uint16) (c flow.Checked, err error) {
	err = r.do(helperChecked, port, &c)
	return c, err
}

func (r *remote) Lives(c flow.Checked) (lives bool, err error) {
	err = r.do(helperLives, c.Ref, &lives)
	return lives, err
}

func (r *remote) OpensName(c flow.Checked, name string) (ok bool) {
	return r.do(helperOpensName, named{c.Ref, name}, &ok) == nil && ok
}

func (r *remote) Opens(peer netip.AddrPort, name string) (rule string, ok bool) {
	var o opened
	if r.do(helperOpens, opening{peer, name}, &o) != nil {
		return "", false
	}
	return o.Rule, o.OK
}

// Denied implements flowLog. The helper has seen the event.
func (r *remote) Denied(netpolicy.Event) {}

func (r *remote) Refused(c flow.Checked, why netpolicy.Reason, name string) {
	_ = r.do(helperRefused, refusal{c.Ref, why, name}, nil)
}

func (r *remote) Named(c flow.Checked, name string) {
	_ = r.do(helperNamed, named{c.Ref, name}, nil)
}

// Run implements flowLog. The helper runs the log.
func (r *remote) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
	case <-r.conn.Done():
	}
	return nil
}

// Drain implements flowLog. The helper drains the log before it answers Remove.
func (r *remote) Drain(time.Duration) {}

func (r *remote) Records(ctx context.Context, follow bool, fn func([]netpolicy.FlowRecord) error) error {
	to := &stream{fn: fn}
	r.mu.Lock()
	r.last++
	id := r.last
	r.streams[id] = to
	r.mu.Unlock()
	files, err := r.conn.Call(ctx, helperFlows, flowsOrder{id, follow}, nil)
	closeAll(files)
	r.mu.Lock()
	delete(r.streams, id)
	r.mu.Unlock()
	return cmp.Or(to.end(), ctx.Err(), err)
}

var _ policed = (*link.Link)(nil)
