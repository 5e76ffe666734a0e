// Package volume manages named disks that outlive the VMs that use them.
//
// A volume is a directory with two files: data, a sparse raw disk with an ext4,
// and volume.json, its record. The one idea: a sleeping guest has parts of the
// file system in its memory, so it may continue only with exactly the content that
// it left. The record says which snapshot that is (Record.Settled). That entry is
// removed, durably, before the first write after it. So no memory ever meets a disk
// that it does not belong to, whatever process dies or loses power at whatever
// instant. A mismatch is refused, and the file system's own journal handles the rest.
//
// # What survives what
//
// As for any disk with a volatile cache: after a loss of power, everything up to the
// last successful Flush is there, and of later writes each sector is old or new.
// Once a flush has failed, every later one fails, since Linux may have dropped the
// data.
//
// # Who may use it
//
// One writer or any number of readers, by flock(2) on data, which ends with the
// process. A sleeping VM has no process, and yet must keep others away: the caller,
// which knows the VMs, must ensure that.
package volume
