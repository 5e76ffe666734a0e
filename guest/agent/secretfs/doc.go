// Package secretfs serves the secrets of a VM to its programs as files. Their values are in the
// guest only while a program reads them.
//
// It is a read-only FUSE file system (the kernel's Documentation/filesystems/fuse.rst and
// include/uapi/linux/fuse.h). All files are opened with FOPEN_DIRECT_IO, so the guest's kernel
// caches no pages of them. A read brings the bytes from the VMM's I/O ports into one buffer of
// this process, and from there into the reader's memory. This process wipes the buffer before it
// does anything else. Files cannot be mapped: the kernel would keep the pages for the mapping.
//
// If the host does not have a secret's value yet, as after a wake, opens and reads of it wait,
// for a minute at most.
//
// It is a separate process. The agent, which starts it, must never wait for a file that only the
// agent could serve. It would do so in the midst of a fork whose child starts in this directory.
package secretfs
