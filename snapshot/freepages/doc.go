// Package freepages finds the pages of RAM that a Linux guest has no use for, so that a
// snapshot need not store what is left in them.
//
// A guest that has written and deleted a file leaves its bytes behind in free pages: they
// differ from the snapshot before, cannot be told from others by looking at them, and may
// be more than all that the guest still needs. Linux keeps a struct page for each page of
// RAM, and marks in it the first page of each free block of the buddy allocator. This
// package reads these marks, from outside, in RAM that stands still: the way that
// makedumpfile(8) leaves free pages out of a crash dump, and hibernation out of its image.
//
// Where the struct pages are, and what they look like, the guest's kernel says itself, in
// its VMCOREINFO note (Documentation/admin-guide/kdump/vmcoreinfo.rst). The agent knows
// where that is from /sys/kernel/vmcoreinfo. [Locate] reads the note once, after boot, and
// follows it to the struct pages; [Map.Free] is for each capture.
//
// # What makes it safe
//
// A page that is taken for free and is not would be lost. So a page counts as free only if
//
//   - its block has a mark: _mapcount of the first page has the value for the buddy
//     allocator, its order is one that there can be, and the block is aligned to its size;
//   - no page of the block has a reference;
//   - the vCPUs still run on page tables that map the struct pages to where they were when
//     the map was made. A kernel that was started by another (kexec) has others.
//
// The mark is true at every instant, not only between two operations of the allocator:
// Linux removes it before it gives a page away, and sets it after everything else, when it
// takes one back. vCPUs that stand still have no writes under way.
//
// What a restored guest finds in such a page is zeros, which is what kernels expect that
// clear pages when they are freed (init_on_free). A kernel that checks free pages for a
// pattern (page_poison) does not get along with it: the agent does not tell of the note
// there.
//
// A guest can lie in all of this. It loses its own pages by that and nothing else: all
// reads are of its own RAM, checked by guestmem, and all loops and allocations are bounded.
package freepages
