// Package hwkvm runs a program on a hardware-style KVM on a machine that has none.
//
// QEMU's TCG emulates a CPU with AMD SVM and nested paging. A stock Debian kernel inside loads kvm-amd, so /dev/kvm
// there is the one that users have: correct SYSCALL, a guest kernel at the speed of everything else, standard exits.
// The host's file system is the root file system inside, shared by 9p, so test binaries and their data need no copying:
//
//	go run ./internal/test/hwkvm/cmd/hwkvm -- CMD ARGS...    # go run turns every failing status into 1
//	go build -o bin/hwkvm ./internal/test/hwkvm/cmd/hwkvm && go test -exec "$PWD/bin/hwkvm --" ./vmm/...
//
// Use it to prove that code works on ordinary KVM and to run real software in guests, not to measure drowse.
//
// # How it works
//
// Prepare fetches Debian's kernel package and unpacks it beside the cache. It installs nothing. It writes an
// initramfs of one static Go program (folder guestinit), the modules that the program inserts, and modules that
// the kernel may ask for later. Image.Run starts QEMU and talks to that program through a virtio-serial port, in
// frames (folder wire): the command goes in, its two output streams and its status come back, binary and separate.
// The serial console is kept for diagnosis only.
//
// The command is root, with the working directory and the environment that it was given. /proc, /sys, /dev and
// /run are the machine's own, with devpts, bpffs, cgroup2 (all controllers) and tracefs mounted. lo is up, and
// /dev/kvm and /dev/net/tun exist. The machine has no network. When the command ends, the machine ends with all
// remaining processes. QEMU dies with its runner (PR_SET_PDEATHSIG), however the runner ends.
//
// The file system is really the host's: a file deleted inside is deleted. $TMPDIR is a tmpfs (/run/hwkvm/tmp), and
// so is /dev/shm. Put Unix sockets there, which 9p cannot carry between kernels, and files with much traffic. 9p
// is mounted with cache=loose: the command may not see changes that the host makes meanwhile.
//
// # What it costs
//
// Two cores of an AMD EPYC with little other load, QEMU 7.2, kernel 6.1, -cpus 2. With both cores busy everything
// takes two to four times as long. Reproduce with go test -run XXX -bench ., with and without -exec, and with
// DROWSE_HWKVM_BENCH_FILE set to a file to read.
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
// Attempts to make it faster, by the CPU time of QEMU: an uncompressed kernel, started by its PVH entry, takes 4.5 s
// for a run of "true", the bzImage 7.1 s. On a busy machine, behind a shell script of many forks, python3 starts in 5
// to 11 s with cache=loose, in 11 to 24 s with cache=mmap and cache=none. The other two read a big file once several
// times faster (no page cache to fill), which matters less. An msize of 512,000 reads twice as fast as 131,072; 1 MiB
// is no better. No effect beyond the noise: init_on_alloc=0, lpj=, tsc_early_khz=, audit and security modules off,
// transparent_hugepage=never, a translation buffer of 128 MiB instead of 1 GiB, mitigations=auto.
//
// # What does not work there
//
//   - Two processors. With two, and the host busy, one run in four of a test that boots, saves and restores guests
//     ended with a triple fault in an ordinary guest, or with both processors stopped and the outer kernel silent.
//     QEMU runs each in its own thread (thread=multi); with thread=single nothing gets done. One processor is the
//     default. Guests with two vCPUs share it.
//   - Timers alone. In a few runs of minutes, also with one processor, an idle outer kernel stopped permanently, its
//     processor halted. The likely cause: in target/i386/tcg, QEMU changes the processor's pending interrupts
//     (interrupt_request) at entries into a guest without its big lock. It may lose what another thread sets then,
//     such as the interrupt of the local APIC's timer. A Linux whose timer does not fire never sets it again. Any
//     other interrupt repairs that, so the runner sends one each second.
//   - Kernel 6.1 has no TCX (6.6; use clsact), no PAGEMAP_SCAN (6.7; the ioctl says ENOTTY), no guest_memfd (6.8), and
//     userfaultfd features only up to WP_HUGETLBFS_SHMEM (mask 0x1fff): no WP_UNPOPULATED, POISON, WP_ASYNC or MOVE.
//     Code has its fall-backs tested there.
//   - QEMU 7.2 emulates no NRIPS (KVM skips instructions with its emulator), AVIC, pause filter, TSC scaling
//     (KVM_CAP_TSC_CONTROL is 0), x2APIC or TSC deadline timer of the outer CPU, PMU, or AVX-512. KVM gives its guests
//     x2APIC, the deadline timer and kvmclock all the same.
//   - Our guests have no XSAVE, and so no AVX. Before QEMU 9.0, XSETBV in a guest of a guest is not intercepted, and
//     KVM does not learn of it. A Linux that sees XSAVE finds its area too small ("XSAVE consistency problem") and does
//     without it. Its programs still see AVX in CPUID, which is then an invalid instruction. vmm hides both.
//   - The outer kernel has no kvmclock. Its clock is the TSC, which TCG takes unscaled from the host: it is stable.
//   - vhost, vsock, veth, bridge, overlay, erofs, loop and the usual traffic-control modules load on demand. A module
//     outside demandModules is missing, and the host's /lib/modules does not help.
package hwkvm
