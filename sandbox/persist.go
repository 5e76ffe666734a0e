package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// What does not persist over a sleep: docs/guides/persistence.md and ADR 0049.

var (
	// ErrPromote says that a part of the guest could not be copied to the host.
	ErrPromote = errors.New("not all that is to be promoted could be")
	// ErrDrop says that a directory of the guest could not be emptied.
	ErrDrop = errors.New("not all that is to be dropped could be")
	// ErrPersistLimit says that a VM's disk has more data than may persist.
	ErrPersistLimit = errors.New("the disk has more data than may persist")
)

// PersistLimitError is an ErrPersistLimit with how much there is. The process of a VM tells others of the
// ErrPersistLimit alone.
type PersistLimitError struct {
	Bytes, Max int64
	name       string
}

// Error is one line.
func (e *PersistLimitError) Error() string {
	return fmt.Sprintf("%v: %d bytes, and %d are allowed: remove files in it, or allow more with `drowse update %s --persist-max BYTES`",
		ErrPersistLimit, e.Bytes, e.Max, e.name)
}

// Unwrap makes it an ErrPersistLimit.
func (e *PersistLimitError) Unwrap() error { return ErrPersistLimit }

// Times that the guest has before a sleep.
const (
	// PromoteTime is for all that is promoted.
	PromoteTime = 15 * time.Minute
	// DropTime is for all that is dropped.
	DropTime = 5 * time.Minute
	// trimTime is for writing out and trimming the disk, which is done for more than trimWorth bytes or beyond the
	// limit: where the guest's kernel is interpreted it takes seconds.
	trimTime  = 2 * time.Minute
	trimWorth = 64 << 20
)

// Promoted is a copy of a part of a VM on the host.
type Promoted = guest.Promoted

// Persisted says what a sleep has done about what does not persist.
type Persisted struct {
	Promoted []Promoted `json:"promoted,omitempty"`
	Dropped  []Dropped  `json:"dropped,omitempty"`
	// DiskBytes is how much data the writable disk has, if that has a limit.
	DiskBytes int64 `json:"disk_bytes,omitempty"`
	// Problems are what has failed and was ignored. What was to be promoted and was not has not been dropped.
	Problems []string `json:"problems,omitempty"`
}

// Dropped says what has gone from a directory, by the guest's word.
type Dropped struct {
	Path    string `json:"path"`
	Entries uint64 `json:"entries"`
	// Bytes are those on the guest's disk that no other name has.
	Bytes uint64 `json:"bytes"`
	// Kept are entries that stay, since a promotion may not have them as they are, and Mounts those on which something
	// is mounted.
	Kept   uint64 `json:"kept,omitempty"`
	Mounts uint64 `json:"mounts,omitempty"`
}

// shedding is what a VM is rid of before it sleeps. A nil one is of a VM all of which persists.
type shedding struct {
	p      *process
	spec   lifetime.Persist
	ignore bool
	out    Persisted
}

// shed promotes and drops what the metadata says. If it fails, nothing has been dropped that was not promoted.
func (p *process) shed(ctx context.Context, over spec.HookPolicy) (*shedding, error) {
	name := p.r.Spec.Name
	l, err := p.store.Metadata(name)
	if err != nil {
		// It is in nobody's way: what it does not say is not dropped.
		p.log.Warn("all of the VM persists over its sleep, since its metadata cannot be read", "error", err)
		return nil, nil
	}
	if l.Persist.Empty() {
		return nil, nil
	}
	policy := p.r.Spec.Hooks.Effective(over)
	sh := &shedding{p: p, spec: l.Persist, ignore: policy == spec.HooksIgnore}
	if policy == spec.HooksSkip || len(sh.spec.Drop)+len(sh.spec.Promote) == 0 && sh.within() == nil {
		return sh, nil
	}
	ctx, cancel := p.in.WhileRunning(ctx)
	defer cancel()
	if err := sh.ask(ctx); err != nil {
		p.tellShed(ctx, sh, err)
		return sh, fmt.Errorf("%w: or use --hooks %s to have it sleep all the same, with what is not promoted not dropped either", p.in.Explain(ctx, err), spec.HooksIgnore)
	}
	p.tellShed(ctx, sh, nil)
	return sh, nil
}

