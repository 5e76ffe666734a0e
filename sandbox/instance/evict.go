package instance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

const (
	// idleLook is how often EvictIdle looks at the guest, which is idle if it has used less than 1/idleShare of a
	// processor since the last look.
	idleLook  = 10 * time.Second
	idleShare = 50
	// worthEvicting is how many pages must have been loaded since the last time: evicting stops the guest for
	// milliseconds, and what it needs again must be loaded again.
	worthEvicting = 2 << 20 / guestmem.PageSize
	// evictPause is how long the guest's devices may take to stand still.
	evictPause = time.Second
)

// EvictIdle gives the host the pages of a restored guest that have not changed, each time the guest has become idle
// after work: a wake and a command load pages that an idle guest does not need, and that come again from the snapshot.
// It returns when the machine ends, or when a capture has begun to count changes anew.
func (in *Instance) EvictIdle() {
	if in.pager == nil || !in.tracked {
		return
	}
	tick := time.NewTicker(idleLook)
	defer tick.Stop()
	worked, used, loaded := true, in.vcpuTime(), uint64(0)
	for {
		select {
		case <-in.machine.Done():
			return
		case <-tick.C:
		}
		before := used
		used = in.vcpuTime()
		copied := in.pager.Stats().PagesCopied.Load()
		switch {
		case used-before >= idleLook/idleShare:
			worked = true
		case worked && copied-loaded >= worthEvicting:
			begun := time.Now()
			pages, again, err := in.evict()
			if err != nil {
				in.log.Warn("unchanged pages stay in memory", "error", err)
			}
			if !again {
				return
			}
			in.log.Debug("gave unchanged pages back", "pages", pages, "of", copied, "took", time.Since(begun))
			worked, loaded = false, copied
		}
	}
}

// vcpuTime is the processor time of all vCPUs.
func (in *Instance) vcpuTime() (sum time.Duration) {
	for i := range in.parts.Spec.VCPUs {
		sum += in.machine.VCPUTime(i)
	}
	return sum
}

// evict gives unchanged pages back. again is false if that cannot be done any more.
func (in *Instance) evict() (pages uint64, again bool, err error) {
	if !in.capturing.TryLock() {
		return 0, true, nil
	}
	defer in.capturing.Unlock()
	if in.machine.DirtyTaken() {
		return 0, false, nil // and after a capture the guest may have to stand still
	}
	defer in.KeepRunning()()
	ctx, cancel := context.WithTimeoutCause(context.Background(), evictPause, errors.New("the devices do not stand still"))
	defer cancel()
	if err := in.machine.Pause(ctx); err != nil {
		return 0, true, fmt.Errorf("pausing the guest: %w", err)
	}
	pages, err = in.machine.Evict()
	if rerr := in.machine.Resume(); rerr != nil {
		in.fail(fmt.Errorf("letting the guest run on: %w", rerr)) // it would stand still unnoticed
		return pages, false, errors.Join(err, rerr)
	}
	return pages, true, err
}
