// Package sandbox makes sandboxes out of virtual machines: they have names, live in
// processes of their own that outlive whoever started them, sleep into a snapshot
// and wake from it, and are found again after anything has been killed.
//
// An [Instance] is one VM in this process, with its disks, its agent, and a pager if
// it was restored. A [Store] is a directory with everything that is kept: records,
// disks, snapshots, images, kernels. [ServeProcess] is the life of a VM's process;
// the methods of a Store are what a command line or an embedding program calls. A
// [Pool] keeps processes ready for VMs that are to be woken.
//
// What is true is decided by locks and by files that are renamed into place, never
// by a process that has to be alive: a record says "running" only for as long as
// the process that wrote it holds the record's lock.
package sandbox
