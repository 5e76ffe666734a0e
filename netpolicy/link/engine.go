package link

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
	"github.com/drowse-vm/drowse/netpolicy/flow"
)

// ErrKernel means that the kernel, or a lack of permission, prevents loading the programs.
var ErrKernel = errors.New("the kernel does not take the programs")

// ErrPinsFull means that the resolver has pinned as many addresses as it may.
var ErrPinsFull = errors.New("too many addresses are pinned")

// maxPins is how many addresses the resolver may pin for one endpoint. The map has room for two generations of them.
const maxPins = 4096

// maxNameSets is how many sets of names are remembered for flows.
const maxNameSets = 2048

// maxPinNames is how many names of one address are pinned at once.
const maxPinNames = 64

// maxAllNames is how many names all addresses of an endpoint are pinned for at once.
const maxAllNames = 4 * maxPins

// engine is the state of one endpoint, in its own maps, and its own programs, which call those of the host.
// Without a table they deny everything.
type engine struct {
	place  place
	shared *programs
	// These maps are the endpoint's own. The one element of current selects the table in force. lasting has the
	// established or answered flows, flows has the others.
	flows, lasting, pinned, counts, events, current *ebpf.Map
	entries                                         [2]*ebpf.Program // by direction

	wg sync.WaitGroup // for writers into the slot, which take some time to end
	// announced is closed when the maps of the endpoint are in its slot and their writers have ended; it is nil
	// before announce.
	announced chan struct{}
	writers   chan struct{} // has one element per writer of prepareSpare that still waits

	mu       sync.Mutex // guards what follows
	gen      uint32
	which    uint32   // the index of the table in force
	tables   [2]table // the other one is spare, and may be empty
	spec     *netpolicy.Spec
	pins     bool                             // the map of pins may have entries
	names    map[netip.Addr]map[string]uint64 // name -> its expiry, on the kernel's clock
	nameSets nameSets

	history flow.History
}

// eventBytes is the size of the ring of events: a second's worth of both directions, twice.
const eventBytes = 32 << 10

// ownMap is a map of an endpoint's own.
type ownMap struct {
	name       string
	kind       ebpf.MapType
	key, value any
	entries    int
	flags      uint32
}

func flowsOf(entries int) ownMap {
	return ownMap{"flows", ebpf.LRUHash, bpf.EndpointFlowKey{}, bpf.EndpointFlow{}, entries, 0}
}

func (m ownMap) make() (*ebpf.Map, error) {
	spec := &ebpf.MapSpec{Name: m.name, Type: m.kind, MaxEntries: uint32(m.entries), Flags: m.flags}
	if m.key != nil {
		spec.KeySize, spec.ValueSize = uint32(binary.Size(m.key)), uint32(binary.Size(m.value))
	}
	out, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("making the map of an endpoint's %s: %w", m.name, err)
	}
	return out, nil
}

// newEngine makes the maps and programs of an endpoint. It takes over p, even if it fails. With a policy, start
// must follow; without one, the programs deny everything.
func newEngine(p *programs, at place, flows int) (_ *engine, err error) {
	e := &engine{place: at, shared: p, names: map[netip.Addr]map[string]uint64{}, writers: make(chan struct{}, maxWriters)}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	for _, m := range []struct {
		to **ebpf.Map
		ownMap
	}{
		{&e.flows, flowsOf(flows)},
		{&e.lasting, flowsOf(flows)},
		{&e.pinned, ownMap{"pins", ebpf.Hash, bpf.EndpointPinKey{}, bpf.EndpointPin{}, 2 * (maxPins + maxNameSets), unix.BPF_F_NO_PREALLOC}},
		{&e.counts, ownMap{"counters", ebpf.PerCPUArray, uint32(0), bpf.EndpointCounter{}, runsAt + len(engine{}.tables), 0}},
		{&e.events, ownMap{"events", ebpf.RingBuf, nil, nil, eventBytes, 0}},
		{&e.current, ownMap{"current", ebpf.Array, uint32(0), uint32(0), 1, 0}},
	} {
		if *m.to, err = m.make(); err != nil {
			return nil, err
		}
	}
	for d := range e.entries {
		if e.entries[d], err = e.entry(p.calls, d); err != nil {
			return nil, err
		}
	}
	if err := p.resetUsage(at.slot); err != nil {
		return nil, err
	}
	return e, nil
}

// flowTable returns the endpoint's flow table.
func (e *engine) flowTable() *flow.Table {
	return &flow.Table{Flows: e.flows, Lasting: e.lasting, Usages: e.shared.usages, Slot: e.place.slot, History: &e.history}
}

