package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Fleet is the sandboxes of a host. Its methods may be called from any goroutine, and several processes may have
// Fleets of one host. The result of an operation is on disk when it returns. An operation with an unknown outcome
// may be repeated. Errors are *records.Error.
type Fleet struct {
	host  *sandbox.Host
	state *state.Store
	now   func() time.Time
	of    Cluster

	mu    sync.Mutex // guards cache, and is held while files are read for it
	cache map[string]cached
}

// Options configure New.
type Options struct {
	// Now is the clock; nil is the host's.
	Now func() time.Time
	// Cluster, if not nil, knows the sandboxes of other hosts: for ListAll and Get.
	Cluster Cluster
}

// Cluster knows the sandboxes of a cluster that this host does not have: package cluster.
type Cluster interface {
	Others(ctx context.Context) state.Others
	// Published returns a sandbox that sleeps in the store and that no host has, or sandbox.ErrNotFound.
	Published(ctx context.Context, name string) (state.Other, error)
}

// New returns a Fleet.
func New(h *sandbox.Host, o Options) *Fleet {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Fleet{host: h, state: h.State, now: o.Now, of: o.Cluster}
}

// Get returns a sandbox: of this host, or one that sleeps in the store of its cluster.
func (f *Fleet) Get(ctx context.Context, name string) (records.Sandbox, error) {
	s, err := f.get(name)
	if f.of != nil && errors.Is(err, sandbox.ErrNotFound) {
		if o, oerr := f.of.Published(ctx, name); oerr == nil {
			s, err = f.other(o), nil
		} else if !errors.Is(oerr, sandbox.ErrNotFound) {
			err = oerr
		}
	}
	return s, fail("get", name, err)
}

func (f *Fleet) get(name string) (records.Sandbox, error) {
	r, err := f.state.Get(name)
	if err != nil {
		return records.Sandbox{}, err
	}
	l, err := f.state.Metadata(name)
	return describe(r, l, err).At(f.now()), nil
}

// Fork makes children of a sandbox. If a call is repeated with the same names, and all of them are forks of the
// sandbox already, it returns them unchanged. If only some exist, the error is sandbox.ErrExists and Fork makes
// nothing.
func (f *Fleet) Fork(ctx context.Context, name string, children []records.Child) ([]records.Sandbox, error) {
	s, err := f.fork(ctx, name, children)
	return s, fail("fork", name, err)
}

func (f *Fleet) fork(ctx context.Context, name string, children []records.Child) ([]records.Sandbox, error) {
	if len(children) < 1 || len(children) > sandbox.MaxForks {
		return nil, spec.InField("children", fmt.Errorf("%w: %d children: use 1 to %d", sandbox.ErrSpec, len(children), sandbox.MaxForks))
	}
	parent, err := f.state.Get(name)
	if err != nil {
		return nil, err
	}
	if there, err := f.forks(parent.ID, children); err == nil {
		return there, nil
	}
	label, err := f.state.Metadata(name)
	if err != nil {
		return nil, err
	}
	var o sandbox.ForkOptions
	for _, c := range children {
		own := label.ForChild()
		own.Tags = append(own.Tags, c.Tags...)
		o.Children = append(o.Children, sandbox.ForkChild{Name: c.Name, Metadata: &own})
	}
	res, err := f.host.Sandbox(name).Fork(ctx, o)
	if err != nil {
		return nil, err
	}
	out := []records.Sandbox{}
	for _, c := range res.Children {
		s, err := f.get(c.Name)
		if err != nil {
			return out, err
		}
		out = append(out, s)
	}
	return out, nil
}

// forks returns the children if all of them exist already.
func (f *Fleet) forks(parentID string, children []records.Child) ([]records.Sandbox, error) {
	var out []records.Sandbox
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

// Update changes a sandbox: first the VM (sandbox.Sandbox.SetSpec, which allows most changes only while the VM
// does not run), then the metadata.
func (f *Fleet) Update(ctx context.Context, name string, c records.Changes) (records.Sandbox, error) {
	s, err := f.update(ctx, name, c)
	return s, fail("update", name, err)
}

func (f *Fleet) update(ctx context.Context, name string, c records.Changes) (records.Sandbox, error) {
	if cl := f.host.Cluster; cl != nil {
		if err := cl.Claim(ctx, name, nil); err != nil {
			return records.Sandbox{}, err
		}
	}
	r, err := f.state.Get(name)
	if err != nil {
		return records.Sandbox{}, err
	}
	idle := r.Spec.Idle.SleepSeconds
	if c.Spec.Idle != nil {
		idle = c.Spec.Idle.SleepSeconds
	}
	change := func(l *spec.Metadata, unreadable error) error {
		if unreadable != nil && !c.Reset {
			return unreadable
		}
		tokens := l.Gateway.Tokens // no token that was replaced may be valid again
		if c.Reset {
			*l = spec.Metadata{}
		}
		if c.Gateway != nil {
			l.Gateway = *c.Gateway
		}
		if l.Gateway.Tokens = tokens; c.NewGatewayToken {
			l.Gateway.Tokens++
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
			return fmt.Errorf("%w: an ephemeral sandbox does not sleep: wake it and take its idle time away first, or use another class", spec.ErrMetadata)
		}
		return nil
	}
	// Check the new metadata before any change.
	l, lerr := f.state.Metadata(name)
	if err := change(&l, lerr); err != nil {
		return records.Sandbox{}, err
	}
	if err := l.Check(); err != nil {
		return records.Sandbox{}, err
	}
	if l.Class == lifetime.Ephemeral && c.Spec.Idle != nil && c.Spec.Idle.SleepSeconds > 0 {
		return records.Sandbox{}, fmt.Errorf("%w: an ephemeral sandbox does not sleep", spec.ErrMetadata)
	}
	if err := f.host.Sandbox(name).SetSpec(ctx, c.Spec); err != nil {
		return records.Sandbox{}, err
	}
	if _, err := f.state.SetMetadata(ctx, name, change); err != nil {
		return records.Sandbox{}, err
	}
	return f.get(name)
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// Extend makes a sandbox last at least until a time. One that lasts longer, or never expires, stays unchanged.
func (f *Fleet) Extend(ctx context.Context, name string, until time.Time) (records.Sandbox, error) {
	_, err := f.state.SetMetadata(ctx, name, func(l *spec.Metadata, unreadable error) error {
		if unreadable != nil {
			return unreadable
		}
		if !l.Expires.IsZero() && until.After(l.Expires) {
			l.Expires = until
		}
		return nil
	})
	if err != nil {
		return records.Sandbox{}, fail("extend", name, err)
	}
	s, err := f.get(name)
	return s, fail("extend", name, err)
}
