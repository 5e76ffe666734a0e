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

// Engine is the programs without a TAP device, on a clock that tests set.
type Engine struct {
	*engine
	clock *ebpf.Variable
	now   uint64
}

// testPrograms are the programs with a clock that tests set. They are loaded once, since the kernel's verifier takes
// about a second of processor time for them. Each engine has its own slot, as the endpoints of a host have.
var testPrograms struct {
	mu     sync.Mutex // guards what follows
	loaded *programs
	clock  *ebpf.Variable
	slots  uint32 // how many were handed out
}

// CloseTestPrograms closes what the engines share.
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

// shareTestPrograms returns new descriptors of the programs and a slot for an engine. It makes the programs forget
// all endpoints, and sets their clock to 0.
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

// NewEngine makes an engine on the tests' clock, or one with programs of its own on the kernel's clock.
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

// Close also empties the engine's slot.
func (e *Engine) Close() error {
	e.wg.Wait() // for goroutines that still write into the slot
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

// Install makes the first installation, or a swap.
func (e *Engine) Install(s *netpolicy.Spec) error {
	if e.spec == nil {
		return e.start(s, true)
	}
	return e.install(s)
}

// PausedProgram returns the egress program with a delay: it reads the clock this many times between the choice of a
// table and its use.
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

// Names returns how many names an address has.
func (e *Engine) Names(a netip.Addr) int { return len(e.names[a]) }

// NameSets returns how many sets of names the engine remembers.
func (e *Engine) NameSets() int { return len(e.nameSets.names) }

// Room returns how many rows each of the two tables has room for.
func (e *Engine) Room() (rows [2]int) { return [2]int{e.tables[0].rows, e.tables[1].rows} }

// Runs returns how many runs by both tables have begun and ended.
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

// BeginSwap does what a process has done that is killed in a swap: it fills the spare table and pins names for it.
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

// ForgetState drops flows, the use of limits, and pins.
func (e *Engine) ForgetState() error {
	if err := e.ForgetFlows(); err != nil {
		return err
	}
	clear(e.names)
	e.gen++ // makes the pins old for a moment
	err := e.unpinOld()
	e.gen--
	if err != nil {
		return err
	}
	return e.shared.resetUsage(e.place.slot)
}

// ForgetUsage drops the use of limits.
func (e *Engine) ForgetUsage() error { return e.shared.resetUsage(e.place.slot) }

// Context is the part of struct __sk_buff that tests use.
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

// Run runs a program on a frame, as if it came by the interface of its source.
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

// RunBy runs a program on a frame that came to the host by the interface of an address. The zero Addr means that the
// host made the frame.
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

// SlotsUsed reports whether a live endpoint has a slot of this version's programs.
func SlotsUsed(root string) (bool, error) {
	s, err := lockShared(root, digest())
	if err != nil {
		return false, err
	}
	defer s.unlock()
	return s.used()
}

// TakeSlot makes an endpoint that has only a slot. It looks for a free one from first on.
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

// InstallFor installs a table that bears another claim.
func (e *Engine) InstallFor(s *netpolicy.Spec, claim uint32) error {
	mine := e.place.claim
	e.place.claim = claim
	defer func() { e.place.claim = mine }()
	return e.install(s)
}

// LoadShared opens the programs that endpoints share, or loads them. It returns the id of their first program.
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

// HasShared reports whether the programs that endpoints share are there as they must be.
func HasShared(root string) (there bool, err error) {
	s, err := lockShared(root, digest())
	if err != nil {
		return false, err
	}
	defer s.unlock()
	p, err := s.open()
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, p.close()
}

// Occupy makes an endpoint without a device that takes a slot, which must be free, and fills it.
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

// SetPeers sets the endpoints of addresses. An address always has the same claim.
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

// interfaceOf returns the interface number of an address in tests.
func interfaceOf(a netip.Addr) uint32 {
	if !a.IsValid() {
		return 0
	}
	h := fnv.New32a()
	h.Write(a.AsSlice())
	return h.Sum32()>>1 | 1
}

// SetPeer sets which endpoint has an address, and its claim; claim 0 removes it. The same claim may get other tags.
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

// FlowLog returns a log that begins now, on the clock that tests set.
func (e *Engine) FlowLog() (*flow.Log, error) {
	return flow.NewLog(e.flowTable(), e.spec.Identity(), func() uint64 { return e.now }, e.now)
}

// OpensName reports whether the rules open the flow of a connection to the TLS port, by its server name, and when
// the flow was opened.
func (e *Engine) OpensName(via uint16, name string) (ok bool, first uint64, err error) {
	c, err := e.checked(via, e.now)
	if err != nil {
		return false, 0, err
	}
	return e.opensName(c, name, e.now), c.Opened, nil
}

// Generation returns the generation of the installed table.
func (e *Engine) Generation() uint32 { return e.gen }

// Flows returns the table of flows that do not last.
func (l *Link) Flows() *ebpf.Map { return l.eng.flows }

// CountersOn reads the counters of the programs on a device, whichever process attached them. Each direction must
// have one program.
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

// Abandon does to a Reserved what the end of its process does, except to the device.
func (r *Reserved) Abandon() error { return r.link.Close() }
