// Package hwkvm runs a program on a hardware-style KVM where the machine has none.
//
// QEMU's TCG emulates a CPU with AMD SVM and nested paging. A stock Debian kernel inside loads kvm-amd, so /dev/kvm
// there is the one that users have: correct SYSCALL, a guest kernel at the speed of everything else, standard exits.
// The host's file system is the root file system inside, shared by 9p, so test binaries and their data need no copying:
//
//	go run ./internal/test/hwkvm/cmd/hwkvm -- CMD ARGS...    # go run turns every failing status into 1
//	go build -o bin/hwkvm ./internal/test/hwkvm/cmd/hwkvm && go test -exec "$PWD/bin/hwkvm --" ./vmm/...
//
// Use it to prove that code works on ordinary KVM, and to run real software in guests. Take no figures of drowse from
// it.
//
// # How it works
//
// Prepare fetches Debian's kernel package, unpacks it beside the cache, installs nothing, and writes an initramfs of
// one static Go program (folder guestinit), the modules it inserts, and modules that the kernel may ask for later.
// Image.Run starts QEMU and talks to that program through a virtio-serial port, in frames (folder wire): the command
// goes in, its two output streams and its status come back, binary and apart. The serial console is kept for diagnosis
// only.
//
// The command is root, with the working directory and the environment it is given. /proc, /sys, /dev and /run are the
// machine's own, with devpts, bpffs, cgroup2 (all controllers) and tracefs mounted, lo up, /dev/kvm and /dev/net/tun
// there. It has no network. When the command ends, all that it left running is killed, and the machine is gone. QEMU
// dies with its runner (PR_SET_PDEATHSIG), however that ends.
//
// The file system is the host's in earnest: what is deleted inside is deleted. $TMPDIR is a tmpfs (/run/hwkvm/tmp), and
// so is /dev/shm: put Unix sockets there, which 9p cannot carry between kernels, and whatever is read or written much.
// 9p is mounted with cache=loose: changes that the host makes while the command runs may go unseen.
//
// # What it costs
//
// Two cores of an AMD EPYC with little else to do, QEMU 7.2, kernel 6.1, -cpus 2; with both cores busy all of it
// takes two to four times as long. Reproduce with go test -run XXX -bench ., with and without -exec, and
// DROWSE_HWKVM_BENCH_FILE naming a file to read.
//
//	                                        inside     the host itself
//	start of QEMU to start of the command   3.8 s
//	whole run of "true"                     4.0 s
//	port I/O exit and re-entry              61 us      7.8 us
//	MMIO exit and re-entry                  75 us      8.0 us
//	integer arithmetic (1,000 rounds)       5.5 us     1.6 us     3.3 times
//	system call                             0.5 us     0.17 us    3 times
//	fork, exec and wait for /bin/true       29 ms      0.6 ms     48 times
//	reading 200 MB, cold cache              130 MB/s   1,900 MB/s
//
// What was tried to make it faster, by the CPU time of QEMU: an uncompressed kernel, started by its PVH entry, takes
// 4.5 s for a run of "true", the bzImage 7.1 s. cache=loose starts python3 in 5 to 11 s behind a shell script of many
// forks, on a busy machine, cache=mmap and cache=none in 11 to 24 s; the other two read a big file once several times
// faster (no page cache to fill), which matters less. An msize of 512,000 reads twice as fast as 131,072, and 1 MiB is
// no better. No effect beyond the noise: init_on_alloc=0, lpj=, tsc_early_khz=, audit and security modules off,
// transparent_hugepage=never, a translation buffer of 128 MiB instead of 1 GiB, mitigations=auto.
//
// # What does not work there
//
//   - Two processors. With two, and the host busy, one run in four of a test that boots, saves and restores guests has
//     ended with a triple fault in a guest that had done nothing special, or with both processors standing still, the
//     outer kernel silent. QEMU runs each in a thread of its own (thread=multi); with thread=single nothing gets done.
//     One processor is the default. Guests with two vCPUs share it.
//   - Timers, by themselves. An outer kernel with nothing else to do has stood still for ever, its processor halted, in a few runs of minutes, with one
//     processor as well. The likely cause: in target/i386/tcg, QEMU changes the processor's pending interrupts (interrupt_request) at entries into a
//     guest without its big lock, and so may lose what another thread sets at that moment, as the interrupt of the local APIC's timer, and
//     a Linux whose timer does not fire sets it no more. Any other interrupt would make up for that, and the runner sends one each second.
//   - Kernel 6.1 has no TCX (6.6; use clsact), no PAGEMAP_SCAN (6.7; the ioctl says ENOTTY), no guest_memfd (6.8), and of
//     userfaultfd the features up to WP_HUGETLBFS_SHMEM (mask 0x1fff): no WP_UNPOPULATED, POISON, WP_ASYNC or MOVE. Code
//     has its fall-backs tested there.
//   - QEMU 7.2 emulates no NRIPS (KVM skips instructions with its emulator), AVIC, pause filter, TSC scaling
//     (KVM_CAP_TSC_CONTROL is 0), x2APIC or TSC deadline timer of the outer CPU, PMU, or AVX-512. KVM gives its guests
//     x2APIC, the deadline timer and kvmclock all the same.
//   - Guests of ours have no XSAVE, and so no AVX: before QEMU 9.0 XSETBV in a guest of a guest is not intercepted, and KVM
//     learns nothing of it. A Linux that is shown XSAVE finds its area too small ("XSAVE consistency problem"), does without,
//     and leaves its programs to find AVX in CPUID, which is an invalid instruction then. vmm takes all of it away together.
//   - The outer kernel has no kvmclock; its clock source is the TSC, which TCG takes from the host unscaled, so it is stable.
//   - vhost, vsock, veth, bridge, overlay, erofs, loop and the usual traffic-control modules load on demand. A module that
//     is not in demandModules is not there, and the host's /lib/modules is of no use.
package hwkvm
