package kvm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
	"golang.org/x/sys/unix"
)

// The sizes are those of the kernel's headers for x86-64.
func TestStructs_have_the_kernels_sizes(t *testing.T) {
	for _, tc := range []struct {
		name      string
		got, want uintptr
	}{
		{"kvm_regs", unsafe.Sizeof(gokvm.Regs{}), 144},
		{"kvm_sregs", unsafe.Sizeof(gokvm.Sregs{}), 312},
		{"kvm_sregs2", unsafe.Sizeof(gokvm.SRegs2{}), 320},
		{"kvm_lapic_state", unsafe.Sizeof(gokvm.LAPICState{}), 1024},
		{"kvm_vcpu_events", unsafe.Sizeof(gokvm.VCPUEvents{}), 64},
		{"kvm_debugregs", unsafe.Sizeof(gokvm.DebugRegs{}), 128},
		{"kvm_xcrs", unsafe.Sizeof(gokvm.XCRS{}), 392},
		{"kvm_mp_state", unsafe.Sizeof(gokvm.MPState{}), 4},
		{"kvm_irqchip", unsafe.Sizeof(gokvm.IRQChip{}), 520},
		{"kvm_pit_state2", unsafe.Sizeof(gokvm.PITState2{}), 112},
		{"kvm_clock_data", unsafe.Sizeof(gokvm.ClockData{}), 48},
		{"kvm_translation", unsafe.Sizeof(gokvm.Translation{}), 24},
		{"kvm_userspace_memory_region", unsafe.Sizeof(gokvm.UserspaceMemoryRegion{}), 32},
		{"kvm_cpuid_entry2", unsafe.Sizeof(CPUIDEntry{}), 40},
		{"kvm_msr_entry", unsafe.Sizeof(MSR{}), 16},
		{"kvm_irqfd", unsafe.Sizeof(irqfdArg{}), 32},
		{"kvm_ioeventfd", unsafe.Sizeof(ioeventfdArg{}), 64},
		{"kvm_enable_cap", unsafe.Sizeof(enableCapArg{}), 104},
	} {
		if tc.got != tc.want {
			t.Errorf("struct %s has %d bytes here, %d in the kernel", tc.name, tc.got, tc.want)
		}
	}
}

func TestOpen_path_says_why_there_is_no_KVM(t *testing.T) {
	if _, err := OpenPath(filepath.Join(t.TempDir(), "kvm")); !errors.Is(err, ErrNoKVM) {
		t.Errorf("missing device: got %v, want ErrNoKVM", err)
	}
	if _, err := OpenPath("/dev/null"); !errors.Is(err, ErrNoKVM) || !errors.Is(err, unix.ENOTTY) {
		t.Errorf("a device that is not KVM: got %v, want ErrNoKVM and what it answered", err)
	}
}

// guest is a VM with one vCPU in real mode and a page of code at 0x1000.
type guest struct {
	vm   *VM
	cpu  *VCPU
	mem  []byte
	code []byte
}

const codeAt = 0x1000

func newGuest(t *testing.T, code []byte) *guest {
	t.Helper()
	sys, err := Open()
	if errors.Is(err, ErrNoKVM) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sys.Close() })
	vm, err := sys.CreateVM()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { vm.Close() })
	if err := errors.Join(vm.SetTSSAddr(0xfffbd000), vm.SetIdentityMapAddr(0xfffbc000), vm.CreateIRQChip(), vm.CreatePIT2()); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	copy(mem[codeAt:], code)
	if err := vm.SetMemory(0, 0, uint64(len(mem)), uintptr(unsafe.Pointer(&mem[0])), 0); err != nil {
		t.Fatal(err)
	}
	cpu, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cpu.Close() })
	cpuid, err := sys.SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	if err := cpu.SetCPUID(cpuid); err != nil {
		t.Fatal(err)
	}
	return &guest{vm: vm, cpu: cpu, mem: mem, code: code}
}

func (g *guest) start(t *testing.T, ip uint64) {
	t.Helper()
	sregs, err := g.cpu.Sregs()
	if err != nil {
		t.Fatal(err)
	}
	sregs.CS.Base, sregs.CS.Selector = 0, 0
	if err := errors.Join(g.cpu.SetSregs(sregs), g.cpu.SetRegs(&Regs{RIP: ip, RAX: 0x41, RDX: 0x3f8, RFLAGS: 2})); err != nil {
		t.Fatal(err)
	}
}

