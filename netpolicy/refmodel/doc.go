// Package refmodel decides about packets as package netpolicy describes it, in plain Go
// and without its tables: rules are tried one by one, flows are in a map. It is what the
// eBPF programs are compared with, and what explains a policy to people. It follows the
// text of netpolicy's package comment, and shares no code with the compiler.
package refmodel
