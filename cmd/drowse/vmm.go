package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
)

// vmmCommand is the process of one VM. `drowse run`, `wake` and `restore` start it.
func (a *app) vmmCommand() *cobra.Command {
	var (
		name string
		fork bool
		o    sandbox.ServeOptions
	)
	cmd := &cobra.Command{
		Use: "vmm", Short: "Be the process of one VM", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			// Hanging up is what ends terminals, not VMs.
			signal.Ignore(syscall.SIGHUP)
			o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("vm", name)
			o.Report = func(r sandbox.Report) {
				f := os.NewFile(sandbox.ReportFD, "report")
				if err := json.NewEncoder(f).Encode(r); err != nil {
					o.Log.Warn("nobody reads the report", "error", err)
				}
				f.Close()
			}
			if fork {
				o.Fork = os.NewFile(sandbox.ForkFD, "fork")
			}
			return s.Serve(context.WithoutCancel(cmd.Context()), name, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "the VM")
	f.StringVar(&o.Snapshot, "snapshot", "", "restore this snapshot instead of booting")
	f.BoolVar(&fork, "fork", false, "be a child whose RAM is on a file descriptor")
	f.BoolVar(&o.NewIdentity, "new-identity", false, "make the restored guest a machine of its own")
	return cmd
}
