package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// defaultDiffLimit is how many paths `drowse diff` lists, and maxDiffLimit is the largest accepted limit.
const (
	defaultDiffLimit = 100_000
	maxDiffLimit     = 10_000_000
)

// diffDoc is a path that differs, as JSON. The last line of a list has only the fields from End on.
type diffDoc struct {
	Op      string  `json:"op,omitempty"`
	Path    string  `json:"path,omitempty"`
	Kind    string  `json:"kind,omitempty"`
	Mode    string  `json:"mode,omitempty"`   // permissions, octal
	Before  string  `json:"before,omitempty"` // kind and mode in the image of a changed path, if they differ
	UID     *uint32 `json:"uid,omitempty"`
	GID     *uint32 `json:"gid,omitempty"`
	Size    *int64  `json:"size,omitempty"`
	From    string  `json:"from,omitempty"`
	End     bool    `json:"end,omitempty"`
	Paths   int     `json:"paths,omitempty"`
	More    bool    `json:"more,omitempty"`
	Partial string  `json:"partial,omitempty"`
}

func (a *app) diffCommand() *cobra.Command {
	limit := defaultDiffLimit
	cmd := &cobra.Command{
		Use: "diff NAME", Short: "List what differs between a VM's disk and its image", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `List what differs between a VM's disk and its image: added (+), changed (~) and removed (-)
paths, with type, mode, owner and size. A removed directory is one line. A sleeping VM is
woken. With -o json each path is one line, and the last line has "end".

drowse does not compare contents: a file that was opened for writing counts as changed. Volumes
and file systems in memory (/proc, /run, /dev/shm) are not included.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			if limit < 1 || limit > maxDiffLimit {
				return usageError{fmt.Errorf("--limit %d: use 1 to %d", limit, maxDiffLimit)}
			}
			if err := p.awake(cmd.Context(), args[0]); err != nil {
				return err
			}
			paths, end := 0, wire.Diff{}
			err := p.vm(args[0]).Diff(cmd.Context(), limit, func(d wire.Diff) error {
				if d.End {
					end = d
					return nil
				}
				if paths++; paths > limit {
					return fmt.Errorf("the server lists more than the %d paths that it was asked for", limit)
				}
				return a.line(diffLine(d), diffText(d))
			})
			if err == nil && !end.End {
				err = fmt.Errorf("the list was cut after %d paths: %w", paths, io.ErrUnexpectedEOF)
			}
			if err != nil {
				return err
			}
			if a.json() {
				return a.line(diffDoc{End: true, Paths: paths, More: end.More, Partial: end.Partial}, "")
			}
			if end.More {
				fmt.Fprintf(a.stderr, "drowse: there are more than %d paths: see --limit\n", paths)
			}
			if end.Partial != "" {
				fmt.Fprintln(a.stderr, "drowse: not all is known: "+printable(end.Partial))
			}
			return nil
		}),
	}
	cmd.Flags().IntVar(&limit, "limit", limit, "list at most this many paths")
	return cmd
}

func diffLine(d wire.Diff) diffDoc {
	out := diffDoc{Op: d.Op, Path: d.Path, Kind: d.Kind, Mode: d.Mode, Before: d.Before, UID: &d.UID, GID: &d.GID, From: d.From}
	if hasSize(d) {
		out.Size = &d.Size
	}
	return out
}

func hasSize(d wire.Diff) bool { return d.Kind == "file" || d.Kind == "symlink" }

// diffText returns a change as one line.
func diffText(d wire.Diff) string {
	mark := map[string]string{"added": "+", "changed": "~", "removed": "-"}[d.Op]
	size := "-"
	if hasSize(d) {
		size = bytesText(d.Size)
	}
	line := fmt.Sprintf("%s  %-7s  %s  %5d:%-5d  %10s  %s", mark, d.Kind, d.Mode, d.UID, d.GID, size, terminalPath(d.Path))
	if d.Before != "" {
		line += "  (was " + d.Before + ")"
	}
	if d.From != "" {
		line += "  (moved from " + terminalPath(d.From) + ")"
	}
	return printable(line)
}
