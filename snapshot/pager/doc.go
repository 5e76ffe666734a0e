// Package pager fills the RAM of a restored guest while the guest runs.
//
// [New] registers the pages that a snapshot has content for with userfaultfd(2),
// and the vCPUs start at once. A thread that touches such a page, in the guest
// or in a system call, sleeps until a handler has found its frame in the
// snapshot, checked it, decompressed it and put all of its pages in place. RAM
// that is known to be zeros is not registered where it comes in pieces of 2 MiB,
// so the kernel fills it without asking.
//
// # Every page is filled exactly once
//
// Guest RAM is looked at in chunks of 512 pages. A chunk has a mutex and two
// bits for each page:
//
//	present   Go code may touch the page without a fault that a pager has to answer
//	zeroed    the page was given to the balloon: the snapshot's content is dead
//
// The rules, and why they suffice:
//
//  1. Content of the snapshot goes into a page only under the chunk's mutex,
//     only if neither bit is set, and the present bit is set before the mutex is
//     released. So handlers, Ensure and prefetching cannot fill a page twice,
//     whoever comes first, and the second one sees the bit.
//  2. Discarding sets zeroed and clears present under the mutex. A fill that was
//     under way has finished by then, and no later one takes place: nothing
//     stale arrives after Discarding has returned, when madvise(MADV_DONTNEED)
//     takes the page away.
//  3. A vCPU may touch a discarded page before madvise does its work, and then
//     again after it. A fault on a zeroed page is therefore answered with zeros
//     every time, and does not set present, for that could be wrong a moment
//     later. Only Ensure sets present on a zeroed page: its callers hold off
//     Discard (see package guestmem), so no madvise is on its way.
//  4. Bits are read without the mutex on the fast path of Ensure. A present bit
//     is only cleared by Discarding, which Ensure's callers hold off.
//  5. A present bit that is not set means something under the mutex only. A fill
//     wakes those who wait before it sets the bit, and they may have written to
//     the page by then. Whoever takes a missing page's content from elsewhere, as
//     Source does, looks under the mutex.
//
// # When a page cannot be had
//
// A frame that fails its checksum, or a file that cannot be read, ends the
// restore: Options.OnFailure is called once, and Err says why. Nobody gets wrong
// bytes and nobody hangs. The pages that are waited for are made inaccessible
// (mprotect PROT_NONE) before their waiters are woken, which turns the fault
// into EFAULT: out of KVM_RUN for a vCPU, out of the system call for device
// I/O. Go code gets the error from Ensure. UFFDIO_POISON would do the same for
// system calls, but makes KVM send the vCPU's thread a SIGBUS, which ends a Go
// program. Pages that are there stay as they are, so an owner can still look at
// the guest.
//
// KVM touches guest memory in two ways, and the tests with a tiny guest show
// what each does (Linux 6.18):
//
//   - For code that runs on the processor KVM looks pages up. EFAULT comes out of
//     KVM_RUN as an error. A signal interrupts the wait (FAULT_FLAG_INTERRUPTIBLE,
//     since Linux 6.2): KVM_RUN fails with EINTR, and when it is called again the
//     vCPU waits again.
//   - KVM's instruction emulator copies like a system call. EFAULT becomes an exit
//     KVM_EXIT_MMIO with an address inside RAM: the owner must take such an exit
//     for a failure, or serve it from guestmem.Memory, which gives the pager's
//     error. Signals other than fatal ones do not interrupt the wait, here or in
//     preadv(2) and the like: the thread goes on waiting, awake, until the page is
//     there. The handlers see to it that this is soon.
//
// # Order of events
//
//	New, vCPU state and device state loaded, Start, vCPUs run
//	vCPUs paused, devices drained, Source and snapshot.Create, Close
//
// or, for a guest that runs on, once or several times in between:
//
//	Prepare, vCPUs paused, devices drained, state saved, Freeze, vCPUs run,
//	snapshot.Create, Frozen.Close
//
// Close needs no cooperation: what has not been loaded by then becomes
// inaccessible, so a vCPU or a device that was forgotten gets EFAULT, not zeros.
// After Load has finished, Close leaves ordinary memory behind.
//
// # Frames that were decompressed before
//
// Options.Cache is asked for a frame before that is read: handlers, Ensure, Prefetch and
// Load put in place what it returns, and read the snapshot if it has nothing. [Source] never
// asks it, so what a later snapshot stores of pages that were not loaded comes from the one
// before. See package pagecache.
//
// # A view of RAM that stands still
//
// [Frozen] is for captures of a guest that runs on, lazily restored or not. Pages that
// it is about are copied while the guest is paused, or write-protected with
// UFFDIO_WRITEPROTECT, by the pager's userfaultfd if there is one, for memory can be
// registered with one only: RAM is then registered a second time, for missing pages
// and writes. The two do not meet. A page that is missing has not changed, so it is
// not in the set; filling it does not protect it; and a fault says which of the two it
// is. A page that was given to the balloon is zeros, which the kernel's page map says
// before anything runs on.
//
// The rule about Go code holds for writes to protected pages as for missing ones:
// guestmem.Memory asks [Frozen.BeforeWrite], which saves the page and lifts its
// protection by a system call. It may wait for the reader, which takes no lock of
// guestmem.Memory, so Discard may wait with that lock held.
//
// # What it costs
//
// On two processors of an AMD EPYC that were shared with other work, RAM of a
// Linux guest with 189 MiB in use (see FORMAT.md):
//
//	DROWSE_BENCH_RAM=ram go test ./snapshot/pager -run xxx -bench .
//
//	open, reserve RAM, New and Start, 256 MiB of RAM    0.13 ms
//	the same, 4 GiB                                     0.15 to 0.18 ms
//	the same, 16 GiB                                    0.24 to 0.35 ms
//	Ensure, the page is there                           15 ns
//	Ensure, a frame has to be read, p50                 0.10 ms
//	fault in a system call, p50                         0.20 ms
//
// Of a fault 68 us are decompression. Zeros in registered chunks cost about 3 us
// a page more than those left to the kernel, in runs of 64.
package pager
