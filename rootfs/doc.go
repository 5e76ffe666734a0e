// Package rootfs holds what a guest boots from: its kernel (rootfs/kernel), the small read-only file systems that carry
// the guest program to it (rootfs/sysdisk for a kernel with built-in drivers, rootfs/initramfs for one with modules),
// and its images.
//
// Everything here is a file on the host, made once, named by a hash of all that went into it, and never changed after:
// virtual machines share them read-only.
package rootfs
