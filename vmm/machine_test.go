package vmm

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The tests' guests are programs of a few bytes. They start where a kernel would, in 64-bit mode.
const codeAt = 0x1000000

func program(t testing.TB, code ...byte) string {
	t.Helper()
	var b bytes.Buffer
	h := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: 1, Entry: codeAt,
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = 2, 1, 1
	if err := errors.Join(
		binary.Write(&b, binary.LittleEndian, h),
		binary.Write(&b, binary.LittleEndian, elf.Prog64{
			Type: uint32(elf.PT_LOAD), Flags: 7, Off: 120, Vaddr: codeAt, Paddr: codeAt,
			Filesz: uint64(len(code)), Memsz: 1 << 20, Align: 4096,
		})); err != nil {
		t.Fatal(err)
	}
	b.Write(code)
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func needKVM(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a guest: not in short mode")
	}
	sys, err := kvm.Open()
	if err == nil {
		sys.Close()
		return
	}
	if !errors.Is(err, kvm.ErrNoKVM) {
		t.Fatal(err)
	}
	t.Skip(err)
}

// testConfig is what a test asks of a machine. It gets one vCPU unless VCPUs asks for more.
type testConfig struct {
	VCPUs      int
	TrackDirty bool
	Devices    []Device
	Console    io.Writer
	Symbolize  Symbolizer
}

// with makes the machine.
func (c testConfig) with(mem *guestmem.Memory) (*Machine, error) {
	// For most devices, the first slot has too many doorbells or just enough. The second has none, and the others
	// are not known ahead.
	prebuilt, err := NewPrebuilt(PrebuiltConfig{VCPUs: max(c.VCPUs, 1), Memory: mem, TrackDirty: c.TrackDirty, Queues: []int{2, 0}})
	if err != nil {
		return nil, err
	}
	return New(prebuilt, Config{Devices: c.Devices, Console: c.Console, Symbolize: c.Symbolize})
}

// newMachine makes a machine that the test closes at its end.
func newMachine(t *testing.T, cfg testConfig) *Machine {
	t.Helper()
	return newMachineOf(t, cfg, 64<<20)
}

// newMachineOf makes a machine with this many bytes of RAM.
func newMachineOf(t *testing.T, cfg testConfig, ram uint64) *Machine {
	t.Helper()
	needKVM(t)
	mem, err := guestmem.New(ram)
	if err != nil {
		t.Fatal(err)
	}
	m, err := cfg.with(mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), mem.Close()); err != nil {
			t.Error(err)
		}
	})
	return m
}

func start(t *testing.T, m *Machine, code ...byte) {
	t.Helper()
	if err := m.Boot(BootOptions{Kernel: program(t, code...)}); err != nil {
		t.Fatal(err)
	}
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
}

// out8 returns code that writes a byte to a port.
func out8(port uint16, v byte) []byte {
	return []byte{0x66, 0xba, byte(port), byte(port >> 8), 0xb0, v, 0xee} // mov dx,port; mov al,v; out dx,al
}

var loop = []byte{0xeb, 0xfe} // jmp to itself

