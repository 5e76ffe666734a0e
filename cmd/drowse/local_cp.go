//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
)

// maxCuts bounds how often one command continues a copy whose connection was lost.
const maxCuts = 64

func (l *local) cp(ctx context.Context, src, dst vmPath, how copyOptions) (any, error) {
	o := guest.CopyOptions{Resume: how.resume}
	var done func(error)
	o.Progress, done = l.a.copying(how.total)
	left := int64(guest.DefaultCopyBytes) // of all tries: a hostile guest cuts them one after the other
	res, err := l.a.copyOn(ctx, l.h, src.vm+dst.vm, how.retry, func(c *guest.Client, again bool) (res guest.CopyResult, err error) {
		o.Resume, o.MaxBytes = o.Resume || again, max(left, 1)
		defer func() { left -= res.Bytes }()
		if src.vm == "" {
			res, err = c.CopyIn(ctx, src.path, dst.path, o)
		} else {
			res, err = c.CopyOut(ctx, src.path, dst.path, o)
		}
		if res.At != "" { // a further try continues the same copy
			dst.path, o.Exact = res.At, true
		}
		return res, err
	})
	done(err)
	return res, err
}

// copyOn copies. If the connection is lost, it continues once the VM is awake again within the time of retry.
func (a *app) copyOn(ctx context.Context, s *sandbox.Host, vm string, retry time.Duration, do func(c *guest.Client, again bool) (guest.CopyResult, error)) (guest.CopyResult, error) {
	c, err := a.awake(ctx, s, vm)
	if err != nil {
		return guest.CopyResult{}, err
	}
	for cuts := 0; ; cuts++ {
		res, err := do(c, cuts > 0)
		c.Close()
		lost := errors.Is(err, guest.ErrConnectionLost) || errors.Is(err, guest.ErrUnavailable)
		if err == nil || ctx.Err() != nil || !lost {
			return res, err
		}
		if c = nil; retry > 0 && cuts < maxCuts {
			a.log.Info("the copy was cut, and goes on when the VM is awake", "error", err, "within", retry)
			c = awakeWithin(ctx, s, vm, retry)
		}
		if c == nil {
			return res, fmt.Errorf("%w: what was copied is kept: go on with the same command and --resume", err)
		}
	}
}

// awakeWithin connects to the VM if it is awake within some time. Otherwise it returns nil.
func awakeWithin(ctx context.Context, s *sandbox.Host, vm string, within time.Duration) *guest.Client {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		if err := s.Sandbox(vm).AwaitAwake(ctx); err != nil {
			return nil
		}
		if c, err := s.Sandbox(vm).Agent(ctx); err == nil {
			return c
		}
		if wait.For(ctx, wakePoll) != nil { // the VM has just gone to sleep, or will answer soon
			return nil
		}
	}
}
