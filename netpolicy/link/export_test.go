package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
	"github.com/drowse-vm/drowse/netpolicy/flow"
)

// Engine is the programs without a TAP device, with a clock that tests set.
type Engine struct {
	*engine
	clock *ebpf.Variable
	now   uint64
}

// testPrograms are the programs with a clock that tests set. They are loaded once, since the kernel's verifier takes
// about a second of processor time for them, and each engine has a slot of its own, as the endpoints of a host have.
var testPrograms struct {
	mu     sync.Mutex // guards what follows
	loaded *programs
	clock  *ebpf.Variable
	slots  uint32 // that were given away
}

// CloseTestPrograms closes what engines have shared.
func CloseTestPrograms() error {
	t := &testPrograms
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.loaded == nil {
		return nil
	}
	err := t.loaded.close()
	t.loaded = nil
	return err
}

// shareTestPrograms gives an engine descriptors of its own, and a slot. Nobody is known to the programs, and their
// clock stands at 0.
func shareTestPrograms() (p *programs, clock *ebpf.Variable, slot uint32, err error) {
	t := &testPrograms
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.loaded == nil {
		if t.loaded, t.clock, err = loadPrograms(true); err != nil {
			return nil, nil, 0, err
		}
	}
	p = &programs{mark: t.loaded.mark}
	from := t.loaded.byName()
	for name, to := range p.byName() {
		if *to, err = (*from[name]).Clone(); err != nil {
			return nil, nil, 0, errors.Join(err, p.close())
		}
	}
	var known [][16]byte
	var address [16]byte
	var value bpf.EndpointTagged
	it := p.endpoints.Iterate()
	for it.Next(&address, &value) {
		known = append(known, address)
	}
	err = errors.Join(it.Err(), t.clock.Set(uint64(0)))
	for _, address := range known {
		err = errors.Join(err, p.endpoints.Delete(address))
	}
	if err != nil {
		return nil, nil, 0, errors.Join(err, p.close())
	}
	t.slots++
	return p, t.clock, t.slots % netpolicy.MaxEndpoints, nil
}

// NewEngine makes an engine by the clock of tests, or with programs of its own by that of the kernel.
func NewEngine(flows int, testing bool) (*Engine, error) {
	slot := uint32(5)
	var p *programs
	var clock *ebpf.Variable
	var err error
	if testing {
		p, clock, slot, err = shareTestPrograms()
	} else {
		p, clock, err = loadPrograms(false)
	}
	if err != nil {
		return nil, err
	}
	e, err := newEngine(p, place{digest(), slot, 77}, flows)
	if err != nil {
		return nil, err
	}
	return &Engine{engine: e, clock: clock}, nil
}

// Close empties the engine's slot as well.
func (e *Engine) Close() error {
	e.wg.Wait() // for those who still write into the slot
	return errors.Join(e.shared.empty(e.place.slot), e.close())
}

func (e *Engine) SetTime(now uint64) error {
	e.now = now
	return e.clock.Set(now)
}
func (e *Engine) Counters() ([]netpolicy.Counter, error) { return e.counters() }
func (e *Engine) Pin(name string, a netip.Addr, until uint64) error {
	return e.pin(name, a, until)
}
func (e *Engine) Program(d netpolicy.Direction) *ebpf.Program {
	if d == netpolicy.Egress {
		return e.entries[0]
	}
	return e.entries[1]
}

// Install is the first installation, or a swap.
func (e *Engine) Install(s *netpolicy.Spec) error {
	if e.spec == nil {
		return e.start(s, true)
	}
	return e.install(s)
}

// PausedProgram is that for egress, in which so many looks at the clock go by between the choice of a table and its
// use.
func (e *Engine) PausedProgram(looks int32) (*ebpf.Program, error) {
	return e.pausedEntry(e.shared.calls, 0, nil, asm.Instructions{
		asm.Mov.Imm(asm.R1, looks),
		asm.StoreMem(asm.RFP, -16, asm.R1, asm.DWord),
		asm.FnKtimeGetNs.Call().WithSymbol("look"),
		asm.LoadMem(asm.R1, asm.RFP, -16, asm.DWord),
		asm.Sub.Imm(asm.R1, 1),
		asm.StoreMem(asm.RFP, -16, asm.R1, asm.DWord),
		asm.JNE.Imm(asm.R1, 0, "look"),
	})
}

// Names is how many an address has.
func (e *Engine) Names(a netip.Addr) int { return len(e.names[a]) }

// NameSets is how many sets of names are remembered.
func (e *Engine) NameSets() int { return len(e.nameSets.names) }

// Room is how many rows there is room for in both tables.
func (e *Engine) Room() (rows [2]int) { return [2]int{e.tables[0].rows, e.tables[1].rows} }

