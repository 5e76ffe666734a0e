package kvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
)

// The state of a vCPU is a sequence of records: tag and length, 32 bits each, little-endian, then the kernel's own
// struct, whose layout the KVM ABI fixes. The order of loading matters: CPUID before the MSRs that depend on it;
// SREGS (which sets the APIC base), then LAPIC, then MSRs (KVM drops the TSC deadline unless the LAPIC timer is
// already in that mode).
const (
	tagCPUID = iota + 1
	tagTSCKHz
	tagMPState
	tagRegs
	tagSregs2
	tagSregs
	tagXSave
	tagXCRs
	tagDebug
	tagEvents
	tagLAPIC
	tagMSRs
	tagCount
)

// Indices of MSRs that need care.
const (
	msrTSC         = 0x10
	MSRMiscEnable  = 0x1a0
	MSRMTRRDefType = 0x2ff
	msrTSCDeadline = 0x6e0
	// Documentation/virt/kvm/x86/msr.rst: MSR_KVM_WALL_CLOCK, MSR_KVM_SYSTEM_TIME, and their present successors.
	msrWallClock    = 0x11
	msrClock        = 0x12
	msrWallClockNew = 0x4b564d00
	msrClockNew     = 0x4b564d01
)

// ofClock reports whether an MSR belongs to the paravirtual clock.
func ofClock(index uint32) bool {
	return index == msrWallClock || index == msrClock || index == msrWallClockNew || index == msrClockNew
}

func record(p []byte, tag uint32, data []byte) []byte {
	p = binary.LittleEndian.AppendUint32(p, tag)
	p = binary.LittleEndian.AppendUint32(p, uint32(len(data)))
	return append(p, data...)
}

// Export appends the whole state of the vCPU to p. cpuid is what SetCPUID was given; msrIndex is what MSRIndexList
// has returned. The vCPU must not be running.
func (c *VCPU) Export(p []byte, cpuid []CPUIDEntry, msrIndex []uint32) ([]byte, error) {
	var data []byte
	for i := range cpuid {
		data = append(data, bytesOf(&cpuid[i])...)
	}
	p = record(p, tagCPUID, data)
	if khz, err := c.TSCKHz(); err == nil {
		p = record(p, tagTSCKHz, binary.LittleEndian.AppendUint64(nil, khz))
	}
	// KVM_GET_MP_STATE comes first: it makes the kernel settle pending INIT and SIPI events, which the other calls
	// then see.
	state, err := c.MPState()
	if err != nil {
		return p, err
	}
	p = record(p, tagMPState, binary.LittleEndian.AppendUint32(nil, state))
	regs, err := c.Regs()
	if err != nil {
		return p, err
	}
	p = record(p, tagRegs, bytesOf(regs))
	if err := gokvm.GetSRegs2(uintptr(c.fd), &c.sregs2); err == nil {
		p = record(p, tagSregs2, bytesOf(&c.sregs2))
	}
	sregs, err := c.Sregs()
	if err != nil {
		return p, err
	}
	p = record(p, tagSregs, bytesOf(sregs))
	if err := c.getXSave(); err != nil {
		return p, err
	}
	p = record(p, tagXSave, c.xsave)
	switch err := gokvm.GetXCRS(uintptr(c.fd), &c.xcrs); {
	case err == nil:
		p = record(p, tagXCRs, bytesOf(&c.xcrs))
	case offersXSave(cpuid):
		return p, fmt.Errorf("KVM_GET_XCRS: %w: without XCR0 the guest's vector registers could not be restored", err)
	}
	if err := gokvm.GetDebugRegs(uintptr(c.fd), &c.debug); err != nil {
		return p, fmt.Errorf("KVM_GET_DEBUGREGS: %w", err)
	}
	p = record(p, tagDebug, bytesOf(&c.debug))
	data, err = c.LAPIC(nil)
	if err != nil {
		return p, err
	}
	p = record(p, tagLAPIC, data)
	msrs, err := c.MSRs(msrIndex)
	if err != nil {
		return p, err
	}
	data = data[:0]
	for i := range msrs {
		data = append(data, bytesOf(&msrs[i])...)
	}
	p = record(p, tagMSRs, data)
	if err := gokvm.GetVCPUEvents(uintptr(c.fd), &c.events); err != nil {
		return p, fmt.Errorf("KVM_GET_VCPU_EVENTS: %w", err)
	}
	return record(p, tagEvents, bytesOf(&c.events)), nil
}

// PutOff is the original and the postponed deadline of the LAPIC's timer, in cycles of the guest's TSC. The zero
// value means that none was put off.
type PutOff struct{ From, To uint64 }

