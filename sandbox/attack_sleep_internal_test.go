package sandbox

import (
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// falling is a VM that runs, as far as the store can tell, has slept before, and sleeps in a new snapshot when it is
// asked to. With lost its answer is lost.
func falling(t *testing.T, lost bool) (s *Store, r *Record, old string) {
	t.Helper()
	s = tempStore(t)
	r = sleepingVM(t, s, "a", 2)
	old = diskSnapshotOf(t, s, r, kindSleep)
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
	r.Snapshot, r.Sleeps = old, []SleepRecord{{Snapshot: old, Asleep: time.Now().Add(-time.Hour)}}
	r.Phase, r.PID = Running, cmd.Process.Pid
	if err := s.save(r); err != nil {
		t.Fatal(err)
	}
	lock, err := s.lock("a")
	if err != nil {
		t.Fatal(err)
	}
	l, err := osfile.ListenUnix(s.controlSocket("a"))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		now := *r
		now.Snapshot = diskSnapshotOf(t, s, r, kindSleep)
		now.Phase, now.PID, now.Sleeps = Asleep, 0, append(now.Sleeps, SleepRecord{Snapshot: now.Snapshot, Asleep: time.Now()})
		if err := s.save(&now); err != nil {
			t.Error(err)
		}
		lock.release()
		_ = cmd.Process.Kill()
		if lost {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write([]byte(`{"name":"a","snapshot":"` + now.Snapshot + `","stages_ms":{}}`))
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return s, r, old
}

func TestAttack_sleep_fails_although_the_vm_sleeps(t *testing.T) {
	for name, tt := range map[string]struct {
		lost    bool
		harm    func(t *testing.T, s *Store)
		problem bool
	}{
		"the record of another VM cannot be read": {harm: func(t *testing.T, s *Store) {
			withMetadata(t, s, "z", Asleep, nil)
			if err := os.WriteFile(s.recordPath("z"), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		"another snapshot cannot be read": {harm: func(t *testing.T, s *Store) {
			if err := os.Mkdir(s.SnapshotDir(spec.NewID()), 0o700); err != nil {
				t.Fatal(err)
			}
		}},
		"the store cannot be locked": {problem: true, harm: func(t *testing.T, s *Store) {
			if err := os.MkdirAll(filepath.Join(s.Dir(), "import.lock"), 0o700); err != nil {
				t.Fatal(err)
			}
		}},
		"the answer is lost": {lost: true, harm: func(*testing.T, *Store) {}},
	} {
		t.Run(name, func(t *testing.T) {
			s, _, old := falling(t, tt.lost)
			tt.harm(t, s)
			res, err := s.Sleep(t.Context(), "a")
			if err != nil {
				t.Fatalf("it sleeps, and the error is: %v", err)
			}
			r, err := s.load("a")
			if err != nil || r.Phase != Asleep || r.Snapshot != res.Snapshot {
				t.Errorf("its record is %+v (%v), and the result %+v", r, err, res)
			}
			if (res.Problem != "") != tt.problem {
				t.Errorf("the problem is %q", res.Problem)
			}
			if !tt.problem && !tt.lost && s.isThere(old) {
				t.Error("the sleep before is still there")
			}
		})
	}
}

func TestAttack_each_sleep_reads_all_snapshots_of_the_store(t *testing.T) {
	s, _, old := falling(t, false)
	// A pipe in place of a manifest holds up whoever reads it.
	id := spec.NewID()
	if err := errors.Join(os.Mkdir(s.SnapshotDir(id), 0o700), unix.Mkfifo(filepath.Join(s.SnapshotDir(id), snapshot.ManifestName), 0o600)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := s.Sleep(context.Background(), "a")
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the sleep reads a snapshot that is none of its VM's")
	}
	if s.isThere(old) {
		t.Error("the sleep before is still there")
	}
}

func TestAttack_sleep_deletes_what_somebody_still_comes_back_from(t *testing.T) {
	for name, keep := range map[string]func(t *testing.T, s *Store, old string){
		"a clone": func(t *testing.T, s *Store, old string) {
			c := &Record{Version: recordVersion, ID: spec.NewID(), Spec: Spec{Name: "c"}, Phase: Asleep, Snapshot: old, Parent: old}
			l, err := s.create(c)
			if err != nil {
				t.Fatal(err)
			}
			l.release()
		},
		"a clone whose record cannot be read": func(t *testing.T, s *Store, old string) {
			withMetadata(t, s, "c", Asleep, nil)
			if err := os.WriteFile(s.recordPath("c"), []byte(`{"snapshot":"`+old+`",`), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"a tag": func(t *testing.T, s *Store, old string) {
			if _, err := s.TagSnapshot(old, []string{"release"}); err != nil {
				t.Fatal(err)
			}
		},
		"its metadata": func(t *testing.T, s *Store, _ string) {
			if _, err := s.SetMetadata(t.Context(), "a", func(l *Metadata, _ error) error { l.Keep = lifetime.Keep{Last: 2}; return nil }); err != nil {
				t.Fatal(err)
			}
		},
		"its rotation": func(t *testing.T, s *Store, old string) {
			if _, err := s.SetMetadata(t.Context(), "a", func(l *Metadata, _ error) error { l.Rotate = Rotation{To: old}; return nil }); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, _, old := falling(t, false)
			keep(t, s, old)
			if res, err := s.Sleep(t.Context(), "a"); err != nil || res.Problem != "" {
				t.Fatal(err, res.Problem)
			}
			if !s.isThere(old) {
				t.Error("it is gone")
			}
		})
	}
}

func TestAttack_fork_waits_for_a_sweep_without_end(t *testing.T) {
	s, _, r, _ := clonable(t)
	sleeping := sleepingVM(t, s, "s", 1)
	sleeping.Spec = r.Spec
	sleeping.Spec.Name, sleeping.Snapshot = "s", diskSnapshotOf(t, s, sleeping, kindSleep)
	if err := s.save(sleeping); err != nil {
		t.Fatal(err)
	}
	unlock, err := s.lockStore(t.Context(), osfile.Exclusive, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unlock() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := s.Fork(ctx, Launcher{}, "s", ForkOptions{Name: "f"})
		done <- err
	}()
	select {
	case err := <-done:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want that its time is over", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("it waits on")
	}
	// And whoever gives no end waits for a time.
	begin := time.Now()
	if _, err := s.lockStore(context.Background(), osfile.Shared, 20*time.Millisecond); !errors.Is(err, errStoreBusy) || time.Since(begin) < 20*time.Millisecond {
		t.Errorf("got %v after %v", err, time.Since(begin))
	}
}
