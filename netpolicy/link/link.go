package link

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
)

// Errors of a link, for errors.Is. A missing interface or endpoint is os.ErrNotExist.
var (
	ErrUp   = errors.New("the interface is up")
	ErrBusy = errors.New("another process has the endpoint's network")
	ErrGone = errors.New("the programs are not on the interface")
	ErrName = errors.New("unusable name of an endpoint")
	ErrRoot = errors.New("the directory of pins is not safe")
)

// DefaultRoot is the directory of pins. Each endpoint has a subdirectory with its maps and programs; the shared
// programs have their own.
const DefaultRoot = bpffs + "/drowse"

const bpffs = "/sys/fs/bpf"

// endpointName has no dot: the BPF file system allows none.
var endpointName = lazyregexp.New(`^[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}$`)

// Config assigns an interface to an endpoint.
type Config struct {
	// Endpoint names the directory of pins: 1 to 63 letters, digits, _ and -.
	Endpoint string
	// Interface is the name of its TAP device, in this network namespace.
	Interface string
	// Root is the directory of all endpoints' pins, in a BPF file system; empty is
	// DefaultRoot.
	Root string
	// Tags identify this endpoint in rules of other endpoints on this host. At most MaxOwnTags.
	Tags []string
}

func (c Config) root() string {
	if c.Root == "" {
		return DefaultRoot
	}
	return c.Root
}

func (c Config) dir() string { return filepath.Join(c.root(), c.Endpoint) }

// Link is the programs on an endpoint's TAP device. They stay there, with the last policy, when the process that
// made them ends for any reason; the function Remove then takes them away. They end with the device. The methods
// are safe for concurrent use, except Close and Remove, which must come last.
type Link struct {
	cfg   Config
	index int
	eng   *engine
	lock  *os.File // held as long as the Link is open
}

const (
	filterName   = "drowse"
	filterHandle = 0x6472
	filterPrio   = 1
	bpffsMode    = 0o700
)

// entryNames are the names of an endpoint's own programs, by direction.
var entryNames = [2]string{"from_guest", "to_guest"}

// Attach puts programs with a policy on an interface. The interface must be down, so that nothing passes before
// they are there. Attach gives it the gateway's MAC and removes what a dead process left under the endpoint's
// name. If Attach fails, the interface stays down. The first call on a host makes the kernel verify the programs
// that all endpoints share.
func Attach(cfg Config, spec *netpolicy.Spec) (*Link, error) {
	if err := netpolicy.CheckTags(cfg.Tags); err != nil {
		return nil, err
	}
	r, err := reserve(cfg, spec.Flows())
	if err != nil {
		return nil, err
	}
	return r.Attach(cfg.Tags, spec)
}

func openUsages(dir string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pinUsages), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("opening the use of the network: %w", err)
	}
	return m, nil
}

// maps returns the endpoint's own maps, by name.
func (e *engine) maps() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		"flows": e.flows, "lasting": e.lasting, "pins": e.pinned, "counters": e.counts, "events": e.events, "current": e.current,
	}
}

// checkName checks that the name is valid for an endpoint.
func (c Config) checkName() error {
	if !endpointName.MatchString(c.Endpoint) {
		return fmt.Errorf("%w: %.80q: 1 to 63 letters, digits, _ and -", ErrName, c.Endpoint)
	}
	return nil
}

// prepareRoot mounts the BPF file system and makes the root of pins.
func prepareRoot(root string) error {
	if err := mountBPFFS(); err != nil {
		return err
	}
	if err := os.MkdirAll(root, bpffsMode); err != nil {
		return fmt.Errorf("making the directory of pins: %w", err)
	}
	// A user who can write to it can replace the programs of future endpoints.
	return ownedByUs(root)
}

// Preload makes the kernel verify the programs that endpoints share, unless that was done since the host started.
// Otherwise the first Attach takes most of a second. An empty root is DefaultRoot. It may be called at any time.
func Preload(root string) error {
	root = Config{Root: root}.root()
	if err := prepareRoot(root); err != nil {
		return err
	}
	s, err := lockShared(root, digest())
	if err != nil {
		return err
	}
	defer s.unlock()
	p, _, err := s.openOrLoad()
	if err != nil {
		return err
	}
	return p.close()
}

