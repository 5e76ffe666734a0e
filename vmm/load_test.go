package vmm

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// saved boots a guest that counts, pauses it, and returns the machine and its state.
func saved(t *testing.T) (*Machine, []State) {
	t.Helper()
	m := newMachine(t, testConfig{VCPUs: 2, Devices: []Device{{Name: "rng", Device: rng.New(rng.Options{})}}})
	start(t, m, counting...)
	waitCount(t, m, 10)
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	states, err := m.Export()
	if err != nil {
		t.Fatal(err)
	}
	return m, states
}

// without returns the states except the one with this name.
func without(states []State, name string) []State {
	return slices.DeleteFunc(slices.Clone(states), func(s State) bool { return s.Name == name })
}

// loadBeside makes a machine while its prebuilt VM loads a saved state.
func loadBeside(t *testing.T, mem *guestmem.Memory, states []State) (m *Machine, loading, making error) {
	t.Helper()
	prebuilt, err := NewPrebuilt(PrebuiltConfig{VCPUs: 2, Memory: mem})
	if err != nil {
		t.Fatal(err)
	}
	made := make(chan error, 1)
	go func() {
		var err error
		m, err = New(prebuilt, Config{Devices: []Device{{Name: "rng", Device: rng.New(rng.Options{})}}})
		made <- err
	}()
	loading = prebuilt.Load(states)
	return m, loading, <-made
}

func TestState_is_loaded_while_the_machine_is_made(t *testing.T) {
	a, states := saved(t)
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	page := make([]byte, 1<<20)
	for gpa := guestmem.GPA(0); gpa < 64<<20; gpa += 1 << 20 {
		if err := errors.Join(a.Memory().Read(gpa, page), mem.Write(gpa, page)); err != nil {
			t.Fatal(err)
		}
	}
	b, loading, making := loadBeside(t, mem, states)
	if err := errors.Join(loading, making); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(b.Close(), mem.Close()); err != nil {
			t.Error(err)
		}
	})
	if err := b.Boot(BootOptions{Kernel: program(t, counting...)}); !errors.Is(err, ErrConfig) {
		t.Errorf("booting what has a saved state: got %v, want ErrConfig", err)
	}
	if err := b.Import(states); err != nil {
		t.Fatal(err)
	}
	if got := b.Stages().Durations(); got[StageKVMState] == 0 || got[StageImport] == 0 {
		t.Errorf("stages %v", got)
	}
	if a, b := a.Facts(), b.Facts(); a.TSCKHz != b.TSCKHz || len(a.CPUID) != len(b.CPUID) {
		t.Errorf("the guest has come to another host: %d kHz and %d leaves of CPUID, %d and %d before", b.TSCKHz, len(b.CPUID), a.TSCKHz, len(a.CPUID))
	}
	before := counter(t, a)
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	waitCount(t, b, before+10)
}

func TestLoad_refuses_what_it_cannot_take_and_the_machine_can_be_closed(t *testing.T) {
	_, states := saved(t)
	before := openFiles(t)
	damaged := without(states, "vcpu/1")
	damaged = append(damaged, State{Name: "vcpu/1", Payload: devices.Payload{Kind: kindVCPU, Version: stateVersion, Data: []byte{1}}})
	for name, states := range map[string][]State{
		"nothing": nil, "no clock": without(states, "clock"), "a vCPU too few": without(states, "vcpu/1"), "a damaged vCPU": damaged, "a part twice": append(without(states, ""), states[0]),
	} {
		mem, err := guestmem.New(64 << 20)
		if err != nil {
			t.Fatal(err)
		}
		m, loading, making := loadBeside(t, mem, states)
		if loading == nil || making != nil {
			t.Errorf("%s: loading says %v, making the machine %v", name, loading, making)
		}
		if err := m.Import(states); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: importing after that: got %v, want ErrConfig", name, err)
		}
		if err := errors.Join(m.Close(), mem.Close()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d open files before, %d after", before, after)
	}
}

func TestPrebuilt_VM_takes_one_state(t *testing.T) {
	_, states := saved(t)
	mem, err := guestmem.New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	s, err := NewPrebuilt(PrebuiltConfig{VCPUs: 2, Memory: mem})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Load(states); err != nil {
		t.Fatal(err)
	}
	if err := s.Load(states); !errors.Is(err, ErrConfig) {
		t.Errorf("a second state: got %v, want ErrConfig", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Load(states); !errors.Is(err, ErrConfig) {
		t.Errorf("after Close: got %v, want ErrConfig", err)
	}
}

// first is a writer that says when something was written.
type first struct {
	once sync.Once
	is   chan struct{}
}

func (f *first) Write(p []byte) (int, error) {
	f.once.Do(func() { close(f.is) })
	return len(p), nil
}

func TestSerial_port_of_a_restored_machine_is_heard(t *testing.T) {
	a := newMachine(t, testConfig{VCPUs: 1})
	start(t, a, 0x66, 0xba, 0xf8, 0x03, 0xb0, 'x', 0xee, 0xeb, 0xfd) // mov dx, 0x3f8; mov al, 'x'; 1: out dx, al; jmp 1
	if err := a.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	states, err := a.Export()
	if err != nil {
		t.Fatal(err)
	}
	heard := &first{is: make(chan struct{})}
	b := newMachine(t, testConfig{VCPUs: 1, Console: heard})
	page := make([]byte, 1<<20)
	for gpa := guestmem.GPA(0); gpa < 64<<20; gpa += 1 << 20 {
		if err := errors.Join(a.Memory().Read(gpa, page), b.Memory().Write(gpa, page)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(b.Import(states), b.Start()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-heard.is:
	case <-time.After(time.Minute):
		t.Error("what the guest writes does not come out")
	}
}

func TestCPUID_of_a_saved_vCPU_may_not_have_what_no_guest_is_given(t *testing.T) {
	_, states := saved(t)
	for name, e := range map[string]kvm.CPUIDEntry{
		"VMX": {Function: leafFeatures, ECX: ecxVMX}, "SVM": {Function: leafExtFeatures, ECX: ecxSVM}, "Hyper-V": {Function: leafHyperV, EAX: hyperVInterface},
	} {
		if err := checkCPUID([]kvm.CPUIDEntry{{Function: leafFeatures}, e}); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: %v, want ErrPayload", name, err)
		}
	}
	for _, s := range states {
		if s.Payload.Kind == kindVCPU {
			if err := checkGuestCPUID(s.Payload.Data); err != nil {
				t.Errorf("of a guest of ours: %v", err)
			}
		}
	}
}
