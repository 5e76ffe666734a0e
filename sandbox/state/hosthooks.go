package state

import (
	"context"
	"log/slog"
	"slices"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
)

// WithHostHooks is the store with hooks that are functions of this program, in place of those that it had. They are
// called before the executables in hooks.d, by whichever process does what they are told of: this one for forks,
// expiries and removals that it carries out itself. A VM's own process is told when it is created, sleeps and wakes,
// also by itself: a program that wants these gives its functions to ServeProcessWith as well, and they are called in
// that process.
func (s *Store) WithHostHooks(hooks ...hosthooks.Func) *Store {
	other := *s
	other.hostHooks = slices.Clone(hooks)
	return &other
}

// FindHostHooks returns the hooks that there are now. With an error these are the functions alone.
func (s *Store) FindHostHooks() (hosthooks.Hooks, error) {
	return hosthooks.Find(hosthooks.In(s.dir), s.hostHooks)
}

// Announce writes an event, and runs the hooks of the host for it. It waits for them, also if ctx has ended: what they
// are told of has been.
func (s *Store) Announce(ctx context.Context, e events.Event) {
	e = s.Tell(e)
	for _, failed := range s.HooksAfter(ctx, e, slog.Default()) {
		s.Tell(failed)
	}
}

// HooksAfter runs the hooks of the host for what has been. It logs what fails, and returns events of that.
func (s *Store) HooksAfter(ctx context.Context, e events.Event, log *slog.Logger) []events.Event {
	hooks, err := s.FindHostHooks()
	failures := hooks.After(context.WithoutCancel(ctx), e)
	if err != nil {
		failures = append(failures, NoneRun(e.Type, err))
	}
	return HostHooksFailed(e, failures, log)
}

// NoneRun is the failure of all hooks in hooks.d.
func NoneRun(t events.Type, err error) report.HookFailure {
	return report.HookFailure{Name: "*", Event: report.HookEvent(hosthooks.Word(t)), Problem: err.Error()}
}

// HostHooksFailed logs failures, and makes events of them: without what the hooks have printed.
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
