// Package guestmem owns the RAM of one guest. No other code touches guest pages: other packages name them by guest
// physical address and get copies, or let the kernel move bytes between guest pages and a file.
//
// # Why no code holds a slice of guest memory
//
// After a lazy restore a guest page may be missing. A userfaultfd pager in this same process then supplies its
// content. The runtime cannot preempt a goroutine that faults inside copy(). If the garbage collector wants to stop
// the world at that moment, it waits for the goroutine, the goroutine waits for the pager, and the pager waits for
// the garbage collector. So Go code dereferences a guest page only after [Residency.Ensure] has said that the page
// is present, and holds off [Memory.Discard] until it has finished. System calls are different: a thread inside
// preadv(2) does not hold up the collector, so kernel I/O may touch missing pages.
//
// Copies also prevent time-of-check to time-of-use bugs, since another vCPU may rewrite a descriptor during a
// check. And one place marks pages dirty: KVM's dirty log does not see what the VMM writes.
package guestmem
