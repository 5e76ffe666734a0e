//go:build linux

package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// What to do with running VMs when "drowse serve" ends.
const (
	exitLeave = "leave"
	exitSleep = "sleep"
)

// sleepers is how many VMs go to sleep at once: they wait for writes to the disk.
const sleepers = 4

// exitFlags say what to do at the end.
type exitFlags struct {
	on    string
	limit time.Duration
}

func (f *exitFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.on, "on-exit", exitLeave, "what to do with running VMs at the end: leave or sleep")
	cmd.Flags().DurationVar(&f.limit, "exit-timeout", time.Minute, "time limit of putting all VMs to sleep; those that are late run on")
}

func (f *exitFlags) check() error {
	if f.on != exitLeave && f.on != exitSleep {
		return usageError{fmt.Errorf("--on-exit %q: use %s or %s", f.on, exitLeave, exitSleep)}
	}
	if f.limit <= 0 {
		return usageError{fmt.Errorf("--exit-timeout %v: use a time of more than 0", f.limit)}
	}
	return nil
}

// do puts all running VMs to sleep, if that is wanted. The error counts the VMs that do not sleep; the log names them
// and says why. A VM whose sleep the time limit cancels runs on, or sleeps a moment later, and loses nothing.
func (f *exitFlags) do(ctx context.Context, log *slog.Logger, h *sandbox.Host) error {
	if f.on != exitSleep {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, f.limit)
	defer cancel()
	asleep, awake := sleepAll(ctx, log, h, sandbox.SleepOptions{})
	log.Info("put to sleep", "asleep", len(asleep), "not", len(awake))
	if len(awake) > 0 {
		return fmt.Errorf("%d of %d VMs that ran were not put to sleep within %v: see the log for which", len(awake), len(awake)+len(asleep), f.limit)
	}
	return nil
}

// sleepAll puts all running VMs to sleep. It returns the names of those that sleep now and of those that run on.
// The log has more about the latter.
func sleepAll(ctx context.Context, log *slog.Logger, h *sandbox.Host, o sandbox.SleepOptions) (asleep, awake []string) {
	asleep, awake = []string{}, []string{}
	all, err := h.State.List()
	if err != nil {
		log.Warn("not all VMs can be looked at", "error", err)
	}
	room := make(chan struct{}, sleepers)
	var wg sync.WaitGroup
	var mu sync.Mutex // guards the results
	for _, r := range all {
		if r.Phase != state.Running && r.Phase != state.Starting {
			continue
		}
		wg.Go(func() {
			name := r.Spec.Name
			var err error
			select {
			case room <- struct{}{}:
				_, err = h.Sandbox(name).Sleep(ctx, o)
				<-room
			case <-ctx.Done():
				err = ctx.Err()
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				awake = append(awake, name)
				log.Warn("a VM was not put to sleep and runs on", "vm", name, "error", err)
				return
			}
			asleep = append(asleep, name)
		})
	}
	wg.Wait()
	slices.Sort(asleep)
	slices.Sort(awake)
	return asleep, awake
}
