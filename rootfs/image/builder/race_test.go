//go:build race

package builder

// raceEnabled: the race detector makes these tests about ten times slower, so those of
// many files use fewer. They are the same code.
const raceEnabled = true
