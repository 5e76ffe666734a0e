// Package boot puts a Linux kernel and what it wants to find into the RAM of an
// x86-64 guest, and says in which state its first vCPU starts: the kernel image,
// boot_params, the memory map, the command line, a seed for its random number
// generator, page tables, ACPI tables, and an MP table for kernels without ACPI.
//
// The protocol is the 64-bit one of Documentation/arch/x86/boot.rst: the kernel is
// entered in long mode at its 64-bit entry point. No real mode, no firmware, and
// no decompression in the guest: a bzImage is unpacked here.
package boot
