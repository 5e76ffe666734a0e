// Package disk is the layered writable block device of a VM.
//
// A disk is a stack of layers. Only the top is ever written. Sealing the top and starting a new one takes the same
// short time for any amount of data, so a snapshot can capture all disks at one instant. A sealed layer is never
// written again. So a VM that crashes after waking can always go back to its last snapshot, and forks share all
// layers below their own tops. [Squash] makes one new layer from several, and keeps those.
//
// # Resolving, not copying
//
// A [Disk] does not move guest data. It returns where bytes are ([Disk.ReadExtent]) and where the device may write
// bytes ([Disk.WriteExtent]). The device lets the kernel copy between that file and guest memory. An index of two
// bytes a block, filled when the stack is opened, has the layer of every block, so a lookup costs the same at any
// depth. See [Disk] for the protocol of a write.
//
// # What survives what
//
//   - The process is killed: if the stack is opened again on the same boot of the host, it has every write for
//     which [Disk.Wrote] returned. A write under way is there in whole or in part, by 512-byte sectors.
//   - The host loses power: everything before the last successful [Disk.Flush] is there. Of later writes, each
//     sector has its old or its new content, as with a real disk without power-loss protection, and never
//     anything else: the disk takes a block from the top only if its data was durable before the map said so
//     (FORMAT.md, "pending").
//   - The host's disk is full or returns EIO: the call returns an error that is [ErrNoSpace] or [ErrIO]. The
//     block keeps its old content or, if it was being overwritten, has old or new sectors. The disk stays usable.
//   - fsync fails: Linux may have dropped the data, so no later flush can promise it. Every later Flush and Seal
//     then returns [ErrSyncFailed]. The sealed layers, and so the last snapshot, are not affected.
//
// Tests cover the metadata path (headers, map, creation, sealing, squashing) and the data written by
// [Disk.WriteAt] through internal/test/faultfs. Model tests, and tests that kill a real child process, cover the
// device's own path, which passes *os.File to the kernel.
package disk
