// Package guestmem owns the RAM of one guest. It is the only code that touches
// guest pages; everything else names them by guest physical address and gets
// copies, or lets the kernel move bytes between guest pages and a file.
//
// # Why nobody holds a slice of guest memory
//
// After a lazy restore a guest page may be missing, and its content is then
// supplied by a userfaultfd pager that runs in this same process. A goroutine
// that faults inside copy() cannot be preempted: if the garbage collector wants
// to stop the world at that moment it waits for the goroutine, the goroutine
// waits for the pager, and the pager waits for the garbage collector. So Go code
// dereferences a guest page only after [Residency.Ensure] has said that it is
// there, and holds off [Memory.Discard] until it has finished. System calls are
// different: a thread inside preadv(2) does not hold up the collector, so kernel
// I/O may touch missing pages.
//
// Copies also end time-of-check to time-of-use bugs (another vCPU may rewrite a
// descriptor while it is being looked at), and they give one place that marks
// pages dirty: KVM's dirty log does not see what the VMM writes.
package guestmem