// Import loads what Export has returned into a fresh vCPU, except for the guest's paravirtual clock: see
// ImportClock. It fails with ErrState when p is damaged or incomplete, and with the kernel's error when this host
// cannot take it. If the LAPIC's timer is in TSC-deadline mode and would interrupt the guest in fewer than quiet
// cycles, Import puts it off until then.
func (c *VCPU) Import(p []byte, quiet uint64) (PutOff, error) {
	rec, err := parseRecords(p)
	if err != nil {
		return PutOff{}, fmt.Errorf("vCPU %d: %w", c.id, err)
	}
	var off PutOff
	err = c.importRecords(rec, quiet, &off)
	return off, err
}

// ImportClock loads what Import has left: the MSRs of the guest's paravirtual clock. KVM then reads and writes the
// pages of RAM that they name, and waits for a pager to load them.
func (c *VCPU) ImportClock() error {
	refused, err := c.setMSRs(c.clock)
	if err != nil {
		return fmt.Errorf("vCPU %d: %w", c.id, err)
	}
	c.clock = nil
	return refusal(refused)
}

// SavedClockPages returns addresses in the pages of RAM that ImportClock will need; pages may repeat.
func (c *VCPU) SavedClockPages() (gpas []uint64) {
	for _, m := range c.clock {
		const on = 1
		switch m.Index {
		case msrClock, msrClockNew:
			if m.Value&on != 0 {
				gpas = append(gpas, m.Value&^on)
			}
		case msrWallClock, msrWallClockNew:
			if m.Value != 0 {
				gpas = append(gpas, m.Value)
			}
		}
	}
	return gpas
}

func (c *VCPU) importRecords(rec [tagCount][]byte, quiet uint64, off *PutOff) error {
	if err := complete(rec); err != nil {
		return fmt.Errorf("vCPU %d: %w", c.id, err)
	}
	if len(rec[tagXSave]) > len(c.xsave) {
		return fmt.Errorf("KVM_SET_XSAVE: %w: %d bytes, this host takes %d", ErrState, len(rec[tagXSave]), len(c.xsave))
	}
	if err := c.SetCPUID(decodeCPUID(rec[tagCPUID])); err != nil {
		return err
	}
	if b := rec[tagTSCKHz]; b != nil {
		if err := c.importTSCKHz(b); err != nil {
			return err
		}
	}
	if b := rec[tagXCRs]; b != nil {
		if err := set("KVM_SET_XCRS", c.fd, &c.xcrs, b, gokvm.SetXCRS); err != nil {
			return err
		}
	}
	clear(c.xsave)
	copy(c.xsave, rec[tagXSave])
	if err := c.setXSave(); err != nil {
		return err
	}
	if err := c.importSregs(rec[tagSregs2], rec[tagSregs]); err != nil {
		return err
	}
	if err := c.SetLAPIC(rec[tagLAPIC]); err != nil {
		return err
	}
	if err := c.importMSRs(rec[tagMSRs], quiet, off); err != nil {
		return err
	}
	if err := set("KVM_SET_REGS", c.fd, new(Regs), rec[tagRegs], gokvm.SetRegs); err != nil {
		return err
	}
	if err := set("KVM_SET_DEBUGREGS", c.fd, &c.debug, rec[tagDebug], gokvm.SetDebugRegs); err != nil {
		return err
	}
	if err := set("KVM_SET_VCPU_EVENTS", c.fd, &c.events, rec[tagEvents], gokvm.SetVCPUEvents); err != nil {
		return err
	}
	return c.SetMPState(binary.LittleEndian.Uint32(rec[tagMPState]))
}

// set loads p into v, which is on the heap, and passes that to KVM.
func set[T any](call string, fd int, v *T, p []byte, do func(uintptr, *T) error) error {
	err := load(v, p)
	if err == nil {
		err = do(uintptr(fd), v)
	}
	return wrap(call, err)
}

// checkRecord checks the size of a record, so that a state that cannot be loaded whole is not loaded in part.
func checkRecord(tag uint32, b []byte) error {
	of := func(n int) bool { return len(b) == n }
	list := func(size, most int) bool { return len(b)%size == 0 && len(b)/size <= most }
	var ok bool
	switch tag {
	case tagCPUID:
		ok = list(sizeOf[CPUIDEntry](), maxCPUIDEntries)
	case tagTSCKHz:
		// KVM takes only 32 bits of it and would drop the others of a larger rate (api.rst 4.55).
		ok = of(8) && binary.LittleEndian.Uint64(b) <= math.MaxUint32
	case tagMPState:
		ok = of(4)
	case tagRegs:
		ok = of(sizeOf[Regs]())
	case tagSregs2:
		ok = of(sizeOf[gokvm.SRegs2]())
	case tagSregs:
		ok = of(sizeOf[Sregs]())
	case tagXSave:
		ok = len(b) <= maxXSave
	case tagXCRs:
		ok = of(sizeOf[gokvm.XCRS]())
	case tagDebug:
		ok = of(sizeOf[gokvm.DebugRegs]())
	case tagEvents:
		ok = of(sizeOf[gokvm.VCPUEvents]())
	case tagLAPIC:
		ok = of(sizeOf[gokvm.LAPICState]())
	case tagMSRs:
		ok = list(sizeOf[MSR](), maxMSRs)
	}
	if !ok {
		return fmt.Errorf("%w: record %d of %d bytes", ErrState, tag, len(b))
	}
	return nil
}

