package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/limits"
)

func (a *app) limitsCommand() *cobra.Command {
	var l limits.Limits
	cmd := &cobra.Command{
		Use: "limits", Short: "Show or set how much of the host all awake sandboxes may use", Args: cobra.NoArgs,
		Long: `Show how much of the host all awake sandboxes together may use, or set it with flags. A start
that finds no room waits, and fails if none becomes free in time.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			now, err := limits.Read(s.State.Dir())
			if err != nil {
				return err
			}
			set := false
			for flag, take := range map[string]func(){
				"memory-overcommit": func() { now.MemoryOvercommit = l.MemoryOvercommit },
				"wake-reserve":      func() { now.WakeReservePercent = l.WakeReservePercent },
				"memory-wait":       func() { now.MemoryWaitSeconds = l.MemoryWaitSeconds },
			} {
				if cmd.Flags().Changed(flag) {
					set = true
					take()
				}
			}
			if set {
				if err := now.Write(s.State.Dir()); errors.Is(err, limits.ErrLimits) {
					return usageError{err}
				} else if err != nil {
					return err
				}
			}
			used, capacity, err := limits.AwakeMemory(s.State.Dir())
			if err != nil {
				return err
			}
			said := struct {
				limits.Limits
				Awake    int64 `json:"awake_mib"`
				Capacity int64 `json:"capacity_mib"`
			}{now, used, capacity}
			return a.print(said, func(w io.Writer) {
				fmt.Fprintf(w, "memory overcommit  %g\nwake reserve       %d%%\nmemory wait        %d s\nawake              %d of %d MiB\n",
					now.MemoryOvercommit, now.WakeReservePercent, now.MemoryWaitSeconds, used, capacity)
			})
		},
	}
	d, f := limits.Default, cmd.Flags()
	f.Float64Var(&l.MemoryOvercommit, "memory-overcommit", d.MemoryOvercommit, "limit of their RAM together, as a multiple of the host's memory")
	f.IntVar(&l.WakeReservePercent, "wake-reserve", d.WakeReservePercent, "percent of that reserved for wakes")
	f.IntVar(&l.MemoryWaitSeconds, "memory-wait", d.MemoryWaitSeconds, "seconds that a start waits for free memory")
	return cmd
}
