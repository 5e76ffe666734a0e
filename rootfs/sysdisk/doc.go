// Package sysdisk makes the small read-only disk from which a kernel with built-in drivers starts /init. Unlike an
// initramfs it needs no unpacking at boot and takes no memory: the guest reads only those pages of its program that
// it runs.
package sysdisk
