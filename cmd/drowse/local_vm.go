//go:build linux

package main

import (
	"context"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// localVM is a VM of this host.
type localVM struct {
	*sandbox.Sandbox
	l *local
}

func (l *local) vm(name string) handle { return localVM{l.h.Sandbox(name), l} }

func (l *local) awake(ctx context.Context, name string) error {
	c, err := l.a.awake(ctx, l.h, name)
	if err != nil {
		return err
	}
	return c.Close()
}

// SetService takes the user, directory and variables of the image, if that is asked for.
func (v localVM) SetService(ctx context.Context, s wire.SetService) (records.Service, error) {
	if s.ImageConfig {
		c, err := v.Command(guest.Cmd{Env: s.Env, Dir: s.Dir, User: s.User})
		if err != nil {
			return records.Service{}, err
		}
		s.Env, s.Dir, s.User = c.Env, c.Dir, c.User
	}
	return v.Sandbox.SetService(ctx, s.Service)
}

func (v localVM) Network(ctx context.Context) (spec.NetworkStats, error) {
	return v.NetworkStats(ctx)
}

func (v localVM) flows(ctx context.Context, follow bool, f func(netpolicy.FlowRecord) error) error {
	return v.NetworkFlows(ctx, follow, f)
}

func (v localVM) audit(ctx context.Context, o auditOptions, f func(audit.Entry) error) (audit.Trailer, error) {
	return v.l.h.State.Audit(ctx, v.Name(), audit.ReadOptions{Since: o.since, Follow: o.follow}, f)
}

func (v localVM) watch(ctx context.Context, o watchOptions, f func(wire.FileEvent) error) error {
	return v.Watch(ctx, sandbox.WatchOptions{Paths: o.paths, Recursive: o.recursive, Use: o.use, Ready: o.ready}, func(e guest.WatchEvent) error {
		return f(wire.FileEvent{Time: e.Time.UTC(), Event: e.Kind, Path: e.Path, From: e.From, Dir: e.Dir, Problem: e.Problem})
	})
}

func (v localVM) Diff(ctx context.Context, limit int, f func(wire.Diff) error) error {
	c, err := v.l.a.awake(ctx, v.l.h, v.Name())
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
