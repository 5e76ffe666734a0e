// Package disk is the layered writable block device of a VM.
//
// The one idea: a disk is a stack of layers, of which only the top is ever written. Sealing the top and starting a new
// one takes the same short time however much data there is, so a snapshot can take every disk at one instant; and
// because a sealed layer is never written again, a VM that crashes after waking can always go back to its last
// snapshot, and forks share all layers below their own tops. [Squash] makes one new layer of several, which stay.
//
// # Resolving, not copying
//
// A [Disk] does not move guest data. It answers where bytes live ([Disk.ReadExtent]) and where bytes
// may be written ([Disk.WriteExtent]), and the device lets the kernel copy between that file and
// guest memory. An index of two bytes a block, filled when the stack is opened, names the layer of
// every block, so that a lookup costs the same at any depth. See [Disk] for the protocol of a write.
//
// # What survives what
//
//   - The process is killed: every write for which [Disk.Wrote] returned is there when the stack is
//     opened again on the same boot of the host; a write under way is there in whole or in part, by
//     512-byte sectors.
//   - The host loses power: everything before the last successful [Disk.Flush] is there. Of what came
//     after, each sector has its old or its new content, as with a real disk without power-loss
//     protection. Never anything else: a block is taken from the top only if its data was durable
//     before the map said so (FORMAT.md, "pending").
//   - The host's disk is full or answers EIO: the call returns an error that is [ErrNoSpace] or
//     [ErrIO], the block keeps its old content or, where it was being overwritten, old or new sectors;
//     the disk goes on.
//   - fsync fails: Linux may have dropped the data, so no later flush can promise it. The disk then
//     answers every Flush and Seal with [ErrSyncFailed]; its sealed layers, thus the last snapshot,
//     are untouched.
//
// The tests reach the metadata path (headers, map, creation, sealing, squashing) and the data written
// by [Disk.WriteAt] through internal/test/faultfs; the device's own path, which hands *os.File to the
// kernel, is covered by model tests and by killing a real child process.
package disk
