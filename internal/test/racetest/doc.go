// Package racetest is for tests of many cases that are alike. The race detector makes a case about ten times slower and
// finds in the thousandth what it has found in the first, so these tests try fewer of them under it. `make test` runs
// every package that imports this one without it as well, with all cases.
package racetest

import "testing"

// Cases is how many cases a test tries: all, or few under the race detector and with -short. Flags have been parsed.
func Cases(all, few int) int {
	if Enabled || testing.Short() {
		return few
	}
	return all
}
