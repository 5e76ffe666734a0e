package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// What a Fleet takes and gives.
type (
	Sandbox = records.Sandbox
	Request = records.Request
	Changes = records.Changes
	Child   = records.Child
	List    = records.List
	History = records.History
	Pruned  = records.Pruned
)

// Fleet is a set of sandboxes. Its methods may be called from any goroutine, and those of several Fleets of the same
// VMs from any process. What an operation has done is on disk when it returns. Each may be repeated when its outcome is
// not known. Errors are *Error.
type Fleet struct {
	vms VMs
	now func() time.Time

	mu    sync.Mutex // guards cache, and is held while files are read for it
	cache map[string]cached
}

// Options of New.
type Options struct {
	// Now is the clock; nil is the host's.
	Now func() time.Time
}

// New makes a Fleet.
func New(vms VMs, o Options) *Fleet {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Fleet{vms: vms, now: o.Now}
}

// waitTime is between two looks at a sandbox that somebody else works on.
const waitTime = 5 * time.Millisecond

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(waitTime):
		return nil
	}
}

// Create makes a sandbox and boots it. A name that is taken is sandbox.ErrExists. If it does not come up, nothing is
// left of it.
func (f *Fleet) Create(ctx context.Context, r Request) (Sandbox, error) {
	if lifetime.Expired(r.Metadata.Expires, f.now()) {
		return Sandbox{}, fail("create", r.Spec.Name, fmt.Errorf("%w: it would expire at %s, which is over", state.ErrMetadata, r.Metadata.Expires.Format(time.RFC3339)))
	}
	rep, err := f.vms.Run(ctx, r.Spec, r.Metadata)
	if err != nil {
		return Sandbox{}, fail("create", r.Spec.Name, err)
	}
	s, err := f.get(rep.Name)
	return s, fail("create", rep.Name, err)
}

// GetOrCreate returns the sandbox of a name, and makes it if there is none; of several that want it at once, one makes
// it and all get it. One that is there is returned as it is, asleep or not, whatever the request says of it; created
// says which it was. One that is being made is waited for.
func (f *Fleet) GetOrCreate(ctx context.Context, r Request) (s Sandbox, created bool, err error) {
	if r.Spec.Name == "" {
		return Sandbox{}, false, fail("get or create", "", fmt.Errorf("%w: no name is given to get it by", sandbox.ErrSpec))
	}
	for {
		s, err := f.get(r.Spec.Name)
		switch {
		case err == nil && s.Status != records.Creating:
			return s, false, nil
		case errors.Is(err, sandbox.ErrNotFound):
			s, err := f.Create(ctx, r)
			if !errors.Is(err, sandbox.ErrExists) {
				return s, err == nil, fail("get or create", r.Spec.Name, err)
			}
		case err != nil:
			return Sandbox{}, false, fail("get or create", r.Spec.Name, err)
		}
		if err := pause(ctx); err != nil {
			return Sandbox{}, false, fail("get or create", r.Spec.Name, fmt.Errorf("waiting for sandbox %s: %w", r.Spec.Name, err))
		}
	}
}

// Get returns a sandbox.
func (f *Fleet) Get(_ context.Context, name string) (Sandbox, error) {
	s, err := f.get(name)
	return s, fail("get", name, err)
}

func (f *Fleet) get(name string) (Sandbox, error) {
	r, err := f.vms.Get(name)
	if err != nil {
		return Sandbox{}, err
	}
	l, err := f.vms.Metadata(name)
	return describe(r, l, err).At(f.now()), nil
}

// Start brings a sandbox up, whatever it does: one that sleeps is woken, one that has stopped or crashed is booted with
// its disk as it is, and one that runs is left alone. An expired one is sandbox.ErrExpired.
func (f *Fleet) Start(ctx context.Context, name string) (Sandbox, error) {
	for {
		s, err := f.get(name)
		if err == nil {
			switch s.Status {
			case records.Stopped, records.Crashed:
				_, err = f.vms.Start(ctx, name)
			case records.Expired:
				err = fmt.Errorf("%w: %s, at %s", state.ErrExpired, name, s.Expires.Format(time.RFC3339))
			default:
				_, err = f.vms.BringUp(ctx, name)
			}
		}
		if errors.Is(err, sandbox.ErrRunning) || errors.Is(err, sandbox.ErrNotRunning) {
			// It has changed since it was looked at.
			if now, gerr := f.get(name); gerr == nil && now.Status != s.Status {
				if err := pause(ctx); err != nil {
					return Sandbox{}, fail("start", name, err)
				}
				continue
			}
		}
		if err != nil {
			return Sandbox{}, fail("start", name, err)
		}
		s, err = f.get(name)
		return s, fail("start", name, err)
	}
}

