package pager

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// linux/userfaultfd.h
const (
	uffdAPI           = 0xaa
	ioctlNew          = 0xaa00     // USERFAULTFD_IOC_NEW on /dev/userfaultfd, Linux 6.1
	ioctlAPI          = 0xc018aa3f // UFFDIO_API
	ioctlRegister     = 0xc020aa00 // UFFDIO_REGISTER
	ioctlUnregister   = 0x8010aa01 // UFFDIO_UNREGISTER
	ioctlWake         = 0x8010aa02 // UFFDIO_WAKE
	ioctlCopy         = 0xc028aa03 // UFFDIO_COPY
	ioctlZero         = 0xc020aa04 // UFFDIO_ZEROPAGE
	ioctlProtect      = 0xc018aa06 // UFFDIO_WRITEPROTECT
	registerMissing   = 1 << 0
	registerWP        = 1 << 1
	protectOn         = 1 << 0 // UFFDIO_WRITEPROTECT_MODE_WP
	canProtect        = 1 << 6
	canWake           = 1 << 2
	canCopy           = 1 << 3
	canZero           = 1 << 4
	eventPagefault    = 0x12
	flagWrite         = 1 << 0
	flagProtected     = 1 << 1 // UFFD_PAGEFAULT_FLAG_WP
	messageSize       = 32
	messageFlags      = 8  // offset of arg.pagefault.flags
	messageAddress    = 16 // offset of arg.pagefault.address
	userfaultfdDevice = "/dev/userfaultfd"
)

type uffdAPIArg struct{ api, features, ioctls uint64 }

type uffdRange struct{ start, length uint64 }

type uffdRegister struct {
	r            uffdRange
	mode, ioctls uint64
}

type uffdCopy struct {
	dst, src, length, mode uint64
	copied                 int64
}

type uffdZero struct {
	r      uffdRange
	mode   uint64
	zeroed int64
}

// openUserfaultfd returns a descriptor that also gets faults in kernel mode, which is how KVM touches guest
// memory.
func openUserfaultfd() (int, error) {
	fd, err := newUserfaultfd()
	if err != nil {
		return -1, err
	}
	// Ask for no optional feature: Linux has had MISSING faults on anonymous memory since 4.3.
	arg := uffdAPIArg{api: uffdAPI}
	if err := ioctl(fd, ioctlAPI, unsafe.Pointer(&arg)); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("ioctl(UFFDIO_API): %w", err)
	}
	return fd, nil
}

// ahead is the device that OpenAhead has opened, or nil.
var ahead atomic.Pointer[os.File]

// OpenAhead opens /dev/userfaultfd for all later uses, for a process that can open no path later. On a host without
// that device it does nothing: there is userfaultfd(2).
func OpenAhead() error {
	if ahead.Load() != nil {
		return nil
	}
	f, err := os.OpenFile(userfaultfdDevice, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotPermitted, err)
	}
	if !ahead.CompareAndSwap(nil, f) {
		return f.Close()
	}
	return nil
}

// userfaultfdByDevice makes a userfaultfd by ioctl(2) of the device.
func userfaultfdByDevice(flags uintptr) (int, error) {
	dev := -1
	if f := ahead.Load(); f != nil {
		dev = int(f.Fd())
	} else {
		var err error
		if dev, err = unix.Open(userfaultfdDevice, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return -1, err
		}
		defer unix.Close(dev)
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), ioctlNew, flags)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

func newUserfaultfd() (int, error) {
	const flags = unix.O_CLOEXEC | unix.O_NONBLOCK
	dev, derr := userfaultfdByDevice(flags)
	if derr == nil {
		return dev, nil
	}
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, flags, 0, 0)
	switch {
	case errno == 0:
		return int(fd), nil
	case errno == unix.EPERM:
		return -1, fmt.Errorf("%w: opening %s: %w; userfaultfd(2): %w", ErrNotPermitted, userfaultfdDevice, derr, errno)
	case errno == unix.ENOSYS:
		return -1, fmt.Errorf("%w: userfaultfd(2): %w", ErrNotSupported, errno)
	}
	return -1, os.NewSyscallError("userfaultfd", errno)
}

func ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// register asks the kernel for the faults of a range, of the kinds in mode. Registering again replaces the mode.
func register(fd int, hva uintptr, n, mode uint64) error {
	arg := uffdRegister{r: uffdRange{uint64(hva), n}, mode: mode}
	if err := ioctl(fd, ioctlRegister, unsafe.Pointer(&arg)); err != nil {
		if mode&registerWP != 0 && errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("%w: userfaultfd cannot write-protect", ErrNotSupported)
		}
		return os.NewSyscallError("ioctl(UFFDIO_REGISTER)", err)
	}
	need := uint64(canWake)
	if mode&registerMissing != 0 {
		need |= canCopy | canZero
	}
	if mode&registerWP != 0 {
		need |= canProtect
	}
	if arg.ioctls&need != need {
		return fmt.Errorf("%w: userfaultfd can do %#x, %#x is needed", ErrNotSupported, arg.ioctls, need)
	}
	return nil
}

