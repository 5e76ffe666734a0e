package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// falling returns a VM that runs, as far as the store can tell, and that has slept before. Asked to sleep, it
// sleeps in a new snapshot. With lost, its answer is lost.
func falling(t *testing.T, lost bool) (s *Host, r *state.Record, old string) {
	t.Helper()
	s = tempStore(t)
	r = sleepingVM(t, s, "a", 2)
	old = diskSnapshotOf(t, s, r, state.KindSleep)
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
	r.Snapshot, r.Sleeps = old, []state.SleepRecord{{Snapshot: old, Asleep: time.Now().Add(-time.Hour)}}
	r.Phase, r.PID = state.Running, cmd.Process.Pid
	if err := s.State.Save(r); err != nil {
		t.Fatal(err)
	}
	lock, err := s.State.Lock("a")
	if err != nil {
		t.Fatal(err)
	}
	l, err := osfile.ListenUnix(s.State.ControlSocket("a"))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		now := *r
		now.Snapshot = diskSnapshotOf(t, s, r, state.KindSleep)
		now.Phase, now.PID, now.Sleeps = state.Asleep, 0, append(now.Sleeps, state.SleepRecord{Snapshot: now.Snapshot, Asleep: time.Now()})
		if err := s.State.Save(&now); err != nil {
			t.Error(err)
		}
		lock.Release()
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
		harm    func(t *testing.T, s *Host)
		problem bool
	}{
		"the record of another VM cannot be read": {harm: func(t *testing.T, s *Host) {
			withMetadata(t, s, "z", state.Asleep, nil)
			if err := os.WriteFile(s.State.RecordPath("z"), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		"another snapshot cannot be read": {harm: func(t *testing.T, s *Host) {
			if err := os.Mkdir(s.State.SnapshotDir(spec.NewID()), 0o700); err != nil {
				t.Fatal(err)
			}
		}},
		"the store cannot be locked": {problem: true, harm: func(t *testing.T, s *Host) {
			if err := os.MkdirAll(filepath.Join(s.State.Dir(), "import.lock"), 0o700); err != nil {
				t.Fatal(err)
			}
		}},
		"the answer is lost": {lost: true, harm: func(*testing.T, *Host) {}},
	} {
		t.Run(name, func(t *testing.T) {
			s, _, old := falling(t, tt.lost)
			tt.harm(t, s)
			res, err := s.Sandbox("a").Sleep(t.Context(), SleepOptions{})
			if err != nil {
				t.Fatalf("it sleeps, and the error is: %v", err)
			}
			r, err := s.State.Load("a")
			if err != nil || r.Phase != state.Asleep || r.Snapshot != res.Snapshot {
				t.Errorf("its record is %+v (%v), and the result %+v", r, err, res)
			}
			if (res.Problem != "") != tt.problem {
				t.Errorf("the problem is %q", res.Problem)
			}
			if !tt.problem && !tt.lost && s.State.IsThere(old) {
				t.Error("the sleep before is still there")
			}
		})
	}
}

func TestAttack_each_sleep_reads_all_snapshots_and_records_of_the_store(t *testing.T) {
	s, _, old := falling(t, false)
	// A pipe in place of a file blocks its readers.
	id := spec.NewID()
	if err := errors.Join(
		os.Mkdir(s.State.SnapshotDir(id), 0o700), unix.Mkfifo(filepath.Join(s.State.SnapshotDir(id), snapshot.ManifestName), 0o600),
		os.Mkdir(s.State.VMDir("other"), 0o700), unix.Mkfifo(s.State.RecordPath("other"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := s.Sandbox("a").Sleep(context.Background(), SleepOptions{})
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the sleep reads what is none of its VM's")
	}
	if s.State.IsThere(old) {
		t.Error("the sleep before is still there")
	}
}

func TestAttack_sleep_deletes_what_somebody_still_comes_back_from(t *testing.T) {
	clone := func(t *testing.T, s *Host, old string) {
		t.Helper()
		c := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "c"}, Phase: state.Asleep, Snapshot: old, Parent: old}
		l, err := s.State.Create(c)
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	}
	for name, keep := range map[string]func(t *testing.T, s *Host, old string){
		"a clone": clone,
		"a clone whose record cannot be read": func(t *testing.T, s *Host, old string) {
			clone(t, s, old)
			if err := os.WriteFile(s.State.RecordPath("c"), []byte(`{"snapshot":"`+old+`",`), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"a clone in a store of an older version": func(t *testing.T, s *Host, old string) {
			clone(t, s, old)
			if err := os.RemoveAll(filepath.Join(s.State.Dir(), "lent")); err != nil {
				t.Fatal(err)
			}
		},
		"a tag": func(t *testing.T, s *Host, old string) {
			if _, err := s.State.TagSnapshot(old, []string{"release"}); err != nil {
				t.Fatal(err)
			}
		},
		"its metadata": func(t *testing.T, s *Host, _ string) {
			if _, err := s.State.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Keep = lifetime.Keep{Last: 2}; return nil }); err != nil {
				t.Fatal(err)
			}
		},
		"its rotation": func(t *testing.T, s *Host, old string) {
			if _, err := s.State.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Rotate = spec.Rotation{To: old}; return nil }); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, _, old := falling(t, false)
			keep(t, s, old)
			if res, err := s.Sandbox("a").Sleep(t.Context(), SleepOptions{}); err != nil || res.Problem != "" {
				t.Fatal(err, res.Problem)
			}
			if !s.State.IsThere(old) {
				t.Error("it is gone")
			}
		})
	}
}

