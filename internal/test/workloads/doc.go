// Package workloads is a test of what people do in a VM: git, pip, npm, a Go build, SQLite, a web server and
// containers, in one guest that sleeps and wakes with all of them under way.
//
// It takes long, and an image of its own, so it has the build tag workloads: `make test-workloads` makes what it needs
// and runs it, and `make test-workloads-hard` does so on a KVM of the hardware kind, which is emulated if need be. All
// inputs but Debian's packages are made by the test.
package workloads
