// Package boot loads a Linux kernel and its boot data into the RAM of an x86-64 guest, and returns the state in
// which the first vCPU starts. The data are the kernel image, boot_params, the memory map, the command line, a seed
// for the kernel's random number generator, page tables, ACPI tables, and an MP table for kernels without ACPI.
//
// The protocol is the 64-bit one of Documentation/arch/x86/boot.rst: the vCPU enters the kernel in long mode at its
// 64-bit entry point. There is no real mode, no firmware and no decompression in the guest: this package unpacks a
// bzImage.
package boot
