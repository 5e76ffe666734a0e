package lease

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

const (
	// maxLook bounds the time between two looks at the clock. Go's timers stand still while a host is suspended.
	maxLook = time.Second
	// A VM is frozen for at most frozenTime, and frozenTTLs of the lease's time: see jail.ArrivalTime.
	frozenTime = 4 * time.Minute
	frozenTTLs = 8
)

// Watch returns when this host may not run a sandbox any more, with the reason, or nil at the end of ctx. left and ttl
// are those of Left. It calls low, perhaps often, when less than a third of the lease's time is left. At its end it
// calls freeze: if nothing of the sandbox runs then, thaw is called when the host may run it again. If that takes too
// long, Watch returns, and thaw is not called.
func (d Dir) Watch(ctx context.Context, name string, left, ttl time.Duration, low func(), freeze func() (thaw func(), ok bool)) error {
	look := min(maxLook, ttl/50)
	var thaw func() // of one that is frozen since the time below
	var froze time.Duration
	for until := Now() + left; ; {
		if now := Now(); now >= until-ttl/3 {
			left, _, _, err := d.Left(name)
			if now >= until && err != nil && !errors.Is(err, spec.ErrUnclaimed) {
				err = fmt.Errorf("%w: %w", spec.ErrUnclaimed, err)
			}
			switch {
			case err == nil:
				if until = now + left; thaw != nil {
					thaw()
					thaw = nil
				}
			case errors.Is(err, spec.ErrUnclaimed): // else it cannot be read now
				if thaw == nil {
					thaw, _ = freeze()
					froze = now
				}
				if thaw == nil || now-froze >= min(frozenTime, frozenTTLs*ttl) {
					return err
				}
			}
			if until-now < ttl/3 {
				low()
			}
		}
		if wait.For(ctx, look) != nil {
			return nil
		}
	}
}
