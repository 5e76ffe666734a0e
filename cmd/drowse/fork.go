package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (a *app) forkCommand() *cobra.Command {
	var o sandbox.ForkOptions
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
			if o.Count < 1 || o.Count > sandbox.MaxForks {
				return usageError{fmt.Errorf("--count must be 1 to %d", sandbox.MaxForks)}
			}
			p, err := net.over()
			if err != nil {
				return err
			}
			o.Policy = p
			return a.launchingWith(cmd.Context(), secrets, limit, func(ctx context.Context, s *sandbox.Host, list []spec.Secret) error {
				res, err := s.Sandbox(args[0]).Fork(ctx, o)
				if err != nil {
					return err
				}
				if res.Problem != "" {
					a.log.Warn("the children run, and cannot be brought back if they are killed", "cause", res.Problem)
				}
				var names []string
				for _, c := range res.Children {
					a.warnNetwork(c.Name, c.Network)
					names = append(names, c.Name)
				}
				return errors.Join(handIn(ctx, s, list, names...), a.print(res, func(w io.Writer) {
					for _, c := range res.Children {
						fmt.Fprintln(w, c.Name)
					}
				}))
			})
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Count, "count", 1, fmt.Sprintf("number of children, up to %d", sandbox.MaxForks))
	f.StringVar(&o.Name, "name", "", "name of the child, or the prefix of the names of several (default: random)")
	f.BoolVar(&o.Early, "early", false, "do not wait until the snapshot of the children is on disk")
	net.add(cmd, "", "that of the VM")
	secretFlag(cmd, &secrets, " to each child; children do not get those of the VM")
	f.DurationVar(&limit, "timeout", limit, "give up after this time")
	return cmd
}
