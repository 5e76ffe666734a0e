package kvm

import (
	"errors"
	"fmt"
	"unsafe"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
	"golang.org/x/sys/unix"
)

// ioctl numbers, from include/uapi/linux/kvm.h.
const (
	nrGetMSRIndexList    = 0x02
	nrCheckExtension     = 0x03
	nrGetSupportedCPUID  = 0x05
	nrGetDirtyLog        = 0x42
	nrSetIdentityMapAddr = 0x48
	nrIRQLine            = 0x61
	nrIRQFD              = 0x76
	nrIOEventFD          = 0x79
	nrRun                = 0x80
	nrGetMSRs            = 0x88
	nrSetMSRs            = 0x89
	nrSetCPUID2          = 0x90
	nrEnableCap          = 0xa3
	nrGetXSave           = 0xa4
	nrSetXSave           = 0xa5
	nrKVMClockCtrl       = 0xad
	nrClearDirtyLog      = 0xc0
	nrGetXSave2          = 0xcf
)

// Bounds on the kernel's lists, far above their present lengths.
const (
	maxCPUIDEntries = 256
	maxMSRs         = 1024
)

func ioctl(fd int, req, arg uintptr) (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, arg)
	if errno != 0 {
		return int(n), errno
	}
	return int(n), nil
}

func ioctlPtr(fd int, req uintptr, arg unsafe.Pointer) (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
	if errno != 0 {
		return int(n), errno
	}
	return int(n), nil
}

// CPUIDEntry is struct kvm_cpuid_entry2.
type CPUIDEntry struct {
	Function uint32
	Index    uint32
	Flags    uint32
	EAX      uint32
	EBX      uint32
	ECX      uint32
	EDX      uint32
	_        [3]uint32
}

type cpuid2 struct {
	nent    uint32
	_       uint32
	entries [maxCPUIDEntries]CPUIDEntry
}

func supportedCPUID(fd int) ([]CPUIDEntry, error) {
	list := &cpuid2{nent: maxCPUIDEntries}
	if _, err := ioctlPtr(fd, gokvm.IIOWR(nrGetSupportedCPUID, 8), unsafe.Pointer(list)); err != nil {
		return nil, fmt.Errorf("KVM_GET_SUPPORTED_CPUID: %w", err)
	}
	return append([]CPUIDEntry(nil), list.entries[:list.nent]...), nil
}

func setCPUID(fd int, entries []CPUIDEntry) error {
	if len(entries) > maxCPUIDEntries {
		return fmt.Errorf("%w: %d CPUID entries, at most %d", ErrState, len(entries), maxCPUIDEntries)
	}
	list := &cpuid2{nent: uint32(len(entries))}
	copy(list.entries[:], entries)
	_, err := ioctlPtr(fd, gokvm.IIOW(nrSetCPUID2, 8), unsafe.Pointer(list))
	return err
}

// MSR is struct kvm_msr_entry.
type MSR struct {
	Index uint32
	_     uint32
	Value uint64
}

type msrs struct {
	n       uint32
	_       uint32
	entries [maxMSRs]MSR
}

func msrIndexList(fd int) ([]uint32, error) {
	list := &struct {
		n     uint32
		index [maxMSRs]uint32
	}{n: maxMSRs}
	if _, err := ioctlPtr(fd, gokvm.IIOWR(nrGetMSRIndexList, 4), unsafe.Pointer(list)); err != nil {
		return nil, fmt.Errorf("KVM_GET_MSR_INDEX_LIST: %w", err)
	}
	return append([]uint32(nil), list.index[:list.n]...), nil
}

// getMSRs reads in batches: the kernel stops at an MSR that it cannot read. getMSRs leaves that out.
func getMSRs(fd int, index []uint32) ([]MSR, error) {
	list := new(msrs)
	var got []MSR
	for len(index) > 0 {
		batch := index[:min(len(index), maxMSRs)]
		list.n = uint32(len(batch))
		for i, x := range batch {
			list.entries[i] = MSR{Index: x}
		}
		n, err := ioctlPtr(fd, gokvm.IIOWR(nrGetMSRs, 8), unsafe.Pointer(list))
		if err != nil {
			return nil, fmt.Errorf("KVM_GET_MSRS: %w", err)
		}
		n = min(max(n, 0), len(batch))
		got = append(got, list.entries[:n]...)
		if n < len(batch) {
			n++ // the one that was refused
		}
		index = index[n:]
	}
	return got, nil
}

func setMSRs(fd int, values []MSR) (int, error) {
	if len(values) > maxMSRs {
		return 0, fmt.Errorf("KVM_SET_MSRS: %w: %d MSRs, at most %d", ErrState, len(values), maxMSRs)
	}
	list := &msrs{n: uint32(len(values))}
	copy(list.entries[:], values)
	n, err := ioctlPtr(fd, gokvm.IIOW(nrSetMSRs, 8), unsafe.Pointer(list))
	if err != nil {
		return 0, fmt.Errorf("KVM_SET_MSRS: %w", err)
	}
	return n, nil
}

