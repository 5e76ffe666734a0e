package freepages

import (
	"encoding/binary"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Page tables of x86-64 (SDM volume 3, 4.5).
const (
	present     = 1 << 0
	large       = 1 << 7 // of an entry for 2 MiB or 1 GiB
	addressMask = 0x000f_ffff_ffff_f000
	tableBits   = 9
	pageBits    = 12
	// userTables is the CR3 bit by which Linux's page tables for user space differ from those of the kernel (page
	// table isolation).
	userTables = 1 << pageBits
)

// tables are page tables in guest RAM.
type tables struct {
	mem    *guestmem.Memory
	root   uint64 // physical address of the highest table
	levels int    // 4 or 5
}

// lookup returns the physical address of va, and how many bytes from there on the same entry maps.
func (t tables) lookup(va uint64) (gpa guestmem.GPA, n uint64, err error) {
	at := t.root & addressMask
	for level := t.levels; level > 0; level-- {
		shift := pageBits + tableBits*(level-1)
		index := va >> shift & (1<<tableBits - 1)
		e, err := readWord(t.mem, at+8*index)
		if err != nil {
			return 0, 0, err
		}
		if e&present == 0 {
			return 0, 0, unknown("the address %#x is not mapped", va)
		}
		if level == 1 || level <= 3 && e&large != 0 {
			size := uint64(1) << shift
			at = e & addressMask &^ (size - 1)
			return guestmem.GPA(at + va&(size-1)), size - va&(size-1), nil
		}
		at = e & addressMask
	}
	return 0, 0, unknown("page tables of %d levels", t.levels)
}

// read copies memory at a virtual address.
func (t tables) read(va uint64, p []byte) error {
	for len(p) > 0 {
		gpa, n, err := t.lookup(va)
		if err != nil {
			return err
		}
		n = min(n, uint64(len(p)))
		if err := t.mem.Read(gpa, p[:n]); err != nil {
			return unknown("reading at %#x: %v", va, err)
		}
		p, va = p[n:], va+n
	}
	return nil
}

func (t tables) word(va uint64) (uint64, error) {
	var b [8]byte
	err := t.read(va, b[:])
	return binary.LittleEndian.Uint64(b[:]), err
}

// readWord reads 8 bytes at a physical address.
func readWord(mem *guestmem.Memory, at uint64) (uint64, error) {
	var b [8]byte
	if err := mem.Read(guestmem.GPA(at), b[:]); err != nil {
		return 0, unknown("a page table: %v", err)
	}
	return binary.LittleEndian.Uint64(b[:]), nil
}