func mountBPFFS() error {
	is, err := isBPFFS(bpffs)
	if err != nil {
		return fmt.Errorf("looking for the BPF file system: %w", err)
	}
	if !is {
		if err := unix.Mount("bpf", bpffs, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
			return fmt.Errorf("mounting the BPF file system on %s: %w: run as root, or have it mounted", bpffs, err)
		}
	}
	return nil
}

func isBPFFS(path string) (bool, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return false, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return s.Type == unix.BPF_FS_MAGIC, nil
}

func findInterface(name string) (netlink.Link, error) {
	nl, err := netlink.LinkByName(name)
	if err != nil {
		var none netlink.LinkNotFoundError
		if errors.As(err, &none) {
			err = os.ErrNotExist
		}
		return nil, fmt.Errorf("finding interface %q: %w", name, err)
	}
	return nl, nil
}

// lockFlags open a directory to lock it.
const lockFlags = os.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW

// lockDir ensures that one process at a time owns an endpoint. The kernel releases the lock when the process ends.
func lockDir(dir string) (*os.File, error) {
	f, err := osfile.TryOpenLocked(dir, lockFlags, 0, osfile.Exclusive)
	if errors.Is(err, osfile.ErrLocked) {
		err = fmt.Errorf("%s: %w", dir, ErrBusy)
	}
	if err != nil {
		return nil, fmt.Errorf("locking an endpoint's pins: %w", err)
	}
	return f, nil
}

func clearPins(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("reading an endpoint's pins: %w", err)
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("removing a pin: %w", err)
		}
	}
	return nil
}

// sides returns the programs by their clsact hooks.
func (e *engine) sides() map[uint32]*ebpf.Program {
	return map[uint32]*ebpf.Program{netlink.HANDLE_MIN_INGRESS: e.entries[0], netlink.HANDLE_MIN_EGRESS: e.entries[1]}
}

// addFilters puts programs on an interface, at the hooks of a clsact qdisc. They stay as long as the interface
// does, even after this process. TCX links would stay too, but to attach one the kernel waits until all processors
// have passed through a quiescent state, holding the lock of all its network configuration: 20 ms for both links,
// against less than 1 ms.
func addFilters(nl netlink.Link, programs map[uint32]*ebpf.Program) error {
	index := nl.Attrs().Index
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscReplace(qdisc); err != nil {
		return fmt.Errorf("adding a clsact qdisc to %q: %w", nl.Attrs().Name, err)
	}
	for parent, prog := range programs {
		err := netlink.FilterReplace(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: index, Parent: parent, Handle: filterHandle, Protocol: unix.ETH_P_ALL, Priority: filterPrio,
			},
			Fd: prog.FD(), Name: filterName, DirectAction: true,
		})
		if err != nil {
			return fmt.Errorf("adding a filter to %q: %w", nl.Attrs().Name, err)
		}
	}
	return nil
}

// check returns ErrGone unless both programs are on the interface.
func (l *Link) check() error {
	gone := func(why string) error {
		return fmt.Errorf("endpoint %s on %q: %w: %s", l.cfg.Endpoint, l.cfg.Interface, ErrGone, why)
	}
	nl, err := netlink.LinkByIndex(l.index)
	if err != nil {
		return gone("the interface does not exist")
	}
	for parent, prog := range l.eng.sides() {
		info, err := prog.Info()
		if err != nil {
			return fmt.Errorf("looking at a program of endpoint %s: %w", l.cfg.Endpoint, err)
		}
		id, _ := info.ID()
		filters, err := netlink.FilterList(nl, parent)
		if err != nil {
			return fmt.Errorf("listing the filters of %q: %w", l.cfg.Interface, err)
		}
		found := false
		for _, f := range filters {
			b, ok := f.(*netlink.BpfFilter)
			found = found || ok && b.Id == int(id) && b.Priority == filterPrio
		}
		if !found {
			return gone("a filter is missing")
		}
	}
	return nil
}

