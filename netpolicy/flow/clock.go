package flow

import "golang.org/x/sys/unix"

// Now is the clock of bpf_ktime_get_ns.
func Now() uint64 { return clock(unix.CLOCK_MONOTONIC) }

// Coarse is the clock of bpf_ktime_get_coarse_ns. It is behind Now by up to a tick, so that what happens after a
// moment on it is never seen as before.
func Coarse() uint64 { return clock(unix.CLOCK_MONOTONIC_COARSE) }

// clock is 0 if it cannot be read: what is pinned has expired then.
func clock(id int32) uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return 0
	}
	return uint64(ts.Nano())
}