// run runs the guest until KVM_RUN returns an exit.
func (g *guest) run(t *testing.T) uint32 {
	t.Helper()
	for {
		err := g.cpu.Run()
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return g.cpu.ExitReason()
	}
}

// out writes al to port dx and increments ax, without end.
var out = []byte{0xee, 0x40, 0xeb, 0xfc} // out dx,al; inc ax; jmp -4

func TestGuest_code_runs_and_its_state_moves_to_another_VM(t *testing.T) {
	g := newGuest(t, out)
	g.start(t, codeAt)
	var got []byte
	for len(got) < 3 {
		if r := g.run(t); r != ExitIO {
			t.Fatalf("exit reason %d, want KVM_EXIT_IO", r)
		}
		io, err := g.cpu.IO()
		if err != nil || !io.Out || io.Port != 0x3f8 || io.Size != 1 || io.Count != 1 {
			t.Fatalf("I/O exit %+v, %v", io, err)
		}
		got = append(got, io.Data...)
	}
	// Finish the instruction, so that the state is between two instructions.
	g.cpu.SetImmediateExit(true)
	if err := g.cpu.Run(); !errors.Is(err, unix.EINTR) {
		t.Fatalf("KVM_RUN with immediate exit: %v, want EINTR", err)
	}
	sys, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close()
	cpuid, err := sys.SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	index, err := sys.MSRIndexList()
	if err != nil {
		t.Fatal(err)
	}
	state, err := g.cpu.Export(nil, cpuid, index)
	if err != nil {
		t.Fatal(err)
	}
	h := newGuest(t, out)
	if _, err := h.cpu.Import(state, 0); err != nil {
		t.Fatal(err)
	}
	for len(got) < 6 {
		if r := h.run(t); r != ExitIO {
			t.Fatalf("exit reason %d after the move, want KVM_EXIT_IO", r)
		}
		io, err := h.cpu.IO()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, io.Data...)
	}
	if string(got) != "ABCDEF" {
		t.Fatalf("the guest wrote %q, want ABCDEF", got)
	}
	back, err := SavedCPUID(state)
	if err != nil || len(back) != len(cpuid) {
		t.Errorf("SavedCPUID: %d entries, %v; want %d", len(back), err, len(cpuid))
	}
}

func TestA_timer_that_is_put_off_gets_its_deadline_back(t *testing.T) {
	sys, err := Open()
	if errors.Is(err, ErrNoKVM) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close()
	cpuid, err := sys.SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	for i := range cpuid {
		if cpuid[i].Function == 1 {
			cpuid[i].ECX |= 1 << 24 // TSC deadline: KVM has it even if the CPU does not
		}
	}
	g := newGuest(t, out)
	if err := g.cpu.SetCPUID(cpuid); err != nil {
		t.Fatal(err)
	}
	g.start(t, codeAt)
	lapic, err := g.cpu.LAPIC(nil)
	if err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint32(lapic[0xf0:], 0x1ff)    // on
	binary.LittleEndian.PutUint32(lapic[0x320:], 0x40040) // TSC deadline, vector 0x40
	if err := g.cpu.SetLAPIC(lapic); err != nil {
		t.Fatal(err)
	}
	msr := func(c *VCPU, index uint32) uint64 {
		t.Helper()
		m, err := c.MSRs([]uint32{index})
		if err != nil || len(m) != 1 {
			t.Fatal(m, err)
		}
		return m[0].Value
	}
	const hour = 3600 * 4_000_000_000 // in cycles, or a little more
	deadline := msr(g.cpu, msrTSC) + hour
	if _, err := g.cpu.SetMSRs([]MSR{{Index: msrTSCDeadline, Value: deadline}}); err != nil {
		t.Fatal(err)
	}
	state, err := g.cpu.Export(nil, cpuid, []uint32{msrTSC, msrTSCDeadline})
	if err != nil {
		t.Fatal(err)
	}
	h := newGuest(t, out)
	if off, err := h.cpu.Import(state, hour/2); err != nil || off != (PutOff{}) || msr(h.cpu, msrTSCDeadline) != deadline {
		t.Errorf("a deadline after the quiet time: %+v, %v", off, err)
	}
	h = newGuest(t, out)
	off, err := h.cpu.Import(state, 2*hour)
	if err != nil {
		t.Fatal(err)
	}
	if now := msr(h.cpu, msrTSCDeadline); off.From != deadline || off.To != now || now < deadline+hour/2 {
		t.Errorf("a deadline within the quiet time, %d: %+v, and it is %d", deadline, off, now)
	}
	if err := h.cpu.Undo(off); err != nil {
		t.Fatal(err)
	}
	if now := msr(h.cpu, msrTSCDeadline); now != deadline {
		t.Errorf("afterwards it is %d, want %d", now, deadline)
	}
	if err := h.cpu.Undo(off); err != nil {
		t.Fatal(err)
	}
	if now := msr(h.cpu, msrTSCDeadline); now != deadline {
		t.Errorf("the deadline of the guest's own became %d", now)
	}
}

