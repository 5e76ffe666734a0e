package sandbox

import (
	"os"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
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

func TestSaveRunning_writes_the_record_only_if_more_than_its_phase_has_changed(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(*state.Record)
		want   state.Phase
	}{
		"the phase":              {func(r *state.Record) {}, state.Starting},
		"something else as well": {func(r *state.Record) { r.TrustedCA = "x" }, state.Running},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sleeper(t, "a")
			l, err := s.State.Lock("a")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Release()
			r, err := s.State.Load("a")
			if err != nil {
				t.Fatal(err)
			}
			r.Phase, r.PID = state.Starting, os.Getpid()
			if err := s.State.SaveOver(r, ""); err != nil {
				t.Fatal(err)
			}
			starting := *r
			r.Phase = state.Running
			tc.change(r)
			if err := s.State.SaveRunning(r, starting); err != nil {
				t.Fatal(err)
			}
			if there, err := s.State.Load("a"); err != nil || there.Phase != tc.want || there.TrustedCA != r.TrustedCA {
				t.Errorf("in the file: %+v, %v, want %s", there, err, tc.want)
			}
			// Others see that it runs when its process listens.
			if there, err := s.State.Get("a"); err != nil || there.Phase != tc.want {
				t.Errorf("before it listens: %+v, %v, want %s", there, err, tc.want)
			}
			listener, err := osfile.ListenUnix(s.State.ControlSocket("a"))
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			if there, err := s.State.Get("a"); err != nil || there.Phase != state.Running {
				t.Errorf("when it listens: %+v, %v", there, err)
			}
			if err := s.State.RemoveSockets("a"); err != nil {
				t.Fatal(err)
			}
			// Killed, or after a loss of power.
			l.Release()
			if there, err := s.State.Get("a"); err != nil || there.Phase != state.Crashed {
				t.Errorf("when it has ended: %+v, %v", there, err)
			}
		})
	}
}
