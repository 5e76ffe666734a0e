// Package machine changes the machine that the agent runs in as a whole: its clock, its random number generator, its
// identity, the file system of its writable disk, its power.
package machine
