package main

import (
	"context"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
)

// vmmCommand is the process of one VM. `drowse run`, `wake` and `restore` start it, and it
// takes its own flags.
func (a *app) vmmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "vmm", Short: "Be the process of one VM", Hidden: true, DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			// Hanging up is what ends terminals, not VMs.
			signal.Ignore(syscall.SIGHUP)
			return sandbox.ServeProcess(context.WithoutCancel(cmd.Context()), args)
		},
	}
}
