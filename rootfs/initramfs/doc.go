// Package initramfs makes the archive from which a kernel without built-in virtio drivers starts /init, unpacked into
// memory: the guest program, and the modules that it must load before it can reach a disk or the host.
package initramfs
