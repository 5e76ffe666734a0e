// Package snapshot writes and reads sleeping machines.
//
// A snapshot is the whole machine at one instant: vCPUs, interrupt controllers,
// clock, devices and RAM, and the names of the disk layers that go with them. It
// is a directory that appears whole or not at all, and it is never changed once
// it is there:
//
//	manifest    what the machine is, and the state of all but its RAM
//	memory      RAM: compressed frames of a few pages each, and the index of them
//	memory-ID   what it still needs of the memory files of snapshots before it
//
// [Create] writes all of RAM, or, as a delta, only what has changed since another
// snapshot. A delta has the complete index all the same, so it is as quick to
// read at depth 1,000 as at depth 1, and its directory has hard links to the
// files that it needs, so it depends on nothing outside: removing a snapshot
// frees what nobody else has, and no more. Here and there a delta carries over
// what is left in small or mostly needless files, so that there are never many.
//
// The idea of the format is that nothing is believed before it has been checked,
// and that nothing is read before it is needed. The manifest carries a checksum
// of the root of the index, the root one of each leaf (2 MiB of RAM), a leaf one
// of each frame (a few pages). [Open] checks the manifest and the root, which
// takes the same time for every size of RAM; package pager checks the rest page
// by page while the guest is already running. FORMAT.md is the format to the
// byte.
package snapshot