// Up gives the interface the gateway's addresses, adds the host's route to the endpoint's address, and sets the
// interface up.
func (l *Link) Up(id netpolicy.Identity) error {
	nl, err := netlink.LinkByIndex(l.index)
	if err != nil {
		return fmt.Errorf("raising %q: %w", l.cfg.Interface, err)
	}
	if err := l.check(); err != nil {
		return err
	}
	type family struct {
		own, guest, gateway netip.Addr
		bits                int
	}
	families := []family{{id.Address4, netpolicy.TheWire.Guest4, netpolicy.TheWire.Gateway4, 30}}
	if id.Address6.IsValid() {
		families = append(families, family{id.Address6, netpolicy.TheWire.Guest6, netpolicy.TheWire.Gateway6, 64})
	}
	for _, f := range families {
		addr := &netlink.Addr{IPNet: ipNet(f.gateway, f.bits)}
		if f.gateway.Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrReplace(nl, addr); err != nil {
			return fmt.Errorf("giving %q the address %v: %w", l.cfg.Interface, f.gateway, err)
		}
	}
	if err := netlink.LinkSetUp(nl); err != nil {
		return fmt.Errorf("raising %q: %w", l.cfg.Interface, err)
	}
	for _, f := range families {
		// The guest's MAC is known, so the host never has to ask for it.
		n := &netlink.Neigh{LinkIndex: l.index, State: netlink.NUD_PERMANENT, IP: f.guest.AsSlice(), HardwareAddr: netpolicy.TheWire.GuestMAC[:]}
		if err := netlink.NeighSet(n); err != nil {
			return fmt.Errorf("telling the host the guest's MAC on %q: %w", l.cfg.Interface, err)
		}
		if f.own == f.guest {
			continue
		}
		r := &netlink.Route{
			LinkIndex: l.index, Dst: ipNet(f.own, f.own.BitLen()), Gw: f.guest.AsSlice(), Src: f.gateway.AsSlice(),
			Flags: int(netlink.FLAG_ONLINK),
		}
		if err := netlink.RouteReplace(r); err != nil {
			return fmt.Errorf("routing %v to %q: %w", f.own, l.cfg.Interface, err)
		}
	}
	if id.Address6.IsValid() {
		return awaitLocal(netpolicy.TheWire.Gateway6, l.cfg.Interface)
	}
	return nil
}

// The kernel activates an IPv6 address in a work item of its own, some time after the call that added it returned.
const (
	localWithin = 30 * time.Second
	localPause  = time.Millisecond
)

// awaitLocal waits until the host accepts packets to one of its addresses.
func awaitLocal(a netip.Addr, name string) error {
	for end := time.Now().Add(localWithin); ; time.Sleep(localPause) {
		routes, err := netlink.RouteGet(a.AsSlice())
		if err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("raising %q: the kernel has not put %v into service for %v: is IPv6 switched off (sysctl net.ipv6.conf.*.disable_ipv6)?", name, a, localWithin)
		}
	}
}

func ipNet(a netip.Addr, bits int) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}
}

// Swap replaces the policy while packets pass. Each packet is judged by exactly one of the old and the new policy.
// When Swap returns, the old one judges no packet any more. It takes half a millisecond with 1,000 rules, and
// longer the more addresses the resolver has pinned. If the policy is too large for the memory of the one before
// the last, it gets new memory; more than maxWriters of these in a row wait for the kernel, up to 100 ms each. The
// flow table keeps its size.
func (l *Link) Swap(s *netpolicy.Spec) error { return l.eng.install(s) }

