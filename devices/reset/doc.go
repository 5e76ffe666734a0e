// Package reset has the ports through which a guest ends itself or says that it
// has failed: the keyboard controller's reset line, the reset and sleep registers
// that ACPI describes, and pvpanic. Each is a few bytes of I/O ports without
// interrupts; what happens is reported to the machine, which decides.
//
// They keep no state that a snapshot would have to hold.
package reset
