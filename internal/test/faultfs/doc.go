// Package faultfs replaces the file system that crash-safe code writes through, so that a test can break it.
//
// Production code uses [osfile.OS]. A test uses a [Sim], which is a real directory plus three powers: it
// counts calls by kind, fails chosen calls (ENOSPC, EIO, short writes, failed fsync), and remembers
// which bytes and which directory entries were made durable, so that [Sim.Crash] can build the
// directory that a power failure at this instant might have left behind.
//
// # The power-loss model
//
// The simulation keeps only what POSIX promises. For a file: everything written before the last successful Sync or
// Datasync is there. Of later writes, every 512-byte sector shows its content at an instant of its own between
// that sync and the crash, chosen by the seed. So writes are dropped and reordered freely, but a sector is never
// torn. The file's length is chosen in the same way. For a directory: its entries are those of one instant between
// the last SyncDir and the crash. A sync of a file does not make its name durable. A rename within a directory is
// atomic. A file renamed into another directory is in at least one of the two. A failed sync loses permanently
// what it should have written, as on Linux (the pages are marked clean): a later, successful sync does not bring
// it back.
//
// # What does not pass through here
//
// Code that gives an *os.File to the kernel (preadv, pwritev into guest memory) bypasses the interface.
// [osfile.File.OS] returns that file. A test that plays the part of the kernel finds the recorded twin with
// [Sim.Twin].
package faultfs
