// Package pager fills the RAM of a restored guest while the guest runs.
//
// [New] registers the RAM that a snapshot has content for with userfaultfd(2), and the vCPUs start at once. A
// thread that touches such a page, in the guest or in a system call, sleeps until a handler has found its frame in
// the snapshot, checked it, decompressed it and put all of its pages in place. New leaves chunks of 2 MiB that are
// all zeros unregistered where it can, so the kernel fills them without asking.
//
// # Every page is filled once, and again only after Evict
//
// The pager divides guest RAM into chunks of 512 pages. A chunk has a mutex and two bits for each page:
//
//	present   Go code may touch the page without a fault that the pager must answer
//	zeroed    the page was given to the balloon: the snapshot's content is dead
//
// The rules, and why they suffice:
//
//  1. A fill puts snapshot content into a page only under the chunk's mutex and only if neither bit is set, and
//     sets present before it releases the mutex. So handlers, Ensure and prefetching cannot fill a page twice:
//     the second one sees the bit.
//  2. Discarding sets zeroed and clears present under the mutex. A fill that was under way has finished by then,
//     and no later one takes place. So nothing stale arrives after Discarding has returned, when
//     madvise(MADV_DONTNEED) removes the page.
//  3. A vCPU may touch a discarded page before madvise does its work, and then again after it. So a handler
//     answers every fault on a zeroed page with zeros, and does not set present, which could be wrong a moment
//     later. Only Ensure sets present on a zeroed page: its callers hold off Discard (see package guestmem), so
//     no madvise is on its way.
//  4. The fast path of Ensure reads the bits without the mutex. Only Discarding and Evict clear a present bit, and
//     Ensure's callers hold them off.
//  5. A clear present bit is reliable only under the mutex. A fill wakes the waiting threads before it sets the
//     bit, and they may have written to the page by then. Code that takes a missing page's content from
//     elsewhere, as Source does, must check the bit under the mutex.
//  6. Evict takes pages away under the mutex, while the vCPUs and devices are paused, and clears present. It spares
//     what may have changed since the fill, so the next fill brings back what was there.
//
// # When a page cannot be loaded
//
// A frame that fails its checksum, or a file that cannot be read, ends the restore: the pager calls
// Options.OnFailure once, and Err returns the reason. No thread gets wrong bytes, and none hangs. The pager makes
// a page that threads wait for inaccessible (mprotect PROT_NONE) before it wakes them, which turns the fault into
// EFAULT: out of KVM_RUN for a vCPU, out of the system call for device I/O. Go code gets the error from Ensure.
// UFFDIO_POISON would do the same for system calls, but makes KVM send the vCPU's thread a SIGBUS, which ends a Go
// program. Present pages stay unchanged, so an owner can still inspect the guest.
//
// KVM touches guest memory in two ways. The tests with a tiny guest show what each does (Linux 6.18):
//
//   - For code that runs on the processor KVM looks pages up. KVM_RUN returns EFAULT as an error. A signal
//     interrupts the wait (FAULT_FLAG_INTERRUPTIBLE, since Linux 6.2): KVM_RUN fails with EINTR, and the vCPU
//     waits again when KVM_RUN is called again.
//   - KVM's instruction emulator copies like a system call. EFAULT becomes an exit KVM_EXIT_MMIO with an address
//     inside RAM. The owner must treat such an exit as a failure, or serve it from guestmem.Memory, which returns
//     the pager's error. Only fatal signals interrupt the wait, here and in preadv(2) and the like: after any
//     other the thread keeps waiting, awake, until the page is there. The handlers make sure that this is soon.
//
// # Order of events
//
//	New, vCPU state and device state loaded, Start, vCPUs run
//	vCPUs paused, devices drained, Source and snapshot.Create, Close
//
// or, for a guest that keeps running, once or several times in between:
//
//	Prepare, vCPUs paused, devices drained, state saved, Freeze, vCPUs run,
//	snapshot.Create, Frozen.Close
//
// Close needs no cooperation: pages that are not loaded by then become inaccessible, so a vCPU or a device that
// was not stopped gets EFAULT, not zeros. After Load has finished, Close leaves ordinary memory behind.
//
// # The working set
//
// [Pager.WorkingSet] is what the guest waited for, for the next resume to load ahead: [Pager.LoadWorkingSet]. A wake
// waits for the pages before [Pager.Ready], so these are recorded one by one: until then a fault fills its page alone,
// and not with the rest of its frame. The snapshot packs them into frames of their own without compression
// (snapshot.Spec.Hot). In the first resume of a VM, which knows no hot pages, later pages come alone too, for
// Options.RecordTime. Further resumes load what is known ahead, without the other pages of its frames; a page that they
// wait for after Ready brings its frame, since what is new to a guest is often near.
//
// # Frames that were decompressed before
//
// Handlers, Ensure, Prefetch and Load ask Options.Cache for a frame first, and read the snapshot only if the cache
// does not have it. [Source] never asks the cache, so a page that was never loaded enters a later snapshot from
// the earlier one, not from the cache. See package pagecache.
//
// # A frozen view of RAM
//
// [Frozen] is for captures of a guest that keeps running, lazily restored or not. Freeze copies the pages of its
// set while the guest is paused, or write-protects them with UFFDIO_WRITEPROTECT. It uses the pager's userfaultfd
// if there is one, because memory can be registered with only one. RAM is then registered a second time, for
// missing pages and writes. Loading and protection do not conflict. A missing page has not changed, so it is not
// in the set. Filling it does not protect it. A fault says which of the two kinds it is. A page that was given to
// the balloon is zeros, and the kernel's page map says so before the guest runs again.
//
// Go code must not fault on protected pages either. Before a write guestmem.Memory calls [Frozen.BeforeWrite],
// which saves the page and lifts its protection by a system call. It may wait for the reader. The reader takes no
// lock of guestmem.Memory, so Discard may wait with that lock held.
//
// # What it costs
//
// Measured on two processors of an AMD EPYC that were shared with other work, with the RAM of a Linux guest with
// 189 MiB in use (see FORMAT.md):
//
//	DROWSE_BENCH_RAM=ram go test ./snapshot/pager -run xxx -bench .
//
//	open, reserve RAM, New and Start, 256 MiB of RAM    0.13 ms
//	the same, 4 GiB                                     0.15 to 0.18 ms
//	the same, 16 GiB                                    0.24 to 0.35 ms
//	Ensure, the page is present                         15 ns
//	Ensure, it must read a frame, p50                   0.10 ms
//	fault in a system call, p50                         0.20 ms
//
// Decompression takes 68 us of a fault. Zeros in registered chunks cost about 3 us a page more than those left to
// the kernel, in runs of 64.
package pager
