package kernel

import (
	"fmt"
	"slices"
	"strings"
)

// Host is the kind of KVM a guest is to run on.
type Host string

const (
	// Hardware is KVM on VMX or SVM.
	Hardware Host = "hardware"
	// Soft is a KVM whose vendor module has neither: guest user code runs on the CPU, guest kernel code in an
	// interpreter.
	Soft Host = "soft"
)

// Root is what a guest kernel starts its first program from.
type Root string

const (
	// SysDisk is the read-only EROFS that rootfs/sysdisk makes, as the first virtio disk.
	SysDisk Root = "sysdisk"
	// Initramfs is the archive that rootfs/initramfs makes.
	Initramfs Root = "initramfs"
)

// Param is one kernel parameter. The kernel's Documentation/admin-guide/kernel-parameters.txt describes those without a
// word to the contrary.
type Param struct {
	Name  string `json:"name"`
	Value string `json:"value,omitempty"` // "" for a parameter that is only named
	Why   string `json:"why"`
}

// String returns the parameter as it stands on the command line.
func (p Param) String() string {
	if p.Value == "" {
		return p.Name
	}
	return p.Name + "=" + p.Value
}

// Params is a kernel command line, or part of one.
type Params []Param

// String returns the parameters in order, separated by spaces.
func (p Params) String() string {
	words := make([]string, len(p))
	for i, param := range p {
		words[i] = param.String()
	}
	return strings.Join(words, " ")
}

// anyHost is what every guest gets.
var anyHost = Params{
	{"console", "ttyS0", "messages go to the first serial port"},
	{"quiet", "", "only warnings do: each character is an exit to the VMM, and a boot prints 10,000"},
	{"panic", "-1", "restart at once after a panic, so that the VMM learns of it; pvpanic has told it the reason before"},
	{"reboot", "k", "restart by the keyboard controller, a write of 0xfe to port 0x64: the VMM can tell it from a crash that ends in a triple fault"},
}

// softHost is what a built kernel gets besides on a soft KVM. fault_around_bytes is from the patches; README.md has the
// figures.
var softHost = Params{
	{"tsc", "reliable", "no clock watchdog: the interpreter is slow, the time stamp counter is not wrong"},
	{"no_timer_check", "", "do not wait for timer interrupts to see whether they come: they come late here"},
	{"rodata", "off", "do not walk and split the kernel's page tables to write-protect its text, 0.85 s of a boot; the VM is the boundary"},
	{"no-kvmapf", "", "no asynchronous page faults: KVM ends them all when a VM is restored, and the guest looks through its table of them for 1.3 ms"},
	{"nf_conntrack.hashsize", "512", "connection tracking looks through its table after each wake and once a minute: 50 instructions for each of 2,048 buckets with 256 MiB, 65,536 with 4 GiB; 4,096 connections still fit"},
	{"fault_around_bytes", "4096", "map one page on a fault in a file, not sixteen: each costs more to map and unmap than most faults it saves"},
}

// softHostEnv becomes the environment of the guest program, to which the kernel hands on what it does not know itself.
// User code asks the CPU what it has, and finds the AVX of the host, which CPUID and XCR0 of the VM do not hide on a
// soft KVM. The kernel saves x87 and SSE registers only, since the interpreter has no XSAVE: the upper halves of AVX
// registers are lost, or those of another program, when a task is switched or moves to another CPU. So what programs
// are made with is told not to use them. A program that looks for itself, as JavaScript and Java run-times do, is not
// reached by this.
var softHostEnv = Params{
	{"GODEBUG", "cpu.avx=off,cpu.avx2=off,cpu.avx512f=off,cpu.avx512bw=off,cpu.avx512vl=off", "no AVX in Go programs"},
	{"GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512BW,-AVX512VL,-AVX512CD,-AVX512DQ,-AVX_Fast_Unaligned_Load", "no AVX in memcpy and its like"},
	{"OPENSSL_ia32cap", "~0x1000000000000000:~0xdc230020", "no AVX in hashes and ciphers"},
}

// DefaultParams returns the parameters with which a kernel of this kind starts best on this kind of host. What depends
// on the VM (its root, its devices when it has no ACPI tables) is not in them. The error wraps ErrUnsupported for
// Debian's kernel on a soft KVM, which cannot run it.
func DefaultParams(kind Kind, host Host) (Params, error) {
	switch {
	case kind != Built && kind != Debian:
		return nil, fmt.Errorf("%w: kernel of kind %q", ErrUnsupported, kind)
	case host != Hardware && host != Soft:
		return nil, fmt.Errorf("%w: host of kind %q", ErrUnsupported, host)
	case kind == Debian && host == Soft:
		return nil, fmt.Errorf("%w: Debian's kernel does not run on a KVM without hardware virtualisation (use a built kernel: drowse kernel build)",
			ErrUnsupported)
	}
	out := slices.Clone(anyHost)
	if host == Soft {
		out = append(out, softHost...)
		out = append(out, softHostEnv...)
	}
	return out, nil
}

// DefaultRoot returns what a kernel of this kind starts from.
func DefaultRoot(kind Kind) Root {
	if kind == Debian {
		return Initramfs
	}
	return SysDisk
}

// RootParams returns the parameters that make the kernel start /init from root.
func RootParams(root Root) (Params, error) {
	switch root {
	case SysDisk:
		return Params{
			{"root", "/dev/vda", "the first virtio disk"},
			{"rootfstype", "erofs", "do not try other file systems first"},
			{"ro", "", "the image is read-only"},
			{"init", "/init", "the guest program"},
		}, nil
	case Initramfs:
		return Params{{"rdinit", "/init", "the guest program; an initramfs needs no root"}}, nil
	}
	return nil, fmt.Errorf("%w: root of kind %q", ErrUnsupported, root)
}
