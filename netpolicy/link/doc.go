// Package link puts policies on TAP devices. It manages the eBPF programs, their maps and pins, and swaps the
// tables that the programs read.
package link
