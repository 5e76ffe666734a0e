//go:build linux

package main

import (
	"errors"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
)

func (a *app) benchCompare() *cobra.Command {
	var (
		state  string
		rounds int
	)
	cmd := &cobra.Command{
		Use: "compare [flags] PROGRAM BENCHMARK [FLAG...]", Short: "Measure another build of drowse and this one in turn",
		Long: `Measure another build of drowse, PROGRAM, and this one in turn, and print the ratios of their
medians. Each build needs a state directory with the image and the kernel: snapshots of one may be
unknown to the other. "bench exec", which older builds lack, measures another one with --beside.`,
		Example: "  drowse bench compare --old-state /var/lib/drowse-1 ./drowse-1 resume_ready --runs 50",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := within("rounds", rounds, 1, 1000); err != nil {
				return usageError{err}
			}
			if state == "" {
				return usageError{errors.New("name the state directory of the other build with --old-state")}
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			rows, err := bench.Compare(cmd.Context(), bench.Build{Program: args[0], State: state}, bench.Build{Program: self, State: a.state}, args[1:], rounds, func(s string) { a.log.Info(s) })
			if err != nil {
				return err
			}
			return a.print(rows, func(w io.Writer) { _ = bench.WriteCompared(w, rows) })
		},
	}
	cmd.Flags().SetInterspersed(false) // what follows PROGRAM is the benchmark's
	cmd.Flags().StringVar(&state, "old-state", "", "state directory of the other build")
	cmd.Flags().IntVar(&rounds, "rounds", 4, "how often to measure both")
	return cmd
}
