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

type pageRegion struct{ start, end, _ uint64 }

const (
	ioctlPagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)
	pageIsPresent    = 1 << 3
	pageIsSwapped    = 1 << 4
	pageIsPFNZero    = 1 << 5
	// scanRegions is the most runs that one call returns.
	scanRegions = 256
)

// pagemapScan fills regions with the runs of pages in [start, end) that are present or swapped out, but not the
// kernel's zero page. It returns the number of runs and, if regions is full, the address where it stopped.
func pagemapScan(fd, start, end uintptr, regions *[scanRegions]pageRegion) (n int, at uint64, err error) {
	// The kernel writes to regions through an address held as a number in arg. The garbage collector and stack
	// growth do not see that.
	var pin runtime.Pinner
	pin.Pin(regions)
	defer pin.Unpin()
	arg := &scanArg{
		size: uint64(unsafe.Sizeof(scanArg{})), start: uint64(start), end: uint64(end),
		vec: uint64(uintptr(unsafe.Pointer(regions))), vecLen: scanRegions,
		inverted: pageIsPFNZero, mask: pageIsPFNZero, anyOf: pageIsPresent | pageIsSwapped, returned: pageIsPFNZero,
	}
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, ioctlPagemapScan, uintptr(unsafe.Pointer(arg)))
		switch errno {
		case 0:
			return int(n), arg.walkEnd, nil
		case unix.EINTR:
		default:
			return 0, 0, errno
		}
	}
}
