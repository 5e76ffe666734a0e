package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm"
)

// The counts of a row. Unlike times, they hardly depend on what else the machine does.
const (
	countCalls    = "syscalls" // system calls of the host's processes, without waits
	countWaits    = "waits"    // those with which threads wait for each other: more if it takes longer, see waitCalls
	countSyncs    = "syncs"    // those among syscalls that wait for the disk: see syncCalls
	countExits    = "exits"    // exits of guests to KVM
	countEmulated = "emulated" // instructions of guests that KVM has interpreted
)

// CountNames are the names of counts, in the order of columns.
var CountNames = []string{countCalls, countWaits, countSyncs, countExits, countEmulated}

// Where the kernel's programs count.
const callsAt, waitsAt, syncsAt, exitsAt, emulatedAt = 0, 1, 2, 3, 4

// waitCalls are those of Go's scheduler (package runtime): how many a program makes is a matter of time.
var waitCalls = []int32{
	unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_EPOLL_PWAIT, unix.SYS_SCHED_YIELD, unix.SYS_TGKILL, unix.SYS_GETPID, unix.SYS_RT_SIGRETURN,
}

var syncCalls = []int32{unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_SYNC_FILE_RANGE, unix.SYS_SYNCFS}

// maxCounted bounds the processes of a benchmark, including those that have ended.
const maxCounted = 1 << 16

// Layout of the map of counts: the counts of this process, those of the others, and how many processes were not
// followed.
const (
	countSize  = 8
	places     = 8 // a power of two
	ofProcess  = places * countSize
	ofOthers   = ofProcess
	lostAt     = 2 * ofProcess
	countsSize = lostAt + countSize
)

// counter counts what this process and all those that it has started since ask of the kernel, and what their guests
// ask of KVM. Programs at the kernel's tracepoints count. They follow processes from parent to child, so it does not
// matter whether a process is still a child of this one.
//
// Meanwhile a system call and an exit take up to a microsecond more: figures get worse by that, never better. The
// exception is a KVM that interprets the guest's kernel: there each instruction would. On such a host instructions are
// counted in the runs that do not count for anything else.
type counter struct {
	tracked, counts *ebpf.Map
	memory          *ebpf.Memory
	programs        []*ebpf.Program
	links           []link.Link

	// emulated is put in place for some runs, if interpreted is set.
	emulated    *ebpf.Program
	emulating   link.Link
	interpreted bool

	// missing says why a count is missing, by name.
	missing map[string]string
}

// tally is what has been counted at some time, or between two times.
type tally struct {
	process [2][places]uint64 // of this process, and of the others
	// timed means that the time of the run counts.
	timed bool
}

// counting starts to count. What the host cannot count is missing from the rows, which say why. Processes that exist
// already do not count.
func counting() *counter {
	c := &counter{missing: map[string]string{}, interpreted: vmm.SoftKVM()}
	if err := c.start(); err != nil {
		c.lack(err)
		c.close()
	}
	return c
}

func (c *counter) start() (err error) {
	pid, tgid, err := taskFields()
	if err != nil {
		return err
	}
	if c.tracked, err = ebpf.NewMap(&ebpf.MapSpec{Name: "bench_processes", Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: maxCounted}); err != nil {
		return fmt.Errorf("making a map of processes: %w", err)
	}
	if c.counts, err = ebpf.NewMap(&ebpf.MapSpec{
		Name: "bench_counts", Type: ebpf.Array, KeySize: 4, ValueSize: countsSize, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE,
	}); err != nil {
		return fmt.Errorf("making a map of counts: %w", err)
	}
	// Reading it takes no system call.
	if c.memory, err = c.counts.Memory(); err != nil {
		return fmt.Errorf("mapping the counts: %w", err)
	}
	if err := c.attach("sched_process_fork", c.follow(pid, tgid)); err != nil {
		return err
	}
	if err := c.trackSelf(); err != nil {
		return err
	}
	if err := c.attach("sys_enter", c.countCalls()); err != nil {
		return err
	}
	if err := c.attach("kvm_exit", c.count(nil, exitsAt)); err != nil {
		c.missing[countExits] = err.Error()
	}
	// The second argument of kvm_emulate_insn says that KVM could not.
	done := asm.Instructions{asm.LoadMem(asm.R1, asm.R6, 8, asm.DWord), asm.And.Imm(asm.R1, 0xff), asm.JNE.Imm(asm.R1, 0, "exit")}
	if c.emulated, err = c.load("kvm_emulate_insn", c.count(done, emulatedAt)); err == nil && !c.interpreted {
		err = c.emulate(true)
	}
	if err != nil {
		c.missing[countEmulated] = err.Error()
	}
	return nil
}