func (e *engine) close() error {
	e.wg.Wait()
	errs := []error{e.shared.close()}
	for _, m := range e.maps() {
		errs = append(errs, m.Close()) // a nil map's Close does nothing
	}
	for i := range e.tables {
		errs = append(errs, e.tables[i].close())
	}
	for _, p := range e.entries {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// announce puts the endpoint's maps into its slot. Without a table, every packet is denied.
func (e *engine) announce() error {
	p := e.shared
	wait, err := publish([]slotMap{
		{p.flows, e.place.table(0), e.flows}, {p.flows, e.place.table(1), e.lasting},
		{p.pins, e.place.slot, e.pinned}, {p.counters, e.place.slot, e.counts}, {p.stream, e.place.slot, e.events},
	})
	if err != nil {
		return err
	}
	e.announced = make(chan struct{})
	e.wg.Go(func() {
		defer close(e.announced)
		// publish has already seen the maps in place, so errors of its writers do not matter.
		_ = wait()
	})
	return nil
}

// start puts the endpoint's first table into its slot; if announce has not run, start puts the maps there first.
// No packet was judged before, so there is none to wait for. With keep, all maps that endpoints share stay open;
// otherwise only policies and usages do.
func (e *engine) start(s *netpolicy.Spec, keep bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.announced == nil {
		if err := e.announce(); err != nil {
			return err
		}
	}
	if err := e.clearSpare(); err != nil {
		return err
	}
	t, err := e.newTable(s, e.gen+1)
	if err != nil {
		return err
	}
	p := e.shared
	wait, err := publish([]slotMap{{p.policies, e.place.table(e.which), t.m}})
	if err != nil {
		return errors.Join(err, t.close())
	}
	e.gen++
	e.history.AddRules(e.gen, s.RuleNames())
	e.tables[e.which], e.spec = t, s
	e.wg.Go(func() {
		_ = wait()
		<-e.announced
		if !keep {
			_ = p.closeShared()
		}
	})
	return nil
}

// track replaces the endpoint's flow tables by empty ones, before start.
func (e *engine) track(flows int) (err error) {
	brief, err := flowsOf(flows).make()
	if err != nil {
		return err
	}
	lasting, err := flowsOf(flows).make()
	if err != nil {
		return errors.Join(err, brief.Close())
	}
	wait, err := publish([]slotMap{{e.shared.flows, e.place.table(0), brief}, {e.shared.flows, e.place.table(1), lasting}})
	if err != nil {
		return errors.Join(err, brief.Close(), lasting.Close())
	}
	before := e.announced
	e.announced = make(chan struct{})
	e.wg.Go(func() {
		defer close(e.announced)
		_ = wait()
		<-before
	})
	err = errors.Join(e.flows.Close(), e.lasting.Close())
	e.flows, e.lasting = brief, lasting
	return err
}

// mapID returns the kernel's ID of a map.
func mapID(m *ebpf.Map) (ebpf.MapID, error) {
	info, err := m.Info()
	if err != nil {
		return 0, fmt.Errorf("looking at an endpoint's map: %w", err)
	}
	id, _ := info.ID()
	return id, nil
}

// pinSlots is how many distinct expiry times the names of one address have in the map. Names with earlier times count
// as expired.
const pinSlots = 4

// matching returns the rules that the names of an address match, and until when. nameSetID numbers a set of names.
func matching(s *netpolicy.Spec, names map[string]uint64, nameSetID func(names []string) uint32) (p bpf.EndpointPin, ok bool) {
	type ruleSet = [netpolicy.MaxRules / 64]uint64
	sets, named := map[uint64]ruleSet{}, map[uint64][]string{} // by time
	join := func(to *ruleSet, more ruleSet) {
		for w, x := range more {
			to[w] |= x
		}
	}
	for name, until := range names {
		if rules, ok := s.Naming(name); ok {
			join(&rules, sets[until])
			sets[until] = rules
			named[until] = append(named[until], name)
		}
	}
	// The latest comes first; each slot includes what the later ones have.
	times := slices.SortedFunc(maps.Keys(sets), func(a, b uint64) int { return cmp.Compare(b, a) })
	var all ruleSet
	var matched []string
	for i, t := range times[:min(len(times), pinSlots)] {
		join(&all, sets[t])
		matched = append(matched, named[t]...)
		at := min(len(times), pinSlots) - 1 - i
		p.Expires[at], p.Set[at].W, p.NameSets[at] = t, all, nameSetID(matched)
	}
	return p, len(times) > 0
}

func pinKey(a netip.Addr, gen uint32) bpf.EndpointPinKey {
	k := bpf.EndpointPinKey{Gen: gen}
	b := a.As16()
	for i := range k.Addr {
		k.Addr[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return k
}

// repin writes the resolver's pins into the map for the next generation.
func (e *engine) repin(s *netpolicy.Spec) error {
	e.expire()
	for a, names := range e.names {
		if err := e.writePin(s, a, names); err != nil {
			return err
		}
	}
	// Also write what the names of flows mean now, though they may have expired.
	for id, names := range e.nameSets.names {
		v, ok := matching(s, forever(names), func([]string) uint32 { return id })
		if !ok {
			continue
		}
		e.pins = true
		if err := e.pinned.Put(bpf.EndpointPinKey{Addr: [4]uint32{nameSetKey, 0, 0, id}, Gen: e.gen}, &v); err != nil {
			return fmt.Errorf("writing the names of flows: %w", err)
		}
	}
	return nil
}

func (e *engine) writePin(s *netpolicy.Spec, a netip.Addr, names map[string]uint64) error {
	v, ok := matching(s, names, e.nameSetID)
	if !ok {
		return nil
	}
	e.pins = true
	if err := e.pinned.Put(pinKey(a, e.gen), &v); err != nil {
		return fmt.Errorf("pinning %v: %w", a, err)
	}
	return nil
}

// unpinOld removes the entries of past generations. Most endpoints have no pins, and the search visits each bucket
// of the map.
func (e *engine) unpinOld() error {
	if !e.pins {
		return nil
	}
	var k bpf.EndpointPinKey
	var v bpf.EndpointPin
	var old []bpf.EndpointPinKey
	left := false
	it := e.pinned.Iterate()
	for it.Next(&k, &v) {
		if k.Gen != e.gen {
			old = append(old, k)
		} else {
			left = true
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("looking for pinned addresses of an old policy: %w", err)
	}
	for _, k := range old {
		if err := e.pinned.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("removing pinned addresses of an old policy: %w", err)
		}
	}
	e.pins = left
	return nil
}

// pin lets rules with a name match an address until a time on the kernel's clock.
func (e *engine) pin(name string, a netip.Addr, until uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spec == nil {
		return errors.New("pinning an address: there is no policy")
	}
	names := e.names[a]
	if names == nil {
		if len(e.names) >= maxPins {
			e.expire()
		}
		if len(e.names) >= maxPins {
			return fmt.Errorf("pinning %v: %w (%d)", a, ErrPinsFull, maxPins)
		}
		names = map[string]uint64{}
		e.names[a] = names
	}
	if _, ok := names[name]; !ok {
		if len(names) >= maxPinNames {
			makeRoom(names)
		}
		if e.allNames() >= maxAllNames {
			e.expire()
		}
		if e.allNames() >= maxAllNames {
			return fmt.Errorf("pinning %v: %w (%d names)", a, ErrPinsFull, maxAllNames)
		}
		if e.names[a] == nil { // it has expired
			e.names[a] = names
		}
	}
	names[name] = max(names[name], until)
	e.history.AddName(name, a)
	return e.writePin(e.spec, a, names)
}

func (e *engine) allNames() (n int) {
	for _, names := range e.names {
		n += len(names)
	}
	return n
}

// makeRoom forgets the expired names of an address, or, if there are none, the name that expires first. So a guest
// that asks for more names has the latest of them.
func makeRoom(names map[string]uint64) {
	if dropExpired(names); len(names) >= maxPinNames {
		delete(names, slices.MinFunc(slices.Collect(maps.Keys(names)), func(a, b string) int { return cmp.Compare(names[a], names[b]) }))
	}
}

func dropExpired(names map[string]uint64) {
	now := flow.Now()
	maps.DeleteFunc(names, func(_ string, until uint64) bool { return until <= now })
}

// expire forgets expired pins.
func (e *engine) expire() {
	for a, names := range e.names {
		if dropExpired(names); len(names) == 0 {
			delete(e.names, a)
			// An entry that is missing was removed with an old policy.
			_ = e.pinned.Delete(pinKey(a, e.gen))
		}
	}
}

// counters reads the counters that are not zero.
func (e *engine) counters() ([]netpolicy.Counter, error) {
	var out []netpolicy.Counter
	for d, dir := range netpolicy.Directions {
		for v, verdict := range netpolicy.Verdicts {
			for r := range netpolicy.Reasons {
				var per []bpf.EndpointCounter
				if err := e.counts.Lookup(uint32((d*len(netpolicy.Verdicts)+v)*netpolicy.Reasons+r), &per); err != nil {
					return nil, fmt.Errorf("reading counters: %w", err)
				}
				c := netpolicy.Counter{Direction: dir, Verdict: verdict, Reason: netpolicy.Reason(r)}
				for _, p := range per {
					c.Packets += p.Packets
					c.Bytes += p.Bytes
				}
				if c.Packets != 0 {
					out = append(out, c)
				}
			}
		}
	}
	return out, nil
}

func (e *engine) usage(d netpolicy.Direction) (netpolicy.Usage, error) {
	u, err := flow.Usage(e.shared.usages, e.place.slot, code(d))
	if err != nil {
		return netpolicy.Usage{}, err
	}
	out := netpolicy.Usage{Bytes: u.Used, Idle: -1}
	if u.Active != 0 {
		out.Idle = max(0, time.Duration(flow.Now()-u.Active))
	}
	return out, nil
}
