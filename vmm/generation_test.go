package vmm

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// generationOf returns the machine's VM generation ID, and whether its interrupt is pending: the PIC's IRR has that
// bit even if the guest has masked it (struct kvm_pic_state: last_irr, irr, ...).
func generationOf(t *testing.T, m *Machine) (id [generationSize]byte, pending bool) {
	t.Helper()
	if err := m.Memory().Read(boot.GenerationIDAddr, id[:]); err != nil {
		t.Fatal(err)
	}
	pic, err := m.vm.IRQChip(kvm.ChipPICMaster, nil)
	if err != nil {
		t.Fatal(err)
	}
	const irr = 1
	return id, pic[irr]&(1<<generationGSI) != 0
}

func TestGenerationID_changes_and_is_notified_before_the_first_instruction_only_when_that_is_wanted(t *testing.T) {
	a, states := saved(t)
	first, _ := generationOf(t, a)
	if first == [generationSize]byte{} {
		t.Error("a booted guest has none")
	}
	if err := a.NewGeneration(); !errors.Is(err, ErrConfig) {
		t.Errorf("of a machine that has run: %v", err)
	}
	seen := [][generationSize]byte{first}
	for _, again := range []bool{false, true, true} {
		b := newMachine(t, testConfig{VCPUs: 2, Devices: []Device{{Name: "rng", Device: rng.New(rng.Options{})}}})
		if err := b.Memory().Write(boot.GenerationIDAddr, first[:]); err != nil {
			t.Fatal(err)
		}
		if err := b.NewGeneration(); !errors.Is(err, ErrConfig) {
			t.Errorf("of an empty machine: %v", err)
		}
		if err := b.Import(states); err != nil {
			t.Fatal(err)
		}
		if again {
			if err := b.NewGeneration(); err != nil {
				t.Fatal(err)
			}
		}
		id, pending := generationOf(t, b)
		if pending != again || slices.Contains(seen, id) == again {
			t.Errorf("wanted: %t; notified: %t, ID % x of % x", again, pending, id, seen)
		}
		seen = append(seen, id)
	}
}

func TestGenerationID_of_a_guest_without_one_is_left_alone(t *testing.T) {
	a, states := saved(t)
	b := newMachine(t, testConfig{VCPUs: 2, Devices: []Device{{Name: "rng", Device: rng.New(rng.Options{})}}})
	// All RAM that the guest uses, except its ID.
	page := make([]byte, 1<<20)
	for gpa := guestmem.GPA(1 << 20); gpa < 64<<20; gpa += 1 << 20 {
		if err := errors.Join(a.Memory().Read(gpa, page), b.Memory().Write(gpa, page)); err != nil {
			t.Fatal(err)
		}
	}
	low := page[:boot.GenerationIDAddr]
	if err := errors.Join(a.Memory().Read(0, low), b.Memory().Write(0, low)); err != nil {
		t.Fatal(err)
	}
	if err := b.Import(without(states, generationName)); err != nil {
		t.Fatal(err)
	}
	if err := b.NewGeneration(); err != nil {
		t.Fatal(err)
	}
	if id, pending := generationOf(t, b); pending || id != [generationSize]byte{} {
		t.Errorf("notified: %t, ID % x", pending, id)
	}
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	if err := b.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := b.Export()
	if err != nil {
		t.Fatal(err)
	}
	if len(without(again, generationName)) != len(again) {
		t.Error("it is saved as one that has an ID")
	}
}

func TestGenerationID_elsewhere_or_damaged_is_refused(t *testing.T) {
	_, states := saved(t)
	var elsewhere devices.Encoder
	elsewhere.Uint64(0x1000)
	for name, p := range map[string]devices.Payload{
		"elsewhere":       elsewhere.Payload(kindGeneration, stateVersion),
		"empty":           {Kind: kindGeneration, Version: stateVersion},
		"a later version": {Kind: kindGeneration, Version: stateVersion + 1, Data: bytes.Repeat([]byte{0}, 8)},
		"another kind":    {Kind: kindPIT, Version: stateVersion},
	} {
		b := newMachine(t, testConfig{VCPUs: 2, Devices: []Device{{Name: "rng", Device: rng.New(rng.Options{})}}})
		if err := b.Import(append(without(states, generationName), State{Name: generationName, Payload: p})); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
