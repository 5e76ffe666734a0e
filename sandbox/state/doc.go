// Package state keeps the stored state of VMs. A [Store] is a directory with their records, metadata, disks,
// snapshots, volumes and events. It knows which of them a process has locked. It neither starts nor asks
// processes; package sandbox does.
//
// Locks, and files that are renamed into place, decide what is true, never a process that must be alive: a record
// says "running" only while the process that wrote it holds the record's lock.
package state
