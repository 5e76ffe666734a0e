package snapshot

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// struct pm_scan_arg and struct page_region of linux/fs.h.
type scanArg struct {
	size, flags                     uint64
	start, end, walkEnd             uint64
	vec, vecLen, maxPages           uint64
	inverted, mask, anyOf, returned uint64
}

type pageRegion struct{ start, end, categories uint64 }

const (
	ioctlPagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)
	pageIsPresent    = 1 << 3
	pageIsSwapped    = 1 << 4
	pageIsPFNZero    = 1 << 5
)

// pagemapScan returns the first run of pages in [start, end) that are present
// or swapped out, and not the kernel's page of zeros; end, end if there is none.
func pagemapScan(fd, start, end uintptr) (lo, hi uintptr, err error) {
	if start >= end {
		return end, end, nil
	}
	// The kernel writes to region through a number in arg, which the collector
	// and the growing of stacks know nothing of.
	region := new(pageRegion)
	var pin runtime.Pinner
	pin.Pin(region)
	defer pin.Unpin()
	arg := &scanArg{
		size: uint64(unsafe.Sizeof(scanArg{})), start: uint64(start), end: uint64(end),
		vec: uint64(uintptr(unsafe.Pointer(region))), vecLen: 1,
		inverted: pageIsPFNZero, mask: pageIsPFNZero, anyOf: pageIsPresent | pageIsSwapped, returned: pageIsPFNZero,
	}
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, ioctlPagemapScan, uintptr(unsafe.Pointer(arg)))
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return 0, 0, errno
		case n == 0:
			return end, end, nil
		}
		return uintptr(region.start), uintptr(region.end), nil
	}
}
