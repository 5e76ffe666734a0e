//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// local is the state directory of this host.
type local struct {
	*fleet.Fleet
	a     *app
	h     *sandbox.Host
	ahead *sandbox.Host // nil until ready
}

func (a *app) local() (place, error) {
	h, err := a.store()
	if err != nil {
		return nil, err
	}
	return &local{Fleet: fleet.New(h, fleet.Options{}), a: a, h: h}, nil
}

// ready makes a host that can start VMs.
func (l *local) ready(ctx context.Context) (err error) {
	if l.ahead == nil {
		l.ahead, err = l.a.launching(ctx)
	}
	return err
}

func (l *local) Rename(ctx context.Context, name, to string) (records.Sandbox, error) {
	if err := l.h.State.Rename(ctx, name, to); err != nil {
		return records.Sandbox{}, err
	}
	return l.Get(ctx, to)
}

func (l *local) Sleep(ctx context.Context, name string, o spec.SleepOptions) (spec.SleepResult, error) {
	h, err := l.a.traced(ctx, l.h)
	if err != nil {
		return spec.SleepResult{}, err
	}
	return h.Sandbox(name).Sleep(ctx, o)
}

func (l *local) Migrate(ctx context.Context, name string, o spec.MigrateOptions) (spec.MigrateResult, error) {
	if l.h.Cluster == nil {
		return spec.MigrateResult{}, fmt.Errorf("%w: moving %s: this host is in no cluster: run `drowse serve --cluster` here", spec.ErrInvalid, name)
	}
	return l.h.Cluster.Migrate(ctx, name, o)
}

func (l *local) Snapshot(ctx context.Context, name string, o spec.SnapshotOptions) (spec.SleepResult, error) {
	h, err := l.a.traced(ctx, l.h)
	if err != nil {
		return spec.SleepResult{}, err
	}
	return h.Sandbox(name).Snapshot(ctx, o)
}

func (l *local) Promote(ctx context.Context, name string) ([]spec.Promoted, error) {
	return l.h.Sandbox(name).Promote(ctx)
}

func (l *local) Stats(ctx context.Context, name string) (spec.Stats, error) {
	return l.h.Sandbox(name).Stats(ctx)
}

func (l *local) Policy(_ context.Context, name string) (*netpolicy.Policy, error) {
	return l.h.Sandbox(name).Policy()
}

func (l *local) SetPolicy(ctx context.Context, name string, p *netpolicy.Policy) (spec.PolicyResult, error) {
	return l.h.Sandbox(name).SetPolicy(ctx, p)
}

func (l *local) TagSnapshot(_ context.Context, snapshot string, tags []string) (spec.SnapshotInfo, error) {
	return l.h.State.TagSnapshot(snapshot, tags)
}

func (l *local) RemoveSnapshot(ctx context.Context, snapshot string) error {
	return l.h.State.RemoveSnapshot(ctx, snapshot)
}

func (l *local) snapshots(context.Context) ([]spec.SnapshotInfo, error) { return l.h.State.Snapshots() }

func (l *local) idle(_ context.Context, name string) (spec.Idle, spec.Hooks, error) {
	r, err := l.h.State.Get(name)
	if err != nil {
		return spec.Idle{}, spec.Hooks{}, err
	}
	return r.Spec.Idle, r.Spec.Hooks, nil
}

// note asks the process of a running VM.
func (l *local) note(ctx context.Context, b records.Sandbox) (pid int, note string, err error) {
	r, err := l.h.State.Get(b.Name)
	if err != nil {
		return 0, "", err
	}
	return r.PID, vmNote(ctx, l.h, r), nil
}

