package kvm

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	gokvm "github.com/bobuhiro11/gokvm/kvm"
	"golang.org/x/sys/unix"
)

// APIVersion is the only version of the KVM API (api.rst 4.1).
const APIVersion = 12

// The reasons why a host cannot run VMs.
var (
	ErrNoKVM        = errors.New("this host has no usable /dev/kvm")
	ErrNoPermission = errors.New("no permission to use /dev/kvm")
)

// System is an open /dev/kvm. Its methods may be called from any goroutine.
type System struct {
	fd int

	cpuidOnce sync.Once
	cpuid     []CPUIDEntry
	cpuidErr  error
}

const device = "/dev/kvm"

// ahead is the device that OpenAhead has opened, or nil.
var ahead atomic.Pointer[System]

// OpenAhead opens /dev/kvm for all later calls of Open, for a process that can open no path later.
func OpenAhead() error {
	if ahead.Load() != nil {
		return nil
	}
	s, err := Open()
	if err != nil {
		return err
	}
	if !ahead.CompareAndSwap(nil, s) {
		return s.Close()
	}
	return nil
}

// Open opens /dev/kvm. The error wraps ErrNoKVM or ErrNoPermission where that is
// the cause.
func Open() (*System, error) {
	if s := ahead.Load(); s != nil {
		return open(device, func() (int, error) { return unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0) })
	}
	return OpenPath(device)
}

// OpenPath is Open for another device node.
func OpenPath(path string) (*System, error) {
	return open(path, func() (int, error) { return unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0) })
}

func open(path string, get func() (int, error)) (*System, error) {
	fd, err := get()
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return nil, fmt.Errorf("opening %s: %w (%w): enable virtualisation in the firmware and load kvm_intel or kvm_amd, or run where /dev/kvm is passed through",
			path, ErrNoKVM, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return nil, fmt.Errorf("opening %s: %w (%w): run as root, or add the user to the group that owns it",
			path, ErrNoPermission, err)
	case err != nil:
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	v, err := gokvm.GetAPIVersion(uintptr(fd))
	switch {
	case err != nil:
		unix.Close(fd)
		return nil, fmt.Errorf("opening %s: %w: it does not answer as KVM does (%w): let the kernel make the node (character device 10:232)", path, ErrNoKVM, err)
	case v != APIVersion:
		unix.Close(fd)
		return nil, fmt.Errorf("opening %s: %w: it speaks API version %d instead of %d: use a kernel later than 2.6.22", path, ErrNoKVM, v, APIVersion)
	}
	return &System{fd: fd}, nil
}

// Close closes /dev/kvm. VMs made from it remain usable.
func (s *System) Close() error { return os.NewSyscallError("close /dev/kvm", unix.Close(s.fd)) }

// Check returns the value of a capability (api.rst 4.4). 0 means that the host lacks it; the meaning of a positive
// value depends on the capability.
func (s *System) Check(c Capability) int {
	n, err := ioctl(s.fd, gokvm.IIO(nrCheckExtension), uintptr(c))
	if err != nil {
		return 0
	}
	return n
}

// SupportedCPUID returns the CPUID that KVM can offer to guests on this host (api.rst 4.46). It asks KVM only once,
// since that takes a large part of a millisecond. The caller must not change the result.
func (s *System) SupportedCPUID() ([]CPUIDEntry, error) {
	s.cpuidOnce.Do(func() { s.cpuid, s.cpuidErr = supportedCPUID(s.fd) })
	return s.cpuid, s.cpuidErr
}

// MSRIndexList returns the indices of the MSRs that are part of a vCPU's state (api.rst 4.3).
func (s *System) MSRIndexList() ([]uint32, error) { return msrIndexList(s.fd) }

// CreateVM makes an empty VM (api.rst 4.2).
func (s *System) CreateVM() (*VM, error) {
	for {
		fd, err := gokvm.CreateVM(uintptr(s.fd))
		if errors.Is(err, unix.EINTR) {
			// A signal came during the start of KVM's worker thread; try again.
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("KVM_CREATE_VM: %w", err)
		}
		unix.CloseOnExec(int(fd))
		size, err := gokvm.GetVCPUMMmapSize(uintptr(s.fd))
		if err != nil {
			unix.Close(int(fd))
			return nil, fmt.Errorf("KVM_GET_VCPU_MMAP_SIZE: %w", err)
		}
		return &VM{fd: int(fd), runSize: int(size)}, nil
	}
}
