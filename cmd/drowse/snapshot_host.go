//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// snapshotVerbs are the commands on snapshots that need their files.
func (a *app) snapshotVerbs() []*cobra.Command {
	return []*cobra.Command{
		a.showCommand("inspect ID", "Show a snapshot, as JSON", func(s *sandbox.Host, id string) (any, error) { return s.State.InspectSnapshot(id) }),
		a.snapshotCompactCommand(), a.snapshotExportCommand(), a.snapshotImportCommand(),
		snapshotVerb(a, a.store, "verify", "Read all of a snapshot and check it", "ok", func(ctx context.Context, s *sandbox.Host, id string) error { return s.State.VerifySnapshot(ctx, id) }),
	}
}

func (a *app) snapshotCompactCommand() *cobra.Command {
	return &cobra.Command{
		Use: "compact ID", Short: "Rewrite a snapshot without unneeded data, sharing nothing with others", Args: cobra.ExactArgs(1),
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			before, after, err := s.State.CompactSnapshot(cmd.Context(), args[0])
			return a.answer(map[string]any{"snapshot": args[0], "own_bytes_before": before, "own_bytes": after}, err, func(w io.Writer) {
				fmt.Fprintf(w, "%s: %s of its own before, %s now\n", args[0], bytesText(before), bytesText(after))
			})
		}),
	}
}

func (a *app) snapshotExportCommand() *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use: "export ID", Short: "Export a snapshot with its disk to one file", Args: cobra.ExactArgs(1),
		Long: `Export a snapshot with its disk to one file (--to) or to stdout. "drowse snapshot import" reads it
in any store that has the VM's image: the file has the image's id, the SHA-256 of its content,
but not the image.`,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			if to == "-" {
				if isTerminal(a.stdout) {
					return usageError{errors.New("a snapshot is not for a terminal: name a file with --to, or use a pipe")}
				}
				return s.State.ExportSnapshot(cmd.Context(), args[0], a.stdout)
			}
			// The file appears under its name only when it is complete.
			write := func(f *os.File) error { return s.State.ExportSnapshot(cmd.Context(), args[0], f) }
			err := osfile.Replace(to, 0o600, write)
			return a.answer(map[string]string{"snapshot": args[0], "file": to}, err, func(w io.Writer) { fmt.Fprintln(w, to) })
		}),
	}
	cmd.Flags().StringVar(&to, "to", "-", "output file, - for stdout")
	return cmd
}

func (a *app) snapshotImportCommand() *cobra.Command {
	var o state.ImportOptions
	cmd := &cobra.Command{
		Use: "import FILE", Annotations: makesState, Short: "Import a snapshot from a file of \"snapshot export\", - for stdin", Args: cobra.ExactArgs(1),
		Long: `Import a snapshot from a file of "snapshot export", - for stdin.

drowse does not trust the file. It imports memory, disk and devices, and nothing else. It drops
network policy, tags, grants, hooks, services, the kernel's path and the like, and reports what
it dropped. VMs made from the snapshot have no policy: set one with "restore --policy". --trust
imports everything.`,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			in, err := input(args[0], os.Stdin)
			if err != nil {
				return fmt.Errorf("importing a snapshot: %w", err)
			}
			defer in.Close()
			info, err := s.State.ImportSnapshot(cmd.Context(), bufio.NewReaderSize(in, 1<<20), o)
			return a.imported(info, err)
		}),
	}
	cmd.Flags().BoolVar(&o.Trust, "trust", false, "also import policy, tags, grants, kernel and everything else about the VM")
	return cmd
}

// imported tells of a snapshot that came from elsewhere.
func (a *app) imported(res state.ImportResult, err error) error {
	return a.answer(res, err, func(w io.Writer) {
		fmt.Fprintln(w, res.ID)
		if len(res.Dropped) > 0 {
			fmt.Fprintf(a.stderr, "not taken over from it: %s (--trust takes all)\n", strings.Join(res.Dropped, ", "))
		}
	})
}
