// Package fs is the virtio file system device (virtio 1.2, section 5.11): it shows a
// directory of the host to the guest, which speaks FUSE to it (protocol 7.31, as in
// include/uapi/linux/fuse.h).
//
// What the guest names is found anew for each request, by its path below the shared
// directory, in one openat2(2) that cannot leave it, and is compared with the file that
// the guest means. So the device holds no descriptor but those of open files, and its
// state can be saved and loaded as names.
package fs
