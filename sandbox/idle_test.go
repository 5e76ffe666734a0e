package sandbox_test

import (
	"errors"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// idleVM checks that a VM falls asleep by itself when it is unused, and only then.
func idleVM(t *testing.T, e *guesttest.Env, snap, said string) {
	const seconds = 1
	if _, err := e.Store.With(e.Launcher).Clone(t.Context(), snap, sandbox.CloneOptions{Name: "i", Idle: &spec.Idle{SleepSeconds: seconds}}); err != nil {
		t.Fatal(err)
	}
	// use connects as a command does, which wakes a sleeping VM first.
	use := func() *guest.Client {
		t.Helper()
		for {
			e.Wake("i")
			c, err := e.Store.Sandbox("i").Agent(t.Context())
			if err == nil {
				return c
			}
			if !errors.Is(err, sandbox.ErrNotRunning) {
				t.Fatal(err)
			}
		}
	}
	staysAwake := func(why string) {
		t.Helper()
		time.Sleep(3 * seconds * time.Second)
		if r, err := e.Store.State.Get("i"); err != nil || r.Phase != state.Running {
			t.Errorf("%s, and it is %v (%v)", why, r.Phase, err)
		}
	}
	c := use()
	staysAwake("a connection to its agent is open")
	if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"/bin/sh", "-c", "while :; do :; done >/dev/null 2>&1 & echo $! > /root/busy"}}); err != nil {
		t.Fatal(err)
	}
	c.Close()
	staysAwake("it computes")
	c = use()
	if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"/bin/sh", "-c", "kill $(cat /root/busy)"}}); err != nil {
		t.Fatal(err)
	}
	c.Close()
	r := e.WaitPhase("i", state.Asleep, 5*time.Minute)
	if r.PID != 0 || r.Snapshot == snap {
		t.Errorf("it sleeps with process %d and snapshot %s", r.PID, r.Snapshot)
	}
	use().Close()
	r = e.WaitPhase("i", state.Asleep, 5*time.Minute)
	// This clone does not fall asleep between two questions.
	if _, err := e.Store.With(e.Launcher).Clone(t.Context(), r.Snapshot, sandbox.CloneOptions{Name: "j", Idle: &spec.Idle{}}); err != nil {
		t.Fatal(err)
	}
	if got := ask(e, "j"); got != said {
		t.Errorf("the keeper says %q after a sleep of its own accord, want %q", got, said)
	}
	for _, name := range []string{"i", "j"} {
		if err := e.Store.Sandbox(name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}
}
