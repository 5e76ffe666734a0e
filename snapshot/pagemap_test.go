package snapshot

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The test has runs of one page each, at every other page.
func TestMore_runs_than_one_call_returns(t *testing.T) {
	mem := testMemory(t, 64<<20)
	for _, s := range mem.Slots() {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, s.HVA, uintptr(s.Size), unix.MADV_NOHUGEPAGE); errno != 0 && errno != unix.EINVAL {
			t.Fatal(errno)
		}
	}
	var want []uint64
	for page := uint64(3); page < mem.Size()/guestmem.PageSize; page += 2 {
		want = append(want, page)
		writePage(t, mem, page, []byte{1})
	}
	for _, scan := range []bool{true, false} {
		pm, err := OpenPagemap()
		if err != nil {
			t.Fatal(err)
		}
		defer pm.Close()
		pm.scan = scan && hasPagemapScan(t, mem)
		for range 2 { // from the beginning again
			if got := usedPages(t, pm, mem); !slices.Equal(got, want) {
				t.Errorf("scan %t: %d pages are in use, want %d", scan, len(got), len(want))
			}
		}
		// Backwards, and far ahead.
		for _, page := range []uint64{9000, 8000, 8001, 8001, 12000, 3, 4} {
			first, end, err := pm.NextData(mem.Slots(), page)
			if err != nil || first != page|1 || end <= first {
				t.Errorf("scan %t: after page %d: %d to %d, %v", scan, page, first, end, err)
			}
		}
	}
}

// usedPages lists the pages that the kernel has committed.
func usedPages(t *testing.T, pm *Pagemap, mem *guestmem.Memory) []uint64 {
	t.Helper()
	var out []uint64
	for page := uint64(0); ; {
		first, end, err := pm.NextData(mem.Slots(), page)
		if err != nil {
			t.Fatal(err)
		}
		if first == end {
			return out
		}
		if first < page {
			t.Fatalf("run from %d, asked from %d", first, page)
		}
		for page = first; page < end; page++ {
			out = append(out, page)
		}
	}
}

func hasPagemapScan(t *testing.T, mem *guestmem.Memory) bool {
	t.Helper()
	pm, err := OpenPagemap()
	if err != nil {
		t.Fatal(err)
	}
	defer pm.Close()
	if _, _, err := pm.NextData(mem.Slots(), 0); err != nil {
		t.Fatal(err)
	}
	return pm.scan
}

func TestThe_pagemap_knows_what_was_touched(t *testing.T) {
	mem := testMemory(t, 4<<30)
	// Turn off huge pages: the kernel may commit one for a single byte.
	for _, s := range mem.Slots() {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, s.HVA, uintptr(s.Size), unix.MADV_NOHUGEPAGE); errno != 0 && errno != unix.EINVAL {
			t.Fatal(errno)
		}
	}
	hole := uint64(guestmem.HoleStart) / guestmem.PageSize
	last := mem.Size()/guestmem.PageSize - 1
	written := []uint64{0, 1, 5, 511, 512, 100000, hole - 1, hole, hole + 1, last}
	for _, page := range written {
		writePage(t, mem, page, []byte{1})
	}
	// A page that was only read is mapped, but to zeros.
	if err := mem.Read(7*guestmem.PageSize, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	scan := hasPagemapScan(t, mem)
	scanned := written
	if cmdline, _ := os.ReadFile("/proc/cmdline"); strings.Contains(string(cmdline), "pvm_no_zero_page=1") {
		// Such a kernel gives each reader a page of its own.
		scanned = slices.Sorted(slices.Values(append([]uint64{7}, written...)))
	}
	for _, tc := range []struct {
		name string
		scan bool
		want []uint64
	}{
		{"PAGEMAP_SCAN", true, scanned},
		{"pagemap file", false, slices.Sorted(slices.Values(append([]uint64{7}, written...)))},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.scan && !scan {
				t.Skip("this kernel has no PAGEMAP_SCAN: it came with Linux 6.7")
			}
			pm, err := OpenPagemap()
			if err != nil {
				t.Fatal(err)
			}
			defer pm.Close()
			pm.scan = tc.scan
			if got := usedPages(t, pm, mem); !slices.Equal(got, tc.want) {
				t.Errorf("pages %v are in use, want %v", got, tc.want)
			}
			var scanned []uint64
			for _, s := range mem.Slots() {
				if err := pm.Scan(s.HVA, s.Size/guestmem.PageSize, func(lo, hi uint64) {
					for page := lo; page < hi; page++ {
						scanned = append(scanned, s.Offset/guestmem.PageSize+page)
					}
				}); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.Equal(scanned, tc.want) {
				t.Errorf("a scan finds pages %v, want %v", scanned, tc.want)
			}
			if pm.scan != tc.scan {
				t.Error("it was asked in another way")
			}
		})
	}
}

func TestA_snapshot_commits_no_memory_of_the_guest(t *testing.T) {
	mem := testMemory(t, 4<<30)
	for page := uint64(0); page < 300; page++ {
		writePage(t, mem, page*1000, []byte{1})
	}
	pm, err := OpenPagemap()
	if err != nil {
		t.Fatal(err)
	}
	defer pm.Close()
	pm.scan = false // which counts mapped zeros as well
	before := usedPages(t, pm, mem)
	spec := testSpec(t, mem)
	spec.Memory.(*GuestSource).pagemap.scan = hasPagemapScan(t, mem)
	if _, err := Create(context.Background(), filepath.Join(t.TempDir(), "snap"), spec); err != nil {
		t.Fatal(err)
	}
	if after := usedPages(t, pm, mem); len(after) != len(before) {
		t.Errorf("%d pages were committed before the snapshot, %d after it", len(before), len(after))
	}
}

func TestSnapshots_are_the_same_without_pagemap_scan(t *testing.T) {
	mem := testMemory(t, 4<<30)
	p := make([]byte, guestmem.PageSize)
	for page := uint64(0); page < 900; page += 2 {
		fillPage(p, page, false)
		writePage(t, mem, page*900, p)
	}
	var stats [2]Stats
	for i := range stats {
		spec := testSpec(t, mem)
		if i == 1 {
			spec.Memory.(*GuestSource).pagemap.scan = false
		}
		info, err := Create(context.Background(), filepath.Join(t.TempDir(), "snap"), spec)
		if err != nil {
			t.Fatal(err)
		}
		stats[i] = info.Manifest.Stats
	}
	if stats[0] != stats[1] || stats[0].Pages != 450 {
		t.Errorf("%+v and %+v", stats[0], stats[1])
	}
}
