// Package initramfs makes the archive that a kernel without built-in virtio drivers unpacks into memory and starts
// /init from: the guest program, and the modules it has to load before it can reach a disk or the host.
package initramfs
