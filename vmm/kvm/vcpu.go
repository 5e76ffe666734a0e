package kvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
	"golang.org/x/sys/unix"
)

// ErrState says that KVM cannot take a saved state.
var ErrState = errors.New("unusable KVM state")

// The kernel's structs of a vCPU's registers.
type (
	// Regs are the general registers (KVM API 4.11).
	Regs = gokvm.Regs
	// Sregs are the control and segment registers (KVM API 4.13).
	Sregs = gokvm.Sregs
	// Segment is a segment register.
	Segment = gokvm.Segment
)

// VCPU is one virtual CPU. Only one thread at a time may call its methods, except ID, SetImmediateExit, Stats and
// Counter. Run must always be called on the same thread.
type VCPU struct {
	fd  int
	id  int
	run []byte // struct kvm_run, shared with the kernel

	stats statistics

	// Caches of what KVM has been given or has returned; nil and 0 if unknown.
	cpuid  []CPUIDEntry
	tscKHz uint64
	clock  []MSR // the guest's paravirtual clock, for ImportClock

	// Heap memory for calls that go through gokvm; see the package comment.
	sregs2  gokvm.SRegs2
	sregs   gokvm.Sregs
	lapic   gokvm.LAPICState
	mp      gokvm.MPState
	events  gokvm.VCPUEvents
	debug   gokvm.DebugRegs
	xcrs    gokvm.XCRS
	transl  gokvm.Translation
	xsave   []byte
	hasXSv2 bool
}

// CreateVCPU makes the vCPU with the given APIC id (api.rst 4.7).
func (v *VM) CreateVCPU(id int) (*VCPU, error) {
	fd, err := gokvm.CreateVCPU(uintptr(v.fd), id)
	if err != nil {
		return nil, fmt.Errorf("KVM_CREATE_VCPU %d: %w", id, err)
	}
	unix.CloseOnExec(int(fd))
	run, err := unix.Mmap(int(fd), 0, v.runSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(int(fd))
		return nil, fmt.Errorf("mapping the kvm_run area of vCPU %d: %w", id, err)
	}
	c := &VCPU{fd: int(fd), id: id, run: run}
	size := 4096
	if n := v.Check(CapXSave2); n > 0 {
		size, c.hasXSv2 = max(n, 4096), true
	}
	c.xsave = make([]byte, size)
	return c, nil
}

// ID returns the APIC id.
func (c *VCPU) ID() int { return c.id }

// Close releases the vCPU, which must not be running.
func (c *VCPU) Close() error {
	return errors.Join(
		c.stats.close(),
		os.NewSyscallError("munmap kvm_run", unix.Munmap(c.run)),
		os.NewSyscallError("close vCPU", unix.Close(c.fd)))
}

// Run runs the guest until something needs attention (api.rst 4.10). It returns unix.EINTR after a signal or on
// immediate exit. Other errors are failures of the host.
func (c *VCPU) Run() error {
	_, err := ioctl(c.fd, gokvm.IIO(nrRun), 0)
	return err
}

// Layout of struct kvm_run (include/uapi/linux/kvm.h).
const (
	runImmediateExit = 1
	runExitReason    = 8
	runUnion         = 32
)

// SetImmediateExit makes the next Run, or the running one if a signal comes, only finish a pending I/O instruction
// and return (api.rst 5, immediate_exit).
func (c *VCPU) SetImmediateExit(on bool) { storeByte(c.run, runImmediateExit, on) }

// ExitReason returns why Run has returned nil.
func (c *VCPU) ExitReason() uint32 { return binary.NativeEndian.Uint32(c.run[runExitReason:]) }

// IO describes a KVM_EXIT_IO.
type IO struct {
	Out   bool
	Size  int // bytes of one access: 1, 2 or 4
	Port  uint16
	Count int    // accesses; more than one for string instructions
	Data  []byte // Size*Count bytes; the caller fills them in for a read
}

