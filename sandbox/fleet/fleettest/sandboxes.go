package fleettest

import (
	"context"
	"errors"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Sandboxes are those of a host, with what is done with one answered by its row, as a server of it does: Fleet.
type Sandboxes struct {
	*fleet.Fleet
	Host *sandbox.Host
}

// Of are the sandboxes of a host.
func Of(h *sandbox.Host, o fleet.Options) Sandboxes { return Sandboxes{fleet.New(h, o), h} }

// row is that of a sandbox with which something was done.
func (s Sandboxes) row(ctx context.Context, op, name string, err error) (records.Sandbox, error) {
	if err != nil {
		return records.Sandbox{}, fleet.Fail(op, name, err)
	}
	return s.Get(ctx, name)
}

// Create makes a sandbox: sandbox.Host.Create.
func (s Sandboxes) Create(ctx context.Context, r records.Request) (records.Sandbox, error) {
	b, err := s.Host.Create(ctx, r.Spec, sandbox.CreateOptions{Metadata: &r.Metadata, Boot: r.Boot})
	if err != nil {
		return records.Sandbox{}, fleet.Fail("create", r.Spec.Name, err)
	}
	return s.Get(ctx, b.Name())
}

// GetOrCreate implements Fleet.
func (s Sandboxes) GetOrCreate(ctx context.Context, r records.Request) (is records.Sandbox, created bool, err error) {
	_, created, err = s.Host.GetOrCreate(ctx, r.Spec, sandbox.CreateOptions{Metadata: &r.Metadata, Boot: r.Boot})
	is, err = s.row(ctx, "get or create", r.Spec.Name, err)
	return is, created, err
}

// Start implements Fleet.
func (s Sandboxes) Start(ctx context.Context, name string) (records.Sandbox, error) {
	_, err := s.Host.Sandbox(name).Start(ctx, sandbox.StartOptions{Awake: true})
	return s.row(ctx, "start", name, err)
}

// Wake implements Fleet.
func (s Sandboxes) Wake(ctx context.Context, name string) (records.Sandbox, error) {
	_, err := s.Host.Sandbox(name).Wake(ctx)
	return s.row(ctx, "wake", name, err)
}

// Sleep implements Fleet.
func (s Sandboxes) Sleep(ctx context.Context, name string, o sandbox.SleepOptions) (spec.SleepResult, error) {
	res, err := s.Host.Sandbox(name).Sleep(ctx, o)
	return res, fleet.Fail("sleep", name, err)
}

// Promote implements Fleet.
func (s Sandboxes) Promote(ctx context.Context, name string) ([]spec.Promoted, error) {
	copies, err := s.Host.Sandbox(name).Promote(ctx)
	return copies, fleet.Fail("promote", name, err)
}

// Restore implements Fleet.
func (s Sandboxes) Restore(ctx context.Context, name, snapshot string) (records.Sandbox, error) {
	return s.row(ctx, "restore", name, s.Host.Sandbox(name).Rewind(ctx, snapshot))
}

// Rename implements Fleet.
func (s Sandboxes) Rename(ctx context.Context, name, to string) (records.Sandbox, error) {
	if err := s.Host.State.Rename(ctx, name, to); err != nil {
		return records.Sandbox{}, fleet.Fail("rename", name, err)
	}
	return s.Get(ctx, to)
}

// Delete implements Fleet: one that is gone already is no error.
func (s Sandboxes) Delete(ctx context.Context, name string) (freed spec.Freed, err error) {
	err = s.Host.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true, Freed: &freed})
	if errors.Is(err, sandbox.ErrNotFound) {
		err = nil
	}
	return freed, fleet.Fail("delete", name, err)
}
