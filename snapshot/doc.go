// Package snapshot writes and reads sleeping machines.
//
// A snapshot is the whole machine at one instant: vCPUs, interrupt controllers, clock, devices and RAM, and the
// names of the disk layers that go with them. It is a directory that appears atomically and never changes
// afterwards:
//
//	manifest    what the machine is, and the state of all but its RAM
//	memory      RAM: compressed frames of a few pages each, and the index of them
//	memory-ID   memory files of earlier snapshots that it still needs
//
// [Create] writes all of RAM, or, as a delta, only what has changed since another snapshot. A delta still has the
// complete index, so reading it takes as long at depth 1,000 as at depth 1. Its directory has hard links to the
// files that it needs, so it depends on nothing outside: removing a snapshot frees exactly the files that no other
// snapshot links to. Now and then a delta copies the live frames out of small or mostly dead files, which bounds
// the number of files.
//
// The format lets a reader check everything before it trusts it, and read nothing before it needs it. The manifest
// carries a checksum of the index root, the root has a checksum of each leaf (2 MiB of RAM), and a leaf has a
// checksum of each frame (a few pages). [Open] checks the manifest and the root, which takes hardly longer for
// more RAM. Package pager checks the rest as the running guest needs it. FORMAT.md specifies the format to the
// byte.
package snapshot
