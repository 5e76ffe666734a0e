// Package flowtest is for tests: it adds to package refmodel what the programs do beyond the rules, which are flows,
// limits, pinned names and translation. Tests compare the programs with it, packet by packet.
package flowtest
