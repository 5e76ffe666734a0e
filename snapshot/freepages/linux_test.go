package freepages

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// linux is RAM with as much of a Linux kernel as this package reads: a note, page tables, sections and struct
// pages.
type linux struct {
	t   *testing.T
	mem *guestmem.Memory
	linuxConfig
	next uint64 // physical address of the next page that alloc gives out
	root uint64
	note struct{ at, size uint64 }
	// memmap[pfn] is where the struct page of pfn begins, in pieces: pages of memmap in order of their virtual
	// address.
	memmap map[uint64]uint64 // virtual page -> physical page
}

type linuxConfig struct {
	ram      uint64
	stride   uint64
	levels   int
	direct   bool // sections in one list, not in lists of lists
	small    bool // struct pages mapped by pages of 4 KiB, scattered
	buddy    int32
	sections []bool // sections that exist; all if nil
}

// The layout of the kernel of these tests.
const (
	physBase    = 0x0100_0000
	directMap   = 0xffff_8880_0000_0000
	vmemmap     = 0xffff_ea00_0000_0000
	offFlags    = 0
	offPrivate  = 40
	offMapcount = 48
	offRefcount = 52
	offMap      = 8 // of section_mem_map
	sectionSize = 32
	sectionBits = 27
	physBits    = 36
	orders      = 11
)

func (l *linux) alloc(pages uint64) uint64 {
	at := l.next
	l.next += pages * guestmem.PageSize
	return at
}

func (l *linux) put(at uint64, p []byte) {
	l.t.Helper()
	if err := l.mem.Write(guestmem.GPA(at), p); err != nil {
		l.t.Fatal(err)
	}
}

func (l *linux) put32(at uint64, v uint32) { l.put(at, binary.LittleEndian.AppendUint32(nil, v)) }
func (l *linux) put64(at, v uint64)        { l.put(at, binary.LittleEndian.AppendUint64(nil, v)) }

func (l *linux) get64(at uint64) uint64 {
	l.t.Helper()
	v, err := readWord(l.mem, at)
	if err != nil {
		l.t.Fatal(err)
	}
	return v
}

// mapPage maps a page of 4 KiB, or of 2 MiB, below the table root.
func (l *linux) mapPage(root, va, pa uint64, big bool) {
	at, last := root, 1
	if big {
		last = 2
	}
	for level := l.levels; ; level-- {
		entry := at + 8*(va>>(pageBits+tableBits*(level-1))&(1<<tableBits-1))
		if level == last {
			e := pa | present | 1<<63 // and no-execute
			if big {
				e |= large
			}
			l.put64(entry, e)
			return
		}
		if e := l.get64(entry); e&present != 0 {
			at = e & addressMask
		} else {
			at = l.alloc(1)
			l.put64(entry, at|present)
		}
	}
}

func newLinux(t *testing.T, c linuxConfig) *linux {
	t.Helper()
	mem, err := guestmem.New(c.ram)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	l := &linux{t: t, mem: mem, linuxConfig: c, next: physBase, memmap: map[uint64]uint64{}}
	l.root = l.alloc(1)
	for pa := uint64(0); pa < 256<<20; pa += 2 << 20 {
		l.mapPage(l.root, directMap+pa, pa, true)
		if pa >= physBase {
			l.mapPage(l.root, kernelMap+pa-physBase, pa, true)
		}
	}
	l.mapStructPages()
	l.sectionsAndNote()
	return l
}

// mapStructPages gives every page of RAM an empty struct page.
func (l *linux) mapStructPages() {
	for _, slot := range l.mem.Slots() {
		first := vmemmap + uint64(slot.GPA)/guestmem.PageSize*l.stride
		end := first + slot.Size/guestmem.PageSize*l.stride
		if l.small {
			var pages []uint64
			for va := first &^ (guestmem.PageSize - 1); va < end; va += guestmem.PageSize {
				pages = append(pages, va)
			}
			// Map them out of order, so that no two are contiguous.
			for i := range pages {
				if i%2 == 1 {
					pages[i-1], pages[i] = pages[i], pages[i-1]
				}
			}
			for _, va := range pages {
				pa := l.alloc(1)
				l.memmap[va/guestmem.PageSize] = pa
				l.mapPage(l.root, va, pa, false)
			}
			continue
		}
		const big = 2 << 20
		for va := first &^ (big - 1); va < end; va += big {
			l.next = (l.next + big - 1) &^ (big - 1)
			pa := l.alloc(big / guestmem.PageSize)
			for i := uint64(0); i < big; i += guestmem.PageSize {
				l.memmap[(va+i)/guestmem.PageSize] = pa + i
			}
			l.mapPage(l.root, va, pa, true)
		}
	}
}