// vmNote explains a VM's state.
func vmNote(ctx context.Context, s *sandbox.Host, r *state.Record) string {
	if r.Exit != nil {
		return r.Exit.Reason
	}
	if r.Phase != state.Running {
		return r.Problem
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	switch info, err := s.Sandbox(r.Spec.Name).Info(ctx); {
	case err != nil:
		return err.Error()
	case info.Hung:
		return "hung: " + info.Problem
	case info.NoSpace:
		return info.Problem
	}
	return r.Problem
}

// upOf says of a VM that it runs.
func upOf(rep control.Report) cameUp {
	return cameUp{name: rep.Name, hooks: rep.Hooks, network: rep.Network, doc: rep, with: func(d execDoc) any {
		return struct {
			control.Report
			Command execDoc `json:"command"`
		}{rep, d}
	}}
}

func (l *local) start(ctx context.Context, name string, discardMemory bool) (cameUp, error) {
	rep, err := l.ahead.Sandbox(name).Start(ctx, sandbox.StartOptions{DiscardMemory: discardMemory})
	if err == nil && discardMemory {
		l.a.log.Warn("the memory of its last sleep is given up: it has booted from the disk that it slept with", "vm", name)
	}
	return upOf(rep), err
}

func (l *local) wake(ctx context.Context, name string) (cameUp, error) {
	rep, err := l.ahead.Sandbox(name).Wake(ctx)
	return upOf(rep), err
}

func (l *local) clone(ctx context.Context, snapshot string, o cloneOptions) (cameUp, error) {
	var rep control.Report
	_, err := l.ahead.Clone(ctx, snapshot, sandbox.CloneOptions{Name: o.name, Policy: o.policy, Idle: o.idle, Report: &rep})
	return upOf(rep), err
}

func (l *local) rewind(ctx context.Context, name, snapshot string) (cameUp, error) {
	if _, err := l.ahead.State.RestoreTo(ctx, name, snapshot); err != nil {
		return cameUp{}, err
	}
	return l.wake(ctx, name)
}

func (l *local) fork(ctx context.Context, name string, o forkOptions) (forked, error) {
	res, err := l.ahead.Sandbox(name).Fork(ctx, sandbox.ForkOptions{Count: o.count, Name: o.name, Early: o.early, Policy: o.policy})
	out := forked{problem: res.Problem, doc: res}
	for _, c := range res.Children {
		out.children = append(out.children, upOf(c))
	}
	return out, err
}

func (l *local) sleepAll(ctx context.Context, o spec.SleepOptions) (asleep, awake []string, err error) {
	h, err := l.a.traced(ctx, l.h)
	if err != nil {
		return nil, nil, err
	}
	asleep, awake = sleepAll(ctx, l.a.log, h, o)
	return asleep, awake, nil
}

func (l *local) evacuees(ctx context.Context) (records.List, error) {
	list, err := allOf(ctx, l, records.Filter{})
	shared := lease.In(l.h.State.Dir())
	list.Sandboxes = slices.DeleteFunc(list.Sandboxes, func(b records.Sandbox) bool { return b.Status == records.Asleep && shared.Shared(b.Name) })
	return list, err
}

func (l *local) stop(ctx context.Context, name string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return l.h.Sandbox(name).Stop(ctx)
}

func (l *local) kill(ctx context.Context, name string) error { return l.h.Sandbox(name).Kill(ctx) }

func (l *local) signal(ctx context.Context, name, process string, signal int) error {
	c, err := l.h.Sandbox(name).Agent(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Kill(ctx, process, signal); err != nil {
		return signalError(name, err)
	}
	return nil
}

func (l *local) remove(ctx context.Context, name string, force bool) (freed spec.Freed, err error) {
	err = l.h.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: force, Freed: &freed})
	return freed, err
}

func rowOf(i *image.Image) imageRow {
	return imageRow{
		ID: i.ID, Tags: i.Tags, Source: i.Source, Packages: len(i.Packages), Size: i.Size, Created: i.Created, Entrypoint: i.Entrypoint, Cmd: i.Cmd,
		name: i.Name(), doc: infoOf(i),
	}
}

func (l *local) images(context.Context) (out []imageRow, err error) {
	s, err := image.OpenStore(l.h.State.ImageDir())
	if err != nil {
		return nil, err
	}
	list, err := s.List()
	for _, i := range list {
		out = append(out, rowOf(i))
	}
	return out, err
}

func (l *local) pull(ctx context.Context, ref string, how pullFlags) (imageRow, error) {
	s, err := image.OpenStore(l.h.State.ImageDir())
	if err != nil {
		return imageRow{}, err
	}
	img, err := l.a.pull(ctx, s, ref, how)
	if err != nil {
		return imageRow{}, err
	}
	return rowOf(img), nil
}

func (l *local) removeImage(ctx context.Context, ref string) (wire.ImageRemoved, error) {
	s, err := image.OpenStore(l.h.State.ImageDir())
	if err != nil {
		return wire.ImageRemoved{}, err
	}
	r, err := removeImage(ctx, l.h, s, ref)
	return wire.ImageRemoved{ID: r.ID, Untagged: some(r.Untagged), Deleted: r.Deleted}, err
}

// isMissingImage reports whether an image was not found.
func isMissingImage(err error) bool { return errors.Is(err, image.ErrNotFound) }

// errorCode returns the code of an error of the library, or "".
func errorCode(err error) string { return control.ErrorCode(err) }

func (l *local) events(ctx context.Context, o eventOptions, give func(events.Event) error) error {
	j := l.h.State.Events()
	since, err := j.ParseCursor(o.since)
	if err != nil {
		return usageError{fmt.Errorf("--since: %w, a time as 2026-11-22T13:25:42Z, or one ago as 10m", err)}
	}
	r := events.ReadOptions{Since: since, Filter: o.filter}
	if o.follow {
		return j.Follow(ctx, r, give)
	}
	_, err = j.Read(ctx, r, give)
	return err
}

func (l *local) info(ctx context.Context) (infoDoc, error) {
	s := l.h.State
	i := infoDoc{versionDoc: thisVersion(), State: s.Dir(), CPUs: runtime.NumCPU()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		i.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	list, err := allOf(ctx, l, records.Filter{})
	i.counted(list)
	images, ierr := l.images(ctx)
	snapshots, serr := s.Snapshots()
	volumes, verr := s.Volumes().List()
	i.Images, i.Snapshots, i.Volumes = len(images), len(snapshots), len(volumes)
	return i, errors.Join(err, ierr, serr, verr)
}

// maxForks is the library's.
var _ = [1]struct{}{}[maxForks-sandbox.MaxForks]
