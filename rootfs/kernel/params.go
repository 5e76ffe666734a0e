package kernel

import (
	"fmt"
	"slices"
	"strings"
)

// Host is the kind of KVM that a guest runs on.
type Host string

const (
	// Hardware is KVM on VMX or SVM.
	Hardware Host = "hardware"
	// Soft is a KVM whose vendor module has neither: guest user code runs on the CPU, guest kernel code in an
	// interpreter.
	Soft Host = "soft"
)

// Unless a comment says otherwise, Documentation/admin-guide/kernel-parameters.txt of the kernel describes the
// parameters.

// anyHost has the parameters of every guest.
var anyHost = []string{
	// Messages go to the first serial port.
	"console=ttyS0",
	// Print warnings only: each character is an exit to the VMM, and a boot prints 10,000.
	"quiet",
	// Restart at once after a panic, so that the VMM learns of it; pvpanic has reported the reason before.
	"panic=-1",
	// Restart by the keyboard controller, a write of 0xfe to port 0x64: the VMM can distinguish it from a crash
	// that ends in a triple fault.
	"reboot=k",
}

// softHost has further parameters for a built kernel on a soft KVM. fault_around_bytes is from the patches;
// README.md has the figures.
var softHost = []string{
	// No clock watchdog: the interpreter is slow, but the time stamp counter is right.
	"tsc=reliable",
	// This KVM ignores a value set as the time stamp counter, so by that clock a sleep takes time: after minutes, all of
	// the guest's timers are due in the wake, and work for 300 ms. kvm-clock stands still, as on other hosts, and also
	// goes on when the host has restarted, whose counter then is less.
	"clocksource=kvm-clock",
	// Do not test whether timer interrupts arrive: here they arrive late.
	"no_timer_check",
	// Do not walk and split the kernel's page tables to write-protect its text, 0.85 s of a boot; the VM is the
	// boundary.
	"rodata=off",
	// No asynchronous page faults: KVM ends them all when a VM is restored, and the guest then searches its table
	// of them for 1.3 ms.
	"no-kvmapf",
	// Connection tracking searches its table after each wake and once a minute: 50 instructions for each of 2,048
	// buckets with 256 MiB, 65,536 with 4 GiB. 4,096 connections still fit.
	"nf_conntrack.hashsize=512",
	// Map one page on a fault in a file, not sixteen: mapping and unmapping the others costs more than they save.
	"fault_around_bytes=4096",
}

// softHostEnv becomes the environment of the guest program: the kernel passes on parameters that it does not know.
// User code asks the CPU for its features, and finds the host's AVX, which CPUID and XCR0 of the VM do not hide on
// a soft KVM. The kernel saves x87 and SSE registers only, since the interpreter has no XSAVE: when a task is
// switched or moves to another CPU, it loses the upper halves of AVX registers, or gets another program's. So
// these variables tell common libraries not to use AVX. They do not reach a program that checks the CPU itself,
// such as JavaScript and Java run-times.
var softHostEnv = []string{
	// No AVX in Go programs.
	"GODEBUG=cpu.avx=off,cpu.avx2=off,cpu.avx512f=off,cpu.avx512bw=off,cpu.avx512vl=off",
	// No AVX in memcpy and its like.
	"GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512BW,-AVX512VL,-AVX512CD,-AVX512DQ,-AVX_Fast_Unaligned_Load",
	// No AVX in hashes and ciphers.
	"OPENSSL_ia32cap=~0x1000000000000000:~0xdc230020",
}

// DefaultParams returns the parameters with which a kernel of this kind starts best on this kind of host. They do
// not include what depends on the VM: its root, and its devices if it has no ACPI tables. The error wraps
// ErrUnsupported for Debian's kernel on a soft KVM, which cannot run it.
func DefaultParams(kind Kind, host Host) (string, error) {
	switch {
	case kind != Built && kind != Debian:
		return "", fmt.Errorf("%w: kernel of kind %q", ErrUnsupported, kind)
	case host != Hardware && host != Soft:
		return "", fmt.Errorf("%w: host of kind %q", ErrUnsupported, host)
	case kind == Debian && host == Soft:
		return "", fmt.Errorf("%w: Debian's kernel does not run on a KVM without hardware virtualisation (use a built kernel: drowse kernel build)",
			ErrUnsupported)
	}
	words := anyHost
	if host == Soft {
		words = slices.Concat(words, softHost, softHostEnv)
	}
	return strings.Join(words, " "), nil
}

// RootParams returns the parameters that make a kernel of this kind start /init: a built one from the first virtio
// disk, which is the read-only EROFS that rootfs/sysdisk makes, and Debian's from the archive that rootfs/initramfs
// makes.
func RootParams(kind Kind) string {
	if kind == Debian {
		return "rdinit=/init" // an initramfs needs no root
	}
	return "root=/dev/vda rootfstype=erofs ro init=/init"
}