func TestState_of_a_VCPU_with_XSAVE_has_its_XCR0(t *testing.T) {
	g := newGuest(t, out)
	g.start(t, codeAt)
	xsave := []CPUIDEntry{{Function: 1, ECX: 1 << 26}}
	for name, cpuid := range map[string][]CPUIDEntry{"with XSAVE": xsave, "without": {{Function: 1, ECX: ^uint32(1 << 26)}}, "without leaf 1": nil} {
		state, err := g.cpu.Export(nil, cpuid, nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		rec, err := parseRecords(state)
		if err != nil {
			t.Fatal(err)
		}
		if name == "with XSAVE" && rec[tagXCRs] == nil {
			t.Errorf("%s: XCR0 is not in the state", name)
		}
		var cut []byte
		for tag, b := range rec {
			if b != nil && tag != tagXCRs {
				cut = record(cut, uint32(tag), b)
			}
		}
		_, err = newGuest(t, out).cpu.Import(cut, 0)
		if refused := err != nil && strings.Contains(err.Error(), "no XCR0"); refused != (name == "with XSAVE") || refused && !errors.Is(err, ErrState) {
			t.Errorf("%s: a state without XCR0: %v", name, err)
		}
	}
}

func TestImport_refuses_damaged_state(t *testing.T) {
	g := newGuest(t, out)
	g.start(t, codeAt)
	state, err := g.cpu.Export(nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string][]byte{
		"empty":           {},
		"truncated":       state[:len(state)-1],
		"a record twice":  append(bytes.Clone(state), state[:8]...),
		"unknown tag":     append(bytes.Clone(state), 99, 0, 0, 0, 0, 0, 0, 0),
		"length too long": append(bytes.Clone(state), 1, 0, 0, 0, 255, 255, 255, 255),
	} {
		if _, err := newGuest(t, out).cpu.Import(p, 0); !errors.Is(err, ErrState) {
			t.Errorf("%s: got %v, want ErrState", name, err)
		}
	}
}

func TestKick_brings_a_VCPU_out_of_an_endless_loop(t *testing.T) {
	g := newGuest(t, []byte{0xeb, 0xfe}) // jmp to itself
	g.start(t, codeAt)
	tid := make(chan int)
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		tid <- unix.Gettid()
		for {
			err := g.cpu.Run()
			if err != nil && !errors.Is(err, unix.EINTR) {
				done <- err
				return
			}
			if g.cpu.run[runImmediateExit] != 0 {
				done <- nil
				return
			}
		}
	}()
	id := <-tid
	time.Sleep(10 * time.Millisecond)
	g.cpu.SetImmediateExit(true)
	if err := Kick(id); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the vCPU did not leave KVM_RUN")
	}
}

