package state

import (
	"context"
	"log/slog"
	"slices"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
)

// WithHostHooks returns the store with hooks that are functions of this program, in place of its previous ones.
// They are called before the executables in hooks.d, in the process that does what they report: in this one for
// forks, expiries and removals that it carries out itself. The VM's own process calls hooks when the VM is
// created, sleeps and wakes, also by itself. A program that wants those also gives its functions to
// ServeProcessWith, and they are called in that process.
func (s *Store) WithHostHooks(hooks ...hosthooks.Func) *Store {
	other := *s
	other.hostHooks = slices.Clone(hooks)
	return &other
}

// FindHostHooks returns the current hooks. With an error it returns only the functions.
func (s *Store) FindHostHooks() (hosthooks.Hooks, error) {
	return hosthooks.Find(hosthooks.In(s.dir), s.hostHooks)
}

// Announce writes an event, and runs the host's hooks for it. It waits for them, even if ctx has ended, because
// the event has already happened.
func (s *Store) Announce(ctx context.Context, e events.Event) {
	e = s.Tell(e)
	for _, failed := range s.HooksAfter(ctx, e, slog.Default()) {
		s.Tell(failed)
	}
}

// HooksAfter runs the host's hooks for an event that has happened. It logs failures, and returns events for them.
func (s *Store) HooksAfter(ctx context.Context, e events.Event, log *slog.Logger) []events.Event {
	hooks, err := s.FindHostHooks()
	failures := hooks.After(context.WithoutCancel(ctx), e)
	if err != nil {
		failures = append(failures, NoneRun(e.Type, err))
	}
	return HostHooksFailed(e, failures, log)
}

// NoneRun returns the failure of all hooks in hooks.d.
func NoneRun(t events.Type, err error) report.HookFailure {
	return report.HookFailure{Name: "*", Event: report.HookEvent(hosthooks.Word(t)), Problem: err.Error()}
}

// HostHooksFailed logs failures, and returns events for them, without the output of the hooks.
func HostHooksFailed(e events.Event, failures []report.HookFailure, log *slog.Logger) (out []events.Event) {
	for _, f := range failures {
		log.Warn("hook on the host", "sandbox", e.Sandbox, "problem", f.String())
		if len(out) < MaxHooksTold {
			out = append(out, events.Event{
				Type: events.HostHookFailed, Cause: e.Cause, Sandbox: e.Sandbox, SandboxID: e.SandboxID, Owner: e.Owner, Tags: e.Tags,
				Details: events.Details{Hook: f.Name, Event: string(f.Event), Problem: f.Problem},
			})
		}
	}
	return out
}
