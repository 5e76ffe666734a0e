package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// idleFlags adds the flags for when a VM goes to sleep by itself. def describes the default.
func idleFlags(cmd *cobra.Command, idle *spec.Idle, def string) {
	cmd.Flags().Var((*wholeSeconds)(&idle.SleepSeconds), "sleep-after", "sleep after this time without use, such as 15s or 10m; 0 is never (default "+def+")")
	cmd.Flags().IntVar(&idle.CPUPercent, "idle-cpu", 0, fmt.Sprintf("percent of a CPU up to which the VM counts as unused (%d for a new VM)", spec.DefaultIdleCPUPercent))
}

// wholeSeconds is a flag for a duration of whole seconds.
type wholeSeconds int

func (w *wholeSeconds) String() string {
	if *w == 0 {
		return ""
	}
	return (time.Duration(*w) * time.Second).String()
}

// Set parses a duration.
func (w *wholeSeconds) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("%q is no duration: use one as 15s or 10m", s)
	}
	if d%time.Second != 0 {
		return fmt.Errorf("%q: use whole seconds", s)
	}
	*w = wholeSeconds(d / time.Second)
	return nil
}

// Type returns the help's word for the value.
func (*wholeSeconds) Type() string { return "duration" }
