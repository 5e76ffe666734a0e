// Package blk is the virtio block device (virtio 1.2, section 5.2): it turns the
// guest's requests into reads and writes of extents of files, which the kernel
// moves straight between guest pages and the file.
//
// The device's [Backend] decides where the bytes of a disk live: in one image ([Image]), or in a stack of
// layers.
package blk