func TestAttack_fork_waits_for_a_sweep_without_end(t *testing.T) {
	s, _, r, _ := clonable(t)
	sleeping := sleepingVM(t, s, "s", 1)
	sleeping.Spec = r.Spec
	sleeping.Spec.Name, sleeping.Snapshot = "s", diskSnapshotOf(t, s, sleeping, state.KindSleep)
	if err := s.State.Save(sleeping); err != nil {
		t.Fatal(err)
	}
	unlock, err := s.State.LockStore(t.Context(), osfile.Exclusive, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unlock() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := s.With(pool.Launcher{}).Sandbox("s").Fork(ctx, ForkOptions{Name: "f"})
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
	// A caller without a deadline waits for a limited time.
	begin := time.Now()
	if _, err := s.State.LockStore(context.Background(), osfile.Shared, 20*time.Millisecond); !errors.Is(err, state.ErrStoreBusy) || time.Since(begin) < 20*time.Millisecond {
		t.Errorf("got %v after %v", err, time.Since(begin))
	}
}

// clonable returns a store with a snapshot from which VMs can be restored and booted. Their process is a shell. No
// other VM or snapshot has its layers.
func clonable(t *testing.T) (s *Host, l pool.Launcher, r *state.Record, snap string) {
	t.Helper()
	s = tempStore(t)
	dir := t.TempDir()
	l = pool.Launcher{Command: []string{"/bin/sh", "-c", `printf '{"name":"x"}' >&3`}, Agent: filepath.Join(dir, "agent")}
	tree := filepath.Join(dir, "tree")
	if err := errors.Join(os.Mkdir(tree, 0o700), os.WriteFile(filepath.Join(tree, "f"), nil, 0o600), os.WriteFile(l.Agent, []byte("agent"), 0o600)); err != nil {
		t.Fatal(err)
	}
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		t.Fatal(err)
	}
	img, err := builder.Build(t.Context(), builder.Options{Store: images, From: "dir:" + tree})
	if err != nil {
		t.Fatal(err)
	}
	r = sleepingVM(t, s, "origin", 2)
	r.Spec.Image, r.Spec.Kernel, r.Boot.ImageID = img.ID, "/dev/null", img.ID
	if r.Spec, err = r.Spec.WithDefaults(); err != nil {
		t.Fatal(err)
	}
	snap = diskSnapshotOf(t, s, r, state.KindNamed)
	if err := s.Sandbox("origin").Delete(t.Context(), DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, true, r.Disk.Layers...)
	return s, l, r, snap
}

