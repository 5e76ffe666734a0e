package pager

import (
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
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
	ioctlPagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg), Linux 6.7
	pageIsPresent    = 1 << 3
	pageIsSwapped    = 1 << 4
	pageIsPFNZero    = 1 << 5

	// scanRegions is how many runs one call returns, scanGap the largest gap
	// between pages of interest over which a scan goes on: looking at a page
	// costs a hundredth of a call.
	scanRegions = 256
	scanGap     = 64
	// entries of /proc/self/pagemap that are read at once, and what is in them
	// (proc_pid_pagemap(5)).
	pagemapEntries = 4096
	pagemapInUse   = 1<<63 | 1<<62 // present, swapped
)

// inUse returns those pages of set that the host has committed and that it does
// not map to its page of zeros. It touches none. The others are zeros, or missing.
func inUse(slots []guestmem.Slot, set *guestmem.PageSet) (*guestmem.PageSet, error) {
	return scanAll(slots, set, false)
}

func scanAll(slots []guestmem.Slot, set *guestmem.PageSet, slow bool) (*guestmem.PageSet, error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s := &scanner{f: f, slow: slow, regions: new([scanRegions]pageRegion)}
	// The kernel writes to regions through a number in arg, which the collector
	// and the growing of stacks know nothing of.
	var pin runtime.Pinner
	pin.Pin(s.regions)
	defer pin.Unpin()
	out := guestmem.NewPageSet(set.Pages())
	for first, end := range near(set, scanGap) {
		err := pieces(slots, first, end, func(hva uintptr, page, n uint64) error {
			return s.scan(hva, n, func(lo, hi uint64) { out.Add(page+lo, page+hi) })
		})
		if err != nil {
			return nil, err
		}
	}
	for i, w := range set.Words() {
		out.Words()[i] &= w
	}
	return out, nil
}

type scanner struct {
	f       *os.File
	regions *[scanRegions]pageRegion
	slow    bool
	buf     []byte
}

// scan calls found with runs of committed pages among the n at hva, counted from there.
func (s *scanner) scan(hva uintptr, n uint64, found func(lo, hi uint64)) error {
	start, end := uint64(hva), uint64(hva)+n*pageSize
	for at := start; at < end && !s.slow; {
		arg := scanArg{
			size: uint64(unsafe.Sizeof(scanArg{})), start: at, end: end,
			vec: uint64(uintptr(unsafe.Pointer(s.regions))), vecLen: scanRegions,
			inverted: pageIsPFNZero, mask: pageIsPFNZero, anyOf: pageIsPresent | pageIsSwapped, returned: pageIsPFNZero,
		}
		k, _, errno := unix.Syscall(unix.SYS_IOCTL, s.f.Fd(), ioctlPagemapScan, uintptr(unsafe.Pointer(&arg)))
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.ENOTTY, errno == unix.EINVAL:
			s.slow = true
			continue
		case errno != 0:
			return os.NewSyscallError("ioctl(PAGEMAP_SCAN)", errno)
		}
		for _, r := range s.regions[:k] {
			found((r.start-start)/pageSize, (r.end-start)/pageSize)
		}
		if at = arg.walkEnd; k < scanRegions {
			return nil
		}
	}
	if s.slow {
		return s.read(start/pageSize, n, found)
	}
	return nil
}

// read is scan for kernels without PAGEMAP_SCAN.
func (s *scanner) read(first, n uint64, found func(lo, hi uint64)) error {
	const entry = 8
	if s.buf == nil {
		s.buf = make([]byte, pagemapEntries*entry)
	}
	for at := uint64(0); at < n; {
		b := s.buf[:min(n-at, pagemapEntries)*entry]
		if _, err := s.f.ReadAt(b, int64((first+at)*entry)); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		} else if err != nil {
			continue
		}
		for ; len(b) > 0; b, at = b[entry:], at+1 {
			if binary.LittleEndian.Uint64(b)&pagemapInUse != 0 {
				found(at, at+1)
			}
		}
	}
	return nil
}

// address is that of the first byte of b, for the kernel.
func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
