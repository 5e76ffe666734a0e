// Package doctor examines a host: its kind of KVM, and for everything else that drowse uses, whether it is
// available and what follows if not.
//
// It stands alone under internal because it belongs to no layer. It asks KVM, the kernel, the file system of the
// state directory, the builders' tools and the stores. Only `drowse doctor` uses it. The meaning of a capability
// stays in the package that uses it. This package has only the consequence of its absence.
//
// An examination changes nothing. It makes no directory, its test files have no name, and it closes what it opens.
// What only root can find out is reported as unknown to others.
package doctor
