// Package sysdisk makes the small read-only disk that a kernel with built-in drivers starts /init from. Against an
// initramfs it has nothing to unpack at boot and takes no memory: the guest reads only those pages of its program that
// it runs.
package sysdisk
