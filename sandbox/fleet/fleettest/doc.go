// Package fleettest has VMs that are in memory, for tests of programs that embed package fleet and have no /dev/kvm,
// and the tests that these and real VMs both have to pass.
package fleettest
