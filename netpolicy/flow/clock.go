package flow

import "golang.org/x/sys/unix"

// Now returns the time of bpf_ktime_get_ns.
func Now() uint64 { return clock(unix.CLOCK_MONOTONIC) }

// Coarse returns the time of bpf_ktime_get_coarse_ns. It is behind Now by up to a tick, so an event after a call
// of Coarse never has an earlier time on that clock.
func Coarse() uint64 { return clock(unix.CLOCK_MONOTONIC_COARSE) }

// clock returns 0 if it cannot read the clock; then pins count as expired.
func clock(id int32) uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return 0
	}
	return uint64(ts.Nano())
}
