//go:build linux

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/internal/doctor"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check this host: its KVM, and everything else that drowse uses",
		Long: `Check which kind of KVM this host has, whether everything that drowse uses is there, and what
follows if it is not. Nothing is changed. The exit status is 0 if VMs can run, else 1.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := doctor.Examine(cmd.Context(), doctor.Options{StateDir: a.state, Agent: agentPath(), VMM: beside(vmmName)})
			if err != nil {
				return err
			}
			if err := a.print(r, func(w io.Writer) { printReport(w, r) }); err != nil {
				return err
			}
			if !r.CanRun {
				return statusError(exitFailed)
			}
			return nil
		},
	}
}

func printReport(w io.Writer, r doctor.Report) {
	t := columns(w)
	group := ""
	for _, c := range r.Checks {
		if c.Group != group {
			group = c.Group
			fmt.Fprintf(t, "%s\t\t\n", group)
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\n", c.Name, c.Status, c.Detail)
		if c.Consequence != "" {
			fmt.Fprintf(t, "\t\t  -> %s\n", c.Consequence)
		}
	}
	t.Flush()
	if r.CanRun {
		fmt.Fprintf(w, "\nVMs can run here, on KVM of the kind %s.\n", r.KVM.Kind)
	} else {
		fmt.Fprintf(w, "\nVMs cannot run here.\n")
	}
}