// maxXSave bounds the XSAVE area of a saved vCPU in bytes; that of a host with AMX is 11 KiB.
const maxXSave = 64 << 10

func parseRecords(p []byte) (rec [tagCount][]byte, err error) {
	for len(p) > 0 {
		if len(p) < 8 {
			return rec, fmt.Errorf("%w: truncated record", ErrState)
		}
		tag, n := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint32(p[4:])
		p = p[8:]
		if tag == 0 || tag >= tagCount || rec[tag] != nil || uint64(n) > uint64(len(p)) {
			return rec, fmt.Errorf("%w: record %d of %d bytes", ErrState, tag, n)
		}
		rec[tag], p = p[:n:n], p[n:]
		if err := checkRecord(tag, rec[tag]); err != nil {
			return rec, err
		}
	}
	return rec, nil
}

// complete checks that a state has all that a vCPU needs.
func complete(rec [tagCount][]byte) error {
	for _, tag := range []int{tagCPUID, tagMPState, tagRegs, tagSregs, tagXSave, tagDebug, tagEvents, tagLAPIC, tagMSRs} {
		if rec[tag] == nil {
			return fmt.Errorf("%w: record %d is missing", ErrState, tag)
		}
	}
	if rec[tagXCRs] == nil && offersXSave(decodeCPUID(rec[tagCPUID])) {
		return fmt.Errorf("%w: it has XSAVE and no XCR0", ErrState)
	}
	return nil
}

// CheckSaved fails with ErrState unless p has all parts of a vCPU's state in their sizes. Only KVM can judge their
// content.
func CheckSaved(p []byte) error {
	rec, err := parseRecords(p)
	if err == nil {
		err = complete(rec)
	}
	if err != nil {
		return fmt.Errorf("state of a vCPU: %w", err)
	}
	return nil
}

// SavedCPUID returns the CPUID of the vCPU whose state p Export has returned.
func SavedCPUID(p []byte) ([]CPUIDEntry, error) {
	rec, err := parseRecords(p)
	if err != nil {
		return nil, fmt.Errorf("state of a vCPU: %w", err)
	}
	return decodeCPUID(rec[tagCPUID]), nil
}

// offersXSave reports whether CPUID shows XSAVE (SDM volume 2, CPUID, leaf 1). The guest may then have registers
// that can be restored only together with XCR0.
func offersXSave(cpuid []CPUIDEntry) bool {
	const leafFeatures, ecxXSave = 0x1, 1 << 26
	for i := range cpuid {
		if cpuid[i].Function == leafFeatures {
			return cpuid[i].ECX&ecxXSave != 0
		}
	}
	return false
}

// decodeCPUID decodes a record. Like sortMSRs and importTSCKHz it relies on checkRecord for the size.
func decodeCPUID(b []byte) []CPUIDEntry {
	size := sizeOf[CPUIDEntry]()
	entries := make([]CPUIDEntry, len(b)/size)
	for i := range entries {
		copy(bytesOf(&entries[i]), b[i*size:])
	}
	return entries
}

// tscTolerance is the largest difference of two TSC rates that count as the same, in parts per million: what NTP
// itself corrects.
const tscTolerance = 250

// SameTSCRate reports whether a guest whose TSC ran at want kHz can continue at have kHz.
func SameTSCRate(want, have uint64) bool {
	diff := max(want, have) - min(want, have)
	return diff <= want/1_000_000*tscTolerance+want%1_000_000*tscTolerance/1_000_000
}

func (c *VCPU) importTSCKHz(b []byte) error {
	want := binary.LittleEndian.Uint64(b)
	have, err := c.TSCKHz()
	if err != nil || want == have {
		return nil
	}
	if SameTSCRate(want, have) {
		return nil
	}
	if err := c.SetTSCKHz(want); err != nil {
		return fmt.Errorf("running a guest of %d kHz TSC on a host of %d kHz: %w: this host cannot scale the TSC; restore on one like the first", want, have, err)
	}
	return nil
}

