package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Pagemap asks the kernel which pages of guest RAM it has committed, without touching any. It uses PAGEMAP_SCAN
// (Linux 6.7), or else reads /proc/self/pagemap, which does not tell a mapped zero page from others. Only one
// goroutine at a time may use a Pagemap.
type Pagemap struct {
	f      *os.File
	shared bool // f is that of OpenAhead
	scan   bool
	// regions and entries are the results of one call, of PAGEMAP_SCAN and of pagemap.
	regions [scanRegions]pageRegion
	entries []byte
	// runs are the runs found between from and upto that NextData has not passed yet.
	runs       []pageRun
	from, upto uint64
}

type pageRun struct{ first, end uint64 }

// Bits of an entry of /proc/pid/pagemap, see proc_pid_pagemap(5).
const (
	pagemapPresent = 1 << 63
	pagemapSwapped = 1 << 62
	pagemapEntry   = 8
	pagemapBatch   = 4096 // entries
)

// ahead is the page map that OpenAhead has opened, or nil.
var ahead atomic.Pointer[os.File]

// OpenAhead opens the page map for all later calls of OpenPagemap, for a process that can open no path later.
func OpenAhead() error {
	if ahead.Load() != nil {
		return nil
	}
	f, err := openPagemap()
	if err != nil {
		return err
	}
	if !ahead.CompareAndSwap(nil, f) {
		return f.Close()
	}
	return nil
}

// OpenPagemap opens the page map of this process.
func OpenPagemap() (*Pagemap, error) {
	if f := ahead.Load(); f != nil {
		return &Pagemap{f: f, scan: true, shared: true}, nil
	}
	f, err := openPagemap()
	if err != nil {
		return nil, err
	}
	return &Pagemap{f: f, scan: true}, nil
}

func openPagemap() (*os.File, error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, fmt.Errorf("asking which guest pages are in use: %w: mount /proc", err)
	}
	return f, nil
}

// Close closes the page map.
func (p *Pagemap) Close() error {
	if p.shared {
		return nil
	}
	return p.f.Close()
}

// NextData returns the first run [first, end) of committed pages at or after page, in the linear numbering of
// slots; first == end if there is none. The run may end early. NextData fetches many runs at once and keeps them.
// A call with page 0 discards them and asks the kernel again.
func (p *Pagemap) NextData(slots []guestmem.Slot, page uint64) (first, end uint64, err error) {
	if page == 0 || page < p.from || page > p.upto {
		p.runs, p.upto = p.runs[:0], page
	}
	for p.from = page; ; {
		for len(p.runs) > 0 && p.runs[0].end <= page {
			p.runs = p.runs[1:]
		}
		if len(p.runs) > 0 {
			return max(page, p.runs[0].first), p.runs[0].end, nil
		}
		if more, err := p.goOn(slots); err != nil || !more {
			return page, page, err
		}
	}
}

// goOn looks at some pages from upto on, and reports whether there were any left.
func (p *Pagemap) goOn(slots []guestmem.Slot) (bool, error) {
	for _, s := range slots {
		base, n := s.Offset/guestmem.PageSize, s.Size/guestmem.PageSize
		if p.upto >= base+n {
			continue
		}
		at := max(p.upto, base)
		seen, err := p.look(s.HVA+uintptr(at-base)*guestmem.PageSize, base+n-at, func(lo, hi uint64) {
			if k := len(p.runs); k > 0 && p.runs[k-1].end == at+lo {
				p.runs[k-1].end = at + hi
			} else {
				p.runs = append(p.runs, pageRun{at + lo, at + hi})
			}
		})
		p.upto = at + seen
		return true, err
	}
	return false, nil
}

// Scan calls found with the runs of committed pages among the n at hva. Page numbers count from hva.
func (p *Pagemap) Scan(hva uintptr, n uint64, found func(lo, hi uint64)) error {
	for at := uint64(0); at < n; {
		seen, err := p.look(hva+uintptr(at)*guestmem.PageSize, n-at, func(lo, hi uint64) { found(at+lo, at+hi) })
		if err != nil {
			return err
		}
		at += seen
	}
	return nil
}

// look is Scan for the first few of the pages. It returns how many it has looked at, at least one.
func (p *Pagemap) look(hva uintptr, n uint64, found func(lo, hi uint64)) (seen uint64, err error) {
	page := func(at uint64) uint64 { return (at - uint64(hva)) / guestmem.PageSize }
	if p.scan {
		k, end, err := pagemapScan(p.f.Fd(), hva, hva+uintptr(n)*guestmem.PageSize, &p.regions)
		switch {
		case err == nil:
			for _, r := range p.regions[:k] {
				found(page(r.start), page(r.end))
			}
			if k < len(p.regions) {
				return n, nil
			}
			return page(end), nil
		case !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EINVAL):
			return 0, fmt.Errorf("asking which guest pages are in use: %w", os.NewSyscallError("ioctl(PAGEMAP_SCAN)", err))
		}
		p.scan = false
	}
	if p.entries == nil {
		p.entries = make([]byte, pagemapBatch*pagemapEntry)
	}
	b := p.entries[:min(n, pagemapBatch)*pagemapEntry]
	for again := true; again; again = errors.Is(err, unix.EINTR) {
		_, err = p.f.ReadAt(b, int64(uint64(hva)/guestmem.PageSize*pagemapEntry))
	}
	if err != nil {
		return 0, fmt.Errorf("asking which guest pages are in use: %w", err)
	}
	for ; len(b) > 0; b, seen = b[pagemapEntry:], seen+1 {
		if binary.LittleEndian.Uint64(b)&(pagemapPresent|pagemapSwapped) != 0 {
			found(seen, seen+1)
		}
	}
	return seen, nil
}
