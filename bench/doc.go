// Package bench measures the promises of docs/SPECIFICATION.md: one file for each number. A number names where it
// starts and where it ends. It comes with the machine, percentiles, the stages that make it up, the page faults
// and the memory touched.
//
// Peers are other monitors. A run measures them in turn with drowse: other load on the machine affects both alike,
// and the ratio of two neighbouring runs is a figure of its own.
//
// These are measurements, not tests. They fail only when something does not work.
package bench
