// Package wire is what the two halves of hwkvm say to each other: the runner on the host and the init program in
// the virtual machine. It depends on the standard library alone, because the init program is built from an
// embedded copy of this package.
package wire
