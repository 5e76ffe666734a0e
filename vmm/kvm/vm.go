package kvm

import (
	"fmt"
	"os"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
	"golang.org/x/sys/unix"
)

// VM is a KVM virtual machine. Only one goroutine at a time may set it up or load its state. Others may connect
// interrupts and events concurrently.
type VM struct {
	fd      int
	runSize int

	// Heap memory for calls that go through gokvm; see the package comment.
	clock   gokvm.ClockData
	pit     gokvm.PITState2
	irqchip gokvm.IRQChip
	region  gokvm.UserspaceMemoryRegion
}

// FD returns the VM's file descriptor.
func (v *VM) FD() int { return v.fd }

// Close releases the VM. Close its vCPUs first.
func (v *VM) Close() error { return os.NewSyscallError("close VM", unix.Close(v.fd)) }

// Check returns the value of a capability of this VM (api.rst 4.4).
func (v *VM) Check(c Capability) int {
	n, err := ioctl(v.fd, gokvm.IIO(nrCheckExtension), uintptr(c))
	if err != nil {
		return 0
	}
	return n
}

// SetTSSAddr gives VMX the address of three pages that no guest sees (api.rst 4.20).
func (v *VM) SetTSSAddr(addr uint32) error {
	return wrap("KVM_SET_TSS_ADDR", gokvm.SetTSSAddr(uintptr(v.fd), addr))
}

// SetIdentityMapAddr gives VMX the address of one more such page (api.rst 4.45).
func (v *VM) SetIdentityMapAddr(addr uint64) error {
	return wrap("KVM_SET_IDENTITY_MAP_ADDR", setIdentityMapAddr(v.fd, addr))
}

// CreateIRQChip makes the in-kernel PICs, IOAPIC and LAPICs (api.rst 4.24).
func (v *VM) CreateIRQChip() error {
	return wrap("KVM_CREATE_IRQCHIP", gokvm.CreateIRQChip(uintptr(v.fd)))
}

// CreatePIT2 makes the in-kernel i8254 (api.rst 4.70).
func (v *VM) CreatePIT2() error {
	return wrap("KVM_CREATE_PIT2", gokvm.CreatePIT2(uintptr(v.fd)))
}

// SetMemory maps size bytes of this process at hva into the guest at gpa (api.rst 4.35). Size 0 removes the slot.
func (v *VM) SetMemory(slot uint32, gpa, size uint64, hva uintptr, flags uint32) error {
	v.region = gokvm.UserspaceMemoryRegion{
		Slot: slot, Flags: flags, GuestPhysAddr: gpa, MemorySize: size, UserspaceAddr: uint64(hva),
	}
	if err := gokvm.SetUserMemoryRegion(uintptr(v.fd), &v.region); err != nil {
		return fmt.Errorf("KVM_SET_USER_MEMORY_REGION slot %d, %d bytes at %#x: %w", slot, size, gpa, err)
	}
	return nil
}

// IRQFD makes the eventfd fd raise an edge on an interrupt line (api.rst 4.75).
func (v *VM) IRQFD(fd int, gsi uint32) error {
	if err := irqfd(v.fd, fd, gsi); err != nil {
		return fmt.Errorf("KVM_IRQFD for GSI %d: %w", gsi, err)
	}
	return nil
}

// IRQLine sets the level of an interrupt line (api.rst 4.25). The interrupt controllers have seen the level when
// IRQLine returns, so a vCPU that starts later finds it.
func (v *VM) IRQLine(gsi uint32, high bool) error {
	if err := irqLine(v.fd, gsi, high); err != nil {
		return fmt.Errorf("KVM_IRQ_LINE for GSI %d: %w", gsi, err)
	}
	return nil
}

// IOEventFD makes a 32-bit guest write of value to the MMIO address addr signal the eventfd fd, without leaving the
// kernel (api.rst 4.59).
func (v *VM) IOEventFD(fd int, addr uint64, value uint32) error {
	if err := ioeventfd(v.fd, fd, addr, value); err != nil {
		return fmt.Errorf("KVM_IOEVENTFD at %#x: %w", addr, err)
	}
	return nil
}