// taskFields returns the offsets of two fields of the kernel's struct task_struct.
func taskFields() (pid, tgid uint32, err error) {
	fail := func(err error) (uint32, uint32, error) {
		return 0, 0, fmt.Errorf("looking for the ids of processes in the kernel: %w: it needs CONFIG_DEBUG_INFO_BTF", err)
	}
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return fail(err)
	}
	var task *btf.Struct
	if err := spec.TypeByName("task_struct", &task); err != nil {
		return fail(err)
	}
	at := map[string]uint32{}
	for _, m := range task.Members {
		at[m.Name] = m.Offset.Bytes()
	}
	if at["pid"] == 0 || at["tgid"] == 0 {
		return fail(errors.New("struct task_struct has no pid or no tgid"))
	}
	return at["pid"], at["tgid"], nil
}

func (c *counter) load(at string, insns asm.Instructions) (*ebpf.Program, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "bench_" + at[:min(len(at), 9)], Type: ebpf.RawTracepoint, License: "GPL", Instructions: insns})
	if err != nil {
		return nil, fmt.Errorf("loading a program that counts: %w", err)
	}
	c.programs = append(c.programs, p)
	return p, nil
}

func (c *counter) attach(at string, insns asm.Instructions) error {
	p, err := c.load(at, insns)
	if err != nil {
		return err
	}
	l, err := attachTo(at, p)
	if err == nil {
		c.links = append(c.links, l)
	}
	return err
}

func attachTo(at string, p *ebpf.Program) (link.Link, error) {
	l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: at, Program: p})
	if err != nil {
		return nil, fmt.Errorf("counting at the kernel's tracepoint %s: %w", at, err)
	}
	return l, nil
}

// emulate starts or ends the count of instructions.
func (c *counter) emulate(on bool) (err error) {
	switch {
	case on && c.emulating == nil:
		c.emulating, err = attachTo("kvm_emulate_insn", c.emulated)
	case !on && c.emulating != nil:
		err = c.emulating.Close()
		c.emulating = nil
	}
	return err
}

// trackSelf enters this process. The kernel says its id, which may differ from what this process sees.
func (c *counter) trackSelf() error {
	p, err := c.load("self", asm.Instructions{
		asm.FnGetCurrentPidTgid.Call(), asm.RSh.Imm(asm.R0, 32), asm.Return(),
	})
	if err != nil {
		return err
	}
	id, err := p.Run(&ebpf.RunOptions{})
	if err == nil {
		err = c.tracked.Put(id, uint32(0))
	}
	if err != nil {
		return fmt.Errorf("asking for the id of this process: %w: it needs Linux 5.10", err)
	}
	return nil
}

// lookup finds the running process: R0 points to its value, or control goes on at exit. R6 becomes the context.
func (c *counter) lookup() asm.Instructions {
	return asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.FnGetCurrentPidTgid.Call(),
		asm.RSh.Imm(asm.R0, 32),
		asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
		asm.LoadMapPtr(asm.R1, c.tracked.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
	}
}

var exit = asm.Instructions{asm.Mov.Imm(asm.R0, 0).WithSymbol("exit"), asm.Return()}

// group makes R7 point to the counts of the running process.
func (c *counter) group() asm.Instructions {
	return append(c.lookup(),
		asm.JEq.Imm(asm.R0, 0, "exit"),
		asm.LoadMapValue(asm.R7, c.counts.FD(), 0),
		asm.LoadMem(asm.R0, asm.R0, 0, asm.Word),
		asm.And.Imm(asm.R0, ofOthers),
		asm.Add.Reg(asm.R7, asm.R0),
	)
}

func addOne(at int16) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R1, 1), asm.AddAtomic.Mem(asm.R7, asm.R1, asm.DWord, at*countSize)}
}

// count counts each event that passes the condition, which has the context in R6.
func (c *counter) count(condition asm.Instructions, at int16) asm.Instructions {
	return slices.Concat(c.group(), condition, addOne(at), exit)
}

// countCalls counts system calls: the second argument of sys_enter is the number.
func (c *counter) countCalls() asm.Instructions {
	insns := append(c.group(), asm.LoadMem(asm.R2, asm.R6, 8, asm.DWord))
	for _, nr := range waitCalls {
		insns = append(insns, asm.JEq.Imm(asm.R2, nr, "wait"))
	}
	insns = append(insns, addOne(callsAt)...)
	for _, nr := range syncCalls {
		insns = append(insns, asm.JEq.Imm(asm.R2, nr, "sync"))
	}
	sync, wait := addOne(syncsAt), addOne(waitsAt)
	sync[0], wait[0] = sync[0].WithSymbol("sync"), wait[0].WithSymbol("wait")
	end := asm.Instructions{asm.Ja.Label("exit")}
	return slices.Concat(insns, end, sync, end, wait, exit)
}

