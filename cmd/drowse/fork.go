package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// maxForks is sandbox.MaxForks, the most children of a fork.
const maxForks = 64

func (a *app) forkCommand() *cobra.Command {
	var o forkOptions
	var net netFlags
	var secrets []string
	limit := bootTimeout
	cmd := &cobra.Command{
		Use:   "fork NAME",
		Short: "Make children of a VM that share its memory and disk until they write",
		Long: `Make children of a VM. Each continues from the same moment of the VM, with its memory, processes
and files, and with its own random numbers, clock, host name and ids.

A running VM is paused for some milliseconds, once for all children, and runs on. The children
share its memory until they write to it. A sleeping VM goes on sleeping. The command prints the
names of the children.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.count < 1 || o.count > maxForks {
				return usageError{fmt.Errorf("--count must be 1 to %d", maxForks)}
			}
			p, err := net.over()
			if err != nil {
				return err
			}
			o.policy = p
			return a.launchingWith(cmd.Context(), secrets, limit, func(ctx context.Context, p place, list []spec.Secret) error {
				res, err := p.fork(ctx, args[0], o)
				if err != nil {
					return err
				}
				if res.problem != "" {
					a.log.Warn("the children run, and cannot be brought back if they are killed", "cause", res.problem)
				}
				var names []string
				for _, c := range res.children {
					a.warnNetwork(c.name, c.network)
					names = append(names, c.name)
				}
				return errors.Join(handIn(ctx, p, list, names...), a.print(res.doc, func(w io.Writer) {
					for _, name := range names {
						fmt.Fprintln(w, name)
					}
				}))
			})
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.count, "count", 1, fmt.Sprintf("number of children, up to %d", maxForks))
	f.StringVar(&o.name, "name", "", "name of the child, or the prefix of the names of several (default: random)")
	f.BoolVar(&o.early, "early", false, "do not wait until the snapshot of the children is on disk")
	net.add(cmd, "", "that of the VM")
	secretFlag(cmd, &secrets, " to each child; children do not get those of the VM")
	f.DurationVar(&limit, "timeout", limit, "give up after this time")
	return cmd
}