func TestEnds_of_a_guest_are_told_apart(t *testing.T) {
	soft := SoftKVM()
	unknown := []byte{0x0f, 0xc7, 0x0d, 0, 0, 0, 0} // cmpxchg8b of its own bytes, harmless
	if soft {
		unknown = []byte{0xcc} // int3, which an interpreting host does not know
	}
	for _, tc := range []struct {
		name   string
		code   []byte
		want   ExitReason
		detail string
		skip   bool
	}{
		{name: "keyboard controller pulses reset", code: append(out8(0x64, 0xfe), loop...), want: Rebooted},
		{name: "ACPI reset register", code: append(out8(0x600, 1), loop...), want: Rebooted},
		{name: "ACPI sleep control to S5", code: append(out8(0x604, 5<<2|1<<5), loop...), want: PoweredOff},
		{name: "pvpanic", code: append(out8(0x505, 1), loop...), want: Panicked},
		{
			name: "exception without a handler",
			// lidt of six zero bytes; ud2
			code: []byte{0x0f, 0x01, 0x1c, 0x25, 0, 0, 0, 1, 0x0f, 0x0b}, want: TripleFault, detail: "exception",
		},
		{
			name: "instruction that KVM does not know", code: unknown, want: InternalError,
			detail: "RIP 0x1000000 (here+0x0)", skip: !soft,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			needKVM(t)
			if tc.skip {
				t.Skip("only a KVM without hardware virtualisation lacks instructions")
			}
			m := newMachine(t, testConfig{Symbolize: func(a uint64) (string, uint64, bool) { return "here", a - codeAt, a >= codeAt }})
			start(t, m, tc.code...)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			x, err := m.Wait(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if x.Reason != tc.want || !strings.Contains(x.Detail, tc.detail) {
				t.Errorf("ended as %v, want %s with %q", x, tc.want, tc.detail)
			}
		})
	}
}

