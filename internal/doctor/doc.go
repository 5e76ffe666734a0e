// Package doctor looks a host over: which kind of KVM it has, and for everything else
// that drowse uses, whether it is there and what follows if not.
//
// It stands by itself under internal because it belongs to no layer: it asks KVM, the
// kernel, the file system of the state directory, the tools of the builders and the
// stores, and nothing asks it but `drowse doctor`. What a capability is, stays in the
// package that uses it; here is only what its absence means.
//
// Looking changes nothing: no directory is made, files for trying out a file system
// have no name, and what is opened is closed. Everything that root alone can find out
// is reported as such to others.
package doctor