// SetTags replaces the tags that the rules of other endpoints match. At most MaxOwnTags. When it returns, the old
// tags judge no packet of another endpoint any more, and flows with this one are judged anew: flows that its new
// tags do not open are cut. It waits for the kernel, up to 100 ms. It fails with ErrGone if it cannot tell other
// endpoints, because the pins of what endpoints share were removed.
func (l *Link) SetTags(tags []string) error {
	if err := netpolicy.CheckTags(tags); err != nil {
		return err
	}
	s, err := lockShared(l.cfg.root(), l.eng.place.version)
	if err != nil {
		return fmt.Errorf("changing the tags of endpoint %s: %w", l.cfg.Endpoint, err)
	}
	err = s.retag(l.cfg.Endpoint, l.eng.place.claim, tags)
	s.unlock()
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("%w: %w", ErrGone, err)
	}
	if err != nil {
		return fmt.Errorf("changing the tags of endpoint %s: %w", l.cfg.Endpoint, err)
	}
	return l.eng.settle()
}

// Pin records that the resolver has given the guest an address for a name. Rules with a matching name match the
// address for ttl. The name is in lower case, without a final dot. Pin fails with ErrPinsFull if there are too
// many.
func (l *Link) Pin(name string, a netip.Addr, ttl time.Duration) error {
	return l.eng.pin(name, a.Unmap(), flow.Now()+uint64(max(0, ttl)))
}

// Name returns the last name that Pin was called with for an address; empty is none.
func (l *Link) Name(a netip.Addr) string { return l.eng.history.NameAt(a.Unmap(), ^uint64(0)) }

// RuleName returns the name of a rule of the table with this generation, for events; an unnamed rule has its
// place. It returns "" for tables before the last few.
func (l *Link) RuleName(generation uint32, rule int) string {
	return l.eng.history.RuleName(generation, rule)
}

// FlowLog starts a log of the endpoint's flows: see flow.NewLog.
func (l *Link) FlowLog(id netpolicy.Identity) (*flow.Log, error) {
	return flow.NewLog(l.eng.flowTable(), id, flow.Now, flow.Coarse())
}

// Counters returns the counts of packets by outcome since the programs were loaded.
func (l *Link) Counters() ([]netpolicy.Counter, error) { return l.eng.counters() }

// Usage returns the traffic that passed in a direction, and the time since the last packet.
func (l *Link) Usage(d netpolicy.Direction) (netpolicy.Usage, error) { return l.eng.usage(d) }

// Events calls fn for each event until the context ends, and returns the context's error. Only one call at a time
// gets events.
func (l *Link) Events(ctx context.Context, fn func(netpolicy.Event)) error {
	r, err := ringbuf.NewReader(l.eng.events)
	if err != nil {
		return fmt.Errorf("reading events: %w", err)
	}
	defer r.Close()
	// Setting a deadline would wait for the next event.
	stop := context.AfterFunc(ctx, func() { _ = r.Flush() })
	defer stop()
	var rec ringbuf.Record
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := r.ReadInto(&rec); err != nil {
			if errors.Is(err, ringbuf.ErrFlushed) {
				continue
			}
			return fmt.Errorf("reading events: %w", err)
		}
		if ev, ok := decodeEvent(rec.RawSample); ok {
			fn(ev)
		}
	}
}

// eventSize is the size of an event as bpf/endpoint.c writes it.
const eventSize = 48

func decodeEvent(b []byte) (netpolicy.Event, bool) {
	if len(b) < eventSize {
		return netpolicy.Event{}, false
	}
	le, be := binary.LittleEndian, binary.BigEndian
	v, d := int(b[44]), int(b[46])
	if v >= len(netpolicy.Verdicts) || d >= len(netpolicy.Directions) {
		return netpolicy.Event{}, false
	}
	e := netpolicy.Event{
		Uptime: time.Duration(le.Uint64(b)), Peer: netip.AddrFrom16([16]byte(b[8:24])).Unmap(), Generation: le.Uint32(b[24:]), Bytes: le.Uint32(b[28:]),
		Suppressed: le.Uint32(b[32:]), Rule: int(le.Uint16(b[36:])), PeerPort: be.Uint16(b[38:]), GuestPort: be.Uint16(b[40:]),
		EtherType: be.Uint16(b[42:]), Verdict: netpolicy.Verdicts[v], Reason: netpolicy.Reason(b[45]), Direction: netpolicy.Directions[d], Protocol: b[47],
	}
	if e.Rule == 0xffff {
		e.Rule = -1
	}
	return e, true
}

