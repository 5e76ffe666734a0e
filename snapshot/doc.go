// Package snapshot writes and reads sleeping machines.
//
// A snapshot is the whole machine at one instant: vCPUs, interrupt controllers,
// clock, devices and RAM, and the names of the disk layers that go with them. It
// is a directory that appears whole or not at all, and it is never changed once
// it is there:
//
//	manifest   what the machine is, and the state of all but its RAM
//	memory     RAM: compressed frames of a few pages each, and the index of them
//
// The idea of the format is that nothing is believed before it has been checked,
// and that nothing is read before it is needed. The manifest carries a checksum
// of the root of the index, the root one of each leaf (2 MiB of RAM), a leaf one
// of each frame (a few pages). [Open] checks the manifest and the root, which
// takes the same time for every size of RAM; package pager checks the rest page
// by page while the guest is already running. FORMAT.md is the format to the
// byte.
package snapshot
