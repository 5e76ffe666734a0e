package process

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

// putHostHook puts an executable into hooks.d. It notes its argument and the event, and then runs the script more.
func putHostHook(t *testing.T, s *state.Store, name, more string) {
	t.Helper()
	dir := filepath.Join(s.Dir(), hosthooks.DirName)
	script := "#!/bin/sh\necho " + name + ` $1 >>"$DROWSE_STATE/notes"; cat >>"$DROWSE_STATE/told"` + "\n" + more + "\n"
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700)); err != nil {
		t.Fatal(err)
	}
}

// hostNotes returns what the hooks have noted.
func hostNotes(t *testing.T, s *state.Store) (notes []string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(s.Dir(), "notes"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

// An event with a cursor is in the journal before a hook gets it.
func TestHostHooks_are_told_of_removals_and_expiries_by_who_carries_them_out(t *testing.T) {
	s := statetest.TempStore(t)
	putHostHook(t, s, "a", "")
	var got []events.Event
	ended, end := context.WithCancel(t.Context())
	end()
	withFunc := s.WithHostHooks(hosthooks.Func{Name: "f", Run: func(ctx context.Context, e events.Event) error {
		if types, last := statetest.Told(t, s); last.ID != e.ID || last.Cursor != e.Cursor || types[len(types)-1] != e.Type {
			t.Errorf("told of %+v, and the journal ends with %+v", e, last)
		}
		// The caller is gone, and the metadata is not locked.
		if e.Type == events.Expired {
			if _, err := s.SetMetadata(ctx, e.Sandbox, func(l *spec.Metadata, _ error) error { l.Owner = "other"; return nil }); err != nil {
				t.Error(err)
			}
		}
		got = append(got, e)
		return ctx.Err()
	}})
	statetest.WithMetadata(t, s, "a", state.Stopped, &spec.Metadata{Owner: "team", Expires: time.Now().Add(-time.Hour)})
	for range 2 {
		if err := withFunc.TellExpired(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := withFunc.Remove(ended, "a", false); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Type != events.Expired || got[0].Owner != "team" || got[1].Type != events.Removed || got[1].Owner != "other" {
		t.Fatalf("%+v", got)
	}
	if notes := hostNotes(t, s); !slices.Equal(notes, []string{"a expire", "a remove"}) {
		t.Fatal(notes)
	}
	statetest.WantTold(t, s, events.Expired, events.Updated, events.Removed)
}

func TestHostHooks_that_fail_afterwards_are_events_and_stand_against_nothing(t *testing.T) {
	s := statetest.TempStore(t)
	statetest.WithMetadata(t, s, "a", state.Stopped, &spec.Metadata{Owner: "team"})
	putHostHook(t, s, "a", "echo a secret; exit 1")
	if _, err := s.Remove(t.Context(), "a", false); err != nil {
		t.Fatal(err)
	}
	e := statetest.WantTold(t, s, events.Removed, events.HostHookFailed)
	if e.Sandbox != "a" || e.Owner != "team" || !reflect.DeepEqual(e.Details, events.Details{Hook: "a", Event: "remove", Problem: "exit status 1"}) {
		t.Fatalf("%+v", e)
	}
	statetest.WithMetadata(t, s, "b", state.Stopped, nil)
	if err := os.Chmod(filepath.Join(s.Dir(), hosthooks.DirName, "a"), 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(t.Context(), "b", false); err != nil {
		t.Fatal(err)
	}
	if _, e := statetest.Told(t, s); e.Type != events.HostHookFailed || e.Details.Hook != "*" || !strings.Contains(e.Details.Problem, "others may write to it") {
		t.Fatalf("%+v", e)
	}
	if notes := hostNotes(t, s); !slices.Equal(notes, []string{"a remove"}) {
		t.Fatal(notes)
	}
}

// begunProcess makes a VM's process, as far as hooks of the host need it.
func begunProcess(t *testing.T, s *state.Store, name string, policy spec.HookPolicy) *process {
	t.Helper()
	r := statetest.WithMetadata(t, s, name, state.Stopped, nil)
	r.Spec.Hooks.Policy = policy
	p := &process{store: s, log: slog.New(slog.DiscardHandler), r: r}
	p.events = s.NewEventWriter(p.log)
	t.Cleanup(func() {
		p.welcomed.Wait()
		p.events.Close()
	})
	return p
}

func TestHostHooks_before_a_sleep(t *testing.T) {
	for name, c := range map[string]struct {
		spec, over spec.HookPolicy
		hook       string // the rest of its script
		unsafe     bool
		fails      string
		failures   int
		notes      []string
	}{
		"none":                   {},
		"one that succeeds":      {hook: "true", notes: []string{"a sleep"}},
		"one that fails refuses": {hook: "[ $1 = wake ] || exit 3", fails: "hook a, sleep: exit status 3", notes: []string{"a sleep", "a wake"}},
		"what it fails with afterwards is said too": {hook: "exit 3", fails: "hook a, wake: exit status 3", notes: []string{"a sleep", "a wake"}},
		"one that fails is ignored":                 {over: spec.HooksIgnore, hook: "exit 3", failures: 1, notes: []string{"a sleep"}},
		"one that fails is ignored by the Spec":     {spec: spec.HooksIgnore, hook: "exit 3", failures: 1, notes: []string{"a sleep"}},
		"the Spec is overruled":                     {spec: spec.HooksIgnore, over: spec.HooksRequire, hook: "exit 3", fails: "exit status 3", notes: []string{"a sleep", "a wake"}},
		"skipped":                                   {over: spec.HooksSkip, hook: "exit 3"},
		"an unsafe one refuses, and none is run":    {hook: "true", unsafe: true, fails: "hook *, sleep: "},
		"an unsafe one is ignored":                  {over: spec.HooksIgnore, hook: "true", unsafe: true, failures: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := statetest.TempStore(t)
			if c.hook != "" {
				putHostHook(t, s, "a", c.hook)
			}
			if c.unsafe {
				if err := os.Chmod(filepath.Join(s.Dir(), hosthooks.DirName, "a"), 0o707|0o022); err != nil {
					t.Fatal(err)
				}
			}
			p := begunProcess(t, s, "a", c.spec)
			h, err := p.hostBefore(t.Context(), c.over)
			if c.fails != "" {
				var he *spec.HostHooksError
				if !errors.Is(err, spec.ErrHostHooks) || !errors.As(err, &he) || !strings.Contains(err.Error(), c.fails) {
					t.Fatalf("got %v, want ErrHostHooks with %q", err, c.fails)
				}
				var there *control.ErrorReport
				if rep := error(control.ReportError(err)); !errors.Is(rep, spec.ErrHostHooks) || !errors.As(rep, &there) || len(there.HostHooks) != len(he.Failures) {
					t.Errorf("it arrives as %+v", rep)
				}
			} else if err != nil {
				t.Fatal(err)
			} else if failures := h.settle(t.Context(), nil); len(failures) != c.failures {
				t.Fatal(failures)
			}
			if notes := hostNotes(t, s); !slices.Equal(notes, c.notes) {
				t.Fatalf("noted %q, want %q", notes, c.notes)
			}
			if types, _ := statetest.Told(t, s); slices.Contains(types, events.Sleeping) || slices.Contains(types, events.SleepFailed) {
				t.Errorf("told %v", types)
			}
		})
	}
}

// Hooks learn of a sleep that fails after them, whatever the cause, but not in the guest's words.
func TestHostHooks_are_told_when_the_sleep_has_not_come_about(t *testing.T) {
	for why, err := range map[string]error{
		"hooks":    &spec.HooksError{Failures: []guest.HookFailure{{Name: "x", Output: "the guest's words"}}},
		"no-space": errors.Join(errors.New("x"), reportOf("no-space")),
		"used":     errUsed,
		"error":    errors.New("the guest's words"),
	} {
		t.Run(why, func(t *testing.T) {
			s := statetest.TempStore(t)
			var got []events.Event
			s = s.WithHostHooks(hosthooks.Func{Name: "f", Run: func(_ context.Context, e events.Event) error { got = append(got, e); return nil }})
			p := begunProcess(t, s, "a", "")
			h, herr := p.hostBefore(events.WithCause(t.Context(), events.Idle), "")
			if herr != nil {
				t.Fatal(herr)
			}
			h.settle(t.Context(), err)
			if len(got) != 2 {
				t.Fatalf("%+v", got)
			}
			before, after := got[0], got[1]
			if before.Type != events.Sleeping || before.Cursor != 0 || before.ID != "" || before.Version != events.Version || before.Time.IsZero() || before.Cause != events.Idle {
				t.Errorf("before: %+v", before)
			}
			if after.Type != events.SleepFailed || !reflect.DeepEqual(after.Details, events.Details{Reason: why}) || after.Cause != events.Idle || after.SandboxID != p.r.ID {
				t.Errorf("after: %+v", after)
			}
		})
	}
}

func reportOf(code string) error { return &control.ErrorReport{Code: code, Message: code} }

// Hooks get the beginning of a VM's process in the background, once it is in the journal, and before a sleep.
func TestHostHooks_of_a_beginning_are_not_waited_for_but_by_a_sleep(t *testing.T) {
	for typ, want := range map[events.Type][]string{
		events.Woken:   {"woken", "sleeping"},
		events.Created: {"created", "sleeping"},
		events.Started: {"sleeping"},
	} {
		t.Run(string(typ), func(t *testing.T) {
			s := statetest.TempStore(t)
			var mu sync.Mutex
			var got []string
			begun, goOn := make(chan struct{}), make(chan struct{})
			s = s.WithHostHooks(hosthooks.Func{Name: "f", Run: func(_ context.Context, e events.Event) error {
				if e.Type == typ {
					close(begun)
					<-goOn
					if _, last := statetest.Told(t, s); last.ID != e.ID || e.Cursor == 0 || last.Cursor != e.Cursor {
						t.Errorf("told of %+v, which is not written: %+v", e, last)
					}
				}
				mu.Lock()
				defer mu.Unlock()
				got = append(got, strings.TrimPrefix(string(e.Type), "sandbox."))
				return nil
			}})
			p := begunProcess(t, s, "a", "")
			p.welcomed.Add(1)
			p.tellThen(events.CLI, typ, events.Details{}, p.welcome)
			if typ == events.Started {
				p.welcomed.Wait()
			} else {
				<-begun // and tellThen has returned
			}
			slept := make(chan error, 1)
			go func() { _, err := p.hostBefore(t.Context(), ""); slept <- err }()
			select {
			case err := <-slept:
				if typ != events.Started {
					t.Errorf("the sleep goes on before its hooks are done: %v", err)
				}
				slept <- err
			case <-time.After(20 * time.Millisecond):
			}
			close(goOn)
			if err := <-slept; err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, want) {
				t.Fatalf("told %v, want %v", got, want)
			}
		})
	}
}

// Hooks get an event even if it cannot be written, then without a cursor.
func TestHostHooks_do_not_depend_on_the_journal(t *testing.T) {
	s := statetest.TempStore(t)
	if err := os.WriteFile(s.Events().Dir(), nil, 0o600); err != nil { // a file in place of the directory
		t.Fatal(err)
	}
	var got events.Event
	s = s.WithHostHooks(hosthooks.Func{Name: "f", Run: func(_ context.Context, e events.Event) error { got = e; return nil }})
	p := begunProcess(t, s, "a", "")
	p.welcomed.Add(1)
	p.tellThen(events.CLI, events.Woken, events.Details{}, p.welcome)
	p.welcomed.Wait()
	if got.Type != events.Woken || got.Cursor != 0 {
		t.Fatalf("%+v", got)
	}
}
