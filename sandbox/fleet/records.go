package fleet

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// describe returns the row of a VM.
func describe(r *state.Record, l spec.Metadata, unreadable error) records.Sandbox {
	s := records.Sandbox{
		ID: r.ID, Name: r.Spec.Name, Class: l.EffectiveClass(), Owner: l.Owner, Purpose: l.Purpose,
		Tags:  slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(l.Tags), r.Spec.Tags...)))),
		Image: r.Spec.Image, ImageID: r.Boot.ImageID, Kernel: r.Boot.KernelID,
		VCPUs: r.Spec.VCPUs, Memory: r.Spec.MemoryMiB, Disk: r.Spec.DiskMiB, Network: r.Spec.Network,
		Hooks: string(r.Spec.Hooks.Policy), IdleSeconds: r.Spec.Idle.SleepSeconds,
		Created: r.Created, Expires: l.Expires, Keep: l.Keep, NextWake: l.Wake.At, Persist: l.Persist.Clone(),
		ForkPoint: r.Parent, Snapshot: r.Snapshot, Problem: r.Problem, Status: status(r),
		Confined: r.PID != 0 && r.Confined,
	}
	if s.Tags == nil {
		s.Tags = []string{}
	}
	if r.Exit != nil {
		s.Exit = r.Exit.Reason
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

// status returns the status in a record, without regard to expiry.
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

// cached is a row with the stamp of the files that it was made from.
type cached struct {
	stamp string
	row   records.Sandbox
}

// rows returns the rows of all sandboxes, in the order of their names. It does not read a sandbox's files again if
// they are unchanged and no process of it may have died. problems are unreadable sandboxes.
func (f *Fleet) rows(ctx context.Context) (out []records.Sandbox, problems []string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	stamps, err := f.state.FileStamps()
	if err != nil {
		return nil, nil, err
	}
	now := make(map[string]cached, len(stamps))
	out = make([]records.Sandbox, 0, len(stamps))
	for _, name := range slices.Sorted(maps.Keys(stamps)) {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		c, ok := f.cache[name]
		if !ok || c.stamp == "" || c.stamp != stamps[name] || c.row.Status.Live() {
			r, err := f.state.Get(name)
			if errors.Is(err, sandbox.ErrNotFound) {
				continue
			}
			if err != nil {
				problems = append(problems, lines(err)...)
				continue
			}
			m, merr := f.state.Metadata(name)
			c = cached{stamps[name], describe(r, m, merr)}
			if merr != nil || r.Fork != nil && r.Snapshot == "" { // its parent may be writing its snapshot
				c.stamp = ""
			}
		}
		now[name] = c
		out = append(out, c.row.At(f.now()))
	}
	f.cache = now
	return out, problems, nil
}

// run returns a command from its entry in the audit trail.
func run(e audit.Entry) records.Run {
	r := records.Run{ID: e.ID, Command: e.Argv, User: e.User, State: string(e.Status), Begun: e.Begin, Ended: e.End}
	if o := e.Outcome; o != nil {
		r.Exit, r.Signal, r.CPUSeconds, r.In, r.Out, r.Error = o.Exit, o.ExitSignal, o.CPUMs/1000, o.BytesIn, o.BytesOut, o.Error
	}
	return r.Bounded()
}

// List returns the sandboxes as their files describe them, in the order of their names. A Fleet caches what it
// reads, so keep one for several lists.
func (f *Fleet) List(ctx context.Context, filter records.Filter) (records.List, error) {
	if err := filter.Check(); err != nil {
		return records.List{}, fail("list", "", err)
	}
	all, problems, err := f.rows(ctx)
	if err != nil {
		return records.List{}, fail("list", "", err)
	}
	out := records.List{Page: records.PageOf(all, filter), Problems: problems}
	for i := range out.Sandboxes {
		// The caller may change what it gets.
		s := &out.Sandboxes[i]
		s.Tags, s.Persist = slices.Clone(s.Tags), s.Persist.Clone()
	}
	return out, nil
}

// ListAll is List of the sandboxes of all hosts of the cluster: see Sandbox.Host. Those that are not shared are only in
// the lists of their own hosts. problems is what the list lacks of other hosts.
func (f *Fleet) ListAll(ctx context.Context, filter records.Filter) (l records.List, problems []string, err error) {
	if f.of == nil {
		l, err = f.List(ctx, filter)
		return l, nil, err
	}
	if err := filter.Check(); err != nil {
		return l, nil, fail("list", "", err)
	}
	here, unreadable, err := f.rows(ctx)
	if err != nil {
		return l, nil, fail("list", "", err)
	}
	others := f.of.Others(ctx)
	all := make(map[string]records.Sandbox, len(here)+len(others.List))
	for _, s := range here {
		if others.Held(s.Name) {
			s.Host = others.Self
		}
		all[s.Name] = s
	}
	for _, o := range others.List {
		if name := o.Record.Spec.Name; !others.Held(name) { // it may have come here since
			all[name] = f.other(o)
		}
	}
	rows := make([]records.Sandbox, 0, len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		rows = append(rows, all[name])
	}
	l = records.List{Page: records.PageOf(rows, filter), Problems: append(unreadable, others.Problems...)}
	for i := range l.Sandboxes {
		s := &l.Sandboxes[i]
		s.Tags, s.Persist = slices.Clone(s.Tags), s.Persist.Clone()
	}
	return l, others.Problems, nil
}

// other returns the row of a sandbox that this host does not have.
func (f *Fleet) other(o state.Other) records.Sandbox {
	s := describe(o.Record, o.Metadata, nil)
	s.Host = o.Host
	why := ""
	switch {
	case !o.Stale.IsZero():
		why = fmt.Sprintf("%s does not answer: this is as it was at %s", o.Host, o.Stale.UTC().Format(time.RFC3339))
	case o.Published:
		why = fmt.Sprintf("%s has not said how it is: this is as it was last published", o.Host)
	}
	if why != "" {
		s.Problem = strings.TrimPrefix(s.Problem+"; "+why, "; ")
	}
	return s.At(f.now())
}

func lines(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

// History returns the commands that ran in a sandbox, as far as its audit trail goes back, and its last sleeps, at
// most state.MaxSleeps. name may be its id as well. For a removed sandbox it returns what is left, for
// state.HistoryTime.
func (f *Fleet) History(ctx context.Context, name string, span records.Span) (records.History, error) {
	h, err := f.history(ctx, name, span)
	return h, fail("history", name, err)
}

func (f *Fleet) history(ctx context.Context, name string, span records.Span) (h records.History, err error) {
	if err := span.Check(); err != nil {
		return h, err
	}
	runs := records.Part[records.Run]{Span: span, At: func(r records.Run) time.Time { return r.Begun }}
	sleeps := records.Part[records.Sleep]{Span: span, At: func(s records.Sleep) time.Time { return s.Asleep }}
	r, err := f.byNameOrID(ctx, name)
	switch {
	case err == nil:
		m, merr := f.state.Metadata(r.Spec.Name)
		h.Sandbox = describe(r, m, merr)
		is, err := f.state.Audit(ctx, r.Spec.Name, audit.ReadOptions{}, func(e audit.Entry) error {
			if state.IsRun(e) {
				runs.Add(run(e))
			}
			return nil
		})
		if ctx.Err() != nil {
			return h, ctx.Err()
		}
		if err == nil && is.VM != r.ID { // replaced just now
			runs = records.Part[records.Run]{Span: span, At: runs.At}
		}
		h.Problems = lines(err)
	case errors.Is(err, sandbox.ErrNotFound):
		gone, err := f.state.Removed(name)
		if err != nil {
			return h, err
		}
		r, h.Sandbox = gone.Record, describe(gone.Record, gone.Metadata, nil)
		h.Sandbox.Removed = gone.Time
		for _, e := range gone.Runs {
			runs.Add(run(e))
		}
	default:
		return h, err
	}
	for _, s := range r.Sleeps {
		sleeps.Add(records.Sleep{
			Snapshot: s.Snapshot, Awake: s.Awake, Asleep: s.Asleep, Stored: s.Stored, Raw: s.Raw,
			CPUSeconds: s.CPUSeconds, NetworkIn: s.NetworkIn, NetworkOut: s.NetworkOut,
		})
	}
	h.Sandbox, h.Runs, h.Sleeps = h.Sandbox.At(f.now()), runs.Newest(), sleeps.Newest()
	return h, nil
}

// byNameOrID returns the record of an existing sandbox.
func (f *Fleet) byNameOrID(ctx context.Context, name string) (*state.Record, error) {
	r, err := f.state.Get(name)
	if !errors.Is(err, sandbox.ErrNotFound) || !state.IDPattern.MatchString(name) {
		return r, err
	}
	all, _, rerr := f.rows(ctx)
	if rerr != nil {
		return nil, rerr
	}
	for _, s := range all {
		if s.ID == name {
			return f.state.Get(s.Name)
		}
	}
	return nil, err
}
