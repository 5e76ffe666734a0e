package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
)

// Trial is an endpoint without a device, to measure the cost of its programs: they get frames one after another in
// the kernel (BPF_PROG_RUN). A Trial has programs of its own and pins nothing, or it belongs to a Link. Its
// methods are safe for concurrent use, except Close, which must come last.
type Trial struct {
	eng   *engine
	link  bool             // the engine belongs to a Link
	run   [2]*ebpf.Program // by direction
	empty [2]*ebpf.Program
	// These are for egress frames that each have other ports. The one element of ports is the last ones.
	first, firstEmpty *ebpf.Program
	ports             *ebpf.Map
}

// portsAt is the offset of the ports in a frame of TCP or UDP over IPv4.
const portsAt = 14 + 20

// addressAt is the offset of the translated address in an IPv4 frame, by direction: the source on egress, the
// destination on ingress.
var addressAt = [2]int32{14 + 12, 14 + 16}

// NewTrial loads the programs with a policy.
func NewTrial(s *netpolicy.Spec) (_ *Trial, err error) {
	p, _, err := loadPrograms(false)
	if err != nil {
		return nil, err
	}
	const slot, claim = 1, 1
	t := &Trial{}
	if t.eng, err = newEngine(p, place{digest(), slot, claim}, s.Flows()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.Close())
		}
	}()
	if err := t.load(p.calls, s.Identity()); err != nil {
		return nil, err
	}
	return t, t.eng.start(s, true)
}

// Trial returns a trial of an endpoint that has a device, among all others of its host: its tags and its swaps are
// the endpoint's own. Close it before the Link.
func (l *Link) Trial() (_ *Trial, err error) {
	calls, err := ebpf.LoadPinnedMap(filepath.Join(l.cfg.dir(), pinCalls), nil)
	if err != nil {
		return nil, fmt.Errorf("finding the programs of endpoint %s: %w", l.cfg.Endpoint, err)
	}
	defer calls.Close()
	l.eng.mu.Lock()
	spec := l.eng.spec
	l.eng.mu.Unlock()
	t := &Trial{eng: l.eng, link: true}
	if err := t.load(calls, spec.Identity()); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// load makes the programs that get the frames.
func (t *Trial) load(calls *ebpf.Map, id netpolicy.Identity) (err error) {
	for d := range t.run {
		if t.run[d], t.empty[d], err = t.pair(calls, d, untranslated(d, id)); err != nil {
			return err
		}
	}
	t.ports, err = ebpf.NewMap(&ebpf.MapSpec{Name: "ports", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return fmt.Errorf("making a map of ports: %w", err)
	}
	if err := t.ports.Put(uint32(0), firstPorts); err != nil {
		return fmt.Errorf("choosing a port: %w", err)
	}
	const egress = 0
	t.first, t.firstEmpty, err = t.pair(calls, egress, slices.Concat(untranslated(egress, id), otherPorts(t.ports)))
	return err
}

// pair makes two programs that begin with some instructions: one goes on to the endpoint's program, the other lets
// everything pass.
func (t *Trial) pair(calls *ebpf.Map, dir int, before asm.Instructions) (judging, empty *ebpf.Program, err error) {
	if judging, err = t.eng.entry(calls, dir, before...); err != nil {
		return nil, nil, err
	}
	empty, err = ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "empty", Type: ebpf.SchedCLS, License: "GPL", Instructions: append(before, asm.Mov.Imm(asm.R0, 0), asm.Return()),
	})
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("loading an empty program: %w", err), judging.Close())
	}
	return judging, empty, nil
}

// firstPorts are the ports before the first ones, as laid out in a frame: 1 << 8 of the guest, 443 of the peer.
var firstPorts = []byte{1, 0, 443 >> 8, 443 & 0xff}

// otherPorts sets the next ports in a frame. It adds 2 to the ports as one little-endian word: the guest's port
// counts, and carries into the peer's. The guest's is never 0, and the peer's is not 0 for the first eight million
// frames.
func otherPorts(ports *ebpf.Map) asm.Instructions {
	return store(portsAt,
		asm.LoadMapValue(asm.R7, ports.FD(), 0),
		asm.LoadMem(asm.R8, asm.R7, 0, asm.Word),
		asm.Add.Imm(asm.R8, 2),
		asm.StoreMem(asm.R7, 0, asm.R8, asm.Word),
		asm.StoreMem(asm.RFP, -4, asm.R8, asm.Word),
	)
}

