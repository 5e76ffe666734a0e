//go:build linux

package main

import (
	"context"
	"io"

	"github.com/drowse-vm/drowse/sandbox/state"
)

func (l *local) log(ctx context.Context, name string, o logOptions, w io.Writer) error {
	s := l.h.State
	if _, err := s.Get(name); err != nil {
		return err
	}
	path := s.ConsoleLog(name)
	if o.process {
		path = s.ProcessLog(name)
	}
	text, at, err := state.ReadLog(path)
	if err != nil {
		return err
	}
	if _, err := w.Write(lastLines(text, o.lines)); err != nil || !o.follow {
		return err
	}
	return s.FollowLog(ctx, name, path, at, w)
}
