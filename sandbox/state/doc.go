// Package state is what is kept of VMs: a [Store] is a directory with their records, metadata, disks, snapshots,
// volumes and events. It knows which of them is locked by a process, and neither starts nor asks one: package sandbox
// does.
//
// What is true is decided by locks and by files that are renamed into place, never by a process that has to be alive: a
// record says "running" only for as long as the process that wrote it holds the record's lock.
package state
