package vmm

import (
	"reflect"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/vmm/kvm"
)

// entry returns one CPUID leaf, with the registers in the instruction's order.
func entry(function, index, a, b, c, d uint32) kvm.CPUIDEntry {
	return kvm.CPUIDEntry{Function: function, Index: index, EAX: a, EBX: b, ECX: c, EDX: d}
}

// all sets every existing feature, even those without registers of their own.
func all(components uint64) []kvm.CPUIDEntry {
	const every = ^uint32(0)
	return []kvm.CPUIDEntry{
		entry(0, 0, 0xd, 1, 2, 3),
		entry(0x1, 0, 0x60fb1, 0x10800, every, every),
		entry(0x7, 0, 1, every, every, every),
		entry(0x7, 1, every, 0, 0, every),
		entry(0xd, 0, uint32(components), 2696, 2696, uint32(components>>32)),
		entry(0xd, 1, 0xf, 0, 0, 0),
		entry(0xd, 2, 256, 576, 0, 0),
		entry(0x80000001, 0, 1, 0, every, every),
	}
}

func TestSavedFeatures_none_is_offered_whose_registers_are_not_saved(t *testing.T) {
	const (
		avx512b = 0xdc230000
		avx512c = 0x5842
		avx512d = 0x80010c &^ (1 << 16)
	)
	for name, c := range map[string]struct {
		offered []kvm.CPUIDEntry
		xsave   bool
		want    []kvm.CPUIDEntry
	}{
		"everything is saved: nothing is taken away": {all(0x40000000_000e02ff), true, all(0x40000000_000e02ff)},
		"x87, SSE and AVX are saved": {all(0x7), true, []kvm.CPUIDEntry{
			entry(0, 0, 0xd, 1, 2, 3),
			entry(0x1, 0, 0x60fb1, 0x10800, ^uint32(0), ^uint32(0)),
			entry(0x7, 0, 1, ^uint32(avx512b|1<<14), ^uint32(avx512c|1<<3|1<<4), ^uint32(avx512d|0x3400000&^(1<<21|1<<23)|1<<22)),
			entry(0x7, 1, ^uint32(1<<5|1<<21), 0, 0, ^uint32(1<<8|1<<19|1<<21)),
			entry(0xd, 0, 7, 2696, 2696, 0),
			entry(0xd, 1, 0xf, 0, 0, 0),
			entry(0xd, 2, 256, 576, 0, 0),
			entry(0x80000001, 0, 1, 0, ^uint32(1<<15), ^uint32(0)),
		}},
		"XSAVE is not to be used": {all(0x2ff), false, bare()},
		"the CPU has no XSAVE": {func() []kvm.CPUIDEntry {
			out := all(0x2ff)
			out[1].ECX &^= ecxXSave
			return out
		}(), true, bare()},
		"XSAVE without a leaf that says what it saves": {slices.DeleteFunc(all(0), func(e kvm.CPUIDEntry) bool { return e.Function == 0xd }), true,
			func() []kvm.CPUIDEntry {
				out := bare()
				out[1].ECX |= ecxXSave | ecxOSXSave
				return out
			}()},
		"nothing": {nil, true, []kvm.CPUIDEntry{}},
	} {
		before := slices.Clone(c.offered)
		if got := savedFeatures(c.offered, c.xsave); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\n got %x\nwant %x", name, got, c.want)
		}
		if !reflect.DeepEqual(c.offered, before) {
			t.Errorf("%s: what KVM has offered was changed", name)
		}
	}
}

// bare is all without XSAVE and the features that need it. The numbers come from the manuals, not from the code's
// table.
func bare() []kvm.CPUIDEntry {
	return []kvm.CPUIDEntry{
		entry(0, 0, 0xd, 1, 2, 3),
		entry(0x1, 0, 0x60fb1, 0x10800, ^uint32(0x3c001000), ^uint32(0)),
		entry(0x7, 0, 1, ^uint32(0xdc234020), ^uint32(0x5e5a), ^uint32(0x3c0010c)),
		entry(0x7, 1, ^uint32(0xa00037), 0, 0, ^uint32(0x280530)),
		entry(0x80000001, 0, 1, 0, ^uint32(0x18800), ^uint32(0)),
	}
}

func TestSupportedCPUID_a_guest_of_this_host_has_no_AVX_without_XSAVE(t *testing.T) {
	needKVM(t)
	supported, err := supportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	if got := savedFeatures(supported, true); !reflect.DeepEqual(got, supported) {
		t.Errorf("some features have no place in the XSAVE area:\n have %x\nsaved %x", supported, got)
	}
	if emulatedByTCG() && slices.ContainsFunc(supported, func(e kvm.CPUIDEntry) bool { return e.Function == 1 && e.ECX&ecxXSave != 0 }) {
		t.Error("XSAVE is offered where QEMU emulates the CPU")
	}
}

func TestCheckFacts_features_that_were_of_no_use_to_the_guest_are_not_missed(t *testing.T) {
	needKVM(t)
	have, err := supportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	// Older versions showed AVX, AVX2 and an XSAVE area even where there is no XSAVE.
	saved := append(savedFeatures(have, false), entry(0xd, 0, 0xe7, 2432, 2432, 0))
	for i := range saved {
		switch e := &saved[i]; {
		case e.Function == 1:
			e.ECX |= 1 << 28
		case e.Function == 7 && e.Index == 0:
			e.EBX |= 1 << 5
		}
	}
	if err := CheckFacts(hostFacts(saved, 0)); err != nil {
		t.Error(err)
	}
}