// follow enters the children of processes that are followed. The second argument of sched_process_fork is the new
// task, which has not run yet. An id may have been that of another process before.
func (c *counter) follow(pid, tgid uint32) asm.Instructions {
	read := func(to int32, at uint32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.RFP),
			asm.Add.Imm(asm.R1, to),
			asm.Mov.Imm(asm.R2, 4),
			asm.LoadMem(asm.R3, asm.R6, 8, asm.DWord),
			asm.Add.Imm(asm.R3, int32(at)),
			asm.FnProbeReadKernel.Call(),
			asm.JNE.Imm(asm.R0, 0, "exit"),
		}
	}
	const childTgid, childPid, value = -8, -12, -16
	key := asm.Instructions{asm.LoadMapPtr(asm.R1, c.tracked.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, childTgid)}
	other := slices.Clone(key)
	other[0] = other[0].WithSymbol("other")
	return slices.Concat(
		asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, read(childTgid, tgid), read(childPid, pid),
		asm.Instructions{
			asm.LoadMem(asm.R1, asm.RFP, childTgid, asm.Word),
			asm.LoadMem(asm.R2, asm.RFP, childPid, asm.Word),
			asm.JNE.Reg(asm.R1, asm.R2, "exit"), // a thread
			asm.Mov.Reg(asm.R1, asm.R6),
		},
		c.lookup(),
		asm.Instructions{asm.JEq.Imm(asm.R0, 0, "other"), asm.StoreImm(asm.RFP, value, ofOthers, asm.Word)},
		key,
		asm.Instructions{
			asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, value), asm.Mov.Imm(asm.R4, int32(ebpf.UpdateAny)),
			asm.FnMapUpdateElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "exit"),
			asm.LoadMapValue(asm.R7, c.counts.FD(), lostAt),
		},
		addOne(0), asm.Instructions{asm.Ja.Label("exit")},
		other, asm.Instructions{asm.FnMapDeleteElem.Call()}, exit,
	)
}

// now returns what has been counted so far.
func (c *counter) now() (t tally) {
	if c == nil || c.memory == nil {
		return t
	}
	var b [countsSize]byte
	if _, err := c.memory.ReadAt(b[:], 0); err != nil {
		c.lack(fmt.Errorf("reading the counts: %w", err))
		return t
	}
	at := func(off int) uint64 { return binary.NativeEndian.Uint64(b[off:]) }
	for p := range t.process {
		for k := range t.process[p] {
			t.process[p][k] = at(p*ofProcess + k*countSize)
		}
	}
	if n := at(lostAt); n > 0 {
		c.lack(fmt.Errorf("there were more than %d processes", maxCounted))
	}
	return t
}

// lack says why everything is missing.
func (c *counter) lack(err error) {
	for _, name := range CountNames {
		c.missing[name] = err.Error()
	}
}

// begin begins a run, whose time counts if timed is set.
func (c *counter) begin(timed bool) tally {
	if c != nil && c.interpreted && c.emulated != nil {
		if err := c.emulate(!timed); err != nil {
			c.missing[countEmulated] = err.Error()
		}
	}
	t := c.now()
	t.timed = timed
	return t
}

// since returns what a run has counted.
func (c *counter) since(begin tally) tally {
	t := c.now()
	for p := range t.process {
		for k := range t.process[p] {
			t.process[p][k] -= begin.process[p][k]
		}
	}
	t.timed = begin.timed
	return t
}

// counted records the counts of a run. What this process did counts only with own: it may just be the caller.
func (s *series) counted(c *counter, t tally, own bool) {
	if c == nil {
		return
	}
	for name, n := range t.by(c, own) {
		s.counts[name] = append(s.counts[name], n)
	}
	s.uncounted = maps.Clone(c.missing)
	if c.interpreted && c.missing[countEmulated] == "" && s.counts[countEmulated] == nil {
		if s.uncounted == nil {
			s.uncounted = map[string]string{}
		}
		s.uncounted[countEmulated] = "on a KVM that interprets they are counted in warm-up runs, and there was none"
	}
}

// by returns the counts of a run by name, as far as they count.
func (t tally) by(c *counter, own bool) map[string]float64 {
	out := map[string]float64{}
	for k, name := range CountNames {
		if inWarmup := name == countEmulated && c.interpreted; t.timed == inWarmup || c.missing[name] != "" {
			continue
		}
		n := t.process[1][k]
		if own {
			n += t.process[0][k]
		}
		out[name] = float64(n)
	}
	return out
}

// medianCounts returns the median of each count, the lower one of two, and why others are missing.
func (s *series) medianCounts() (counts map[string]float64, missing map[string]string) {
	for name, values := range s.counts {
		if s.uncounted[name] == "" {
			all := slices.Sorted(slices.Values(values))
			if counts == nil {
				counts = map[string]float64{}
			}
			counts[name] = all[(len(all)-1)/2]
		}
	}
	return counts, s.uncounted
}

// close ends the counting.
func (c *counter) close() {
	for _, l := range append(c.links, c.emulating) {
		if l != nil {
			_ = l.Close()
		}
	}
	for _, p := range c.programs {
		_ = p.Close()
	}
	for _, m := range []*ebpf.Map{c.tracked, c.counts} {
		_ = m.Close() // nil is none
	}
	c.links, c.emulating, c.emulated, c.programs, c.memory = nil, nil, nil, nil, nil
}
