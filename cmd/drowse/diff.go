//go:build linux

package main

import (
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
)

// defaultDiffLimit is how many paths `drowse diff` lists, and maxDiffLimit is the largest accepted limit.
const (
	defaultDiffLimit = 100_000
	maxDiffLimit     = 10_000_000
)

// diffDoc is a path that differs, as JSON. The last line of a list has only the fields from End on.
type diffDoc struct {
	Op      guest.ChangeOp `json:"op,omitempty"`
	Path    string         `json:"path,omitempty"`
	Kind    string         `json:"kind,omitempty"`
	Mode    string         `json:"mode,omitempty"`   // permissions, octal
	Before  string         `json:"before,omitempty"` // kind and mode in the image of a changed path, if they differ
	UID     *uint32        `json:"uid,omitempty"`
	GID     *uint32        `json:"gid,omitempty"`
	Size    *int64         `json:"size,omitempty"`
	From    string         `json:"from,omitempty"`
	End     bool           `json:"end,omitempty"`
	Paths   int            `json:"paths,omitempty"`
	More    bool           `json:"more,omitempty"`
	Partial string         `json:"partial,omitempty"`
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
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			if limit < 1 || limit > maxDiffLimit {
				return usageError{fmt.Errorf("--limit %d: use 1 to %d", limit, maxDiffLimit)}
			}
			c, err := a.awake(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			defer c.Close()
			end, err := c.Changes(cmd.Context(), limit, func(ch guest.Change) error {
				return a.line(diffLine(ch), diffText(ch))
			})
			if err != nil {
				return err
			}
			if a.json() {
				return a.line(diffDoc{End: true, Paths: end.Told, More: end.More, Partial: end.Partial}, "")
			}
			if end.More {
				fmt.Fprintf(a.stderr, "drowse: there are more than %d paths: see --limit\n", end.Told)
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

// kindOf returns the kind of a file in a word.
func kindOf(m fs.FileMode) string {
	switch m.Type() {
	case 0:
		return "file"
	case fs.ModeDir:
		return "dir"
	case fs.ModeSymlink:
		return "symlink"
	case fs.ModeNamedPipe:
		return "fifo"
	case fs.ModeSocket:
		return "socket"
	case fs.ModeDevice:
		return "block"
	case fs.ModeDevice | fs.ModeCharDevice:
		return "char"
	}
	return "other"
}

// octal returns the permissions, with setuid, setgid and sticky where chmod(1) has them.
func octal(m fs.FileMode) string {
	p := uint32(m.Perm())
	for _, b := range []struct {
		m fs.FileMode
		p uint32
	}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}} {
		if m&b.m != 0 {
			p |= b.p
		}
	}
	return fmt.Sprintf("%04o", p)
}

func before(ch guest.Change) string {
	if ch.Op != guest.PathChanged || ch.Before == ch.Mode {
		return ""
	}
	return kindOf(ch.Before) + " " + octal(ch.Before)
}

func diffLine(ch guest.Change) diffDoc {
	d := diffDoc{Op: ch.Op, Path: audit.PathText(ch.Path), Kind: kindOf(ch.Mode), Mode: octal(ch.Mode), Before: before(ch), UID: &ch.UID, GID: &ch.GID}
	if ch.From != "" {
		d.From = audit.PathText(ch.From)
	}
	if t := ch.Mode.Type(); t == 0 || t == fs.ModeSymlink {
		d.Size = &ch.Size
	}
	return d
}

// diffText returns a change as one line.
func diffText(ch guest.Change) string {
	mark := map[guest.ChangeOp]string{guest.PathAdded: "+", guest.PathChanged: "~", guest.PathRemoved: "-"}[ch.Op]
	size := "-"
	if t := ch.Mode.Type(); t == 0 || t == fs.ModeSymlink {
		size = bytesText(ch.Size)
	}
	line := fmt.Sprintf("%s  %-7s  %s  %5d:%-5d  %10s  %s", mark, kindOf(ch.Mode), octal(ch.Mode), ch.UID, ch.GID, size, terminalPath(ch.Path))
	if was := before(ch); was != "" {
		line += "  (was " + was + ")"
	}
	if ch.From != "" {
		line += "  (moved from " + terminalPath(ch.From) + ")"
	}
	return line
}
