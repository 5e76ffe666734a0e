package fleet

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// errNoRecords says that there is no database.
var errNoRecords = errors.New("there are no records")

// describe is the row of a VM.
func describe(r *state.Record, l state.Metadata, unreadable error) Sandbox {
	s := Sandbox{
		ID: r.ID, Name: r.Spec.Name, Class: l.EffectiveClass(), Owner: l.Owner, Purpose: l.Purpose,
		Tags:  slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(l.Tags), r.Spec.Tags...)))),
		Image: r.Spec.Image, ImageID: r.Boot.ImageID, Kernel: r.Boot.KernelID,
		VCPUs: r.Spec.VCPUs, Memory: r.Spec.MemoryMiB, Disk: r.Spec.DiskMiB, Network: r.Spec.Network,
		Hooks: string(r.Spec.Hooks.Policy), IdleSeconds: r.Spec.Idle.SleepSeconds,
		Created: r.Created, Expires: l.Expires, Keep: l.Keep, NextWake: l.Wake.At, Persist: l.Persist.Clone(),
		ForkPoint: r.Parent, Snapshot: r.Snapshot, Problem: r.Problem, Status: status(r),
	}
	if s.Tags == nil {
		s.Tags = []string{}
	}
	if r.Fork != nil {
		s.Parent, s.ParentID, s.Generation = r.Fork.Parent, r.Fork.ParentID, r.Fork.Generation
	}
	if r.Spec.Policy != nil {
		if text, err := json.Marshal(r.Spec.Policy); err == nil {
			sum := sha256.Sum256(text)
			s.Policy = hex.EncodeToString(sum[:])
		}
	}
	if unreadable != nil {
		s.Problem = strings.TrimPrefix(s.Problem+"; "+unreadable.Error(), "; ")
	}
	return s
}

// status is what a record says, its time aside.
func status(r *state.Record) records.Status {
	switch r.Phase {
	case state.Running:
		return records.Running
	case state.Starting:
		if r.Creating() {
			return records.Creating
		}
		return records.Waiting
	case state.Asleep:
		return records.Asleep
	case state.Stopped:
		return records.Stopped
	}
	// Its process was killed. Problem says so.
	return records.Crashed
}

// described is counted up when describe says something else of the same files, which are all read again then.
const described = "2 "

// recordsTime bounds how long an operation takes care of the records, on top of what it has to do.
const recordsTime = 10 * time.Second

