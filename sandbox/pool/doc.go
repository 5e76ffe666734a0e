// Package pool starts the processes of VMs, and keeps some ready for VMs that are to be woken, restored or forked: a
// [Pool] makes them ahead and can serve them to other processes of the host.
package pool
