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

// Trial is an endpoint without a device: its programs get frames one after another in the kernel (BPF_PROG_RUN), so
// that what they cost can be measured. Its programs are its own, and nothing is pinned; or it is that of a Link. Its
// methods may be called from any goroutine, but for Close, which must be the last.
type Trial struct {
	eng   *engine
	link  bool             // the engine is a Link's
	run   [2]*ebpf.Program // by direction
	empty [2]*ebpf.Program
	// The same on egress, with frames of which each has other ports; the one element of ports is the last ones.
	first, firstEmpty *ebpf.Program
	ports             *ebpf.Map
}

// portsAt is where a frame of TCP or UDP over IPv4 has its ports.
const portsAt = 14 + 20

// Where an IPv4 packet has the address that is translated, by direction: its source on
// egress, its destination on ingress.
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

// Trial is a trial of an endpoint that has a device, beside all others of its host: what it is told of, and its swaps,
// are the endpoint's own. It ends before the Link does.
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

// load makes the programs that frames are given to.
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

// pair is a program that goes on with the endpoint's after some instructions, and one that lets everything pass after
// them.
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

// firstPorts are the ports before the first ones, as they lie in a frame: 1 << 8 of the guest's, 443 of the peer's.
var firstPorts = []byte{1, 0, 443 >> 8, 443 & 0xff}

// otherPorts gives a frame the ports after the last ones: two more for the guest in little-endian order, and from there
// on to the peer's. The guest's is never 0, and the peer's not for the first eight million frames.
func otherPorts(ports *ebpf.Map) asm.Instructions {
	return store(portsAt,
		asm.LoadMapValue(asm.R7, ports.FD(), 0),
		asm.LoadMem(asm.R8, asm.R7, 0, asm.Word),
		asm.Add.Imm(asm.R8, 2),
		asm.StoreMem(asm.R7, 0, asm.R8, asm.Word),
		asm.StoreMem(asm.RFP, -4, asm.R8, asm.Word),
	)
}

// store writes into a frame the four bytes that some instructions put on the stack.
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

// untranslated gives a frame the address again that it came with. The kernel runs a
// program on one frame many times, and would have the second run find an address that has
// been translated.
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

// Swap replaces the policy, as Link.Swap does, and says how much of the time went by
// until the new table was filled.
func (t *Trial) Swap(s *netpolicy.Spec) (filled time.Duration, err error) {
	begin := time.Now()
	err = t.eng.swap(s, func() { filled = time.Since(begin) })
	return filled, err
}

// Judge has a frame of IPv4 judged so many times, one after another, as if each were
// new. It says how long one took on average, by the kernel's clock and in whole nanoseconds, and whether the last
// passed. The time includes what Empty takes.
func (t *Trial) Judge(d netpolicy.Direction, frame []byte, times int) (each time.Duration, passed bool, err error) {
	return benchmark(t.run[code(d)], frame, times)
}

// Empty is Judge by a program that lets everything pass: the cost of running any.
func (t *Trial) Empty(d netpolicy.Direction, frame []byte, times int) (each time.Duration, err error) {
	each, _, err = benchmark(t.empty[code(d)], frame, times)
	return each, err
}

// JudgeFirst is Judge for a frame of TCP or UDP that the guest sends, each time with other ports, so that each is the
// first of a flow that was not there. The policy has to allow them all. It says how many flows were opened.
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

// EmptyFirst is JudgeFirst by a program that lets everything pass.
func (t *Trial) EmptyFirst(frame []byte, times int) (each time.Duration, err error) {
	each, _, err = benchmark(t.firstEmpty, frame, times)
	return each, err
}

// opened is how many flows the guest has opened.
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

// code is the number by which the programs know a direction.
func code(d netpolicy.Direction) int { return max(0, slices.Index(netpolicy.Directions[:], d)) }

// Memory is the kernel memory of what is the endpoint's own, in bytes, by its name: maps, the table, and programs. It
// is 0 where the kernel does not say. What endpoints share, the device, and what else the kernel keeps for it are not
// in it.
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
