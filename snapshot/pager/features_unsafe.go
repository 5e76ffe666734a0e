package pager

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Features asks the kernel, in the way New does, for a userfaultfd that gets the
// faults of KVM, and returns which optional features it has: the UFFD_FEATURE_ bits
// of linux/userfaultfd.h. The error wraps ErrNotPermitted or ErrNotSupported where
// that is the cause, and New would fail too.
func Features() (uint64, error) {
	fd, err := newUserfaultfd()
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	arg := uffdAPIArg{api: uffdAPI}
	if err := ioctl(fd, ioctlAPI, unsafe.Pointer(&arg)); err != nil {
		return 0, fmt.Errorf("ioctl(UFFDIO_API): %w", err)
	}
	return arg.features, nil
}