func TestA_loop_with_interrupts_off_is_reported(t *testing.T) {
	m := newMachine(t, testConfig{})
	m.watchInterval = 20 * time.Millisecond
	start(t, m, append([]byte{0xfa}, loop...)...) // cli
	deadline := time.Now().Add(2 * time.Minute)
	for !m.Health().Hung {
		if time.Now().After(deadline) {
			t.Fatal("the hang was not noticed")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if h := m.Health(); !strings.Contains(h.Detail, "interrupts off") || !strings.Contains(h.Detail, "0x1000001") {
		t.Errorf("report %q does not say what and where", h.Detail)
	}
}

// ticking takes a timer's interrupts. It is ready for them 6% of the time, at no shorter stretch: a KVM that
// interprets looks for interrupts once in a thousand instructions.
var ticking = []byte{
	0xfa,                                     // cli
	0x48, 0xc7, 0xc4, 0x00, 0x00, 0x10, 0x02, // mov rsp,0x2100000
	0x48, 0xc7, 0xc3, 0x00, 0x04, 0x00, 0x02, // mov rbx,0x2000400: gate 0x40 of the IDT
	0x48, 0xb8, 0x80, 0x00, 0x10, 0x00, 0x00, 0x8e, 0x00, 0x01, // mov rax: interrupt gate, 0x10:codeAt+0x80
	0x48, 0x89, 0x03, // mov [rbx],rax
	0x48, 0xc7, 0x43, 0x08, 0x00, 0x00, 0x00, 0x00, // mov qword [rbx+8],0
	0x0f, 0x01, 0x1d, 0x46, 0x00, 0x00, 0x00, // lidt [rip+0x46]
	0xb8, 0x00, 0x00, 0xe0, 0xfe, // mov eax,0xfee00000: the local APIC
	0x48, 0x89, 0xc3, // mov rbx,rax
	0xc7, 0x83, 0xf0, 0x00, 0x00, 0x00, 0xff, 0x01, 0x00, 0x00, // spurious vector: 0x1ff, on
	0xc7, 0x83, 0x20, 0x03, 0x00, 0x00, 0x40, 0x00, 0x02, 0x00, // timer: periodic, vector 0x40
	0xc7, 0x83, 0xe0, 0x03, 0x00, 0x00, 0x0b, 0x00, 0x00, 0x00, // divisor 1
	0xc7, 0x83, 0x80, 0x03, 0x00, 0x00, 0x40, 0x42, 0x0f, 0x00, // a million of 1 ns
	0xfb,                         // sti
	0xb9, 0xb8, 0x0b, 0x00, 0x00, // mov ecx,3000
	0xff, 0xc9, 0x75, 0xfc, // dec ecx; jnz to it
	0xfa,                         // cli
	0xb9, 0x50, 0xc3, 0x00, 0x00, // mov ecx,50000
	0xff, 0xc9, 0x75, 0xfc, // dec ecx; jnz to it
	0xeb, 0xea, // jmp to the sti
	0xff, 0x0f, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, // IDT: at 0x2000000
	0, 0, 0, 0, 0,
	0xc7, 0x83, 0xb0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, // end of interrupt
	0x48, 0xcf, // iretq
}

func TestA_guest_that_takes_interrupts_is_not_hung(t *testing.T) {
	m := newMachine(t, testConfig{})
	m.watchInterval = 200 * time.Millisecond // a busy machine may delay interrupts for some of these
	start(t, m, ticking...)
	var taken uint64
	for deadline := time.Now().Add(2 * time.Minute); taken < 100; time.Sleep(m.watchInterval) {
		if h := m.Health(); h.Hung {
			t.Fatalf("reported as hung after %d interrupts: %s", taken, h.Detail)
		}
		if s := m.look(m.cpus[0], false); s != nil {
			taken = s.taken
		}
		if time.Now().After(deadline) {
			if os.Getenv("CI") != "" || taken > 0 {
				t.Fatalf("the guest has taken %d interrupts", taken)
			}
			t.Skip("this KVM does not count interrupts, or its CPU delivers them")
		}
	}
	t.Logf("%d interrupts", taken)
}

func TestA_halted_guest_is_not_hung(t *testing.T) {
	m := newMachine(t, testConfig{})
	m.watchInterval = 10 * time.Millisecond
	start(t, m, 0xfa, 0xf4) // cli; hlt
	time.Sleep(500 * time.Millisecond)
	if h := m.Health(); h.Hung {
		t.Errorf("reported as hung: %s", h.Detail)
	}
}

func TestFacts_are_told_while_the_guest_halts(t *testing.T) {
	m := newMachine(t, testConfig{})
	start(t, m, 0xfa, 0xf4) // cli; hlt
	if err := m.WaitEntry(t.Context()); err != nil {
		t.Fatal(err)
	}
	told := make(chan HostFacts)
	go func() { told <- m.Facts() }()
	select {
	case f := <-told:
		if f.Arch == "" || len(f.CPUID) == 0 {
			t.Errorf("facts %+v", f)
		}
	case <-time.After(time.Minute):
		// Closing the machine releases the vCPU, and with it the goroutine.
		t.Error("no facts while the vCPU is in the guest")
		go func() { <-told }()
	}
}

// counting increments a counter in memory without end: mov rbx,0x2000000; inc qword [rbx]; jmp
var counting = []byte{0x48, 0xc7, 0xc3, 0, 0, 0, 2, 0x48, 0xff, 0x03, 0xeb, 0xfb}

const counterAt = 0x2000000

func counter(t *testing.T, m *Machine) uint64 {
	t.Helper()
	var b [8]byte
	if err := m.Memory().Read(counterAt, b[:]); err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b[:])
}

func waitCount(t *testing.T, m *Machine, above uint64) uint64 {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		if n := counter(t, m); n > above {
			return n
		}
		if time.Now().After(deadline) {
			t.Fatal("the guest does not run")
		}
		time.Sleep(time.Millisecond)
	}
}

