package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// copyOptions say how to copy.
type copyOptions struct {
	resume bool
	retry  time.Duration
	total  int64 // about how many bytes there are; 0 if that is unknown
}

// copying shows the progress of a copy on a terminal.
func (a *app) copying(total int64) (moved func(bytes int64), done func(error)) {
	if !hasWidth(a.stderr) {
		return nil, func(error) {}
	}
	p := a.newProgress("cp")
	return func(n int64) {
		if total > 0 {
			p.report(stageCopy, n, max(total, n))
		} else {
			p.report(stageCopy, n, 0)
		}
	}, p.finish
}

func (a *app) cpCommand() *cobra.Command {
	var o copyOptions
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
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			src, dst := splitVM(args[0]), splitVM(args[1])
			if (src.vm == "") == (dst.vm == "") {
				return usageError{errors.New("exactly one of SRC and DST must be NAME:PATH")}
			}
			if o.retry < 0 {
				return usageError{fmt.Errorf("--retry %v is negative", o.retry)}
			}
			if src.vm == "" {
				o.total = treeSize(src.path)
			}
			res, err := p.cp(cmd.Context(), src, dst, o)
			return a.answer(res, err, func(io.Writer) {})
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&o.resume, "resume", false, "continue an interrupted copy: compare what is there and copy the rest")
	f.DurationVar(&o.retry, "retry", time.Minute, "how long to wait for the VM to be awake again after an interruption; 0 gives up at once")
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

type vmPath struct{ vm, path string }

// splitVM splits NAME:PATH. A path with a slash before the colon is a path of the host.
func splitVM(arg string) vmPath {
	name, path, ok := strings.Cut(arg, ":")
	if !ok || strings.Contains(name, "/") || name == "" {
		return vmPath{path: arg}
	}
	return vmPath{name, path}
}
