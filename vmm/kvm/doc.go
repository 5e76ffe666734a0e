// Package kvm is a thin layer over the KVM API (Documentation/virt/kvm/api.rst in the Linux source; section numbers
// in comments refer to it): file descriptors with methods, the kernel's structs, and no policy.
//
// Registers, LAPIC, interrupt controllers, PIT, clock, debug and extended control registers go through
// github.com/bobuhiro11/gokvm, whose structs for these equal the kernel's (a test compares their sizes). This
// package makes the other calls itself. For MSRs and CPUID gokvm uses reflection and loses how many MSRs the kernel
// has taken. It lacks irqfd, ioeventfd, XSAVE2, the dirty log with manual protection, KVM_KVMCLOCK_CTRL,
// KVM_ENABLE_CAP and immediate_exit.
//
// gokvm passes pointers to ioctl(2) through a Go function as uintptr. That is safe only for memory that does not
// move, so all structs passed to it are on the heap, in VM and VCPU.
package kvm
