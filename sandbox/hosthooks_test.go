package sandbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// stateArg returns the store of a VM's process, from its arguments.
func stateArg() string {
	i := slices.Index(os.Args, "--state")
	if i < 0 || i+1 >= len(os.Args) {
		return ""
	}
	return os.Args[i+1]
}

// funcNotes is the file in which noteInProcess notes events, if it exists.
const funcNotes = "func-notes"

// noteInProcess is a hook in the form of a function in the process of a VM.
func noteInProcess(_ context.Context, e events.Event) error {
	f, err := os.OpenFile(filepath.Join(stateArg(), funcNotes), os.O_APPEND|os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(strings.TrimPrefix(string(e.Type), "sandbox.") + " " + e.Sandbox + "\n")
	return errors.Join(err, f.Close())
}

// onHost installs hooks of the host in a store. They note the events that they get.
type onHost struct{ e *guesttest.Env }

func newOnHost(e *guesttest.Env) onHost {
	e.T.Helper()
	h := onHost{e}
	script := `#!/bin/sh
ls /proc/self/fd | tr '\n' ' ' >"$DROWSE_STATE/fds"
cat >>"$DROWSE_STATE/told"
echo "$1 $DROWSE_SANDBOX" >>"$DROWSE_STATE/notes"
[ ! -e "$DROWSE_STATE/fail-$1" ] || { echo not now; exit 3; }
`
	dir := h.path("hooks.d")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "10-note"), []byte(script), 0o700), os.WriteFile(h.path(funcNotes), nil, 0o600)); err != nil {
		e.T.Fatal(err)
	}
	return h
}

func (h onHost) path(name string) string { return filepath.Join(h.e.Store.State.Dir(), name) }

// noted waits until hooks have noted want and nothing else since the last call, in any order, and clears the file.
// It has to wait since a wake returns before its hooks have run.
func (h onHost) noted(file string, want ...string) {
	h.e.T.Helper()
	slices.Sort(want)
	var got []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		text, err := os.ReadFile(h.path(file))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			h.e.T.Fatal(err)
		}
		if got = strings.Split(string(text), "\n"); len(got) > len(want) { // each note ends with a line feed
			got = got[:len(got)-1]
			break
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		h.e.T.Errorf("%s: the hooks of the host noted %q, want %q", file, got, want)
	}
	if err := os.Truncate(h.path(file), 0); err != nil {
		h.e.T.Error(err)
	}
}

// told returns the events that the hooks got.
func (h onHost) told() (all []events.Event) {
	h.e.T.Helper()
	data, err := os.ReadFile(h.path("told"))
	if err != nil {
		h.e.T.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		var e events.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			h.e.T.Fatalf("%v: %q", err, line)
		}
		all = append(all, e)
	}
	return all
}

// refuses has the hooks refuse the sleep of a running VM. The guest's hooks do not run.
func (h onHost) refuses(vm string) {
	h.e.T.Helper()
	if err := os.WriteFile(h.path("fail-sleep"), nil, 0o600); err != nil {
		h.e.T.Fatal(err)
	}
	_, err := h.e.Store.Sandbox(vm).Sleep(h.e.T.Context(), sandbox.SleepOptions{})
	var there *control.ErrorReport
	if !errors.Is(err, spec.ErrHostHooks) || errors.Is(err, spec.ErrHooks) || !errors.As(err, &there) || len(there.HostHooks) != 1 || there.HostHooks[0].Output != "not now" {
		h.e.T.Errorf("a hook of the host that fails: %v, want ErrHostHooks with its words", err)
	}
	if r, err := h.e.Store.State.Get(vm); err != nil || r.Phase != state.Running {
		h.e.T.Fatalf("after a refusal by the host: %v, %v", r.Phase, err)
	}
	h.noted("notes", "sleep "+vm, "wake "+vm)
	if err := os.Remove(h.path("fail-sleep")); err != nil {
		h.e.T.Fatal(err)
	}
}

// complete checks that the journal has each event that a hook got (not those before a sleep), and one failed hook.
func (h onHost) complete() {
	h.e.T.Helper()
	var failed []events.Event
	written := map[string]events.Event{}
	if _, err := h.e.Store.State.Events().Read(h.e.T.Context(), events.ReadOptions{}, func(e events.Event) error {
		written[e.ID] = e
		if e.Type == events.HostHookFailed {
			failed = append(failed, e)
		}
		return nil
	}); err != nil {
		h.e.T.Fatal(err)
	}
	seen := map[events.Type]int{}
	for _, e := range h.told() {
		seen[e.Type]++
		switch e.Type {
		case events.Sleeping, events.SleepFailed:
			if e.Cursor != 0 || e.ID != "" || e.Sandbox == "" || (e.Details.Reason != "") != (e.Type == events.SleepFailed) {
				h.e.T.Errorf("told before a sleep: %+v", e)
			}
		default:
			if is := written[e.ID]; is.Cursor != e.Cursor || is.Type != e.Type || e.Cursor == 0 {
				h.e.T.Errorf("told of %+v, the journal has %+v", e, is)
			}
		}
	}
	for _, typ := range []events.Type{events.Created, events.Sleeping, events.SleepFailed, events.Woken, events.Forked, events.Removed} {
		if seen[typ] == 0 {
			h.e.T.Errorf("never told of %s", typ)
		}
	}
	if len(failed) != 1 || failed[0].Details.Hook != "10-note" || failed[0].Details.Event != "sleep" || failed[0].Details.Problem != "exit status 3" {
		h.e.T.Errorf("events of failed hooks of the host: %+v", failed)
	}
}

// fds checks the files that the last hook had open: its standard streams, and the directory that it lists.
func (h onHost) fds() {
	h.e.T.Helper()
	if open, err := os.ReadFile(h.path("fds")); err != nil || string(open) != "0 1 2 3 " {
		h.e.T.Errorf("a hook that the process of a VM has started had open: %s, %v", open, err)
	}
}