func (l *linux) sectionsAndNote() {
	count := uint64(1) << (physBits - sectionBits)
	perRoot := uint64(guestmem.PageSize / sectionSize)
	length := count
	list := l.alloc(count*sectionSize/guestmem.PageSize + 1)
	roots := list
	if !l.direct {
		length = (count + perRoot - 1) / perRoot
		roots = l.alloc(1)
		for i := range length {
			l.put64(roots+8*i, directMap+list+i*guestmem.PageSize)
		}
	}
	for _, slot := range l.mem.Slots() {
		for s := uint64(slot.GPA) >> sectionBits; s <= (uint64(slot.GPA)+slot.Size-1)>>sectionBits; s++ {
			if l.sections == nil || s < uint64(len(l.sections)) && l.sections[s] {
				l.put64(list+s*sectionSize+offMap, vmemmap|0xf)
			}
		}
	}
	l.writeNote(l.noteText(length, directMap+roots))
}

func (l *linux) noteText(length, roots uint64) string {
	b := &strings.Builder{}
	five := 0
	if l.levels == 5 {
		five = 1
	}
	fmt.Fprintf(b, "OSRELEASE=6.1.0-test\nBUILD-ID=abcd\nPAGESIZE=4096\n")
	fmt.Fprintf(b, "SIZE(page)=%d\nOFFSET(page.flags)=%d\nOFFSET(page._refcount)=%d\nOFFSET(page._mapcount)=%d\nOFFSET(page.private)=%d\n",
		l.stride, offFlags, offRefcount, offMapcount, offPrivate)
	fmt.Fprintf(b, "LENGTH(zone.free_area)=%d\nNUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=%d\n", orders, l.buddy)
	fmt.Fprintf(b, "NUMBER(phys_base)=%d\nSYMBOL(init_top_pgt)=%x\nNUMBER(pgtable_l5_enabled)=%d\n", physBase, kernelMap+l.root-physBase, five)
	fmt.Fprintf(b, "SYMBOL(mem_section)=%x\nLENGTH(mem_section)=%d\nSIZE(mem_section)=%d\nOFFSET(mem_section.section_mem_map)=%d\n",
		roots, length, sectionSize, offMap)
	fmt.Fprintf(b, "NUMBER(SECTION_SIZE_BITS)=%d\nNUMBER(MAX_PHYSMEM_BITS)=%d\nKERNELOFFSET=0\n", sectionBits, physBits)
	return b.String()
}

// asNote returns an ELF note with the given text.
func asNote(text string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(noteName)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = append(b, noteName+"\x00"...) // padded to four bytes
	return append(b, text...)
}

func (l *linux) writeNote(text string) {
	b := asNote(text)
	l.note.at, l.note.size = l.alloc(2), uint64(len(b)+100)
	l.put(l.note.at, b)
}

func (l *linux) locate() (*Map, error) {
	return Locate(l.mem, guestmem.GPA(l.note.at), l.note.size)
}

// field returns the physical address of 4 bytes of the struct page of pfn.
func (l *linux) field(pfn, off uint64) uint64 {
	va := vmemmap + pfn*l.stride + off
	return l.memmap[va/guestmem.PageSize] + va%guestmem.PageSize
}

// use marks pages [pfn, pfn+n) as in use.
func (l *linux) use(pfn, n uint64) {
	for p := pfn; p < pfn+n; p++ {
		l.put32(l.field(p, offRefcount), 1)
		l.put32(l.field(p, offMapcount), 1<<32-1)
	}
}

// free marks a block as free.
func (l *linux) free(pfn uint64, order uint) {
	for p := pfn; p < pfn+1<<order; p++ {
		l.put32(l.field(p, offRefcount), 0)
	}
	l.put32(l.field(pfn, offMapcount), uint32(l.buddy))
	l.put32(l.field(pfn, offPrivate), uint32(order))
	l.put32(l.field(pfn, offPrivate+4), 0)
}

// populate makes blocks within a block of the given order free or not, at random, and calls isFree for the free
// ones.
func (l *linux) populate(r *rand.Rand, pfn uint64, order uint, isFree func(first, end uint64)) {
	switch n := r.IntN(10); {
	case n < 4 && order > 0:
		l.populate(r, pfn, order-1, isFree)
		l.populate(r, pfn+1<<(order-1), order-1, isFree)
	case n < 7:
		l.free(pfn, order)
		isFree(pfn, pfn+1<<order)
	default:
		l.use(pfn, 1<<order)
	}
}
