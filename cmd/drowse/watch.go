package main

import (
	"fmt"
	"path"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// watchOptions say what to watch, and how.
type watchOptions struct {
	paths     []string
	recursive bool
	use       bool   // the VM does not go to sleep by itself
	ready     func() // all later changes will be told
}

func (a *app) watchCommand() *cobra.Command {
	var o watchOptions
	cmd := &cobra.Command{
		Use:   "watch NAME PATH...",
		Short: "Report changes of files in a VM as they happen",
		Long: `Report changes of files in a VM until interrupted: created, written, attributes, removed, renamed,
and overflow, which says where changes may be missing. With -o json each change is one line. A
sleeping VM is woken at the beginning only; watching continues whenever it is awake.

Watching does not count as use of the VM, which may fall asleep, unless --keep-awake is given.`,
		ValidArgsFunction: a.completeVM,
		Args: cobra.MatchAll(cobra.MinimumNArgs(2), func(_ *cobra.Command, args []string) error {
			for _, p := range args[1:] {
				if !path.IsAbs(p) {
					return fmt.Errorf("%q is not an absolute path in the VM", p)
				}
			}
			return nil
		}),
		RunE: a.onAwake(func(cmd *cobra.Command, args []string, b handle) error {
			o.paths = args[1:]
			o.ready = func() { a.log.Debug("watching", "vm", args[0]) }
			err := b.watch(cmd.Context(), o, a.printEvent)
			if cmd.Context().Err() != nil {
				return nil // the normal end is an interrupt
			}
			return err
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&o.recursive, "recursive", "r", false, "also watch subdirectories on the same file system")
	f.BoolVar(&o.use, "keep-awake", false, "count as use of the VM, so that it stays awake")
	return cmd
}

// printEvent prints one event on a line of its own.
func (a *app) printEvent(e wire.FileEvent) error {
	name := func(p string) string {
		if printable(p) != p || path.Clean(p) != p {
			return strconv.Quote(p)
		}
		if e.Dir && p != "/" {
			p += "/"
		}
		return p
	}
	line := e.Time.Local().Format("15:04:05.000") + "  " + fmt.Sprintf("%-10s", printable(e.Event))
	if e.From != "" {
		line += "  " + name(e.From) + " ->"
	}
	if e.Path != "" {
		line += "  " + name(e.Path)
	}
	if e.Problem != "" {
		line += "  " + printable(e.Problem)
	}
	return a.line(e, line)
}
