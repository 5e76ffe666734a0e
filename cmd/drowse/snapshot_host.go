//go:build linux

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
)

// snapshotVerbs are the commands on snapshots that need their files.
func (a *app) snapshotVerbs() []*cobra.Command {
	return []*cobra.Command{
		a.snapshotCompactCommand(),
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
