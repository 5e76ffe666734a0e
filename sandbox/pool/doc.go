// Package pool starts the processes of VMs. A [Pool] keeps some processes ready for VMs that are woken, restored
// or forked, and can serve them to other processes of the host.
package pool
