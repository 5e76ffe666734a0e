package pager

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Features opens a userfaultfd that gets the faults of KVM, as New does, and returns its optional features: the
// UFFD_FEATURE_ bits of linux/userfaultfd.h. The error wraps ErrNotPermitted or ErrNotSupported where that is the
// cause; New would fail then too.
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
