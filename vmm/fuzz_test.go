package vmm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// fuzzNames are the names that a part of the fuzzed state can have.
var fuzzNames = []string{"irqchip/0", "irqchip/1", "irqchip/2", "pit", "clock", "vcpu/0", "vcpu/1", "handover", "serial", "device/rng", "irqchip/3"}

var fuzzKinds = []string{kindIRQChip, kindPIT, kindClock, kindVCPU, "handover", "x"}

// statesOf makes states from bytes: for each a name, a kind, a version, a 16-bit length, and that many bytes.
func statesOf(p []byte) (states []State) {
	for len(p) >= 5 && len(states) < 16 {
		n := min(int(binary.LittleEndian.Uint16(p[3:])), len(p)-5)
		states = append(states, State{
			Name:    fuzzNames[int(p[0])%len(fuzzNames)],
			Payload: devices.Payload{Kind: fuzzKinds[int(p[1])%len(fuzzKinds)], Version: uint32(p[2]), Data: p[5 : 5+n : 5+n]},
		})
		p = p[5+n:]
	}
	return states
}

func bytesOfStates(states []State) (p []byte) {
	for _, s := range states {
		p = append(p, byte(slices.Index(fuzzNames, s.Name)), byte(max(slices.Index(fuzzKinds, s.Payload.Kind), 0)), byte(s.Payload.Version))
		p = binary.LittleEndian.AppendUint16(p, uint16(len(s.Payload.Data)))
		p = append(p, s.Payload.Data...)
	}
	return p
}

// emptyVCPU returns the state of a vCPU with all registers zero, in the sizes of KVM's structs
// (include/uapi/linux/kvm.h).
func emptyVCPU() (p []byte) {
	for _, r := range []struct{ tag, size uint32 }{{1, 0}, {3, 4}, {4, 144}, {6, 312}, {7, 4096}, {9, 128}, {10, 64}, {11, 1024}, {12, 0}} {
		p = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(p, r.tag), r.size)
		p = append(p, make([]byte, r.size)...)
	}
	return p
}

func emptyStates() []State {
	state := func(name, kind string, data []byte) State {
		return State{name, devices.Payload{Kind: kind, Version: stateVersion, Data: data}}
	}
	return []State{
		state("irqchip/0", kindIRQChip, make([]byte, kvm.ChipSize)), state("irqchip/1", kindIRQChip, make([]byte, kvm.ChipSize)),
		state("irqchip/2", kindIRQChip, make([]byte, kvm.ChipSize)), state("pit", kindPIT, make([]byte, kvm.PITSize)),
		state("clock", kindClock, make([]byte, 8)), state("vcpu/0", kindVCPU, emptyVCPU()),
	}
}

// Any saved state is either refused with a typed error before KVM gets any of it, or complete: it has all parts, in
// their sizes. The parts of devices are left untouched.
func FuzzLoadState(f *testing.F) {
	good := emptyStates()
	f.Add(bytesOfStates(good))
	f.Add(bytesOfStates(good[1:]))
	f.Add(bytesOfStates(append(slices.Clone(good), good[0])))
	h, err := handover.New(nil).Export()
	if err != nil {
		f.Fatal(err)
	}
	fuzzKinds[4] = h.Kind
	f.Add(bytesOfStates(append(slices.Clone(good), State{"handover", h}, State{Name: "device/rng"})))
	f.Fuzz(func(t *testing.T, p []byte) {
		kept := bytes.Clone(p)
		states := statesOf(p)
		typed := func(err error) {
			if !errors.Is(err, devices.ErrPayload) && !errors.Is(err, kvm.ErrState) {
				t.Fatalf("refused with %v: neither ErrPayload nor ErrState", err)
			}
		}
		parts, err := partsOf(states)
		if err != nil {
			typed(err)
			return
		}
		all := maps.Clone(parts)
		k, err := kvmStateOf(parts, 1)
		if !bytes.Equal(p, kept) {
			t.Fatal("the saved state has been changed")
		}
		if err != nil {
			typed(err)
			return
		}
		if len(k.vcpus) != 1 || kvm.CheckSaved(k.vcpus[0]) != nil || len(k.pit) != kvm.PITSize {
			t.Fatalf("accepted without a vCPU or a timer: %+v", k)
		}
		for chip, b := range k.chips {
			if len(b) != kvm.ChipSize {
				t.Fatalf("interrupt controller %d of %d bytes accepted", chip, len(b))
			}
		}
		// Only KVM's six parts are taken.
		if len(all)-len(parts) != 6 {
			t.Fatalf("%d parts of %d are left", len(parts), len(all))
		}
		for name := range parts {
			if slices.Contains(fuzzNames[:6], name) {
				t.Fatalf("%s was not taken", name)
			}
		}
	})
}

func TestAttack_saved_machine_with_a_damaged_last_part_is_refused_before_KVM_is_given_the_first(t *testing.T) {
	states := emptyStates()
	parts := func() savedParts {
		p, err := partsOf(states)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if _, err := kvmStateOf(parts(), 1); err != nil {
		t.Fatal(err)
	}
	last := &states[len(states)-1].Payload
	last.Data = last.Data[:len(last.Data)-1]
	// A prebuilt VM without KVM: any use of KVM panics.
	s := &Prebuilt{vcpus: make([]*kvm.VCPU, 1), cpuid: make([][]kvm.CPUIDEntry, 1)}
	if err := s.load(states); !errors.Is(err, kvm.ErrState) {
		t.Errorf("got %v, want ErrState", err)
	}
}
