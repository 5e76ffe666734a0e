// Package reset has the ports by which a guest ends itself or reports a crash: the keyboard controller's reset
// line, the reset and sleep registers that ACPI describes, and pvpanic. Each is a few bytes of I/O ports without
// interrupts. They report to the machine, which decides.
//
// They have no state to save in a snapshot.
package reset
