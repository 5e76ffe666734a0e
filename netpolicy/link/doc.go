// Package link puts policies on TAP devices: the eBPF programs, their maps and pins, and swaps of the tables that the
// programs read.
package link