// Runs is how many runs by both tables have begun and ended.
func (e *Engine) Runs() (begun, ended uint64, err error) {
	for which := range uint32(len(e.tables)) {
		b, n, err := e.runs(which)
		if err != nil {
			return 0, 0, err
		}
		begun, ended = begun+b, ended+n
	}
	return begun, ended, nil
}

// BeginSwap is what a process has done that is killed in a swap: the spare table is filled, and names are pinned for
// it.
func (l *Link) BeginSwap(s *netpolicy.Spec) error {
	e := l.eng
	if err := e.prepareSpare(s, 1-e.which); err != nil {
		return err
	}
	e.gen++
	return e.repin(s)
}

// Table fills the map of a table, and drops it.
func (e *Engine) Table(s *netpolicy.Spec) error {
	t, err := e.newTable(s, 1)
	if err != nil {
		return err
	}
	return t.close()
}

// ForgetFlows drops all flows.
func (e *Engine) ForgetFlows() error {
	var k [24]byte
	for _, m := range []*ebpf.Map{e.flows, e.lasting} {
		for m.NextKey(nil, &k) == nil {
			if err := m.Delete(k); err != nil {
				return err
			}
		}
	}
	return nil
}

// ForgetState drops flows, the use of limits and pins.
func (e *Engine) ForgetState() error {
	if err := e.ForgetFlows(); err != nil {
		return err
	}
	clear(e.names)
	e.gen++ // makes them old for a moment
	err := e.unpinOld()
	e.gen--
	if err != nil {
		return err
	}
	return e.shared.resetUsage(e.place.slot)
}

// ForgetUsage drops the use of limits.
func (e *Engine) ForgetUsage() error { return e.shared.resetUsage(e.place.slot) }

// Context is struct __sk_buff as far as tests use it.
type Context [192]byte

const (
	ctxVLAN    = 20 // vlan_present
	ctxIngress = 36 // ingress_ifindex
	ctxCB      = 48
	ctxGSOSize = 176
)

// Ran is what the programs did with a frame.
type Ran struct {
	Verdict netpolicy.Verdict
	Reason  netpolicy.Reason
	Rule    int // of the table; -1 is none
	Action  uint32
	Bytes   []byte
}

// Run runs a program on a frame, which has come to the host where its source says.
func (e *Engine) Run(d netpolicy.Direction, frame []byte, gsoSize int) (Ran, error) {
	var by netip.Addr
	switch {
	case d == netpolicy.Ingress && len(frame) >= 34 && frame[12] == 8 && frame[13] == 0:
		by = netip.AddrFrom4([4]byte(frame[26:30]))
	case d == netpolicy.Ingress && len(frame) >= 54 && frame[12] == 0x86:
		by = netip.AddrFrom16([16]byte(frame[22:38]))
	}
	var there bpf.EndpointTagged
	if e.shared.endpoints.Lookup(by.As16(), &there) != nil {
		by = netip.Addr{}
	}
	return e.RunBy(d, frame, gsoSize, by)
}

// RunBy runs a program on a frame that has come to the host by the interface of an address; none is that the host has
// made it.
func (e *Engine) RunBy(d netpolicy.Direction, frame []byte, gsoSize int, by netip.Addr) (Ran, error) {
	var in, out Context
	binary.LittleEndian.PutUint32(in[ctxIngress:], interfaceOf(by))
	binary.LittleEndian.PutUint32(in[ctxGSOSize:], uint32(gsoSize))
	o := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: in[:], ContextOut: out[:]}
	action, err := e.Program(d).Run(&o)
	if err != nil {
		return Ran{}, err
	}
	cb := func(i int) uint32 { return binary.LittleEndian.Uint32(out[ctxCB+4*i:]) }
	r := Ran{Reason: netpolicy.Reason(cb(2)), Verdict: netpolicy.Verdicts[cb(3)], Rule: int(cb(4)), Action: action, Bytes: o.DataOut}
	if r.Rule == 0xffff {
		r.Rule = -1
	}
	return r, nil
}

// SlotsUsed says whether a live endpoint has a slot of this version's programs.
func SlotsUsed(root string) (bool, error) {
	s, err := lockShared(root, digest())
	if err != nil {
		return false, err
	}
	defer s.unlock()
	return s.used()
}

// TakeSlot makes an endpoint that has a slot and nothing else, beginning to look at one.
func TakeSlot(root, endpoint string, first uint32) (uint32, error) {
	if err := os.MkdirAll(filepath.Join(root, endpoint), bpffsMode); err != nil {
		return 0, err
	}
	s, err := lockShared(root, digest())
	if err != nil {
		return 0, err
	}
	defer s.unlock()
	at, err := s.takeFrom(endpoint, first)
	return at.slot, err
}

// InstallFor installs a table that says it is of another claim.
func (e *Engine) InstallFor(s *netpolicy.Spec, claim uint32) error {
	mine := e.place.claim
	e.place.claim = claim
	defer func() { e.place.claim = mine }()
	return e.install(s)
}

