// Package fleet makes VMs into sandboxes that products are built on: whose they are, how long they last, what has been
// done in them, and operations that may be repeated and called at once.
//
// A [Fleet] works on [VMs]: those of a [sandbox.Store] by [OfHost], or those in memory of package fleettest, for tests
// of programs that embed it and have no /dev/kvm. Lists and histories are read from the files of the store: see
// docs/adr/0041-lists-and-histories-are-read-from-the-files.md.
package fleet