// Close releases the endpoint. The programs stay on the interface, with their policy.
func (l *Link) Close() error {
	var errs []error
	if l.eng != nil {
		errs = append(errs, l.eng.close())
	}
	if l.lock != nil {
		errs = append(errs, l.lock.Close())
		l.lock = nil
	}
	return errors.Join(errs...)
}

// Remove sets the interface down, if it still exists, takes the programs off it and removes their pins. It closes
// the Link.
func (l *Link) Remove() error {
	return errors.Join(l.takeOff(), removeEndpoint(l.cfg), l.Close())
}

func (l *Link) takeOff() error {
	nl, err := netlink.LinkByIndex(l.index)
	if err != nil {
		return nil // it has taken them with it
	}
	return takeOff(nl)
}

// takeOff sets an interface down and removes the programs that addFilters has put on it. One that goes meanwhile, with
// the process that had it, takes them along.
func takeOff(nl netlink.Link) error {
	if err := takeOffPresent(nl); !errors.Is(err, unix.ENODEV) {
		return err
	}
	return nil
}

func takeOffPresent(nl netlink.Link) error {
	name := nl.Attrs().Name
	if err := netlink.LinkSetDown(nl); err != nil {
		return fmt.Errorf("setting %q down: %w", name, err)
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := netlink.FilterList(nl, parent)
		if err != nil {
			return fmt.Errorf("listing the filters of %q: %w", name, err)
		}
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && b.Handle == filterHandle && b.Priority == filterPrio {
				if err := netlink.FilterDel(f); err != nil {
					return fmt.Errorf("removing a filter of %q: %w", name, err)
				}
			}
		}
	}
	return nil
}

// clearEndpoint gives back the slot of an endpoint whose programs are not on an interface that is up, and removes
// its pins. The link to the slot goes last.
func clearEndpoint(cfg Config) error {
	at, err := placeOf(cfg.dir())
	if err == nil {
		err = giveBack(cfg, at)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return clearPins(cfg.dir())
}

func giveBack(cfg Config, at place) error {
	s, err := lockShared(cfg.root(), at.version)
	if err != nil {
		return err
	}
	defer s.unlock()
	return s.release(cfg.Endpoint, at)
}

// removeEndpoint does what clearEndpoint does, and removes the endpoint's directory.
func removeEndpoint(cfg Config) error {
	err := clearEndpoint(cfg)
	if err == nil {
		err = removePins(cfg.dir())
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// removePins removes a directory of pins, if there is one.
func removePins(dir string) error {
	err := clearPins(dir)
	if err == nil {
		err = os.Remove(dir)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing an endpoint's pins: %w", err)
	}
	return nil
}

// Remove takes away what a dead process left under an endpoint's name, complete or not: see Link.Remove. An
// endpoint without leftovers is not an error. Remove fails with ErrBusy if the process still runs.
func Remove(cfg Config) error {
	err := cfg.checkName()
	if err == nil {
		err = ownedByUs(cfg.root())
	}
	var lock *os.File
	if err == nil {
		lock, err = lockDir(cfg.dir())
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if nl, err := findInterface(cfg.Interface); err == nil {
		if err := takeOff(nl); err != nil {
			return err
		}
	}
	return removeEndpoint(cfg)
}

// readRoot reads a root of pins. A missing root is empty.
func readRoot(root string) ([]os.DirEntry, error) {
	err := ownedByUs(root)
	var entries []os.DirEntry
	if err == nil {
		entries, err = os.ReadDir(root)
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return entries, err
}

// Endpoints lists the names under a root of pins; empty is DefaultRoot.
func Endpoints(root string) ([]string, error) {
	entries, err := readRoot(Config{Root: root}.root())
	if err != nil {
		return nil, fmt.Errorf("listing endpoints: %w", err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() && endpointName.MatchString(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}