// Wake brings a sandbox back from its sleep: sandbox.Sandbox.Wake.
func (f *Fleet) Wake(ctx context.Context, name string) (Sandbox, error) {
	if _, err := f.vms.Wake(ctx, name); err != nil {
		return Sandbox{}, fail("wake", name, err)
	}
	s, err := f.get(name)
	return s, fail("wake", name, err)
}

// Sleep puts a sandbox to sleep, and says what that has done. One that sleeps is left alone: what its last sleep has
// done is returned.
func (f *Fleet) Sleep(ctx context.Context, name string, o sandbox.SleepOptions) (control.SleepResult, error) {
	res, err := f.vms.SleepWith(ctx, name, o)
	return res, fail("sleep", name, err)
}

// Snapshot writes a running sandbox to a snapshot that stays until it is removed.
func (f *Fleet) Snapshot(ctx context.Context, name string, o sandbox.SnapshotOptions) (control.SleepResult, error) {
	res, err := f.vms.SnapshotWith(ctx, name, o)
	return res, fail("snapshot", name, err)
}

// Promote copies what the metadata of a running sandbox names to the host, and says where it is:
// sandbox.Sandbox.Promote. It is done before each sleep by itself.
func (f *Fleet) Promote(ctx context.Context, name string) ([]control.Promoted, error) {
	copies, err := f.vms.Promote(ctx, name)
	return copies, fail("promote", name, err)
}

// Restore takes a sandbox that does not run back to one of its snapshots, in which it sleeps then:
// state.Store.RestoreTo.
func (f *Fleet) Restore(ctx context.Context, name, snapshot string) (Sandbox, error) {
	if _, err := f.vms.RestoreTo(ctx, name, snapshot); err != nil {
		return Sandbox{}, fail("restore", name, err)
	}
	s, err := f.get(name)
	return s, fail("restore", name, err)
}

// Fork makes children of a sandbox. When it is repeated with the same names, and these are forks of the sandbox
// already, they are returned as they are. When some are there and some not, the error is sandbox.ErrExists and nothing
// is made.
func (f *Fleet) Fork(ctx context.Context, name string, children []Child) ([]Sandbox, error) {
	s, err := f.fork(ctx, name, children)
	return s, fail("fork", name, err)
}

func (f *Fleet) fork(ctx context.Context, name string, children []Child) ([]Sandbox, error) {
	if len(children) < 1 || len(children) > sandbox.MaxForks {
		return nil, fmt.Errorf("%w: %d children: use 1 to %d", sandbox.ErrSpec, len(children), sandbox.MaxForks)
	}
	parent, err := f.vms.Get(name)
	if err != nil {
		return nil, err
	}
	if there, err := f.forks(parent.ID, children); err == nil {
		return there, nil
	}
	label, err := f.vms.Metadata(name)
	if err != nil {
		return nil, err
	}
	var o sandbox.ForkOptions
	for _, c := range children {
		own := label.ForChild()
		own.Tags = append(own.Tags, c.Tags...)
		o.Children = append(o.Children, sandbox.ForkChild{Name: c.Name, Metadata: &own})
	}
	res, err := f.vms.Fork(ctx, name, o)
	if err != nil {
		return nil, err
	}
	out := []Sandbox{}
	for _, c := range res.Children {
		s, err := f.get(c.Name)
		if err != nil {
			return out, err
		}
		out = append(out, s)
	}
	return out, nil
}

// forks are the children if they are all there already.
func (f *Fleet) forks(parentID string, children []Child) ([]Sandbox, error) {
	var out []Sandbox
	for _, c := range children {
		if c.Name == "" {
			return nil, sandbox.ErrNotFound
		}
		s, err := f.get(c.Name)
		if err != nil {
			return nil, err
		}
		if s.ParentID != parentID {
			return nil, sandbox.ErrExists
		}
		out = append(out, s)
	}
	return out, nil
}

