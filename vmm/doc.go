// Package vmm is one virtual machine: it puts KVM, guest RAM, the boot protocol
// and devices together, runs the vCPUs, and stops, saves and restores the whole at
// a defined point.
//
// A [Machine] goes through few states. NewPrebuilt begins to make the KVM part, in the background. New adds the
// devices: the machine then has all its resources and nothing to run. Boot loads a kernel, or Import loads the
// state of a saved machine. Start lets the vCPUs run. Pause and Resume stop and continue the machine, and Export
// returns the state of a paused one. Wait returns how the guest has ended. Close releases everything.
//
// The machine knows nothing of names, files or processes: see package sandbox.
package vmm
