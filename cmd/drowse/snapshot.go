package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (a *app) snapshotCommand() *cobra.Command {
	cmd := a.snapshotCreateCommand("snapshot")
	cmd.AddCommand(
		a.snapshotCreateCommand("create"),
		&cobra.Command{
			Use: "ls", Short: "List snapshots", Args: cobra.NoArgs,
			RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
				list, err := p.snapshots(cmd.Context())
				slices.SortFunc(list, func(x, y spec.SnapshotInfo) int { return cmp.Or(x.Created.Compare(y.Created), cmp.Compare(x.ID, y.ID)) })
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
		a.snapshotTagCommand(), a.pruneCommand(), a.snapshotExportCommand(), a.snapshotImportCommand(),
		showCommand(a, "inspect ID", "Show a snapshot, as JSON", func(ctx context.Context, p place, id string) (any, error) { return p.inspectSnapshot(ctx, id) }),
		snapshotVerb(a, a.place, "rm", "Delete a snapshot", "removed", func(ctx context.Context, p place, id string) error { return p.RemoveSnapshot(ctx, id) }),
	)
	cmd.AddCommand(a.snapshotVerbs()...)
	return cmd
}

// snapshotCreateCommand returns "snapshot create", or "snapshot" itself.
func (a *app) snapshotCreateCommand(use string) *cobra.Command {
	var (
		o     spec.SnapshotOptions
		hooks string
	)
	cmd := &cobra.Command{
		Use: use + " NAME", Short: "Take a snapshot of a running VM, which runs on", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Take a snapshot of a running VM, which runs on.

With --disk-only the snapshot has the disk without memory. The guest freezes its file system for
a moment; only programs that write have to wait. "drowse run --from-disk" boots a VM from it.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			o.Hooks = spec.HookPolicy(hooks)
			res, err := p.Snapshot(cmd.Context(), args[0], o)
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

func snapshotVerb[T any](a *app, open func() (T, error), use, short, done string, do func(context.Context, T, string) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " ID", Short: short, Args: cobra.ExactArgs(1),
		RunE: opened(open, func(cmd *cobra.Command, args []string, v T) error {
			err := do(cmd.Context(), v, args[0])
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
		RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
			list, err := p.snapshots(cmd.Context())
			roots := tree(list)
			return a.answer(roots, err, func(w io.Writer) { printTree(w, roots, "") })
		}),
	}
}

func (a *app) restoreCommand() *cobra.Command {
	var (
		name, into string
		net        netFlags
		idle       spec.Idle
		cmd        *cobra.Command
	)
	cmd = a.vmCommand("restore", "Make a new VM from a snapshot, as a clone with an identity of its own",
		func(ctx context.Context, at place, id string) (cameUp, error) {
			if into != "" {
				return at.rewind(ctx, into, id)
			}
			if changed(cmd, "idle-cpu") && !changed(cmd, "sleep-after") {
				return cameUp{}, usageError{errors.New("--idle-cpu of restore needs --sleep-after: the two replace what the snapshot's VM had")}
			}
			p, err := net.over()
			if err != nil {
				return cameUp{}, err
			}
			c := cloneOptions{name: name, policy: p}
			if changed(cmd, "sleep-after", "idle-cpu") {
				c.idle = &idle
			}
			return at.clone(ctx, id, c)
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

func (a *app) snapshotExportCommand() *cobra.Command {
	var to string
	cmd := &cobra.Command{
		Use: "export ID", Short: "Export a snapshot with its disk to one file", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeSnapshot,
		Long: `Export a snapshot with its disk to one file (--to) or to stdout. "drowse snapshot import" reads it
in any store that has the VM's image: the file has the image's id, the SHA-256 of its content,
but not the image.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			if to == "-" {
				if isTerminal(a.stdout) {
					return usageError{errors.New("a snapshot is not for a terminal: name a file with --to, or use a pipe")}
				}
				return p.exportSnapshot(cmd.Context(), args[0], a.stdout)
			}
			// The file appears under its name only when it is complete.
			err := replaceFile(to, 0o600, func(f *os.File) error { return p.exportSnapshot(cmd.Context(), args[0], f) })
			return a.answer(map[string]string{"snapshot": args[0], "file": to}, err, func(w io.Writer) { fmt.Fprintln(w, to) })
		}),
	}
	cmd.Flags().StringVar(&to, "to", "-", "output file, - for stdout")
	return cmd
}

func (a *app) snapshotImportCommand() *cobra.Command {
	var trust bool
	cmd := &cobra.Command{
		Use: "import FILE", Annotations: makesState, Short: "Import a snapshot from a file of \"snapshot export\", - for stdin", Args: cobra.ExactArgs(1),
		Long: `Import a snapshot from a file of "snapshot export", - for stdin.

drowse does not trust the file. It imports memory, disk and devices, and nothing else. It drops
network policy, tags, grants, hooks, services, the kernel's path and the like, and reports what
it dropped. VMs made from the snapshot have no policy: set one with "restore --policy". --trust
imports everything.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			in, err := input(args[0], os.Stdin)
			if err != nil {
				return fmt.Errorf("importing a snapshot: %w", err)
			}
			defer in.Close()
			info, err := p.importSnapshot(cmd.Context(), bufio.NewReaderSize(in, 1<<20), trust)
			return a.imported(info, err)
		}),
	}
	cmd.Flags().BoolVar(&trust, "trust", false, "also import policy, tags, grants, kernel and everything else about the VM")
	return cmd
}

// imported tells of a snapshot that came from elsewhere.
func (a *app) imported(res wire.Imported, err error) error {
	return a.answer(res, err, func(w io.Writer) {
		fmt.Fprintln(w, res.ID)
		if len(res.Dropped) > 0 {
			fmt.Fprintf(a.stderr, "not taken over from it: %s (--trust takes all)\n", strings.Join(res.Dropped, ", "))
		}
	})
}
