package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func (a *app) snapshotCommand() *cobra.Command {
	cmd := a.snapshotCreateCommand("snapshot")
	cmd.AddCommand(
		a.snapshotCreateCommand("create"),
		&cobra.Command{
			Use: "ls", Short: "List snapshots", Args: cobra.NoArgs,
			RunE: a.onHost(func(_ *cobra.Command, _ []string, s *sandbox.Host) error {
				list, err := s.State.Snapshots()
				return answerList(a, list, err, "ID\tVM\tKIND\tCREATED\tRAM\tSTORED\tOWN\tDEPTH\tNOTE", func(i spec.SnapshotInfo) []any {
					ram := "-"
					if i.RAM != 0 {
						ram = bytesText(int64(i.RAM))
					}
					return []any{i.ID, i.VM, i.Kind, i.Created.Local().Format(daySecond), ram, bytesText(i.Stored), bytesText(i.Exclusive), i.Depth, cmp.Or(commands.In(i.Problem), i.Note)}
				})
			}),
		},
		a.snapshotTreeCommand(),
		a.showCommand("inspect ID", "Show a snapshot, as JSON", func(s *sandbox.Host, id string) (any, error) { return s.State.InspectSnapshot(id) }),
		a.snapshotCompactCommand(), a.snapshotExportCommand(), a.snapshotImportCommand(), a.snapshotTagCommand(), a.pruneCommand(),
		a.snapshotVerb("verify", "Read all of a snapshot and check it", "ok", func(ctx context.Context, s *sandbox.Host, id string) error { return s.State.VerifySnapshot(ctx, id) }),
		a.snapshotVerb("rm", "Delete a snapshot", "removed", func(ctx context.Context, s *sandbox.Host, id string) error { return s.State.RemoveSnapshot(ctx, id) }),
	)
	return cmd
}

// snapshotCreateCommand returns "snapshot create", or "snapshot" itself.
func (a *app) snapshotCreateCommand(use string) *cobra.Command {
	var (
		o     sandbox.SnapshotOptions
		hooks string
	)
	cmd := &cobra.Command{
		Use: use + " NAME", Short: "Take a snapshot of a running VM, which runs on", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Take a snapshot of a running VM, which runs on.

With --disk-only the snapshot has the disk without memory. The guest freezes its file system for
a moment; only programs that write have to wait. "drowse run --from-disk" boots a VM from it.`,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			o.Hooks = spec.HookPolicy(hooks)
			s, err := a.traced(cmd.Context(), s)
			if err != nil {
				return err
			}
			res, err := s.Sandbox(args[0]).Snapshot(cmd.Context(), o)
			if err != nil {
				return err
			}
			a.warnHooks(res.Name, res.Hooks)
			return a.print(res, func(w io.Writer) { fmt.Fprintln(w, res.Snapshot) })
		}),
	}
	cmd.Flags().StringVar(&o.Note, "note", "", "description")
	cmd.Flags().BoolVar(&o.DiskOnly, "disk-only", false, "only the disk, with a clean file system")
	hooksFlag(cmd, &hooks)
	return cmd
}

func (a *app) snapshotVerb(use, short, done string, do func(context.Context, *sandbox.Host, string) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " ID", Short: short, Args: cobra.ExactArgs(1),
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			err := do(cmd.Context(), s, args[0])
			return a.answer(map[string]string{"snapshot": args[0], "result": done}, err, func(w io.Writer) { fmt.Fprintln(w, args[0], done) })
		}),
	}
}

// node is a snapshot with the snapshots made from it.
type node struct {
	spec.SnapshotInfo
	Children []*node `json:"children"`
}

// tree arranges snapshots by their bases. A snapshot whose base is gone is a root.
func tree(list []spec.SnapshotInfo) []*node {
	nodes := map[string]*node{}
	for _, i := range list {
		nodes[i.ID] = &node{SnapshotInfo: i, Children: []*node{}}
	}
	roots := []*node{}
	for _, i := range list {
		if base := nodes[i.Base]; base != nil && i.Base != i.ID {
			base.Children = append(base.Children, nodes[i.ID])
		} else {
			roots = append(roots, nodes[i.ID])
		}
	}
	return roots
}

func printTree(w io.Writer, nodes []*node, indent string) {
	for n, at := range nodes {
		branch, below := "├─ ", "│  "
		if n == len(nodes)-1 {
			branch, below = "└─ ", "   "
		}
		fmt.Fprintf(w, "%s%s%s  %s  %s  %s own  %s\n", indent, branch, at.ID, at.VM, at.Created.Local().Format(daySecond), bytesText(at.Exclusive), at.Note)
		printTree(w, at.Children, indent+below)
	}
}

func (a *app) snapshotTreeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "tree", Short: "Show which snapshots were made from which", Args: cobra.NoArgs,
		RunE: a.onHost(func(_ *cobra.Command, _ []string, s *sandbox.Host) error {
			list, err := s.State.Snapshots()
			roots := tree(list)
			return a.answer(roots, err, func(w io.Writer) { printTree(w, roots, "") })
		}),
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

func (a *app) restoreCommand() *cobra.Command {
	var (
		name, into string
		net        netFlags
		idle       spec.Idle
		cmd        *cobra.Command
	)
	cmd = a.vmCommand("restore", "Make a new VM from a snapshot, as a clone with an identity of its own",
		func(ctx context.Context, s *sandbox.Host, id string) (rep control.Report, err error) {
			if into != "" {
				if _, err := s.State.RestoreTo(ctx, into, id); err != nil {
					return control.Report{}, err
				}
				return s.Sandbox(into).Wake(ctx)
			}
			p, err := net.over()
			if err != nil {
				return control.Report{}, err
			}
			c := sandbox.CloneOptions{Name: name, Policy: p, Report: &rep}
			if cmd.Flags().Changed("sleep-after") || cmd.Flags().Changed("idle-cpu") {
				c.Idle = &idle
			}
			_, err = s.Clone(ctx, id, c)
			return rep, err
		})
	cmd.Use, cmd.Args = "restore SNAPSHOT", cobra.ExactArgs(1)
	cmd.ValidArgsFunction = a.firstArg(a.completeSnapshot)
	cmd.Flags().StringVar(&name, "name", "", "name of the new VM (default: random)")
	cmd.Flags().StringVar(&into, "in", "", "do not make a new VM: take this one back to its snapshot and wake it; it must not run")
	net.add(cmd, "", "that of the snapshot")
	idleFlags(cmd, &idle, "as for the VM of the snapshot")
	for _, flag := range []string{"name", "policy", "net", "allow", "sleep-after", "idle-cpu"} {
		cmd.MarkFlagsMutuallyExclusive("in", flag)
	}
	return cmd
}
