package sandbox

import "time"

// SetGraceTime has sweeps delete what is older than d, until what it returns is called.
func SetGraceTime(d time.Duration) (restore func()) {
	old := graceTime
	graceTime = d
	return func() { graceTime = old }
}