// Rename gives a sandbox that does not run another name: state.Store.Rename.
func (f *Fleet) Rename(ctx context.Context, name, to string) (Sandbox, error) {
	if err := f.vms.Rename(ctx, name, to); err != nil {
		return Sandbox{}, fail("rename", name, err)
	}
	s, err := f.get(to)
	return s, fail("rename", to, err)
}

// Update changes a sandbox: first what is said of the VM (sandbox.Sandbox.SetSpec, which wants most only of one that
// does not run), then the metadata.
func (f *Fleet) Update(ctx context.Context, name string, c Changes) (Sandbox, error) {
	s, err := f.update(ctx, name, c)
	return s, fail("update", name, err)
}

func (f *Fleet) update(ctx context.Context, name string, c Changes) (Sandbox, error) {
	r, err := f.vms.Get(name)
	if err != nil {
		return Sandbox{}, err
	}
	idle := r.Spec.Idle.SleepSeconds
	if c.Spec.Idle != nil {
		idle = c.Spec.Idle.SleepSeconds
	}
	change := func(l *state.Metadata, unreadable error) error {
		if unreadable != nil && !c.Reset {
			return unreadable
		}
		if c.Reset {
			*l = state.Metadata{}
		}
		set(&l.Class, c.Class)
		set(&l.Owner, c.Owner)
		set(&l.Purpose, c.Purpose)
		set(&l.Tags, c.Tags)
		set(&l.Expires, c.Expires)
		set(&l.Keep, c.Keep)
		set(&l.Wake, c.Wake)
		set(&l.Rotate, c.Rotate)
		if c.Persist != nil {
			l.Persist = c.Persist.Clone()
		}
		if l.Class == lifetime.Ephemeral && (idle > 0 || r.Phase == state.Asleep) {
			return fmt.Errorf("%w: an ephemeral sandbox does not sleep: wake it and take its idle time away first, or use another class", state.ErrMetadata)
		}
		return nil
	}
	// What the metadata would be is checked before anything is changed.
	l, lerr := f.vms.Metadata(name)
	if err := change(&l, lerr); err != nil {
		return Sandbox{}, err
	}
	if err := l.Check(); err != nil {
		return Sandbox{}, err
	}
	if l.Class == lifetime.Ephemeral && c.Spec.Idle != nil && c.Spec.Idle.SleepSeconds > 0 {
		return Sandbox{}, fmt.Errorf("%w: an ephemeral sandbox does not sleep", state.ErrMetadata)
	}
	if err := f.vms.SetSpec(ctx, name, c.Spec); err != nil {
		return Sandbox{}, err
	}
	if _, err := f.vms.SetMetadata(ctx, name, change); err != nil {
		return Sandbox{}, err
	}
	return f.get(name)
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// Extend lets a sandbox last until a time at least: one that lasts longer, or for ever, is left as it is.
func (f *Fleet) Extend(ctx context.Context, name string, until time.Time) (Sandbox, error) {
	_, err := f.vms.SetMetadata(ctx, name, func(l *state.Metadata, unreadable error) error {
		if unreadable != nil {
			return unreadable
		}
		if !l.Expires.IsZero() && until.After(l.Expires) {
			l.Expires = until
		}
		return nil
	})
	if err != nil {
		return Sandbox{}, fail("extend", name, err)
	}
	s, err := f.get(name)
	return s, fail("extend", name, err)
}

// TagSnapshot gives a snapshot tags, in place of those that it has. While it has any, nothing prunes it.
func (f *Fleet) TagSnapshot(_ context.Context, snapshot string, tags []string) (state.SnapshotInfo, error) {
	info, err := f.vms.TagSnapshot(snapshot, tags)
	return info, fail("tag snapshot", "", err)
}

// Delete removes a sandbox, also one that runs, and says what that has freed. One that is not there is left alone. Its
// history stays for state.HistoryTime, unless it is ephemeral.
func (f *Fleet) Delete(ctx context.Context, name string) (state.Freed, error) {
	freed, err := f.vms.RemoveFreed(ctx, name, true)
	if errors.Is(err, sandbox.ErrNotFound) {
		return state.Freed{}, nil
	}
	return freed, fail("delete", name, err)
}

// Remove is Delete for one that has to be there, and, unless force is set, must not run: sandbox.Sandbox.Delete.
func (f *Fleet) Remove(ctx context.Context, name string, force bool) (state.Freed, error) {
	freed, err := f.vms.RemoveFreed(ctx, name, force)
	return freed, fail("remove", name, err)
}
