package sandbox

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// sleeper returns a store with a sleeping VM, which has no snapshot.
func sleeper(t *testing.T, name string) *Host {
	t.Helper()
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.State.VMDir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.State.Save(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Phase: state.Asleep, Snapshot: "x", Spec: Spec{Name: name, Image: "none"}}); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestWakeHeld(t *testing.T) {
	t.Parallel()
	const report = `echo '{"name":"a","faults":7}' >&3; exec 3>&-; `
	for name, tc := range map[string]struct {
		script string
		held   bool
		ends   bool // without a Release
	}{
		"process that holds until it is released": {script: `echo 'held {"tap":"t","address":"10.200.0.7"}' >&4; ` + report + `cat <&4`, held: true},
		"process that ends":                       {script: `echo 'held {"tap":"t","address":"10.200.0.7"}' >&4; ` + report + `sleep 0.1`, held: true, ends: true},
		"VM that is about to sleep":               {script: `echo 'held {"tap":"t","address":"10.200.0.7"}' >&4; ` + report + `echo ends >&4; cat <&4`, held: true, ends: true},
		"process that holds nothing":              {script: report + `exec 4>&-`},
		"process that says something else":        {script: `echo hello >&4; ` + report + `cat <&4`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sleeper(t, "a")
			rep, h, err := s.With(pool.Launcher{Command: []string{"/bin/sh", "-c", tc.script, "sh"}}).Sandbox("a").wakeWithLock(t.Context())
			if err != nil || rep.Faults != 7 {
				t.Fatalf("%+v, %v", rep, err)
			}
			if (h != nil) != tc.held {
				t.Fatalf("a hold %v, want %v", h != nil, tc.held)
			}
			if h == nil {
				return
			}
			if n := h.Network(); n == nil || n.Address.String() != "10.200.0.7" {
				t.Errorf("it is held with the network %+v", n)
			}
			if tc.ends {
				<-h.Done()
			} else {
				select {
				case <-h.Done():
					t.Error("it is over before it is released")
				case <-time.After(50 * time.Millisecond):
				}
			}
			h.Release()
			<-h.Done()
			h.Release()
		})
	}
}

func TestAheadRecord_takes_the_place_of_the_file_if_it_is_still_true(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(*state.Record)
		done   bool
	}{
		"the same":               {func(r *state.Record) { r.Phase = state.Running }, true},
		"something else as well": {func(r *state.Record) { r.Phase, r.Problem = state.Running, "x" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sleeper(t, "a")
			r, err := s.State.Load("a")
			if err != nil {
				t.Fatal(err)
			}
			ready := *r
			ready.Phase = state.Running
			a, err := s.State.Ahead(&ready)
			if err != nil {
				t.Fatal(err)
			}
			if there, err := s.State.Load("a"); err != nil || there.Phase != state.Asleep {
				t.Fatalf("before it is committed: %+v, %v", there, err)
			}
			tc.change(r)
			done, err := a.Commit(r)
			if err != nil || done != tc.done {
				t.Fatalf("%v, %v, want %v", done, err, tc.done)
			}
			a.Discard()
			want := state.Asleep
			if tc.done {
				want = state.Running
			}
			if there, err := s.State.Load("a"); err != nil || there.Phase != want {
				t.Errorf("%+v, %v, want %s", there, err, want)
			}
			if left, err := filepath.Glob(filepath.Join(s.State.VMDir("a"), ".tmp-*")); err != nil || len(left) > 0 {
				t.Errorf("left: %q, %v", left, err)
			}
		})
	}
}