// unregister leaves a range to the kernel, and wakes the threads that wait for it.
func unregister(fd int, hva uintptr, n uint64) error {
	arg := uffdRange{uint64(hva), n}
	return os.NewSyscallError("ioctl(UFFDIO_UNREGISTER)", ioctl(fd, ioctlUnregister, unsafe.Pointer(&arg)))
}

// filler makes the ioctls that fill pages, without allocating. Only one goroutine at a time may use it.
type filler struct {
	fd int
	c  uffdCopy
	z  uffdZero
	r  uffdRange
}

// copy copies src to the missing pages at hva, which is page-aligned. A present page is an error: its content was
// put there against the rules.
func (f *filler) copy(hva uintptr, src []byte) error {
	for len(src) > 0 {
		f.c = uffdCopy{dst: uint64(hva), src: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(src)))), length: uint64(len(src))}
		err := ioctl(f.fd, ioctlCopy, unsafe.Pointer(&f.c))
		n, err := outcome(f.c.copied, uint64(len(src)), err)
		if errors.Is(err, unix.EEXIST) {
			return ErrNotFresh
		}
		if err != nil {
			return os.NewSyscallError("ioctl(UFFDIO_COPY)", err)
		}
		hva, src = hva+uintptr(n), src[n:]
	}
	return nil
}

// zero maps the kernel's zero page at the missing pages of [hva, hva+n). It does not change present pages.
func (f *filler) zero(hva uintptr, n uint64) error {
	for n > 0 {
		f.z = uffdZero{r: uffdRange{uint64(hva), n}}
		err := ioctl(f.fd, ioctlZero, unsafe.Pointer(&f.z))
		done, err := outcome(f.z.zeroed, n, err)
		if errors.Is(err, unix.EEXIST) {
			// Make the waiting threads look again.
			f.wake(hva, pageSize)
			done, err = pageSize, nil
		}
		if err != nil {
			return os.NewSyscallError("ioctl(UFFDIO_ZEROPAGE)", err)
		}
		hva, n = hva+uintptr(done), n-done
	}
	return nil
}

// outcome returns how many bytes of n are done after an ioctl has returned err and reported done bytes.
func outcome(done int64, n uint64, err error) (uint64, error) {
	switch {
	case err == nil:
		return n, nil
	case done > 0:
		return uint64(done), nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		return 0, nil
	}
	return 0, err
}

// wake makes the threads that wait for pages of a range look again.
func (f *filler) wake(hva uintptr, n uint64) {
	f.r = uffdRange{uint64(hva), n}
	// It can only fail for a range that is no longer registered, and then unregistering it or closing the
	// descriptor has woken all threads.
	_ = ioctl(f.fd, ioctlWake, unsafe.Pointer(&f.r))
}

// protect makes writes to the present pages of a range fault. unprotect undoes that and wakes the waiting threads.
// The range must be registered with registerWP.
func protect(fd int, hva uintptr, n uint64) error {
	return writeProtect(fd, hva, n, protectOn)
}

func unprotect(fd int, hva uintptr, n uint64) error { return writeProtect(fd, hva, n, 0) }

func writeProtect(fd int, hva uintptr, n, mode uint64) error {
	for {
		arg := struct {
			r    uffdRange
			mode uint64
		}{uffdRange{uint64(hva), n}, mode}
		err := ioctl(fd, ioctlProtect, unsafe.Pointer(&arg))
		switch {
		case err == nil:
			return nil
		// EAGAIN: the address space is being changed at the same moment.
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		// Before Linux 6.4 a call may not reach beyond one mapping. Neighbours of one kind stay separate mappings
		// if the guest wrote to each of them before the kernel could merge them.
		case errors.Is(err, unix.ENOENT) && n > pageSize:
			half := n / 2 &^ (pageSize - 1)
			if err := writeProtect(fd, hva, half, mode); err != nil {
				return err
			}
			hva, n = hva+uintptr(half), n-half
			continue
		}
		return os.NewSyscallError("ioctl(UFFDIO_WRITEPROTECT)", err)
	}
}

// revoke makes pages inaccessible to this process and to KVM: system calls and KVM_RUN that touch them get EFAULT.
func revoke(hva uintptr, n uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_MPROTECT, hva, uintptr(n), unix.PROT_NONE); errno != 0 {
		return os.NewSyscallError("mprotect guest RAM", errno)
	}
	return nil
}

// drop gives pages back to the host: the next access to them faults.
func drop(hva uintptr, n uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_MADVISE, hva, uintptr(n), unix.MADV_DONTNEED); errno != 0 {
		return os.NewSyscallError("madvise(MADV_DONTNEED) on guest RAM", errno)
	}
	return nil
}

// address returns the address of the first byte of b, for the kernel.
func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
