// Package vmm is one virtual machine: it puts KVM, guest RAM, the boot protocol
// and devices together, runs the vCPUs, and stops, saves and restores the whole at
// a defined point.
//
// A [Machine] goes through few states. NewPrebuilt begins to make what KVM has of it, in the
// background; New adds the devices, and everything is allocated and nothing in it. Boot
// puts a kernel into it, or Import the state of a machine that was saved; Start lets the
// vCPUs run. Pause and Resume
// stop and go on in between, and Export, while paused, returns the state. Wait says
// how the guest has ended; Close gives everything back.
//
// The machine knows nothing of names, files or processes: see package sandbox.
package vmm
