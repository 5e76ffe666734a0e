// Package kvm is a thin layer over the KVM API
// (Documentation/virt/kvm/api.rst in the Linux source; section numbers in the
// comments here refer to it): file descriptors with methods, the kernel's
// structs, and no policy.
//
// Registers, LAPIC, interrupt controllers, PIT, clock, debug and extended control
// registers go through github.com/bobuhiro11/gokvm, whose structs for these equal
// the kernel's (a test compares their sizes). Where it falls short the calls are
// our own: MSRs and CPUID (its versions use reflection, and lose how many MSRs
// the kernel has taken), and what it does not have: irqfd, ioeventfd, XSAVE2, dirty
// log with manual protection, KVM_KVMCLOCK_CTRL, KVM_ENABLE_CAP, immediate_exit.
//
// gokvm passes pointers to ioctl(2) through a Go function as uintptr. That is
// safe only for memory that does not move, so all structs that are given to it
// live on the heap, in VM and VCPU.
package kvm
