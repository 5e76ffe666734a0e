package sandbox_test

import (
	"context"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// sandboxesOfGuests runs the conformance tests of package fleet on real guests, which are clones.
func sandboxesOfGuests(t *testing.T, e *guesttest.Env, snap string) {
	begin := time.Now()
	defer func() { t.Logf("it took %v", time.Since(begin).Round(time.Millisecond)) }()
	f := fleet.New(e.Store, fleet.Options{})
	// The tests go through the API, which promises the same.
	c := overHTTP(t, e)

	in := func(t *testing.T) *guesttest.Env {
		own := *e
		own.T = t
		return &own
	}
	fleettest.Conformance(t, fleettest.Subject{
		Fleet: c,
		Make: func(t *testing.T, spec sandbox.Spec, l spec.Metadata) {
			if _, err := e.Store.With(e.Launcher).Clone(t.Context(), snap, sandbox.CloneOptions{Name: spec.Name, Metadata: &l}); err != nil {
				t.Fatal(err)
			}
		},
		Write: func(t *testing.T, name, word string) {
			in(t).Write(name, word, "/run/word")
		},
		// It uses builtins of the shell, since a new process costs a guest much time here.
		Read: func(t *testing.T, name string) string {
			out, err := c.Exec(t.Context(), name, wire.Exec{Command: []string{"/bin/sh", "-c", "read w < /run/word; echo $w; exit 3"}})
			if err != nil || out.ExitCode != 3 {
				t.Fatalf("reading in %s: %+v, %v", name, out, err)
			}
			return strings.TrimSpace(string(out.Stdout))
		},
		Kill: func(t *testing.T, name string) {
			r, err := e.Store.State.Get(name)
			if err != nil {
				t.Fatal(err)
			}
			if r.Phase != state.Running {
				return
			}
			if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			in(t).WaitPhase(name, state.Crashed, 30*time.Second)
		},
	})
	h, err := f.History(t.Context(), "conf-later", records.Span{})
	if err != nil {
		t.Fatal(err)
	}
	words := 0
	for _, r := range h.Runs {
		if line := strings.Join(r.Command, " "); strings.Contains(line, "/run/word") && r.Exit != nil && (*r.Exit == 0 || *r.Exit == 3) && r.CPUSeconds > 0 {
			words++
		}
	}
	if words < 4 {
		t.Errorf("the history has %d commands that were run: %+v", words, h.Runs)
	}
	conformanceEvents(t, e)
	if left, _ := filepath.Glob(filepath.Join(e.Store.State.Dir(), "vms", "conf*")); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
}

// overHTTP serves real VMs until the test ends.
func overHTTP(t *testing.T, e *guesttest.Env) *client.Client {
	t.Helper()
	path := filepath.Join(e.Store.State.Dir(), api.SocketFile)
	l, err := api.ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	server := api.New(api.Options{Host: e.Store.With(e.Launcher)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	c := client.Unix(path)
	t.Cleanup(func() {
		c.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return c
}

// conformanceEvents checks the journal's events of the conformance tests.
func conformanceEvents(t *testing.T, e *guesttest.Env) {
	seen, first := map[events.Type]int{}, map[string]events.Type{}
	woken := 0
	if _, err := e.Store.State.Events().Read(t.Context(), events.ReadOptions{}, func(ev events.Event) error {
		if !strings.HasPrefix(ev.Sandbox, "conf") {
			return nil
		}
		seen[ev.Type]++
		if first[ev.SandboxID] == "" {
			first[ev.SandboxID] = ev.Type
		}
		if ev.Type == events.Woken && ev.Details.Milliseconds > 0 && ev.Details.Snapshot != "" && ev.Cause == events.API {
			woken++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []events.Type{events.Created, events.Woken, events.Slept, events.Forked, events.Crashed, events.Renamed, events.Removed} {
		if seen[want] == 0 {
			t.Errorf("there are no events %s: %v", want, seen)
		}
	}
	if woken != seen[events.Woken] {
		t.Errorf("%d of %d events of wakes say what they should", woken, seen[events.Woken])
	}
	for id, ev := range first {
		if ev != events.Created {
			t.Errorf("the first event of %s is %s", id, ev)
		}
	}
}

// wakeDuringSleep checks that a wake that comes while a VM falls asleep ends with the VM awake.
func wakeDuringSleep(t *testing.T, e *guesttest.Env, name string) {
	slept := make(chan error, 1)
	go func() {
		_, err := e.Store.Sandbox(name).Sleep(t.Context(), sandbox.SleepOptions{})
		slept <- err
	}()
	falling := false
	for done := false; !falling && !done; {
		select {
		case err := <-slept:
			slept <- err
			done = true
		default:
			info, err := e.Store.Sandbox(name).Info(t.Context())
			falling = err == nil && info.Falling
		}
	}
	t.Logf("the sleep was seen: %v", falling)
	if _, err := e.Store.With(e.Launcher).Sandbox(name).Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r, err := e.Store.State.Get(name); err != nil || r.Phase != state.Running || len(r.Sleeps) == 0 || r.Sleeps[len(r.Sleeps)-1].Snapshot != r.Snapshot {
		t.Errorf("it is %+v, %v", r, err)
	}
	if err := <-slept; err != nil {
		t.Errorf("the sleep: %v", err)
	}
}