// EnableCap enables a capability (api.rst 4.37).
func (v *VM) EnableCap(c Capability, args ...uint64) error {
	if err := enableCap(v.fd, c, args); err != nil {
		return fmt.Errorf("KVM_ENABLE_CAP %d: %w", c, err)
	}
	return nil
}

// DirtyLog reads the dirty bitmap of a slot into bitmap: a bit for each page (api.rst 4.8). Without manual
// protection it also clears the log.
func (v *VM) DirtyLog(slot uint32, bitmap []uint64) error {
	return wrap("KVM_GET_DIRTY_LOG", dirtyLog(v.fd, slot, bitmap))
}

// ClearDirtyLog write-protects the pages again whose bits are set (api.rst 4.117). first must be a multiple of 64,
// and pages, too, unless it reaches the end of the slot.
func (v *VM) ClearDirtyLog(slot uint32, first uint64, pages uint32, bitmap []uint64) error {
	return wrap("KVM_CLEAR_DIRTY_LOG", clearDirtyLog(v.fd, slot, first, pages, bitmap))
}

// Interrupt controllers for IRQChip and SetIRQChip (api.rst 4.26).
const (
	ChipPICMaster = 0
	ChipPICSlave  = 1
	ChipIOAPIC    = 2
)

// IRQChip appends the state of an interrupt controller to p.
func (v *VM) IRQChip(chip uint32, p []byte) ([]byte, error) {
	v.irqchip = gokvm.IRQChip{ChipID: chip}
	if err := gokvm.GetIRQChip(uintptr(v.fd), &v.irqchip); err != nil {
		return p, fmt.Errorf("KVM_GET_IRQCHIP %d: %w", chip, err)
	}
	return append(p, v.irqchip.Chip[:]...), nil
}

// ChipSize is the size of the state of one interrupt controller, PITSize that of the i8254, in bytes.
const (
	ChipSize = 512
	PITSize  = 112
)

// SetIRQChip loads a state that IRQChip has returned.
func (v *VM) SetIRQChip(chip uint32, p []byte) error {
	if len(p) != ChipSize {
		return fmt.Errorf("KVM_SET_IRQCHIP %d: %w: %d bytes, want %d", chip, ErrState, len(p), ChipSize)
	}
	v.irqchip = gokvm.IRQChip{ChipID: chip}
	copy(v.irqchip.Chip[:], p)
	if err := gokvm.SetIRQChip(uintptr(v.fd), &v.irqchip); err != nil {
		return fmt.Errorf("KVM_SET_IRQCHIP %d: %w", chip, err)
	}
	return nil
}

// PIT appends the state of the i8254 to p (api.rst 4.71).
func (v *VM) PIT(p []byte) ([]byte, error) {
	if err := gokvm.GetPIT2(uintptr(v.fd), &v.pit); err != nil {
		return p, fmt.Errorf("KVM_GET_PIT2: %w", err)
	}
	return append(p, bytesOf(&v.pit)...), nil
}

// SetPIT loads a state that PIT has returned (api.rst 4.72).
func (v *VM) SetPIT(p []byte) error {
	return set("KVM_SET_PIT2", v.fd, &v.pit, p, gokvm.SetPIT2)
}

// Clock returns the guest's kvmclock in nanoseconds (api.rst 4.29).
func (v *VM) Clock() (uint64, error) {
	v.clock = gokvm.ClockData{}
	err := gokvm.GetClock(uintptr(v.fd), &v.clock)
	return v.clock.Clock, wrap("KVM_GET_CLOCK", err)
}

// SetClock sets the guest's kvmclock (api.rst 4.30).
func (v *VM) SetClock(ns uint64) error {
	v.clock = gokvm.ClockData{Clock: ns}
	return wrap("KVM_SET_CLOCK", gokvm.SetClock(uintptr(v.fd), &v.clock))
}

func wrap(call string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	return nil
}
