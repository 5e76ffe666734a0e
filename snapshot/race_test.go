//go:build race

package snapshot

// raceEnabled: the race detector makes these tests about ten times slower, so
// they try fewer seeds.
const raceEnabled = true
