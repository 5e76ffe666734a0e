package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Pagemap asks the kernel which pages of guest RAM it has committed, without
// touching any: by PAGEMAP_SCAN (Linux 6.7), or else by /proc/self/pagemap,
// which does not tell a mapped page of zeros from others. It is for one
// goroutine at a time.
type Pagemap struct {
	f    *os.File
	scan bool
	// buf has the entries of pages from the one at bufHVA on. It is dropped when
	// somebody begins again at the beginning.
	buf    []byte
	bufHVA uintptr
}

// Bits of an entry of /proc/pid/pagemap, see proc_pid_pagemap(5).
const (
	pagemapPresent = 1 << 63
	pagemapSwapped = 1 << 62
	pagemapEntry   = 8
	pagemapBatch   = 4096 // entries
)

// OpenPagemap opens the page map of this process.
func OpenPagemap() (*Pagemap, error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, fmt.Errorf("asking which guest pages are in use: %w: mount /proc", err)
	}
	return &Pagemap{f: f, scan: true}, nil
}

// Close closes it.
func (p *Pagemap) Close() error { return p.f.Close() }

// NextData returns the first run [first, end) of committed pages at or after
// page, in the linear numbering of slots; first == end if there is none. Asking
// from page 0 on makes sure that the answers are not older than that.
func (p *Pagemap) NextData(slots []guestmem.Slot, page uint64) (first, end uint64, err error) {
	if page == 0 {
		p.buf = p.buf[:0]
	}
	for _, s := range slots {
		base, n := s.Offset/guestmem.PageSize, s.Size/guestmem.PageSize
		if page >= base+n {
			continue
		}
		from := max(page, base) - base
		lo, hi, err := p.next(s.HVA, from, n)
		if err != nil {
			return 0, 0, fmt.Errorf("asking which guest pages are in use: %w", err)
		}
		if lo < hi {
			return base + lo, base + hi, nil
		}
	}
	return page, page, nil
}

// next looks at pages from to n of the mapping at hva.
func (p *Pagemap) next(hva uintptr, from, n uint64) (lo, hi uint64, err error) {
	if p.scan {
		start, end, err := pagemapScan(p.f.Fd(), hva+uintptr(from)*guestmem.PageSize, hva+uintptr(n)*guestmem.PageSize)
		if err == nil {
			return uint64(start-hva) / guestmem.PageSize, uint64(end-hva) / guestmem.PageSize, nil
		}
		if !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EINVAL) {
			return 0, 0, os.NewSyscallError("ioctl(PAGEMAP_SCAN)", err)
		}
		p.scan = false
	}
	found := false
	for at := from; at < n; at++ {
		e, err := p.entry(hva+uintptr(at)*guestmem.PageSize, n-at)
		if err != nil {
			return 0, 0, err
		}
		used := e&(pagemapPresent|pagemapSwapped) != 0
		switch {
		case used && !found:
			lo, found = at, true
		case !used && found:
			return lo, at, nil
		}
	}
	if !found {
		return n, n, nil
	}
	return lo, n, nil
}

// entry returns the entry of the page at hva, which has n-1 more behind it.
func (p *Pagemap) entry(hva uintptr, n uint64) (uint64, error) {
	i := uint64(hva-p.bufHVA) / guestmem.PageSize * pagemapEntry
	if hva < p.bufHVA || i >= uint64(len(p.buf)) {
		p.buf = slices.Grow(p.buf[:0], pagemapBatch*pagemapEntry)[:min(n, pagemapBatch)*pagemapEntry]
		if _, err := p.f.ReadAt(p.buf, int64(uint64(hva)/guestmem.PageSize*pagemapEntry)); err != nil {
			p.buf = p.buf[:0]
			return 0, err
		}
		p.bufHVA, i = hva, 0
	}
	return binary.LittleEndian.Uint64(p.buf[i:]), nil
}
