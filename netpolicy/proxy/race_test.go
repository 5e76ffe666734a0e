//go:build race

package proxy

// raceEnabled: the race detector makes requests ten times slower, so that a test of thousands makes fewer of them.
const raceEnabled = true