func (c *VCPU) importSregs(b2, b []byte) error {
	if b2 != nil {
		if set("KVM_SET_SREGS2", c.fd, &c.sregs2, b2, gokvm.SetSRegs2) == nil {
			return nil
		}
	}
	if err := load(&c.sregs, b); err != nil {
		return fmt.Errorf("KVM_SET_SREGS: %w", err)
	}
	// The vCPU events have the pending interrupt.
	c.sregs.InterruptBitmap = [len(c.sregs.InterruptBitmap)]uint64{}
	return wrap("KVM_SET_SREGS", gokvm.SetSregs(uintptr(c.fd), &c.sregs))
}

// Undo gives a timer that was put off its own deadline again, unless it has fired or the guest has set another. The
// vCPU must not be running.
func (c *VCPU) Undo(off PutOff) error {
	now, err := c.MSRs([]uint32{msrTSCDeadline})
	if err != nil || len(now) != 1 || now[0].Value != off.To {
		return err
	}
	_, err = c.SetMSRs([]MSR{{Index: msrTSCDeadline, Value: off.From}})
	return err
}

// putOff moves a deadline less than quiet cycles from now, or past, to quiet cycles from now.
func (c *VCPU) putOff(deadline *MSR, quiet uint64) (PutOff, error) {
	now, err := c.MSRs([]uint32{msrTSC})
	if err != nil || len(now) != 1 {
		return PutOff{}, err
	}
	until := now[0].Value + quiet
	if deadline.Value >= until {
		return PutOff{}, nil
	}
	off := PutOff{From: deadline.Value, To: until}
	deadline.Value = until
	return off, nil
}

// sortMSRs splits saved MSRs into those to load first, the deadline of the LAPIC's timer, and those of the
// paravirtual clock.
func sortMSRs(b []byte) (msrs []MSR, deadline *MSR, clock []MSR) {
	size := sizeOf[MSR]()
	msrs = make([]MSR, 0, len(b)/size)
	for ; len(b) > 0; b = b[size:] {
		var m MSR
		copy(bytesOf(&m), b)
		switch {
		case m.Index == msrTSCDeadline:
			deadline = &m
		case ofClock(m.Index):
			clock = append(clock, m)
		default:
			msrs = append(msrs, m)
		}
	}
	return msrs, deadline, clock
}

func (c *VCPU) importMSRs(b []byte, quiet uint64, off *PutOff) error {
	msrs, deadline, clock := sortMSRs(b)
	c.clock = clock
	refused, err := c.setMSRs(msrs)
	if err != nil {
		return err
	}
	// KVM compares the deadline with the TSC, so load it after the TSC.
	if deadline != nil {
		if quiet > 0 && deadline.Value != 0 {
			if *off, err = c.putOff(deadline, quiet); err != nil {
				return err
			}
		}
		more, err := c.setMSRs([]MSR{*deadline})
		if err != nil {
			return err
		}
		refused = append(refused, more...)
	}
	return refusal(refused)
}

func refusal(refused []uint32) error {
	if refused == nil {
		return nil
	}
	return fmt.Errorf("KVM_SET_MSRS: %w: MSRs %#x: restore on a host with the CPU features of the first", errRefusedMSR, refused)
}

// setMSRs returns the indices of the MSRs that the host refuses and that matter.
func (c *VCPU) setMSRs(msrs []MSR) (refused []uint32, err error) {
	for len(msrs) > 0 {
		n, err := c.SetMSRs(msrs)
		if err != nil {
			return refused, err
		}
		if n >= len(msrs) {
			break
		}
		// Some MSRs can be read but not written. A refused zero loses nothing; any other value is state that this
		// host cannot take.
		if msrs[n].Value != 0 && !readOnlyMSR(msrs[n].Index) {
			refused = append(refused, msrs[n].Index)
		}
		msrs = msrs[n+1:]
	}
	return refused, nil
}

var errRefusedMSR = errors.New("this host refuses the saved value")

// readOnlyMSR reports whether an MSR describes the CPU rather than its state. A host may refuse writes to it,
// either always or unless the value is the same.
func readOnlyMSR(index uint32) bool {
	switch index {
	case 0x10a, // IA32_ARCH_CAPABILITIES
		0x345,      // IA32_PERF_CAPABILITIES
		0x8b,       // IA32_UCODE_REV
		0xc0010015, // MSR_K7_HWCR
		0xc0011029, // MSR_AMD64_DE_CFG
		0x48:       // IA32_SPEC_CTRL where the guest does not have it
		return true
	}
	return index >= 0x480 && index <= 0x491 // VMX capabilities
}