// ask has the guest do its part.
func (sh *shedding) ask(ctx context.Context) error {
	if err := sh.p.store.EnsureAudit(sh.p.r.Spec.Name); err != nil {
		return fmt.Errorf("%w: %w", ErrPromote, err)
	}
	c, err := sh.p.in.Agent(ctx)
	if err != nil {
		switch {
		case len(sh.spec.Promote) > 0:
			return sh.failed(fmt.Errorf("%w: %w", ErrPromote, err))
		case len(sh.spec.Drop) > 0:
			return sh.failed(fmt.Errorf("%w: %w", ErrDrop, err))
		}
		return nil // the limit does not depend on it
	}
	// Before the guest is paused, so that no connection is in what is saved of it.
	defer c.Close()
	copies, seen, err := promote(ctx, c, sh.p.r.Spec.Name, sh.spec)
	sh.out.Promoted = copies
	drops := sh.spec.Drop
	if err != nil {
		if err := sh.failed(err); err != nil {
			return err
		}
		// What has not been promoted stays.
		drops = slices.DeleteFunc(slices.Clone(drops), sh.spec.Promoted)
	}
	if err := sh.drop(ctx, c, drops, seen); err != nil {
		return sh.failed(err)
	}
	return nil
}

// failed notes an error that is ignored, and returns any other.
func (sh *shedding) failed(err error) error {
	if !sh.ignore {
		return err
	}
	sh.out.Problems = append(sh.out.Problems, err.Error())
	return nil
}

// promote copies what is to be promoted, and returns what directories that are dropped, too, were before.
func promote(ctx context.Context, c *guest.Client, name string, spec lifetime.Persist) ([]Promoted, map[string]guest.Seen, error) {
	if len(spec.Promote) == 0 {
		return nil, nil, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, PromoteTime, fmt.Errorf("not done within %v", PromoteTime))
	defer cancel()
	var items []guest.Promotion
	var paths []string
	for _, m := range spec.Promote {
		items = append(items, guest.Promotion{Path: m.Path, Dir: m.To})
		paths = append(paths, m.Path)
	}
	for _, d := range spec.Drop {
		if spec.Promoted(d) {
			paths = append(paths, d)
		}
	}
	looked, err := c.Look(ctx, paths)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrPromote, err)
	}
	seen := map[string]guest.Seen{}
	for i, p := range paths {
		seen[p] = looked[i]
	}
	copies, err := c.Promote(ctx, name, items, looked[:len(items)])
	if err != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = errors.Join(context.Cause(ctx), err)
		}
		return nil, seen, fmt.Errorf("%w: %w", ErrPromote, err)
	}
	return copies, seen, nil
}

// drop empties directories, and has the disk forget what they had.
func (sh *shedding) drop(ctx context.Context, c *guest.Client, drops []string, seen map[string]guest.Seen) error {
	var paths []guest.DropPath
	for _, d := range drops {
		p := guest.DropPath{Path: d}
		if was, ok := seen[d]; ok {
			p.Seen = &was
		}
		paths = append(paths, p)
	}
	var done []guest.Dropped
	var err error
	if len(paths) > 0 {
		done, err = c.Drop(ctx, paths, DropTime, false)
	}
	freed := uint64(0)
	var problems []string
	for i, d := range done {
		freed += min(d.Bytes, trimWorth)
		switch d.State {
		case guest.DropDirectory, guest.DropReplaced:
			sh.out.Dropped = append(sh.out.Dropped, Dropped{Path: drops[i], Entries: d.Entries, Bytes: d.Bytes, Kept: d.Kept, Mounts: d.Mounts})
		case guest.DropAbsent:
		default:
			problems = append(problems, drops[i]+" is no directory, or a symbolic link leads to it")
		}
		if d.Problem != "" {
			problems = append(problems, d.Problem)
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDrop, err)
	}
	if len(problems) > 0 {
		return fmt.Errorf("%w: %s: see to it in the guest, or change what is dropped with `drowse update %s`", ErrDrop, strings.Join(problems, "; "), sh.p.r.Spec.Name)
	}
	if freed < trimWorth && sh.within() == nil {
		return nil
	}
	if _, err := c.Drop(ctx, nil, trimTime, true); err != nil {
		// What is not trimmed is stored, and counts.
		sh.p.log.Warn("the guest has not written out and trimmed its disk", "error", err)
	}
	return nil
}

