package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// defaultPool is how many processes "drowse serve" keeps ready.
const defaultPool = 2

func (a *app) serveCommand() *cobra.Command {
	var processes, conns int
	var hooks webhookFlags
	cmd := &cobra.Command{
		Use: "serve", Short: "Wake VMs for connections, and keep processes ready for those that wake", Args: cobra.NoArgs,
		Long: `Keep processes ready in which VMs wake, with what KVM has of a VM, so that a wake, a
restore or a fork need not start one. They are made for VMs of the sizes that were
started last. Commands with the same --state find them, and do without when there are none.

Listen at the addresses where policies publish ports of VMs ("publish", see "drowse
policy"). A connection, or a datagram, wakes a VM that sleeps, waits until it is there, and
keeps it awake; with UDP, until a minute after the last datagram. A packet to the address of
a VM that sleeps wakes it if its policy would let it in.

Send events to webhooks, in their order, each until it is taken; where it is, it goes on
when it is started again.

VMs do not depend on it: when it ends, they run on, but connections that it carries end.
It goes on until it is interrupted.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			l, err := a.launcher()
			if err != nil {
				return err
			}
			if processes < 0 || processes > sandbox.MaxPool {
				return usageError{fmt.Errorf("a pool of %d processes: use 0 to %d", processes, sandbox.MaxPool)}
			}
			if conns < 1 {
				return usageError{fmt.Errorf("%d connections at once: use 1 or more", conns)}
			}
			webhooks, err := hooks.hooks()
			if err != nil {
				return err
			}
			a.log.Info("serving", "state", s.Dir(), "pool", processes)
			return supervisor.Run(cmd.Context(), s, l, supervisor.Options{Pool: processes, MaxConns: conns, Webhooks: webhooks, Log: a.log})
		},
	}
	cmd.Flags().IntVar(&processes, "pool", defaultPool, "processes that are ready, each with some 24 MiB of memory; 0 is none")
	cmd.Flags().IntVar(&conns, "max-connections", supervisor.DefaultMaxConns, "connections, or senders of UDP, that are carried at once for one port")
	hooks.add(cmd)
	return cmd
}
