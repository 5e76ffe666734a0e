// Package i386 makes system calls of the i386 ABI from a 64-bit program. Tests of filters need it.
package i386

// Call makes a system call by interrupt 0x80 (arch/x86/entry/entry_64_compat.S). The result is negative for an error.
func Call(nr, a, b, c uint32) int32
