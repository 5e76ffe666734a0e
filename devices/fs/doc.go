// Package fs is the virtio file system device (virtio 1.2, section 5.11). It shows a directory of the host to the
// guest, which speaks FUSE to it (protocol 7.31, as in include/uapi/linux/fuse.h).
//
// For each request the device finds the file again by its path below the shared directory, with one openat2(2)
// that cannot leave the directory, and checks that it is the file that the guest means. So the device holds
// descriptors of open files only, and its state can be saved and loaded as names.
package fs
