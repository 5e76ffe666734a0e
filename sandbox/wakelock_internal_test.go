package sandbox

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestHoldSet_that_are_dismissed_are_waited_for(t *testing.T) {
	t.Parallel()
	var h wakeLocks
	leave, done := h.join()
	_, second := h.join()
	if n, ever := h.count(); n != 2 || ever != 2 {
		t.Errorf("%d hold it, and %d ever did, want 2", n, ever)
	}
	dismissed := make(chan struct{})
	go func() {
		defer close(dismissed)
		h.dismiss(time.Hour)
	}()
	<-leave
	done()
	select {
	case <-dismissed:
		t.Error("nobody waited for the second")
	case <-time.After(10 * time.Millisecond):
	}
	second()
	<-dismissed
	// Whoever comes later is not dismissed.
	leave, done = h.join()
	select {
	case <-leave:
		t.Error("one that came later was dismissed")
	default:
	}
	done()
	h.dismiss(time.Hour)
}

func TestHoldSet_that_do_not_go_are_not_waited_for_long(t *testing.T) {
	t.Parallel()
	var h wakeLocks
	_, done := h.join()
	h.dismiss(time.Millisecond)
	done()
	if n, ever := h.count(); n != 0 || ever != 1 {
		t.Errorf("%d hold it, and %d ever did, want none and 1", n, ever)
	}
}

func TestParseHeld_first_line_gives(t *testing.T) {
	for _, c := range []struct {
		name, line string
		want       string // the address; - is none, and empty an error
	}{
		{"no network, or an older process", "held\n", "-"},
		{"the network", `held {"tap":"drowse1","address":"10.200.0.7","warnings":["x"]}` + "\n", "10.200.0.7"},
		{"something else", "gone\n", ""},
		{"a word that only begins like it", "heldx\n", ""},
		{"a network that is none", "held {\n", ""},
		{"nothing", "\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := parseHeld([]byte(c.line))
			switch {
			case c.want == "":
				if err == nil {
					t.Errorf("%q is %+v, want an error", c.line, n)
				}
			case err != nil:
				t.Error(err)
			case c.want == "-":
				if n != nil {
					t.Errorf("%q is %+v, want no network", c.line, n)
				}
			case n == nil || n.Address.String() != c.want:
				t.Errorf("%q is %+v, want %s", c.line, n, c.want)
			}
		})
	}
}

// sleeper is a store with a VM that sleeps, but for a snapshot.
func sleeper(t *testing.T, name string) *Store {
	t.Helper()
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.VMDir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Save(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Phase: state.Asleep, Snapshot: "x", Spec: Spec{Name: name, Image: "none"}}); err != nil {
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
			rep, h, err := s.WakeLocked(t.Context(), shellLauncher(tc.script), "a")
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
			r, err := s.Load("a")
			if err != nil {
				t.Fatal(err)
			}
			ready := *r
			ready.Phase = state.Running
			a, err := s.Ahead(&ready)
			if err != nil {
				t.Fatal(err)
			}
			if there, err := s.Load("a"); err != nil || there.Phase != state.Asleep {
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
			if there, err := s.Load("a"); err != nil || there.Phase != want {
				t.Errorf("%+v, %v, want %s", there, err, want)
			}
			if left, err := filepath.Glob(filepath.Join(s.VMDir("a"), ".tmp-*")); err != nil || len(left) > 0 {
				t.Errorf("left: %q, %v", left, err)
			}
		})
	}
}

func TestOrder_of_a_fork_has_no_hold(t *testing.T) {
	t.Parallel()
	s := sleeper(t, "a")
	if err := s.obey(t.Context(), t.Context(), order{Name: "a", Fork: true, Hold: true}, []*os.File{nil, nil}, nil); err == nil {
		t.Error("it was obeyed")
	}
	var ord order
	for _, o := range []order{{Name: "a", Snapshot: "x", Hold: true}, {Name: "a", Fork: true}, {Name: "a"}} {
		p, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		ord = order{}
		if err := json.Unmarshal(p, &ord); err != nil || ord != o {
			t.Errorf("%s becomes %+v, %v", bytes.TrimSpace(p), ord, err)
		}
	}
}
