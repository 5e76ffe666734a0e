package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// timed makes "drowse wake" set a timer instead, if the flags ask for it.
func (a *app) timed(cmd *cobra.Command) {
	var (
		at, in, every string
		never         bool
	)
	now := cmd.RunE
	cmd.Long = `Wake a sleeping VM: memory, processes and files are as they were.

With --at, --in or --every the VM is not woken now. The command sets a timer, in place of an
earlier one, and "drowse serve" wakes the VM within a second of its time. A timer that was due
while no "drowse serve" ran fires once when one runs again. "drowse ls" shows the next time.`
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if at == "" && in == "" && every == "" && !never {
			return now(cmd, args)
		}
		t, err := timer(time.Now(), at, in, every, never)
		if err != nil {
			return usageError{err}
		}
		if cmd.Flags().Changed("secret") || cmd.Flags().Changed("timeout") {
			return usageError{errors.New("a timer has neither --secret nor --timeout")}
		}
		p, err := a.place()
		if err != nil {
			return err
		}
		return each(a, args, "vms", func(name string) (records.Sandbox, error) {
			return p.Update(cmd.Context(), name, records.Changes{Wake: &t})
		}, func(w io.Writer, s records.Sandbox) {
			if s.NextWake.IsZero() {
				fmt.Fprintf(w, "%s is woken by no timer\n", s.Name)
				return
			}
			fmt.Fprintf(w, "%s is woken at %s\n", s.Name, s.NextWake.Local().Format(time.RFC3339))
		})
	}
	f := cmd.Flags()
	f.StringVar(&at, "at", "", "set a timer for this time, such as 2026-11-22T13:25:42Z")
	f.StringVar(&in, "in", "", "set a timer this long from now, such as 10m or 7d")
	f.StringVar(&every, "every", "", "set a timer that fires again after each period of this time, such as 24h; first at --at or --in, else after one period")
	f.BoolVar(&never, "no-timer", false, "remove the timer")
}

// timer returns the timer that the flags describe.
func timer(now time.Time, at, in, every string, never bool) (t spec.Timer, err error) {
	if never {
		if at != "" || in != "" || every != "" {
			err = errors.New("--no-timer does not go with --at, --in and --every")
		}
		return t, err
	}
	if at != "" && in != "" {
		return t, errors.New("--at does not go with --in")
	}
	return timerOf(now, "--", at, in, every)
}

// timerOf makes a timer from a time, a delay from now, and a period. prefix begins the names of their flags.
func timerOf(now time.Time, prefix, at, in, every string) (t spec.Timer, err error) {
	first := in
	if every != "" {
		d, err := lifetime.ParseDuration(every)
		if err != nil {
			return t, fmt.Errorf("%severy: %w", prefix, err)
		}
		if t.Every = int64(d / time.Second); t.Every < spec.MinTimer {
			return t, fmt.Errorf("%severy %s: use %d s or more", prefix, every, spec.MinTimer)
		}
		first = cmp.Or(in, every)
	}
	if at != "" {
		if t.At, err = time.Parse(time.RFC3339Nano, at); err != nil {
			return t, fmt.Errorf("%sat %q: use a time as 2026-11-22T13:25:42Z", prefix, at)
		}
		return t, nil
	}
	d, err := lifetime.ParseDuration(first)
	if err != nil {
		return t, fmt.Errorf("%sin: %w", prefix, err)
	}
	t.At = now.Add(d)
	return t, nil
}