// store writes four bytes that put leaves on the stack into a frame.
func store(at int32, put ...asm.Instruction) asm.Instructions {
	return slices.Concat(asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, put, asm.Instructions{
		asm.Mov.Imm(asm.R2, at),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, -4),
		asm.Mov.Imm(asm.R4, 4),
		asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Reg(asm.R1, asm.R6),
	})
}

// untranslated restores the original address in a frame. The kernel runs a program on one frame many times, and
// the second run would find an address that is already translated.
func untranslated(dir int, id netpolicy.Identity) asm.Instructions {
	address := netpolicy.TheWire.Guest4
	if dir == 1 {
		address = id.Address4
	}
	return store(addressAt[dir], asm.StoreImm(asm.RFP, -4, int64(int32(binary.NativeEndian.Uint32(address.AsSlice()))), asm.Word))
}

// Close frees the programs.
func (t *Trial) Close() error {
	var errs []error
	if !t.link {
		errs = append(errs, t.eng.close())
	}
	for d := range t.run {
		errs = append(errs, t.run[d].Close(), t.empty[d].Close())
	}
	return errors.Join(append(errs, t.first.Close(), t.firstEmpty.Close(), t.ports.Close())...)
}

// Swap replaces the policy, as Link.Swap does. It returns the time until the new table was filled.
func (t *Trial) Swap(s *netpolicy.Spec) (filled time.Duration, err error) {
	begin := time.Now()
	err = t.eng.swap(s, func() { filled = time.Since(begin) })
	return filled, err
}

// Judge has an IPv4 frame judged times times, one after another, as if each were new. It returns the average time
// of one run, by the kernel's clock and in whole nanoseconds, and whether the last frame passed. The time includes
// that of Empty.
func (t *Trial) Judge(d netpolicy.Direction, frame []byte, times int) (each time.Duration, passed bool, err error) {
	return benchmark(t.run[code(d)], frame, times)
}

// Empty is Judge with a program that lets everything pass: the cost of running any program.
func (t *Trial) Empty(d netpolicy.Direction, frame []byte, times int) (each time.Duration, err error) {
	each, _, err = benchmark(t.empty[code(d)], frame, times)
	return each, err
}

// JudgeFirst is Judge for a TCP or UDP frame from the guest, each time with other ports, so that each frame is the
// first of a new flow. The policy must allow them all. It returns how many flows were opened.
func (t *Trial) JudgeFirst(frame []byte, times int) (each time.Duration, opened uint64, err error) {
	before, err := t.opened()
	if err != nil {
		return 0, 0, err
	}
	if each, _, err = benchmark(t.first, frame, times); err != nil {
		return 0, 0, err
	}
	after, err := t.opened()
	return each, after - before, err
}

// EmptyFirst is JudgeFirst with a program that lets everything pass.
func (t *Trial) EmptyFirst(frame []byte, times int) (each time.Duration, err error) {
	each, _, err = benchmark(t.firstEmpty, frame, times)
	return each, err
}

// opened returns how many flows the guest has opened.
func (t *Trial) opened() (uint64, error) {
	u, err := flow.Usage(t.eng.shared.usages, t.eng.place.slot, 0)
	return u.Opened, err
}

func benchmark(p *ebpf.Program, frame []byte, times int) (time.Duration, bool, error) {
	action, each, err := p.Benchmark(frame, times, nil)
	if err != nil {
		return 0, false, fmt.Errorf("running a program: %w", err)
	}
	return each, action == 0, nil
}

// code returns the programs' number of a direction.
func code(d netpolicy.Direction) int { return max(0, slices.Index(netpolicy.Directions[:], d)) }

// Memory returns the kernel memory of the endpoint's own maps, table and programs, in bytes, by name. It is 0
// where the kernel does not say. It does not include shared objects, the device, or other kernel memory for it.
func (l *Link) Memory() (map[string]uint64, error) {
	e := l.eng
	out := map[string]uint64{}
	for name, m := range e.maps() {
		info, err := m.Info()
		if err != nil {
			return nil, fmt.Errorf("looking at the map %s: %w", name, err)
		}
		out[name], _ = info.Memlock()
	}
	for _, p := range e.entries {
		info, err := p.Info()
		if err != nil {
			return nil, fmt.Errorf("looking at a program: %w", err)
		}
		n, _ := info.Memlock()
		out["programs"] += n
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, t := range e.tables {
		out["table"] += uint64(t.rows * netpolicy.RowSize)
	}
	return out, nil
}
