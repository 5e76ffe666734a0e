package pager

import (
	"unsafe"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// rawPage returns what production code must never have: a slice of guest memory.
func rawPage(mem *guestmem.Memory, page uint64) []byte {
	hva := mem.Slots()[0].HVA + uintptr(page*pageSize)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&hva))), pageSize)
}
