//go:build linux

package main

import (
	"fmt"
	"path"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
)

// watchDoc is an event as JSON.
type watchDoc struct {
	Time    time.Time `json:"time"`
	Event   string    `json:"event"`
	Path    string    `json:"path,omitempty"`
	From    string    `json:"from,omitempty"`
	Dir     bool      `json:"dir,omitempty"`
	Problem string    `json:"problem,omitempty"`
}

func (a *app) watchCommand() *cobra.Command {
	var o sandbox.WatchOptions
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
		RunE: a.onAwake(func(cmd *cobra.Command, args []string, b *sandbox.Sandbox) error {
			o.Paths = args[1:]
			o.Ready = func() { a.log.Debug("watching", "vm", args[0]) }
			err := b.Watch(cmd.Context(), o, a.printEvent)
			if cmd.Context().Err() != nil {
				return nil // the normal end is an interrupt
			}
			return err
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&o.Recursive, "recursive", "r", false, "also watch subdirectories on the same file system")
	f.BoolVar(&o.Use, "keep-awake", false, "count as use of the VM, so that it stays awake")
	return cmd
}

// printEvent prints one event on a line of its own.
func (a *app) printEvent(e guest.WatchEvent) error {
	name := func(p string) string {
		if printable(p) != p || path.Clean(p) != p {
			return strconv.Quote(p)
		}
		if e.Dir && p != "/" {
			p += "/"
		}
		return p
	}
	line := e.Time.Local().Format("15:04:05.000") + "  " + fmt.Sprintf("%-10s", e.Kind)
	if e.From != "" {
		line += "  " + name(e.From) + " ->"
	}
	if e.Path != "" {
		line += "  " + name(e.Path)
	}
	if e.Problem != "" {
		line += "  " + printable(e.Problem)
	}
	return a.line(watchDoc{Time: e.Time.UTC(), Event: e.Kind, Path: e.Path, From: e.From, Dir: e.Dir, Problem: e.Problem}, line)
}