func setIdentityMapAddr(fd int, addr uint64) error {
	_, err := ioctlPtr(fd, gokvm.IIOW(nrSetIdentityMapAddr, 8), unsafe.Pointer(&addr))
	return err
}

// irqfdArg is struct kvm_irqfd.
type irqfdArg struct {
	fd  uint32
	gsi uint32
	_   [24]uint8
}

func irqfd(vm, fd int, gsi uint32) error {
	arg := &irqfdArg{fd: uint32(fd), gsi: gsi}
	_, err := ioctlPtr(vm, gokvm.IIOW(nrIRQFD, unsafe.Sizeof(*arg)), unsafe.Pointer(arg))
	return err
}

// irqLevel is struct kvm_irq_level.
type irqLevel struct{ irq, level uint32 }

func irqLine(vm int, gsi uint32, high bool) error {
	arg := &irqLevel{irq: gsi}
	if high {
		arg.level = 1
	}
	_, err := ioctlPtr(vm, gokvm.IIOW(nrIRQLine, unsafe.Sizeof(*arg)), unsafe.Pointer(arg))
	return err
}

// ioeventfdArg is struct kvm_ioeventfd.
type ioeventfdArg struct {
	datamatch uint64
	addr      uint64
	len       uint32
	fd        int32
	flags     uint32
	_         [36]uint8
}

func ioeventfd(vm, fd int, addr uint64, value uint32) error {
	const datamatch = 1
	arg := &ioeventfdArg{datamatch: uint64(value), addr: addr, len: 4, fd: int32(fd), flags: datamatch}
	_, err := ioctlPtr(vm, gokvm.IIOW(nrIOEventFD, unsafe.Sizeof(*arg)), unsafe.Pointer(arg))
	return err
}

// enableCapArg is struct kvm_enable_cap.
type enableCapArg struct {
	cap   uint32
	flags uint32
	args  [4]uint64
	_     [64]uint8
}

func enableCap(fd int, c Capability, args []uint64) error {
	arg := &enableCapArg{cap: uint32(c)}
	copy(arg.args[:], args)
	_, err := ioctlPtr(fd, gokvm.IIOW(nrEnableCap, unsafe.Sizeof(*arg)), unsafe.Pointer(arg))
	return err
}

func dirtyLog(fd int, slot uint32, bitmap []uint64) error {
	arg := &struct {
		slot   uint32
		_      uint32
		bitmap unsafe.Pointer
	}{slot: slot, bitmap: unsafe.Pointer(unsafe.SliceData(bitmap))}
	_, err := ioctlPtr(fd, gokvm.IIOW(nrGetDirtyLog, unsafe.Sizeof(*arg)), unsafe.Pointer(arg))
	return err
}

func clearDirtyLog(fd int, slot uint32, first uint64, pages uint32, bitmap []uint64) error {
	arg := &struct {
		slot   uint32
		pages  uint32
		first  uint64
		bitmap unsafe.Pointer
	}{slot: slot, pages: pages, first: first, bitmap: unsafe.Pointer(unsafe.SliceData(bitmap))}
	_, err := ioctlPtr(fd, gokvm.IIOWR(nrClearDirtyLog, unsafe.Sizeof(*arg)), unsafe.Pointer(arg))
	return err
}

func (c *VCPU) getXSave() error {
	req := gokvm.IIOR(nrGetXSave, 4096)
	if c.hasXSv2 {
		req = gokvm.IIOR(nrGetXSave2, 4096)
	}
	_, err := ioctlPtr(c.fd, req, unsafe.Pointer(unsafe.SliceData(c.xsave)))
	return wrap("KVM_GET_XSAVE", err)
}

func (c *VCPU) setXSave() error {
	_, err := ioctlPtr(c.fd, gokvm.IIOW(nrSetXSave, 4096), unsafe.Pointer(unsafe.SliceData(c.xsave)))
	return wrap("KVM_SET_XSAVE", err)
}

// bytesOf returns the memory of a struct without pointers.
func bytesOf[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

func sizeOf[T any]() int {
	var v T
	return int(unsafe.Sizeof(v))
}

// load copies p over a struct without pointers; the size must fit.
func load[T any](v *T, p []byte) error {
	b := bytesOf(v)
	if len(p) != len(b) {
		return fmt.Errorf("%w: %d bytes, want %d", ErrState, len(p), len(b))
	}
	copy(b, p)
	return nil
}

// storeByte stores to a field that the kernel may read at any moment.
//
//go:noinline
func storeByte(b []byte, i int, on bool) {
	var v byte
	if on {
		v = 1
	}
	*(*byte)(unsafe.Pointer(&b[i])) = v
}

// Kick makes the thread tid of this process leave KVM_RUN. The Go runtime sends itself the same signal for
// preemption and tolerates extra ones.
func Kick(tid int) error {
	err := unix.Tgkill(unix.Getpid(), tid, unix.SIGURG)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return wrap("signalling a vCPU thread", err)
}
