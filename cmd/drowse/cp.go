package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
)

// maxCuts bounds how often one command continues a copy whose connection was lost.
const maxCuts = 64

func (a *app) cpCommand() *cobra.Command {
	var (
		o     guest.CopyOptions
		retry time.Duration
	)
	cmd := &cobra.Command{
		Use:   "cp [flags] SRC DST",
		Short: "Copy files and directories between the host and a VM",
		Long: `Copy files and directories between the host and a VM. One side is NAME:PATH. A sleeping VM is
woken.

A file gets its name only when it is complete. If a copy is interrupted, the partial file stays,
and --resume continues it after both ends have compared what is there by SHA-256. If the VM
falls asleep during a copy and wakes within --retry, the command continues by itself. It does
not wake the VM for that.`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: a.completePath,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			src, dst := splitVM(args[0]), splitVM(args[1])
			if (src.vm == "") == (dst.vm == "") {
				return usageError{errors.New("exactly one of SRC and DST must be NAME:PATH")}
			}
			if retry < 0 {
				return usageError{fmt.Errorf("--retry %v is negative", retry)}
			}
			done := func(error) {}
			if hasWidth(a.stderr) {
				p := a.newProgress("cp")
				total := int64(0)
				if src.vm == "" {
					total = treeSize(src.path)
				}
				o.Progress, done = func(n int64) { p.report(stageCopy, n, max(total, n)) }, p.finish
				if total == 0 {
					o.Progress = func(n int64) { p.report(stageCopy, n, 0) }
				}
			}
			left := int64(guest.DefaultCopyBytes) // of all tries: a hostile guest cuts them one after the other
			res, err := a.copyOn(cmd.Context(), s, src.vm+dst.vm, retry, func(c *guest.Client, again bool) (res guest.CopyResult, err error) {
				o.Resume, o.MaxBytes = o.Resume || again, max(left, 1)
				defer func() { left -= res.Bytes }()
				if src.vm == "" {
					res, err = c.CopyIn(cmd.Context(), src.path, dst.path, o)
				} else {
					res, err = c.CopyOut(cmd.Context(), src.path, dst.path, o)
				}
				if res.At != "" { // a further try continues the same copy
					dst.path, o.Exact = res.At, true
				}
				return res, err
			})
			done(err)
			return a.answer(res, err, func(io.Writer) {})
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&o.Resume, "resume", false, "continue an interrupted copy: compare what is there and copy the rest")
	f.DurationVar(&retry, "retry", time.Minute, "how long to wait for the VM to be awake again after an interruption; 0 gives up at once")
	return cmd
}

// treeSize returns about how many bytes a copy of a tree moves, for the progress bar, or 0 if that is unknown.
func treeSize(path string) (total int64) {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to
	}
	_ = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // the copy itself reports the error
		}
		if fi, err := d.Info(); err == nil && fi.Mode().IsRegular() {
			total += fi.Size()
		}
		return nil
	})
	return total
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
		select {
		case <-time.After(wakePoll): // the VM has just gone to sleep, or will answer soon
		case <-ctx.Done():
			return nil
		}
	}
}

type vmPath struct{ vm, path string }

// splitVM splits NAME:PATH. A path with a slash before the colon is a path of the host.
func splitVM(arg string) vmPath {
	name, path, ok := strings.Cut(arg, ":")
	if !ok || strings.Contains(name, "/") || name == "" {
		return vmPath{path: arg}
	}
	return vmPath{name, path}
}