func TestPause_stops_the_guest_and_resume_lets_it_go_on(t *testing.T) {
	m := newMachine(t, testConfig{VCPUs: 2})
	start(t, m, counting...)
	var last uint64
	for range 20 {
		last = waitCount(t, m, last)
		if err := errors.Join(m.Pause(t.Context()), m.Pause(t.Context())); err != nil {
			t.Fatal(err)
		}
		before := counter(t, m)
		time.Sleep(2 * time.Millisecond)
		if after := counter(t, m); after != before {
			t.Fatalf("the paused guest counted from %d to %d", before, after)
		}
		if err := m.Resume(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestState_moves_to_another_machine(t *testing.T) {
	devs := func() []Device { return []Device{{Name: "rng", Device: rng.New(rng.Options{})}} }
	a := newMachine(t, testConfig{VCPUs: 2, Devices: devs()})
	start(t, a, counting...)
	waitCount(t, a, 10)
	if _, err := a.Export(); !errors.Is(err, ErrNotPaused) {
		t.Errorf("exporting a running machine: got %v, want ErrNotPaused", err)
	}
	if err := a.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	states, err := a.Export()
	if err != nil {
		t.Fatal(err)
	}
	b := newMachine(t, testConfig{VCPUs: 2, Devices: devs()})
	page := make([]byte, 1<<20)
	for gpa := guestmem.GPA(0); gpa < 64<<20; gpa += 1 << 20 {
		if err := errors.Join(a.Memory().Read(gpa, page), b.Memory().Write(gpa, page)); err != nil {
			t.Fatal(err)
		}
	}
	before := counter(t, a)
	if err := b.Import(states); err != nil {
		t.Fatal(err)
	}
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	waitCount(t, b, before+10)
	if got := counter(t, a); got != before {
		t.Errorf("the machine that was saved counted on to %d", got)
	}
	if err := CheckFacts(a.Facts()); err != nil {
		t.Errorf("the host is foreign to itself: %v", err)
	}
}

func TestImport_refuses_what_does_not_fit(t *testing.T) {
	devs := []Device{{Name: "rng", Device: rng.New(rng.Options{})}}
	a := newMachine(t, testConfig{Devices: devs})
	start(t, a, counting...)
	if err := a.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	states, err := a.Export()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		vcpus  int
		states []State
	}{
		"a missing vCPU":     {1, without(states, "vcpu/0")},
		"a missing device":   {1, without(states, "device/rng")},
		"a part twice":       {1, append(without(states, ""), states[0])},
		"an unknown part":    {1, append(without(states, ""), State{Name: "device/other"})},
		"another vCPU count": {2, states},
	} {
		b := newMachine(t, testConfig{VCPUs: tc.vcpus, Devices: []Device{{Name: "rng", Device: rng.New(rng.Options{})}}})
		if err := b.Import(tc.states); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestImpossible_machines_are_refused(t *testing.T) {
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	for _, n := range []int{-1, 0, 9} {
		if _, err := NewPrebuilt(PrebuiltConfig{VCPUs: n, Memory: mem}); !errors.Is(err, ErrConfig) {
			t.Errorf("%d vCPUs: got %v, want ErrConfig", n, err)
		}
	}
	if _, err := NewPrebuilt(PrebuiltConfig{VCPUs: 1}); !errors.Is(err, ErrConfig) {
		t.Errorf("no memory: got %v, want ErrConfig", err)
	}
	if _, err := (testConfig{Devices: make([]Device, MaxDevices+1)}).with(mem); !errors.Is(err, ErrConfig) {
		t.Errorf("too many devices: got %v, want ErrConfig", err)
	}
	if err := CheckHostMemory(1 << 60); !errors.Is(err, ErrHostMemory) {
		t.Errorf("an exbibyte of RAM: got %v, want ErrHostMemory", err)
	}
}

func TestFeatures_that_this_CPU_lacks_make_a_snapshot_foreign(t *testing.T) {
	needKVM(t)
	sys, err := kvm.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close()
	have, err := sys.SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	saved := append([]kvm.CPUIDEntry(nil), have...)
	for i := range saved {
		if saved[i].Function == 0x80000001 {
			saved[i].EDX = ^uint32(0)
		}
	}
	if err := compareCPUID(saved, have); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "80000001:EDX") {
		t.Errorf("got %v, want ErrForeign for 80000001:EDX", err)
	}
	other := append([]kvm.CPUIDEntry(nil), have...)
	for i := range other {
		if other[i].Function == 0 {
			other[i].EBX ^= 1
		}
	}
	if err := compareCPUID(other, have); !errors.Is(err, ErrForeign) {
		t.Errorf("another vendor: got %v, want ErrForeign", err)
	}
}
