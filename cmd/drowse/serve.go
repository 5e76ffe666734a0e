package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
)

// defaultPool is how many processes "drowse serve" keeps ready.
const defaultPool = 2

func (a *app) serveCommand() *cobra.Command {
	var processes int
	cmd := &cobra.Command{
		Use: "serve", Short: "Keep processes ready for VMs that wake, until interrupted", Args: cobra.NoArgs,
		Long: `Keep processes ready in which VMs wake, with what KVM has of a VM, so that a wake, a
restore or a fork need not start one. They are made for VMs of the sizes that were
started last. Commands with the same --state find them, and do without when there are none.

VMs do not depend on it: when it ends, they run on, and only what nobody has taken ends.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			l, err := a.launcher()
			if err != nil {
				return err
			}
			p, err := s.NewPool(l, sandbox.PoolOptions{Processes: processes, Follow: true, Log: a.log})
			if err != nil {
				return err
			}
			a.log.Info("serving", "state", s.Dir(), "pool", processes)
			err = p.Serve(cmd.Context())
			return errors.Join(err, p.Close())
		},
	}
	cmd.Flags().IntVar(&processes, "pool", defaultPool, "processes that are ready, each with some 24 MiB of memory")
	return cmd
}
