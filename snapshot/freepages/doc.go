// Package freepages finds the pages of RAM that a Linux guest does not use, so that a snapshot need not store
// their old content.
//
// A guest that has written and deleted a file leaves its bytes behind in free pages. They differ from the previous
// snapshot, their content does not tell that they are free, and they may be more than all that the guest still
// needs. Linux keeps a struct page for each page of RAM, and marks in it the first page of each free block of the
// buddy allocator. This package reads these marks from outside while the guest is paused. makedumpfile(8) leaves
// free pages out of a crash dump in the same way, and hibernation out of its image.
//
// The guest's kernel says in its VMCOREINFO note where the struct pages are and what layout they have
// (Documentation/admin-guide/kdump/vmcoreinfo.rst). The agent finds the note's address in /sys/kernel/vmcoreinfo.
// [Locate] reads the note once, after boot, and finds the struct pages from it. [Map.Free] runs for each capture.
//
// # What makes it safe
//
// The content of a page that is wrongly taken for free would be lost. So a page counts as free only if
//
//   - its block has a mark: _mapcount of the first page has the value for the buddy allocator, its order is a
//     possible one, and the block is aligned to its size;
//   - no page of the block has a reference;
//   - the vCPUs still run on page tables that map the struct pages to where they were when the map was made. A
//     kernel that another one has started (kexec) has different page tables.
//
// The mark is correct at every instant, not only between two operations of the allocator: Linux removes it before
// it hands out a page, and sets it as the last step of freeing one. Paused vCPUs have no writes under way.
//
// A restored guest finds zeros in such a page. Kernels that clear pages when they free them (init_on_free) expect
// that. A kernel that checks free pages for a pattern (page_poison) does not tolerate it, so the agent does not
// report the note there.
//
// A guest can lie in all of this, but then it only loses its own pages: all reads are of its own RAM, checked by
// guestmem, and all loops and allocations are bounded.
package freepages