// IO decodes a KVM_EXIT_IO. Data is valid until the next Run.
func (c *VCPU) IO() (IO, error) {
	u := c.run[runUnion:]
	x := IO{
		Out:   u[0] == 1,
		Size:  int(u[1]),
		Port:  binary.NativeEndian.Uint16(u[2:]),
		Count: int(binary.NativeEndian.Uint32(u[4:])),
	}
	off := binary.NativeEndian.Uint64(u[8:])
	n := uint64(x.Size) * uint64(x.Count)
	if off > uint64(len(c.run)) || n > uint64(len(c.run))-off {
		return x, fmt.Errorf("KVM_EXIT_IO with %d bytes at %d of kvm_run: %w", n, off, ErrState)
	}
	x.Data = c.run[off : off+n]
	return x, nil
}

// MMIO decodes a KVM_EXIT_MMIO: the address, the bytes, which are valid until the next Run and which the caller
// fills in for a read, and whether it is a write.
func (c *VCPU) MMIO() (addr uint64, p []byte, write bool) {
	u := c.run[runUnion:]
	n := min(binary.NativeEndian.Uint32(u[16:]), 8)
	return binary.NativeEndian.Uint64(u), u[8 : 8+n], u[20] != 0
}

// InternalError describes a KVM_EXIT_INTERNAL_ERROR.
type InternalError struct {
	Suberror uint32
	// Instruction has the bytes that KVM could not emulate, if KVM reports them.
	Instruction []byte
}

// Suberrors of KVM_EXIT_INTERNAL_ERROR.
const (
	InternalErrorEmulation  = 1
	InternalErrorSimulEx    = 2
	InternalErrorDeliveryEv = 3
)

// InternalError decodes a KVM_EXIT_INTERNAL_ERROR (struct emulation_failure).
func (c *VCPU) InternalError() InternalError {
	u := c.run[runUnion:]
	e := InternalError{Suberror: binary.NativeEndian.Uint32(u)}
	const haveInstruction = 1
	if e.Suberror == InternalErrorEmulation && binary.NativeEndian.Uint32(u[4:]) >= 3 &&
		binary.NativeEndian.Uint64(u[8:])&haveInstruction != 0 {
		n := min(u[16], 15)
		e.Instruction = append([]byte(nil), u[17:17+n]...)
	}
	return e
}

// FailEntryReason returns the hardware's code of a KVM_EXIT_FAIL_ENTRY.
func (c *VCPU) FailEntryReason() uint64 { return binary.NativeEndian.Uint64(c.run[runUnion:]) }

// SystemEvent returns the type of a KVM_EXIT_SYSTEM_EVENT.
func (c *VCPU) SystemEvent() uint32 { return binary.NativeEndian.Uint32(c.run[runUnion:]) }

// MemoryFault returns the guest physical address of a KVM_EXIT_MEMORY_FAULT.
func (c *VCPU) MemoryFault() uint64 { return binary.NativeEndian.Uint64(c.run[runUnion+8:]) }

// Regs reads the general registers (api.rst 4.11).
func (c *VCPU) Regs() (*Regs, error) {
	r, err := gokvm.GetRegs(uintptr(c.fd))
	return r, wrap("KVM_GET_REGS", err)
}

// SetRegs loads the general registers (api.rst 4.12).
func (c *VCPU) SetRegs(r *Regs) error {
	heap := new(Regs)
	*heap = *r
	return wrap("KVM_SET_REGS", gokvm.SetRegs(uintptr(c.fd), heap))
}

// Sregs reads the special registers (api.rst 4.13).
func (c *VCPU) Sregs() (*Sregs, error) {
	r, err := gokvm.GetSregs(uintptr(c.fd))
	return r, wrap("KVM_GET_SREGS", err)
}

// SetSregs loads the special registers (api.rst 4.14).
func (c *VCPU) SetSregs(r *Sregs) error {
	c.sregs = *r
	return wrap("KVM_SET_SREGS", gokvm.SetSregs(uintptr(c.fd), &c.sregs))
}