func TestKicks_and_interrupts_bypass_user_space(t *testing.T) {
	// Real mode cannot reach above 1 MiB, so the doorbell is below it: an MMIO window at 0xf0000 outside of the
	// slot.
	g := newGuest(t, []byte{
		0xb8, 0x00, 0xf0, // mov ax, 0xf000
		0x8e, 0xd8, // mov ds, ax
		0x66, 0xc7, 0x06, 0x50, 0x00, 0x02, 0x00, 0x00, 0x00, // mov dword [0x50], 2
		0x66, 0xc7, 0x06, 0x50, 0x00, 0x03, 0x00, 0x00, 0x00, // mov dword [0x50], 3
	})
	// Shrink RAM so that 0xf0050 is not memory.
	if err := errors.Join(
		g.vm.SetMemory(0, 0, 0, 0, 0),
		g.vm.SetMemory(0, 0, 0xf0000, uintptr(unsafe.Pointer(&g.mem[0])), 0),
	); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := g.vm.IOEventFD(fd, 0xf0050, 2); err != nil {
		t.Fatal(err)
	}
	irq, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(irq)
	if err := g.vm.IRQFD(irq, 5); err != nil {
		t.Fatal(err)
	}
	g.start(t, codeAt)
	if r := g.run(t); r != ExitMMIO {
		t.Fatalf("exit reason %d, want KVM_EXIT_MMIO", r)
	}
	addr, p, write := g.cpu.MMIO()
	if addr != 0xf0050 || !write || !bytes.Equal(p, []byte{3, 0, 0, 0}) {
		t.Errorf("MMIO exit at %#x, write %v, data % x; want the write of 3, not that of 2", addr, write, p)
	}
	var count [8]byte
	if n, err := unix.Read(fd, count[:]); n != 8 || err != nil || count[0] != 1 {
		t.Errorf("ioeventfd read: %d bytes, count %d, %v", n, count[0], err)
	}
	if _, err := unix.Write(irq, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	// The interrupt request shows in the IRR of the first PIC.
	deadline := time.Now().Add(60 * time.Second)
	for {
		pic, err := g.vm.IRQChip(ChipPICMaster, nil)
		if err != nil {
			t.Fatal(err)
		}
		const lastIRR = 1 << 5
		if pic[1]&lastIRR != 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the irqfd did not raise line 5")
		}
		time.Sleep(time.Millisecond)
	}
}

func TestMSRs_that_cannot_be_read_are_left_out(t *testing.T) {
	g := newGuest(t, out)
	got, err := g.cpu.MSRs([]uint32{0x10, 0xdeadbeef, 0x174})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Index != 0x10 || got[1].Index != 0x174 {
		t.Errorf("got MSRs %v, want 0x10 and 0x174", got)
	}
}

func TestDirty_log_names_the_pages_that_the_guest_writes(t *testing.T) {
	g := newGuest(t, []byte{
		0xc6, 0x06, 0x00, 0x30, 0x07, // mov byte [0x3000], 7
		0xee, // out dx, al
	})
	hva := uintptr(unsafe.Pointer(&g.mem[0]))
	if err := errors.Join(
		g.vm.EnableCap(CapManualDirtyLog, DirtyLogManualProtect),
		g.vm.SetMemory(0, 0, uint64(len(g.mem)), hva, MemLogDirtyPages),
	); err != nil {
		t.Fatal(err)
	}
	g.start(t, codeAt)
	if r := g.run(t); r != ExitIO {
		t.Fatalf("exit reason %d", r)
	}
	bitmap := make([]uint64, len(g.mem)/4096/64)
	if err := g.vm.DirtyLog(0, bitmap); err != nil {
		t.Fatal(err)
	}
	if bitmap[0]&(1<<3) == 0 {
		t.Errorf("page 3 is not in the dirty log %#x", bitmap[0])
	}
	if err := g.vm.ClearDirtyLog(0, 0, uint32(len(g.mem)/4096), bitmap); err != nil {
		t.Fatal(err)
	}
	if err := g.vm.DirtyLog(0, bitmap); err != nil {
		t.Fatal(err)
	}
	if bitmap[0]&(1<<3) != 0 {
		t.Errorf("page 3 is dirty after it was cleared")
	}
}

func TestStats_count_exits(t *testing.T) {
	g := newGuest(t, out)
	g.start(t, codeAt)
	before, err := g.cpu.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if r := g.run(t); r != ExitIO {
		t.Fatalf("exit reason %d, want KVM_EXIT_IO", r)
	}
	after, err := g.cpu.Stats()
	if err != nil {
		t.Fatal(err)
	}
	t.Log(after)
	if got := after["exits"] - before["exits"]; got == 0 {
		t.Errorf("no exit was counted, of %d before", before["exits"])
	}
}
