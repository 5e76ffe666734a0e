package control

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Time limits for the guest before a sleep.
const (
	// PromoteTime is for all promotions together.
	PromoteTime = 15 * time.Minute
	// DropTime is for all drops together.
	DropTime = 5 * time.Minute
	// TrimTime is for writing back and trimming the disk. That is done for TrimWorth freed bytes or more, or when
	// the disk is beyond its limit. It takes seconds where the guest's kernel is interpreted.
	TrimTime  = 2 * time.Minute
	TrimWorth = 64 << 20
)

// OrderPromote has the process of a VM with a disk quota promote now: it answers with the copies.
const OrderPromote = "promote"

// Promote copies what must be promoted, into at most room bytes of the host's disk: see guest.Client.Promote. It also
// returns the state that directories to drop had before, by path.
func Promote(ctx context.Context, c *guest.Client, name string, persist lifetime.Persist, room int64) ([]spec.Promoted, map[string]guest.Seen, error) {
	if len(persist.Promote) == 0 {
		return nil, nil, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, PromoteTime, fmt.Errorf("not done within %v", PromoteTime))
	defer cancel()
	var items []guest.Promotion
	var paths []string
	for _, m := range persist.Promote {
		items = append(items, guest.Promotion{Path: m.Path, Dir: m.To})
		paths = append(paths, m.Path)
	}
	for _, d := range persist.Drop {
		if persist.Promoted(d) {
			paths = append(paths, d)
		}
	}
	looked, err := c.Look(ctx, paths)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", spec.ErrPromote, err)
	}
	seen := map[string]guest.Seen{}
	for i, p := range paths {
		seen[p] = looked[i]
	}
	copies, err := c.Promote(ctx, name, items, looked[:len(items)], room)
	if err != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = errors.Join(context.Cause(ctx), err)
		}
		return nil, seen, fmt.Errorf("%w: %w", spec.ErrPromote, err)
	}
	return copies, seen, nil
}

// PromotedDetails returns the details of the event.
func PromotedDetails(m spec.Promoted) events.Details {
	return events.Details{Path: m.At, Bytes: m.Bytes}
}