// SetCPUID sets what the vCPU's CPUID instruction shows (api.rst 4.43). It does not call KVM if that is set
// already, since the call takes 0.1 ms.
func (c *VCPU) SetCPUID(entries []CPUIDEntry) error {
	if c.cpuid != nil && slices.Equal(c.cpuid, entries) {
		return nil
	}
	c.cpuid = nil
	if err := setCPUID(c.fd, entries); err != nil {
		return wrap("KVM_SET_CPUID2", err)
	}
	c.cpuid = slices.Clone(entries)
	return nil
}

// TSCKHz returns the frequency of the vCPU's time stamp counter in kHz (api.rst 4.56).
func (c *VCPU) TSCKHz() (uint64, error) {
	if c.tscKHz != 0 {
		return c.tscKHz, nil
	}
	khz, err := gokvm.GetTSCKHz(uintptr(c.fd))
	if err != nil {
		return 0, wrap("KVM_GET_TSC_KHZ", err)
	}
	c.tscKHz = khz
	return khz, nil
}

// SetTSCKHz sets that frequency (api.rst 4.55); only some hosts can scale it.
func (c *VCPU) SetTSCKHz(khz uint64) error {
	c.tscKHz = 0
	return wrap("KVM_SET_TSC_KHZ", gokvm.SetTSCKHz(uintptr(c.fd), khz))
}

// KVMClockCtrl tells the guest that it was paused, so that its soft-lockup watchdog stays quiet (api.rst 4.69). It
// fails with EINVAL for a guest without kvmclock.
func (c *VCPU) KVMClockCtrl() error {
	_, err := ioctl(c.fd, gokvm.IIO(nrKVMClockCtrl), 0)
	return wrap("KVM_KVMCLOCK_CTRL", err)
}

// MSRs returns the named MSRs (api.rst 4.18), without those that the kernel refuses to read.
func (c *VCPU) MSRs(index []uint32) ([]MSR, error) { return getMSRs(c.fd, index) }

// SetMSRs loads MSRs in order (api.rst 4.19) and returns how many the kernel has taken. The kernel stops at the
// first that it refuses.
func (c *VCPU) SetMSRs(msrs []MSR) (int, error) { return setMSRs(c.fd, msrs) }

// MPState returns whether the vCPU runs, is halted, or waits for its start (api.rst 4.38).
func (c *VCPU) MPState() (uint32, error) {
	err := gokvm.GetMPState(uintptr(c.fd), &c.mp)
	return c.mp.State, wrap("KVM_GET_MP_STATE", err)
}

// SetMPState sets the state that MPState returns (api.rst 4.39).
func (c *VCPU) SetMPState(s uint32) error {
	c.mp.State = s
	return wrap("KVM_SET_MP_STATE", gokvm.SetMPState(uintptr(c.fd), &c.mp))
}

// LAPIC appends the local APIC's registers to p (api.rst 4.57).
func (c *VCPU) LAPIC(p []byte) ([]byte, error) {
	err := gokvm.GetLocalAPIC(uintptr(c.fd), &c.lapic)
	return append(p, c.lapic.Regs[:]...), wrap("KVM_GET_LAPIC", err)
}

// SetLAPIC loads the local APIC's registers (api.rst 4.58).
func (c *VCPU) SetLAPIC(p []byte) error {
	return set("KVM_SET_LAPIC", c.fd, &c.lapic, p, gokvm.SetLocalAPIC)
}

// Translate returns the guest physical address behind a guest virtual one (api.rst 4.15).
func (c *VCPU) Translate(va uint64) (gpa uint64, ok bool) {
	c.transl = gokvm.Translation{LinearAddress: va}
	if err := gokvm.Translate(uintptr(c.fd), &c.transl); err != nil {
		return 0, false
	}
	return c.transl.PhysicalAddress, c.transl.Valid != 0
}