// within is nil if the disk has no more data than may persist.
func (sh *shedding) within() error {
	if sh.spec.MaxBytes == 0 {
		return nil
	}
	sh.out.DiskBytes = sh.p.in.Disk().Data()
	if sh.out.DiskBytes > sh.spec.MaxBytes {
		return &PersistLimitError{Bytes: sh.out.DiskBytes, Max: sh.spec.MaxBytes, name: sh.p.r.Spec.Name}
	}
	return nil
}

// still is for CaptureOptions: with the guest standing still, its disk must not have more data than may persist.
func (sh *shedding) still(also func() error) func() error {
	if sh == nil || sh.spec.MaxBytes == 0 {
		return also
	}
	return func() error {
		if also != nil {
			if err := also(); err != nil {
				return err
			}
		}
		return sh.within()
	}
}

// result is what the sleep says of it.
func (sh *shedding) result() *Persisted {
	if sh == nil {
		return nil
	}
	return &sh.out
}

// tellShed tells of what was promoted, and of what has failed. A sleep that the limit refuses is told of by tellLimit.
func (p *process) tellShed(ctx context.Context, sh *shedding, failed error) {
	for _, m := range sh.out.Promoted {
		p.tell(ctx, events.Promoted, promotedDetails(m))
	}
	problems := sh.out.Problems
	if failed != nil {
		problems = append(slices.Clone(problems), failed.Error())
	}
	for _, problem := range problems {
		p.tell(ctx, events.PersistFailed, events.Details{Problem: problem})
	}
}

func promotedDetails(m Promoted) events.Details {
	return events.Details{Path: m.At, Bytes: m.Bytes}
}

// tellLimit tells of a sleep that the limit has refused.
func (p *process) tellLimit(ctx context.Context, err error) {
	if errors.Is(err, ErrPersistLimit) {
		p.tell(ctx, events.PersistFailed, events.Details{Problem: err.Error()})
	}
}

// Promote copies what the metadata of a running VM names to the host now: guest.Client.Promote. The VM runs on, and
// what its programs write meanwhile is in the copies or not. One that sleeps is ErrNotRunning.
func (s *Store) Promote(ctx context.Context, name string) ([]Promoted, error) {
	l, err := s.Metadata(name)
	if err != nil {
		return nil, err
	}
	if len(l.Persist.Promote) == 0 {
		return nil, fmt.Errorf("%w: nothing of %s is to be promoted: say what with `drowse update %s --promote PATH=HOSTDIR`", state.ErrMetadata, name, name)
	}
	r, err := s.Get(name)
	if err != nil {
		return nil, err
	}
	c, err := s.Agent(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("promoting of %s: %w", name, err)
	}
	defer c.Close()
	copies, _, err := promote(ctx, c, name, l.Persist)
	if err != nil {
		return nil, fmt.Errorf("promoting of %s: %w", name, err)
	}
	for _, m := range copies {
		e := s.Event(ctx, r, events.Promoted)
		e.Details = promotedDetails(m)
		s.Tell(e)
	}
	return copies, nil
}