// LoadShared opens the programs that endpoints share, or loads them; it says which they are.
func LoadShared(root string) (id uint32, loaded bool, err error) {
	s, err := lockShared(root, digest())
	if err != nil {
		return 0, false, err
	}
	defer s.unlock()
	p, loaded, err := s.openOrLoad()
	if err != nil {
		return 0, false, err
	}
	err = p.calls.Lookup(uint32(0), &id)
	return id, loaded, errors.Join(err, p.close())
}

// Occupy is an endpoint without a device that takes a slot, which must be free, and fills it.
func Occupy(root, endpoint string, slot uint32, s *netpolicy.Spec) error {
	if _, err := TakeSlot(root, endpoint, slot); err != nil {
		return err
	}
	at, err := placeOf(filepath.Join(root, endpoint))
	if err != nil {
		return err
	}
	if at.slot != slot {
		return fmt.Errorf("slot %d is not free", slot)
	}
	sh, err := lockShared(root, digest())
	if err != nil {
		return err
	}
	p, err := sh.open()
	sh.unlock()
	if err != nil {
		return err
	}
	e, err := newEngine(p, at, s.Flows())
	if err != nil {
		return err
	}
	return errors.Join(e.start(s, false), e.close())
}

// SetPeers says which endpoints there are. Each address always has the same claim.
func (e *Engine) SetPeers(peers []netpolicy.Peer) error {
	for _, p := range peers {
		h := fnv.New32a()
		h.Write(p.Address.AsSlice())
		if err := e.SetPeer(p, h.Sum32()|1); err != nil {
			return err
		}
	}
	return nil
}

// interfaceOf is the number of the interface that an address has in tests.
func interfaceOf(a netip.Addr) uint32 {
	if !a.IsValid() {
		return 0
	}
	h := fnv.New32a()
	h.Write(a.AsSlice())
	return h.Sum32()>>1 | 1
}

// SetPeer says which endpoint has an address, and by what claim; 0 is none. The same one may have other tags.
func (e *Engine) SetPeer(p netpolicy.Peer, claim uint32) error {
	if claim == 0 {
		return e.shared.endpoints.Delete(p.Address.As16())
	}
	var before bpf.EndpointTagged
	if err := e.shared.endpoints.Lookup(p.Address.As16(), &before); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	v := tagged(claim, 0, p.Tags)
	cookie, err := netnsCookie()
	if err != nil {
		return err
	}
	v.Netns, v.Ifindex = cookie, interfaceOf(p.Address)
	if before.Claim == claim {
		if v.Edition = before.Edition; v != before {
			v.Edition++
		}
	}
	return e.shared.endpoints.Put(p.Address.As16(), &v)
}

// FlowLog is a log on the clock that tests set, from now on.
func (e *Engine) FlowLog() (*flow.Log, error) {
	return flow.NewLog(e.flowTable(), e.spec.Identity(), func() uint64 { return e.now }, e.now)
}

// OpensName says whether the rules open the flow that a connection to the TLS port is of, by its server
// name, and when the flow was opened.
func (e *Engine) OpensName(via uint16, name string) (ok bool, first uint64, err error) {
	c, err := e.checked(via, e.now)
	if err != nil {
		return false, 0, err
	}
	return e.opensName(c, name, e.now), c.Opened, nil
}

// Generation is that of the table that is installed.
func (e *Engine) Generation() uint32 { return e.gen }

// Flows is the table of flows that do not last.
func (l *Link) Flows() *ebpf.Map { return l.eng.flows }

// CountersOn reads the counters of the programs on a device, whoever has put them there. There has to be one for each
// direction.
func CountersOn(device string) (out []netpolicy.Counter, err error) {
	nl, err := netlink.LinkByName(device)
	if err != nil {
		return nil, err
	}
	for _, hook := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := netlink.FilterList(nl, hook)
		if err != nil {
			return nil, err
		}
		if len(filters) != 1 {
			return nil, fmt.Errorf("%d filters at hook %#x of %s", len(filters), hook, device)
		}
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(filters[0].(*netlink.BpfFilter).Id))
		if err != nil {
			return nil, err
		}
		defer p.Close()
		info, err := p.Info()
		if err != nil {
			return nil, err
		}
		ids, _ := info.MapIDs()
		for _, id := range ids {
			m, err := ebpf.NewMapFromID(id)
			if err != nil {
				return nil, err
			}
			defer m.Close()
			if m.Type() == ebpf.PerCPUArray {
				if out, err = (&engine{counts: m}).counters(); err != nil {
					return nil, err
				}
			}
		}
	}
	return out, nil
}

// Abandon is what the end of its process does to a Reserved, but for the device.
func (r *Reserved) Abandon() error { return r.link.Close() }
