package kvm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
)

// savedVCPU returns a state that CheckSaved accepts, of zeros except for the arguments.
func savedVCPU(cpuid []CPUIDEntry, khz uint64, msrs []MSR) []byte {
	var list, values []byte
	for i := range cpuid {
		list = append(list, bytesOf(&cpuid[i])...)
	}
	for i := range msrs {
		values = append(values, bytesOf(&msrs[i])...)
	}
	p := record(nil, tagCPUID, list)
	p = record(p, tagTSCKHz, binary.LittleEndian.AppendUint64(nil, khz))
	for _, r := range []struct{ tag, size int }{
		{tagMPState, 4}, {tagRegs, sizeOf[Regs]()}, {tagSregs2, sizeOf[gokvm.SRegs2]()}, {tagSregs, sizeOf[Sregs]()}, {tagXSave, 4096},
		{tagXCRs, sizeOf[gokvm.XCRS]()}, {tagDebug, sizeOf[gokvm.DebugRegs]()}, {tagEvents, sizeOf[gokvm.VCPUEvents]()}, {tagLAPIC, sizeOf[gokvm.LAPICState]()},
	} {
		p = record(p, uint32(r.tag), make([]byte, r.size))
	}
	return record(p, tagMSRs, values)
}

// For any bytes, a state is taken whole or refused with ErrState, and no part is longer than the state itself.
func FuzzSavedVCPU(f *testing.F) {
	good := savedVCPU([]CPUIDEntry{{Function: 1}}, 2_000_000, []MSR{{Index: msrTSC, Value: 1}, {Index: msrTSCDeadline, Value: 2}, {Index: msrClockNew, Value: 0x1001}})
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add(savedVCPU([]CPUIDEntry{{Function: 1, ECX: 1 << 26}}, 1<<32, nil))
	f.Add(record(record(nil, tagMSRs, make([]byte, 16*(maxMSRs+1))), tagCPUID, make([]byte, 40*(maxCPUIDEntries+1))))
	f.Add([]byte{1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, p []byte) {
		kept := bytes.Clone(p)
		rec, err := parseRecords(p)
		if whole := CheckSaved(p); err != nil || whole != nil {
			if err != nil && !errors.Is(err, ErrState) || !errors.Is(whole, ErrState) {
				t.Fatalf("refused with %v and %v, want ErrState", err, whole)
			}
		}
		if !bytes.Equal(p, kept) {
			t.Fatal("the saved state has been changed")
		}
		if err != nil {
			return
		}
		// Each record is present unchanged, and once.
		total := 0
		for _, b := range rec {
			if b != nil {
				total += 8 + len(b)
			}
		}
		if total != len(p) {
			t.Fatalf("records of %d bytes in a state of %d", total, len(p))
		}
		cpuid, err := SavedCPUID(p)
		if err != nil || len(cpuid) > maxCPUIDEntries {
			t.Fatalf("%d entries of CPUID, %v", len(cpuid), err)
		}
		var list []byte
		for i := range cpuid {
			list = append(list, bytesOf(&cpuid[i])...)
		}
		if !bytes.Equal(list, rec[tagCPUID]) {
			t.Fatal("CPUID is not what was saved")
		}
		msrs, deadline, clock := sortMSRs(rec[tagMSRs])
		if len(msrs)+len(clock) > maxMSRs {
			t.Fatalf("%d MSRs, %d of a clock", len(msrs), len(clock))
		}
		for _, m := range msrs {
			if m.Index == msrTSCDeadline || ofClock(m.Index) {
				t.Fatalf("MSR %#x is loaded before its time", m.Index)
			}
		}
		c := &VCPU{clock: clock}
		if pages := c.SavedClockPages(); len(pages) > len(clock) {
			t.Fatalf("%d pages of %d MSRs", len(pages), len(clock))
		}
		if deadline == nil && len(msrs)+len(clock) != len(rec[tagMSRs])/sizeOf[MSR]() {
			t.Fatal("an MSR was lost")
		}
	})
}

func TestAttack_saved_vCPU_that_is_damaged_is_refused_before_KVM_is_given_any_of_it(t *testing.T) {
	good := savedVCPU([]CPUIDEntry{{Function: 1}}, 2_000_000, []MSR{{Index: msrTSC, Value: 1}})
	if err := CheckSaved(good); err != nil {
		t.Fatal(err)
	}
	replaced := func(tag uint32, data []byte) []byte {
		rec, err := parseRecords(good)
		if err != nil {
			t.Fatal(err)
		}
		var p []byte
		for other, b := range rec {
			if b != nil && uint32(other) != tag {
				p = record(p, uint32(other), b)
			}
		}
		if data == nil {
			return p
		}
		return record(p, tag, data)
	}
	for name, p := range map[string][]byte{
		"registers a byte short":              replaced(tagRegs, make([]byte, sizeOf[Regs]()-1)),
		"events of another size":              replaced(tagEvents, make([]byte, 1)),
		"run state of 8 bytes":                replaced(tagMPState, make([]byte, 8)),
		"debug registers of no size":          replaced(tagDebug, []byte{}),
		"half an MSR":                         replaced(tagMSRs, make([]byte, 8)),
		"too many MSRs":                       replaced(tagMSRs, make([]byte, 16*(maxMSRs+1))),
		"too many entries of CPUID":           replaced(tagCPUID, make([]byte, 40*(maxCPUIDEntries+1))),
		"an XSAVE area of a megabyte":         replaced(tagXSave, make([]byte, 1<<20)),
		"no registers":                        replaced(tagRegs, nil),
		"a TSC frequency that KVM would wrap": replaced(tagTSCKHz, binary.LittleEndian.AppendUint64(nil, 1<<32+2_000_000)),
	} {
		// An invalid vCPU: any call of KVM would fail with another error than ErrState.
		c := &VCPU{fd: -1, xsave: make([]byte, 4096)}
		if _, err := c.Import(p, 0); !errors.Is(err, ErrState) {
			t.Errorf("%s: got %v, want ErrState", name, err)
		}
	}
}
