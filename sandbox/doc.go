// Package sandbox makes sandboxes out of virtual machines. They have names, live in processes of their own that
// outlive the program that started them, sleep into a snapshot and wake from it, and fork while they run. They
// survive the death of any process.
//
// A [Host] is a directory with all stored state, and says how VMs are started. A [Sandbox] is one of its VMs. Its
// methods wake the VM where they say so, or return an error if it does not run. [Host.State] gives access to
// stored state without a VM: records, metadata, snapshots and volumes.
package sandbox