// reconcile makes the index what the files say. The error says what the index lacks.
func (f *Fleet) reconcile(ctx context.Context) error {
	if f.db == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, recordsTime)
	defer cancel()
	var problems []error
	err := f.db.Update(ctx, func(tx *records.Tx) error {
		problems = nil
		known, err := tx.Known()
		if err != nil {
			return err
		}
		// What is read from here on is not older than what is written, since nobody else writes.
		stamps, err := f.vms.FileStamps()
		if err != nil {
			return err
		}
		for name, stamp := range stamps {
			if err := ctx.Err(); err != nil {
				return err
			}
			if stamp != "" {
				stamp = described + stamp
			}
			k, ok := known[name]
			if ok && stamp != "" && k.Stamp == stamp && !k.Status.Live() {
				continue
			}
			err := f.index(tx, name, stamp)
			if errors.Is(err, sandbox.ErrNotFound) {
				delete(stamps, name)
				continue
			}
			var own *indexError
			if errors.As(err, &own) {
				problems = append(problems, own.error)
				continue
			}
			if err != nil {
				return err
			}
		}
		for name, k := range known {
			if _, there := stamps[name]; there {
				continue
			}
			// It may be there under another name.
			if err := tx.Gone(k, f.now()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("%w: %w", errNoRecords, err)
	}
	return errors.Join(problems...)
}

// indexError is of one sandbox's files, and says nothing against the database.
type indexError struct{ error }

// index puts one sandbox into the index.
func (f *Fleet) index(tx *records.Tx, name, stamp string) error {
	r, err := f.vms.Get(name)
	if errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	if err != nil {
		return &indexError{err}
	}
	l, lerr := f.vms.Metadata(name)
	if err := tx.Put(describe(r, l, lerr), stamp); err != nil {
		return err
	}
	var sleeps []records.Sleep
	for _, s := range r.Sleeps {
		sleeps = append(sleeps, records.Sleep{
			Snapshot: s.Snapshot, Awake: s.Awake, Asleep: s.Asleep, Stored: s.Stored, Raw: s.Raw,
			CPUSeconds: s.CPUSeconds, NetworkIn: s.NetworkIn, NetworkOut: s.NetworkOut,
		})
	}
	if len(sleeps) == 0 {
		return nil
	}
	return tx.PutSleeps(r.ID, sleeps)
}

// maxTaken is how many runs are taken over at once; beyond them the oldest are left out.
const maxTaken = records.MaxRuns

// takeOver brings what was run in a sandbox into the records.
func (f *Fleet) takeOver(ctx context.Context, name string) error {
	if f.db == nil {
		return nil
	}
	if err := f.reconcile(ctx); errors.Is(err, errNoRecords) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, recordsTime)
	defer cancel()
	err := f.db.Update(ctx, func(tx *records.Tx) error {
		known, err := tx.Known()
		if err != nil {
			return err
		}
		k, ok := known[name]
		if !ok {
			return nil
		}
		since, err := tx.RunsSince(k.ID)
		if err != nil {
			return err
		}
		var runs []records.Run
		is, err := f.vms.Audit(ctx, name, audit.ReadOptions{Since: since}, func(e audit.Entry) error {
			if e.Kind != audit.KindExec && e.Kind != audit.KindShell || e.ID == "" {
				return nil
			}
			if len(runs) == maxTaken {
				runs = slices.Delete(runs, 0, maxTaken/2)
			}
			runs = append(runs, run(e))
			return nil
		})
		if errors.Is(err, sandbox.ErrNotFound) || err == nil && is.VM != k.ID {
			return nil // it has just been replaced
		}
		if err != nil {
			return &indexError{err}
		}
		return tx.PutRuns(k.ID, runs)
	})
	var own *indexError
	if err != nil && !errors.As(err, &own) {
		return fmt.Errorf("%w: %w", errNoRecords, err)
	}
	return err
}

// Gather brings what was run in all sandboxes into the records, before their trails are full. It returns what could not
// be.
func (f *Fleet) Gather(ctx context.Context) error {
	stamps, err := f.vms.FileStamps()
	if err != nil {
		return fail("gather", "", err)
	}
	var errs []error
	for name := range stamps {
		if ctx.Err() != nil {
			return fail("gather", "", ctx.Err())
		}
		errs = append(errs, f.takeOver(ctx, name))
	}
	return fail("gather", "", errors.Join(errs...))
}

// run is a command as the audit trail tells of it.
func run(e audit.Entry) records.Run {
	r := records.Run{ID: e.ID, Command: e.Argv, User: e.User, State: string(e.Status), Begun: e.Begin, Ended: e.End}
	if o := e.Outcome; o != nil {
		r.Exit, r.Signal, r.CPUSeconds, r.In, r.Out, r.Error = o.Exit, o.ExitSignal, o.CPUMs/1000, o.BytesIn, o.BytesOut, o.Error
	}
	return r
}

// List is a page of sandboxes.
type List struct {
	records.Page
	// Problems are what is missing in it, or was not to be had: of sandboxes that cannot be read, and of the records.
	Problems []string `json:"problems,omitempty"`
}

// List returns those that are there as their files say, in the order of their names. Without usable records it reads
// all of them.
func (f *Fleet) List(ctx context.Context, filter records.Filter) (List, error) {
	if err := filter.Check(); err != nil {
		return List{}, fail("list", "", err)
	}
	var out List
	if f.db != nil {
		err := f.reconcile(ctx)
		if err == nil || !errors.Is(err, errNoRecords) {
			if err != nil {
				out.Problems = lines(err)
			}
			page, lerr := f.db.List(ctx, filter, f.now())
			if lerr == nil {
				for i, s := range page.Sandboxes {
					// They are in the metadata alone.
					if l, err := f.vms.Metadata(s.Name); err == nil {
						page.Sandboxes[i].NextWake, page.Sandboxes[i].Persist = l.Wake.At, l.Persist
					}
				}
				out.Page = page
				return out, nil
			}
			err = lerr
		}
		if ctx.Err() != nil {
			return List{}, fail("list", "", ctx.Err())
		}
		out.Problems = append(out.Problems, lines(err)...)
	}
	if _, err := f.vms.FileStamps(); err != nil {
		return List{}, fail("list", "", err)
	}
	all, err := f.vms.List()
	if err != nil && f.db == nil {
		out.Problems = append(out.Problems, lines(err)...)
	}
	var rows []Sandbox
	for _, r := range all {
		l, lerr := f.vms.Metadata(r.Spec.Name)
		rows = append(rows, describe(r, l, lerr).At(f.now()))
	}
	slices.SortFunc(rows, func(a, b Sandbox) int { return strings.Compare(a.Name, b.Name) })
	out.Page = records.PageOf(rows, filter)
	return out, nil
}

func lines(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

// History is what a sandbox has done, the newest first.
type History struct {
	Sandbox Sandbox         `json:"sandbox"`
	Runs    []records.Run   `json:"runs"`
	Sleeps  []records.Sleep `json:"sleeps"`
	// Problems are what could not be taken over.
	Problems []string `json:"problems,omitempty"`
}

// History returns what was run in a sandbox and what it has slept in. Of one that was removed it is what is left, for
// records.HistoryTime; it can be named by its id as well. The error has CodeNoRecords where there are none.
func (f *Fleet) History(ctx context.Context, name string, span records.Span) (h History, err error) {
	if f.db == nil {
		return h, fail("history", name, errNoRecords)
	}
	err = f.takeOver(ctx, name)
	if errors.Is(err, errNoRecords) {
		return h, fail("history", name, err)
	}
	h.Problems = lines(err)
	if h.Sandbox, err = f.db.Find(ctx, name, f.now()); err != nil {
		return h, fail("history", name, err)
	}
	if h.Runs, err = f.db.Runs(ctx, h.Sandbox.ID, span); err != nil {
		return h, fail("history", name, err)
	}
	h.Sleeps, err = f.db.Sleeps(ctx, h.Sandbox.ID, span)
	return h, fail("history", name, err)
}
