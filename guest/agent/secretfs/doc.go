// Package secretfs serves the secrets of a VM to its programs as files, which are in the
// guest only while somebody reads them.
//
// It is a read-only file system by FUSE (the kernel's Documentation/filesystems/fuse.rst
// and include/uapi/linux/fuse.h). All files are opened with FOPEN_DIRECT_IO, so the guest's
// kernel keeps no pages of them: a read brings the bytes from the VMM's I/O ports into one
// buffer of this process, from there into the memory of whoever reads, and the buffer is
// wiped before anything else is done. Files cannot be mapped: the kernel would keep what it
// has read for that.
//
// A secret whose value the host does not have yet, as after a wake, makes who opens or
// reads it wait, for a minute at most.
//
// It is a process of its own. The agent, which starts it, must never wait for a file that
// only the agent could serve, as it would in the midst of a fork whose child is to start in
// this directory.
package secretfs
