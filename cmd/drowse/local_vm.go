//go:build linux

package main

import (
	"context"
	"io"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// localVM is a VM of this host.
type localVM struct {
	l *local
	b *sandbox.Sandbox
}

func (l *local) vm(name string) handle { return localVM{l, l.h.Sandbox(name)} }

func (l *local) awake(ctx context.Context, name string) error {
	c, err := l.a.awake(ctx, l.h, name)
	if err != nil {
		return err
	}
	return c.Close()
}

func serviceOf(st control.ServiceStatus, err error) (wire.Service, error) {
	return wire.Service(st), err
}

func (v localVM) Services(ctx context.Context) (out []wire.Service, err error) {
	list, err := v.b.Services(ctx)
	for _, st := range list {
		out = append(out, wire.Service(st))
	}
	return out, err
}

func (v localVM) SetService(ctx context.Context, s wire.SetService) (wire.Service, error) {
	if s.ImageConfig {
		c, err := v.b.Command(guest.Cmd{Env: s.Env, Dir: s.Dir, User: s.User})
		if err != nil {
			return wire.Service{}, err
		}
		s.Env, s.Dir, s.User = c.Env, c.Dir, c.User
	}
	return serviceOf(v.b.SetService(ctx, s.Service))
}

func (v localVM) RemoveService(ctx context.Context, service string) error {
	return v.b.RemoveService(ctx, service)
}

func (v localVM) StartService(ctx context.Context, service string, restart bool) (wire.Service, error) {
	return serviceOf(v.b.StartService(ctx, service, restart))
}

func (v localVM) StopService(ctx context.Context, service string) (wire.Service, error) {
	return serviceOf(v.b.StopService(ctx, service))
}

func (v localVM) WaitService(ctx context.Context, service string) (wire.Service, error) {
	return serviceOf(v.b.WaitService(ctx, service))
}

func (v localVM) ServiceLog(ctx context.Context, service string, w io.Writer, follow bool) error {
	return v.b.ServiceLog(ctx, service, w, follow)
}

func (v localVM) Network(ctx context.Context) (spec.NetworkStats, error) {
	return v.b.NetworkStats(ctx)
}

func (v localVM) NetworkEvents(ctx context.Context, follow bool, f func(spec.NetEvent) error) error {
	return v.b.NetworkEvents(ctx, follow, f)
}

func (v localVM) flows(ctx context.Context, follow bool, f func(netpolicy.FlowRecord) error) error {
	return v.b.NetworkFlows(ctx, follow, f)
}

func (v localVM) audit(ctx context.Context, o auditOptions, f func(audit.Entry) error) (audit.Trailer, error) {
	return v.l.h.State.Audit(ctx, v.b.Name(), audit.ReadOptions{Since: o.since, Follow: o.follow}, f)
}

func (v localVM) watch(ctx context.Context, o watchOptions, f func(wire.FileEvent) error) error {
	return v.b.Watch(ctx, sandbox.WatchOptions{Paths: o.paths, Recursive: o.recursive, Use: o.use, Ready: o.ready}, func(e guest.WatchEvent) error {
		return f(wire.FileEvent{Time: e.Time.UTC(), Event: e.Kind, Path: e.Path, From: e.From, Dir: e.Dir, Problem: e.Problem})
	})
}

func (v localVM) Diff(ctx context.Context, limit int, f func(wire.Diff) error) error {
	c, err := v.l.a.awake(ctx, v.l.h, v.b.Name())
	if err != nil {
		return err
	}
	defer c.Close()
	end, err := c.Changes(ctx, limit, func(ch guest.Change) error { return f(api.DiffOf(ch)) })
	if err != nil {
		return err
	}
	return f(wire.Diff{End: true, More: end.More, Partial: end.Partial})
}

// This does not compile unless serviceRunning is the agent's word: a map literal has no key twice.
var _ = map[bool]struct{}{false: {}, serviceRunning == guest.ServiceRunning: {}}
