// Package refmodel judges packets as package netpolicy describes it, in plain Go and without its tables: it tries
// the rules one by one. `drowse policy explain` and the packet waker use it. It follows the text of netpolicy's
// package comment and shares no code with the compiler, so tests compare the eBPF programs with it and with
// package flowtest, which adds flows and limits.
package refmodel
