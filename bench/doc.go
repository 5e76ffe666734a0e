// Package bench measures what docs/SPECIFICATION.md promises: one file for each
// number. A number names where it starts and where it ends, and comes with the
// machine that it was measured on, percentiles, the stages that make it up, the page
// faults taken and the memory touched.
//
// Peers are other monitors that are measured in turn with drowse, in the same run: what
// else a machine does hits both alike, and the ratio of two neighbouring runs is a figure
// of its own.
//
// These are measurements, not tests: they say what is, and fail only when something
// does not work.
package bench
