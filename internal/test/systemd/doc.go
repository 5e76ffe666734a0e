// Package systemd is a test of the units in contrib/systemd, and of what docs/guides/operate.md says of a host with
// them, on a Debian with systemd as its first process. It follows that page as a reader would: as root and as users of
// group kvm and of none.
//
// The Debian is a machine of QEMU whose emulated processor has a KVM of the hardware kind. It has the build tag
// workloads: `make test-systemd` makes what it needs and runs it.
package systemd
