package ledger

import (
	"context"
	"fmt"
)

// Remove marks a snapshot of a sandbox as gone, also one that is intended. One that is not there is no error; the head
// is refused with ErrSnapshot. Collect deletes what then nothing needs.
func (l *Ledger) Remove(ctx context.Context, family, snapshot string) error {
	_, err := l.update(ctx, change{family: family, make: func(f *Family) (bool, error) {
		s, ok := f.Snapshots[snapshot]
		switch {
		case !ok || s.State == Gone:
			return false, nil
		case f.Head == snapshot:
			return false, fmt.Errorf("%w: it is the head", ErrSnapshot)
		}
		s.State, s.Fence = Gone, 0
		f.Snapshots[snapshot] = s
		return true, nil
	}})
	if err != nil {
		return fmt.Errorf("removing the snapshot %s of the sandbox %s: %w", snapshot, family, err)
	}
	return nil
}

// maxCleared is how many snapshots of a family may be cleared away that its record still has.
const maxCleared = 16

// Collect deletes what a sandbox no longer needs: del removes all objects of an upload, also those of one that is not
// or only partly there. Collect may be stopped at any moment, run several times at once and be called again. What it
// has cleared away leaves the record with a later change of this ledger's, which saves a request.
//
// What a host uploads although it has lost its session stays: upload keys are given up for ever, so whoever lists the
// objects may delete those whose upload Family, asked after the list, does not name.
func (l *Ledger) Collect(ctx context.Context, family string, del func(ctx context.Context, upload string) error) error {
	if err := l.collect(ctx, family, del); err != nil {
		return fmt.Errorf("collecting what the sandbox %s does not need: %w", family, err)
	}
	return nil
}

func (l *Ledger) collect(ctx context.Context, family string, del func(ctx context.Context, upload string) error) error {
	f, err := l.release(ctx, family)
	if err != nil {
		return err
	}
	snapshots, uploads := f.garbage()
	// It does not come back to life: see Family.needed.
	for _, u := range uploads {
		if err := del(ctx, u); err != nil {
			return fmt.Errorf("deleting the upload %s: %w", u, err)
		}
	}
	n := l.clear(family, snapshots)
	if n <= maxCleared && !(f.Deleted && n > 0) {
		return nil
	}
	_, err = l.update(ctx, change{family: family, make: func(f *Family) (bool, error) {
		return f.drop(snapshots), nil
	}})
	return err
}

// release ends the claim of a host that is dead, and with it what the claim intends.
func (l *Ledger) release(ctx context.Context, family string) (*Family, error) {
	return l.update(ctx, change{family: family, make: func(f *Family) (bool, error) {
		if f.Holder == nil {
			return false, nil
		}
		wait, err := l.end(ctx, f.Holder.Host, f.Holder.Incarnation)
		if err != nil || wait > 0 {
			return false, err
		}
		f.Holder = nil
		return true, nil
	}})
}
