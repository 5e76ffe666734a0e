package ledger

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// Clock measures how time passes on one host. What it shows means nothing elsewhere.
type Clock interface {
	// Now returns the time since some moment. It never goes back, passes while the host is suspended, and is at most
	// 1/10 too fast or too slow.
	Now() time.Duration
	// Sleep waits until d has passed, or returns an error because ctx has ended.
	Sleep(ctx context.Context, d time.Duration) error
}

// boottime is CLOCK_BOOTTIME. Go's own monotonic clock stands still while a host is suspended, so that it would
// believe itself alive for too long: clock_gettime(2).
type boottime struct{}

func (boottime) Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// Linux has had it since 2.6.39. Nothing may run without.
		panic("CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(ts.Nano())
}

// look is how late a sleep ends that a suspension interrupts: Go's timers stand still in one.
const look = 200 * time.Millisecond

func (c boottime) Sleep(ctx context.Context, d time.Duration) error {
	for end := c.Now() + d; ; {
		left := end - c.Now()
		if left <= 0 {
			return context.Cause(ctx)
		}
		t := time.NewTimer(min(left, look))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// within returns a context that ends after d.
func within(ctx context.Context, c Clock, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_ = c.Sleep(ctx, d) // or ctx has ended anyway
		cancel()
	}()
	return ctx, cancel
}
