package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
)

func (a *app) snapshotCommand() *cobra.Command {
	var note string
	cmd := &cobra.Command{
		Use: "snapshot NAME", Short: "Write a running VM to a snapshot and let it run on", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			res, err := s.Snapshot(cmd.Context(), args[0], note)
			if err != nil {
				return err
			}
			return a.print(res, func(w io.Writer) { fmt.Fprintln(w, res.Snapshot) })
		},
	}
	cmd.Flags().StringVar(&note, "note", "", "words to remember it by")
	cmd.AddCommand(
		&cobra.Command{
			Use: "ls", Short: "List snapshots", Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				s, err := a.store()
				if err != nil {
					return err
				}
				list, err := s.Snapshots()
				if err != nil {
					return err
				}
				if list == nil {
					list = []sandbox.SnapshotInfo{}
				}
				return a.print(list, func(w io.Writer) {
					t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
					fmt.Fprintln(t, "ID\tVM\tKIND\tCREATED\tRAM\tSTORED\tNOTE")
					for _, i := range list {
						if i.Problem != "" {
							i.Note = i.Problem
						}
						fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", i.ID, i.VM, i.Kind, i.Created.Local().Format("2006-01-02 15:04:05"), bytesText(int64(i.RAM)), bytesText(i.Stored), i.Note)
					}
					t.Flush()
				})
			},
		},
		a.snapshotVerb("verify", "Read all of a snapshot and check it", "ok", func(ctx context.Context, s *sandbox.Store, id string) error { return s.VerifySnapshot(ctx, id) }),
		a.snapshotVerb("rm", "Delete a snapshot", "removed", func(ctx context.Context, s *sandbox.Store, id string) error { return s.RemoveSnapshot(ctx, id) }),
	)
	return cmd
}

func (a *app) snapshotVerb(use, short, done string, do func(context.Context, *sandbox.Store, string) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " ID", Short: short, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			if err := do(cmd.Context(), s, args[0]); err != nil {
				return err
			}
			return a.print(map[string]string{"snapshot": args[0], "result": done}, func(w io.Writer) { fmt.Fprintln(w, args[0], done) })
		},
	}
}

func (a *app) restoreCommand() *cobra.Command {
	var name string
	cmd := a.vmCommand("restore", "Make a new VM from a snapshot, as a clone with an identity of its own",
		func(ctx context.Context, s *sandbox.Store, l sandbox.Launcher, id string) (sandbox.Report, error) {
			return s.Restore(ctx, l, id, name)
		})
	cmd.Use = "restore SNAPSHOT"
	cmd.ValidArgsFunction = nil
	cmd.Flags().StringVar(&name, "name", "", "name of the new VM (default: a random one)")
	return cmd
}

func (a *app) pruneCommand() *cobra.Command {
	return &cobra.Command{
		Use: "prune", Short: "Delete sleep snapshots and disk layers that nothing needs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			freed, err := s.Sweep(cmd.Context())
			if err != nil {
				return err
			}
			return a.print(freed, func(w io.Writer) {
				fmt.Fprintf(w, "%d snapshots and %d layers, %s\n", freed.Snapshots, freed.Layers, bytesText(freed.Bytes))
			})
		},
	}
}
