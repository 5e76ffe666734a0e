// Package volume is named disks that live beyond the VMs that use them.
//
// A volume is a directory with two files: data, a sparse raw disk with an ext4,
// and volume.json, its record. The one idea: a guest that sleeps has parts of the
// file system in its memory, so it may go on only with the very content that it
// left. The record says which snapshot that is (Record.Settled), and loses the
// word, durably, before the first byte is written after it. So no memory is ever
// put together with a disk that it does not belong to, whatever is killed or loses
// power at whatever instant; what is left is refused, and the file system's own
// journal is what it is for.
//
// # What survives what
//
// As for any disk with a volatile cache: after a loss of power all that was there
// at the last successful Flush is there, and of what came later each sector is old
// or new. Once a flush has failed, every later one does, since Linux may have
// dropped the data.
//
// # Who may use it
//
// One writer or any number of readers, by flock(2) on data, which ends with the
// process. That a sleeping VM has no process, and yet keeps others away, is for the
// caller to see to: it knows the VMs.
package volume
