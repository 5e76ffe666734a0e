package sandbox_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// putHook puts a hook into a guest. The hook appends its arguments to /root/notes, and then runs the script more.
func putHook(e *guesttest.Env, vm, name, more string) {
	e.T.Helper()
	script := "#!/bin/sh\necho " + name + " $* >> /root/notes\n" + more + "\n"
	err := e.Agent(vm).WriteFile(e.T.Context(), "/etc/drowse/hooks.d/"+name, strings.NewReader(script), guest.WriteOptions{Perm: 0o755, Parents: true})
	if err != nil {
		e.T.Fatal(err)
	}
}

// notes returns what the hooks of a guest have noted since the last call.
func notes(e *guesttest.Env, vm string) []string {
	e.T.Helper()
	text := e.Read(vm, "/root/notes")
	e.Remove(vm, "/root/notes")
	return strings.Split(text, "\n")
}

func wantNotes(e *guesttest.Env, vm string, want ...string) {
	e.T.Helper()
	if got := notes(e, vm); !slices.Equal(got, want) {
		e.T.Errorf("%s: the hooks noted %q, want %q", vm, got, want)
	}
}

// One boot serves all of this.
func TestHooks_in_a_guest(t *testing.T) {
	guesttest.Long(t)
	t.Parallel()
	e := guesttest.New(t)
	shared := newShared(e)
	// The maximum timeouts are long enough for a busy machine.
	e.Run(sandbox.Spec{
		Name: "h", Hooks: spec.Hooks{TimeoutSeconds: spec.MaxHookSeconds, AllSeconds: spec.MaxHookSeconds}, Shares: shared.specs(),
	})
	shared.use("h")
	persist := newPersistence(e)
	persist.begin("h")
	res := e.Sleep("h")
	persist.slept(res)
	rep := e.Wake("h")
	shared.goesOn("h")
	persist.woken("h")
	setPersist(e, "h", lifetime.Persist{})
	t.Logf("without hooks: %v, %v", res.Stages, rep.Stages)
	if len(res.Hooks)+len(rep.Hooks) != 0 {
		t.Errorf("without hooks: %v, %v failed", res.Hooks, rep.Hooks)
	}

	putHook(e, "h", "10-a", "")
	putHook(e, "h", "20-b", `[ -e /root/fail-$1 ] || exit 0; echo not now; exit 3`)
	host := newOnHost(e)
	res = e.Sleep("h")
	rep = e.Wake("h")
	t.Logf("with two hooks: %v, %v", res.Stages, rep.Stages)
	host.noted("notes", "sleep h", "wake h")
	host.noted(funcNotes, "sleeping h", "woken h")
	host.fds()
	wantNotes(e, "h", "10-a sleep", "20-b sleep", "20-b wake sleep", "10-a wake sleep")
	persist.refused("h")
	host.noted("notes", "sleep h", "wake h")

	snap, err := e.Store.Sandbox("h").Snapshot(t.Context(), sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wantNotes(e, "h", "10-a snapshot", "20-b snapshot", "20-b wake snapshot", "10-a wake snapshot")
	clone(e, snap.Snapshot, "c")
	host.noted("notes", "create c")
	wantNotes(e, "c", "10-a snapshot", "20-b snapshot", "20-b clone snapshot", "10-a clone snapshot")

	// The children of a fork start between its hooks.
	forks(e, "h", sandbox.ForkOptions{Count: 1, Name: "f"})
	host.noted("notes", "fork h", "create f")
	// The host's hooks run before the guest's.
	host.refuses("f")
	wantNotes(e, "h", "10-a snapshot", "20-b snapshot", "20-b wake snapshot", "10-a wake snapshot")
	wantNotes(e, "f", "10-a snapshot", "20-b snapshot", "20-b clone snapshot", "10-a clone snapshot")
	shared.alsoIn("f")

	e.Write("c", "", "/root/fail-sleep", "/root/fail-wake", "/root/fail-snapshot")
	_, err = e.Store.Sandbox("c").Sleep(t.Context(), sandbox.SleepOptions{})
	if !errors.Is(err, spec.ErrHooks) || !strings.Contains(err.Error(), "exit status 3: not now") {
		t.Errorf("a hook that fails: %v, want ErrHooks with its words", err)
	}
	var told *control.ErrorReport
	if !errors.As(err, &told) || len(told.Hooks) != 2 || told.Hooks[0].Name != "20-b" || told.Hooks[1].Event != guest.HookWake {
		t.Errorf("failures %+v", told)
	}
	wantNotes(e, "c", "10-a sleep", "20-b sleep", "20-b wake sleep", "10-a wake sleep")
	host.noted("notes", "sleep c", "wake c")
	if _, err = e.Store.Sandbox("c").Snapshot(t.Context(), sandbox.SnapshotOptions{}); !errors.Is(err, spec.ErrHooks) {
		t.Errorf("a snapshot with a hook that fails: %v, want ErrHooks", err)
	}
	if r, err := e.Store.State.Get("c"); err != nil || r.Phase != state.Running {
		t.Fatalf("after the refusals: %v, %v", r.Phase, err)
	}
	notes(e, "c")
	if _, err := e.Store.Sandbox("c").Sleep(t.Context(), sandbox.SleepOptions{Hooks: "maybe"}); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("an unknown policy: %v, want ErrSpec", err)
	}

	setPersist(e, "c", persist.nowhere())
	res, err = e.Store.Sandbox("c").Sleep(t.Context(), sandbox.SleepOptions{Hooks: spec.HooksIgnore})
	persist.ignored(res)
	if err != nil || len(res.Hooks) != 1 || res.Hooks[0].Problem != "exit status 3" {
		t.Errorf("ignoring it: %v, failures %v", err, res.Hooks)
	}
	rep = e.Wake("c")
	if len(rep.Hooks) != 1 || rep.Hooks[0].Event != guest.HookWake || rep.Hooks[0].Output != "not now" {
		t.Errorf("failures after the wake: %v", rep.Hooks)
	}
	wantNotes(e, "c", "10-a sleep", "20-b sleep", "20-b wake sleep", "10-a wake sleep")

	persist.told("c", map[events.Type]int{events.PersistFailed: 1})
	if res, err = e.Store.Sandbox("c").Sleep(t.Context(), sandbox.SleepOptions{Hooks: spec.HooksSkip}); err != nil || len(res.Hooks) != 0 {
		t.Errorf("skipping them: %v, %v", err, res.Hooks)
	}
	e.Wake("c")
	if e.Exists("c", "/root/notes") {
		t.Error("hooks that are to be skipped were run")
	}
	if !e.Exists("c", "/root/out/more") {
		t.Error("what was not promoted was dropped")
	}
	host.noted("notes", "sleep c", "wake c", "wake c") // HooksSkip skipped one sleep
	if err := e.Store.Sandbox("c").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	host.noted("notes", "remove c")
	host.complete()
}
