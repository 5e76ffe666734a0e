package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
)

func (a *app) benchCommand() *cobra.Command {
	var (
		e bench.Env
		o bench.ResumeEntryOptions
	)
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure what drowse promises", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	entry := &cobra.Command{
		Use: "resume_entry", Short: "From the call that restores a VM to its first KVM_RUN", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 {
				return usageError{errors.New("--runs must be 1 or more, --warmup 0 or more, --memory must name a size")}
			}
			if e.Store, err = a.store(); err != nil {
				return err
			}
			if e.Launcher, err = a.launcher(); err != nil {
				return err
			}
			e.Progress = func(s string) { a.log.Info(s) }
			rows, err := bench.ResumeEntry(cmd.Context(), e, o)
			if err != nil {
				return fmt.Errorf("measuring resume_entry: %w", err)
			}
			r := bench.NewReport(rows)
			return a.print(r, func(w io.Writer) { r.Text(w) })
		},
	}
	f := entry.Flags()
	f.StringVar(&e.Image, "image", "debian-python", "image of the guest")
	f.StringVar(&e.Kernel, "kernel", "", "kernel of the guest, as for run")
	f.IntVar(&o.N, "runs", 100, "runs for each size")
	f.IntVar(&o.Warmup, "warmup", 5, "runs before that do not count")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{256, 4096}, "sizes of RAM in MiB")
	cmd.AddCommand(entry)
	return cmd
}
