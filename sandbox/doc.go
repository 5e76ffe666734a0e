// Package sandbox makes sandboxes out of virtual machines: they have names, live in processes of their own that outlive
// whoever started them, sleep into a snapshot and wake from it, fork while they run, and are found again after anything
// has been killed.
//
// A [Host] is a directory with all that is kept, and says how VMs are started. A [Sandbox] is one of its VMs: what is
// done with it wakes it where that is meant, or says that it does not run. [Host.State] has what is kept, without a VM:
// records, metadata, snapshots and volumes.
package sandbox
