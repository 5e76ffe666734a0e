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

// maxDepth is how many deleted families may wait for each other.
const maxDepth = 1000

// Collect deletes what a sandbox no longer needs: del removes all objects of an upload of a family, also those of an
// upload that is not or only partly there. Collect may be stopped at any moment, run several times at once and be
// called again. It gives back loans, and so collects deleted families that waited for these.
//
// What a host uploads although it has lost its session stays: upload keys are given up for ever, so whoever lists the
// objects may delete those whose upload Family, asked after the list, does not name.
func (l *Ledger) Collect(ctx context.Context, family string, del func(ctx context.Context, family, upload string) error) error {
	c := collection{l, del, map[string]bool{}}
	if err := c.collect(ctx, family); err != nil {
		return fmt.Errorf("collecting what the sandbox %s does not need: %w", family, err)
	}
	return nil
}

type collection struct {
	l     *Ledger
	del   func(ctx context.Context, family, upload string) error
	under map[string]bool // families that are being collected
}

func (c collection) collect(ctx context.Context, family string) error {
	if len(c.under) >= maxDepth {
		return fmt.Errorf("%w: collect %s first", ErrDepth, family)
	}
	c.under[family] = true
	defer delete(c.under, family)
	for {
		f, err := c.release(ctx, family)
		if err != nil {
			return err
		}
		g := f.garbage()
		if g.empty() {
			return nil
		}
		// It is published by being in the store, and does not come back to life: see Family.needed.
		for _, u := range g.uploads {
			if err := c.del(ctx, family, u); err != nil {
				return fmt.Errorf("deleting the upload %s: %w", u, err)
			}
		}
		for _, id := range g.loans {
			if err := c.giveBack(ctx, id, f.Loans[id]); err != nil {
				return err
			}
		}
		if _, err := c.l.update(ctx, change{family: family, make: func(f *Family) (bool, error) {
			return f.drop(g), nil
		}}); err != nil {
			return err
		}
	}
}

// release ends the claim of a host that is dead, and with it what the claim intends.
func (c collection) release(ctx context.Context, family string) (*Family, error) {
	return c.l.update(ctx, change{family: family, make: func(f *Family) (bool, error) {
		if f.Holder == nil {
			return false, nil
		}
		wait, err := c.l.end(ctx, f.Holder.Host, f.Holder.Incarnation)
		if err != nil || wait > 0 {
			return false, err
		}
		f.Holder = nil
		return true, nil
	}})
}

// giveBack ends a loan, and then deletes what it alone has kept. Only then may the borrower forget it: nobody else
// collects a deleted family.
func (c collection) giveBack(ctx context.Context, id string, loan Loan) error {
	f, err := c.l.update(ctx, change{family: loan.Family, make: func(f *Family) (bool, error) {
		s := f.Snapshots[loan.Snapshot]
		if _, ok := s.Lent[id]; ok {
			delete(s.Lent, id)
			return true, nil
		}
		// Any change makes a loan that is on its way come too late.
		return s.State == Kept && !s.LentForGood, nil
	}})
	if err != nil {
		return fmt.Errorf("giving back to the sandbox %s: %w", loan.Family, err)
	}
	if f.garbage().empty() || c.under[loan.Family] {
		return nil
	}
	return c.collect(ctx, loan.Family)
}
