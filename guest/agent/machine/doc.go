// Package machine changes the agent's machine as a whole: its clock, its random number generator, its identity, the
// file system of its writable disk, its power.
package machine
