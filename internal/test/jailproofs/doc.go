// Package jailproofs are tests of what confined VMs leave on their host, of the identity of many clones, of time over
// long sleeps, and of what one guest can do to another by flooding its host.
//
// They take as long as they are told to, so they have the build tag workloads: `make jail-proofs` and
// `make jail-floods` run them in full on a KVM of the hardware kind, which is emulated if need be. Those that look at
// the whole host or set its clock run only there: see internal/test/hwkvm. `make create-proofs` runs on any.
package jailproofs