// A call that adds references to layers excludes deletions, and waits for one only as long as its context lasts.
func TestAttack_clone_that_begins_during_a_sweep_loses_its_layers(t *testing.T) {
	s, l, r, snap := clonable(t)
	ways := map[string]func(ctx context.Context, name string) error{
		"restore": func(ctx context.Context, name string) error {
			_, err := s.With(l).Clone(ctx, snap, CloneOptions{Name: name})
			return err
		},
		"run-from-disk": func(ctx context.Context, name string) error {
			_, err := s.With(l).Create(ctx, Spec{Name: name, Kernel: "/dev/null"}, CreateOptions{Disk: snap})
			return err
		},
		"take-back": func(ctx context.Context, name string) error {
			other := sleepingVM(t, s, name, 1)
			id := diskSnapshotOf(t, s, other, state.KindNamed)
			_, err := s.State.RestoreTo(ctx, name, id)
			return err
		},
	}
	for name, do := range ways {
		t.Run(name+" waits for a sweep", func(t *testing.T) {
			unlock, err := s.State.LockStore(t.Context(), osfile.Exclusive, time.Second)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := do(ctx, "w-"+name); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want that it waits", err)
			}
			if err := unlock(); err != nil {
				t.Fatal(err)
			}
		})
		t.Run(name+" is done without one", func(t *testing.T) {
			if err := do(t.Context(), "d-"+name); err != nil {
				t.Fatal(err)
			}
		})
	}
	t.Run("a removal and a sweep wait for it", func(t *testing.T) {
		unlock, err := s.State.Share(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		free := diskSnapshotOf(t, s, r, state.KindNamed)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := s.State.RemoveSnapshot(ctx, free); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the removal: %v", err)
		}
		if _, err := s.State.Sweep(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the sweep: %v", err)
		}
		if !s.State.IsThere(free) {
			t.Error("it is removed")
		}
		if err := unlock(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAttack_snapshot_is_removed_while_it_is_restored(t *testing.T) {
	s, l, r, snap := clonable(t)
	s.State.Grace = 0
	keep := diskSnapshotOf(t, s, r, state.KindNamed) // holds the layers for all rounds
	if err := snapshot.Remove(s.State.SnapshotDir(snap)); err != nil {
		t.Fatal(err)
	}
	restored, booted, removed := 0, 0, 0
	for i := range 60 {
		id := diskSnapshotOf(t, s, r, state.KindNamed)
		name := fmt.Sprint("vm-", i)
		var made, gone, swept error
		var wg sync.WaitGroup
		wg.Go(func() {
			if i%2 == 0 {
				_, made = s.With(l).Clone(t.Context(), id, CloneOptions{Name: name})
				return
			}
			_, made = s.With(l).Create(t.Context(), Spec{Name: name, Kernel: "/dev/null"}, CreateOptions{Disk: id})
		})
		wg.Go(func() {
			time.Sleep(time.Duration(i%12) * time.Millisecond)
			gone = s.State.RemoveSnapshot(t.Context(), id)
		})
		wg.Go(func() { _, swept = s.State.Sweep(t.Context()) })
		wg.Wait()
		if swept != nil {
			t.Errorf("%d: the sweep: %v", i, swept)
		}
		got, err := s.State.Load(name)
		switch {
		case made == nil && err == nil:
			if got.Snapshot != "" && !s.State.IsThere(got.Snapshot) {
				t.Fatalf("%d: it was restored, and its snapshot is gone (the removal: %v)", i, gone)
			}
			wantLayers(t, s, true, got.Disk.Layers...)
			if i%2 == 0 {
				restored++
			} else {
				booted++
			}
		case !errors.Is(made, snapshot.ErrNotFound):
			t.Fatalf("%d: %v, and its record: %v", i, made, err)
		}
		if gone == nil {
			removed++
		} else if !errors.Is(gone, spec.ErrSnapshotInUse) {
			t.Fatalf("%d: the removal: %v", i, gone)
		}
	}
	t.Logf("%d restored, %d booted, %d removed", restored, booted, removed)
	if restored+booted == 0 || removed == 0 {
		t.Error("nothing has met")
	}
	if !s.State.IsThere(keep) {
		t.Error("a snapshot that nobody has removed is gone")
	}
}

func TestAttack_run_from_disk_loses_its_layers_to_the_removal_of_the_snapshot(t *testing.T) {
	for i := range 20 {
		s, l, r, snap := clonable(t)
		s.State.Grace = 0
		var made, gone error
		var wg sync.WaitGroup
		wg.Go(func() {
			_, made = s.With(l).Create(t.Context(), spec.VM{Name: "d", Kernel: "/dev/null"}, CreateOptions{Disk: snap})
		})
		wg.Go(func() {
			time.Sleep(time.Duration(i%10) * 500 * time.Microsecond)
			gone = s.State.RemoveSnapshot(t.Context(), snap)
		})
		wg.Wait()
		if gone != nil {
			t.Fatalf("the removal: %v", gone)
		}
		if made == nil {
			wantLayers(t, s, true, r.Disk.Layers...)
		} else if !errors.Is(made, snapshot.ErrNotFound) {
			t.Fatal(made)
		}
	}
}
