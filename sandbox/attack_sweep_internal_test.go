package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// noGrace has sweeps delete what is of today.
func noGrace(t *testing.T) {
	t.Helper()
	t.Cleanup(SetGraceTime(0))
}

// diskSnapshotOf is a snapshot without memory that has the disk of a VM.
func diskSnapshotOf(t *testing.T, s *Store, r *Record, kind string) string {
	t.Helper()
	labels, err := r.labels(kind)
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	if _, err := snapshot.Create(t.Context(), s.snapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: r.Spec.Name, VCPUs: 1, Image: r.Boot.ImageID, Labels: labels, Memory: noMemory{},
		Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: 64 << 20, Layers: r.Disk.Layers}},
	}); err != nil {
		t.Fatal(err)
	}
	return id
}

func wantLayers(t *testing.T, s *Store, want bool, layers ...string) {
	t.Helper()
	for _, l := range layers {
		if _, err := os.Stat(filepath.Join(s.layerDir(), l)); (err == nil) != want {
			t.Errorf("layer %s is there: %v, want %v", l, err == nil, want)
		}
	}
}

// clonable is a store with a snapshot from which VMs are restored and booted that have a shell for a process, and
// nobody else who has its layers.
func clonable(t *testing.T) (s *Store, l Launcher, r *Record, snap string) {
	t.Helper()
	s = tempStore(t)
	dir := t.TempDir()
	l = Launcher{Command: []string{"/bin/sh", "-c", `printf '{"name":"x"}' >&3`}, Agent: filepath.Join(dir, "agent")}
	tree := filepath.Join(dir, "tree")
	if err := errors.Join(os.Mkdir(tree, 0o700), os.WriteFile(filepath.Join(tree, "f"), nil, 0o600), os.WriteFile(l.Agent, []byte("agent"), 0o600)); err != nil {
		t.Fatal(err)
	}
	images, err := image.OpenStore(s.ImageDir())
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
	snap = diskSnapshotOf(t, s, r, kindNamed)
	if err := s.Remove(t.Context(), "origin", true); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, true, r.Disk.Layers...)
	return s, l, r, snap
}

func TestAttack_sweep_takes_a_named_snapshot_that_lacks_a_memory_file_for_gone(t *testing.T) {
	noGrace(t)
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 3)
	id := diskSnapshotOf(t, s, r, kindNamed)
	if err := os.Remove(filepath.Join(s.snapshotDir(id), snapshot.MemoryName)); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), "a", true); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, true, r.Disk.Layers...)
	list, err := s.Snapshots()
	if err != nil || len(list) != 1 || list[0].ID != id || list[0].Problem == "" {
		t.Errorf("it is listed as %+v, %v", list, err)
	}
	// It goes when somebody says so, and what it needed with it.
	if err := s.RemoveSnapshot(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, false, r.Disk.Layers...)
}

func TestAttack_image_is_removed_under_an_incomplete_or_disk_only_snapshot(t *testing.T) {
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 1)
	r.Boot.ImageID = strings.Repeat("1", 64)
	id, only := diskSnapshotOf(t, s, r, kindNamed), diskSnapshotOf(t, s, r, kindDisk)
	if err := errors.Join(os.Remove(filepath.Join(s.snapshotDir(id), snapshot.MemoryName)), s.Remove(t.Context(), "a", true)); err != nil {
		t.Fatal(err)
	}
	users, err := s.ImageUsers(r.Boot.ImageID)
	if err != nil || len(users) != 2 {
		t.Errorf("the image is used by %v (%v), want snapshots %s and %s", users, err, id, only)
	}
}

// The record of one VM is a pipe, so that the sweep waits there in the midst of reading records.
func TestAttack_layer_moves_from_a_record_to_a_new_snapshot_while_the_sweep_reads(t *testing.T) {
	noGrace(t)
	s := tempStore(t)
	b := sleepingVM(t, s, "b", 2)
	// A layer of a VM that is gone, as that of a clone is.
	gone := sleepingVM(t, s, "gone", 1)
	b.Disk = gone.Disk
	if err := s.save(b); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(s.vmDir("gone")); err != nil {
		t.Fatal(err)
	}
	sweepThatWaits(t, s, "a", func() {
		diskSnapshotOf(t, s, b, kindNamed)
		b.Disk = disk.Stack{}
		if err := s.save(b); err != nil {
			t.Fatal(err)
		}
	})
	wantLayers(t, s, true, gone.Disk.Layers...)
}

// sweepThatWaits sweeps a store, and has something done while the sweep reads the record of a VM of this name, which is
// a pipe. Records are read in the order of their names.
func sweepThatWaits(t *testing.T, s *Store, name string, meanwhile func()) {
	t.Helper()
	text, err := encodeRecord(labelled(t, s, name, Asleep, nil))
	if err != nil {
		t.Fatal(err)
	}
	path := s.recordPath(name)
	if err := errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	swept := make(chan error, 1)
	go func() {
		_, err := s.Sweep(context.Background())
		swept <- err
	}()
	// Opening it waits for the reader.
	done := false
	for {
		f, err := openPipe(path, swept)
		if err != nil {
			t.Fatal(err)
		}
		if f == nil {
			break
		}
		if !done {
			meanwhile()
			done = true
		}
		_, err = f.Write(text)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond) // or one reader could get it twice
	}
	if !done {
		t.Fatal("the sweep has read no record")
	}
}

// openPipe opens a named pipe for whoever reads it; nil if the sweep has ended.
func openPipe(path string, swept chan error) (*os.File, error) {
	for {
		fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
		if !errors.Is(err, unix.ENXIO) {
			return nil, err
		}
		select {
		case err := <-swept:
			return nil, err
		case <-time.After(time.Millisecond):
		}
	}
}

func TestAttack_fork_snapshot_is_swept_before_its_child_has_seen_it(t *testing.T) {
	noGrace(t)
	s := tempStore(t)
	parent := sleepingVM(t, s, "p", 1)
	id := diskSnapshotOf(t, s, parent, kindFork)
	// As it is in the instant between reading the child's record and finding the snapshot.
	child := &Record{Version: recordVersion, ID: spec.NewID(), Spec: Spec{Name: "c"}, Phase: Running, Parent: id, Fork: parent.origin()}
	m := &mark{layers: holders{}, snapshots: map[string]string{}, bases: map[string]bool{}, running: map[string]bool{}, unclear: map[string]bool{}}
	lock, err := s.create(child)
	if err != nil {
		t.Fatal(err)
	}
	lock.release()
	m.add(s, child, false)
	have := manifests{}
	if err := s.markSnapshots(t.Context(), m, have); err != nil {
		t.Fatal(err)
	}
	if drop := m.unneeded(s, have, map[string]bool{id: true}, exempt{}); len(drop) != 0 {
		t.Errorf("%v would be deleted", drop)
	}
}

func TestAttack_sleep_between_the_records_and_the_snapshots_of_a_sweep(t *testing.T) {
	noGrace(t)
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 1)
	r.Snapshot = diskSnapshotOf(t, s, r, kindSleep)
	if err := s.save(r); err != nil {
		t.Fatal(err)
	}
	var next string
	sweepThatWaits(t, s, "b", func() { // the record of a has been read
		next = diskSnapshotOf(t, s, r, kindSleep)
		r.Snapshot = next // it was woken, and sleeps again
		if err := s.save(r); err != nil {
			t.Fatal(err)
		}
	})
	if _, err := snapshot.ReadManifest(s.snapshotDir(next)); err != nil {
		t.Errorf("what it sleeps in is gone: %v", err)
	}
}

func TestAttack_unreadable_record_stops_all_collection(t *testing.T) {
	noGrace(t)
	for name, damage := range map[string]func(text []byte) []byte{
		"of a newer version":        func(b []byte) []byte { return bytes.Replace(b, []byte(`"version": 1`), []byte(`"version": 9`), 1) },
		"with a field of a newer":   func(b []byte) []byte { return bytes.Replace(b, []byte(`{`), []byte(`{"soul":true,`), 1) },
		"cut off":                   func(b []byte) []byte { return b[:len(b)-20] },
		"empty, with a trail alone": func([]byte) []byte { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			s := tempStore(t)
			below := sleepingVM(t, s, "below", 1)
			r := sleepingVM(t, s, "a", 1)
			sleep := diskSnapshotOf(t, s, r, kindSleep)
			r.Snapshot = sleep
			// Its disk lies over a layer of a VM that is gone.
			top := filepath.Join(s.layerDir(), r.newLayer())
			under, err := s.absolute(below.Disk)
			if err != nil {
				t.Fatal(err)
			}
			st, err := disk.Fork(top, under, 0)
			if err != nil {
				t.Fatal(err)
			}
			d, err := disk.Open(st, disk.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if err := d.CloseSealed(); err != nil {
				t.Fatal(err)
			}
			r.Disk = s.relative(st)
			text, err := encodeRecord(r)
			if err == nil {
				err = errors.Join(os.WriteFile(s.recordPath("a"), damage(text), 0o600), os.RemoveAll(s.vmDir("below")))
			}
			if err != nil {
				t.Fatal(err)
			}
			junk := sleepingVM(t, s, "junk", 2)
			orphan := diskSnapshotOf(t, s, junk, kindSleep)
			if err := os.RemoveAll(s.vmDir("junk")); err != nil {
				t.Fatal(err)
			}
			_, err = s.Sweep(t.Context())
			if !errors.Is(err, ErrRecord) {
				t.Errorf("it is not reported: %v", err)
			}
			wantLayers(t, s, true, r.Disk.Layers...)
			if !s.isThere(sleep) {
				t.Error("what it slept in is gone")
			}
			wantLayers(t, s, false, junk.Disk.Layers...)
			if s.isThere(orphan) {
				t.Error("the sleep of a VM that is gone is still there")
			}
		})
	}
}

func TestAttack_young_files_are_swept_before_somebody_names_them(t *testing.T) {
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 2)
	old, young := r.Disk.Layers[0], r.Disk.Layers[1]
	sleep := diskSnapshotOf(t, s, r, kindSleep)
	past := time.Now().Add(-2 * graceTime)
	if err := errors.Join(os.Chtimes(filepath.Join(s.layerDir(), old), past, past), os.RemoveAll(s.vmDir("a"))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, true, old, young) // the snapshot names both
	if !s.isThere(sleep) {
		t.Fatal("a snapshot of this moment is gone")
	}
	if err := snapshot.Remove(s.snapshotDir(sleep)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, false, old)
	wantLayers(t, s, true, young)
}

func TestAttack_layer_that_somebody_has_open_is_swept(t *testing.T) {
	noGrace(t)
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 1)
	st, err := s.absolute(r.Disk)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), "a", true); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, true, r.Disk.Layers...)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, false, r.Disk.Layers...)
}

// Whoever names what another one names keeps those who delete out, and waits for them no longer than its context lasts.
func TestAttack_clone_that_begins_during_a_sweep_loses_its_layers(t *testing.T) {
	s, l, r, snap := clonable(t)
	ways := map[string]func(ctx context.Context, name string) error{
		"restore": func(ctx context.Context, name string) error {
			_, err := s.RestoreWith(ctx, l, snap, RestoreChanges{Name: name})
			return err
		},
		"run-from-disk": func(ctx context.Context, name string) error {
			_, err := s.RunFromDisk(ctx, l, Spec{Name: name, Kernel: "/dev/null"}, snap)
			return err
		},
		"take-back": func(ctx context.Context, name string) error {
			other := sleepingVM(t, s, name, 1)
			id := diskSnapshotOf(t, s, other, kindNamed)
			_, err := s.RestoreTo(ctx, name, id)
			return err
		},
	}
	for name, do := range ways {
		t.Run(name+" waits for a sweep", func(t *testing.T) {
			unlock, err := s.lockStore(t.Context(), osfile.Exclusive, time.Second)
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
		unlock, err := s.share(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		free := diskSnapshotOf(t, s, r, kindNamed)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := s.RemoveSnapshot(ctx, free); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the removal: %v", err)
		}
		if _, err := s.Sweep(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the sweep: %v", err)
		}
		if !s.isThere(free) {
			t.Error("it is removed")
		}
		if err := unlock(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAttack_snapshot_is_removed_while_it_is_restored(t *testing.T) {
	noGrace(t)
	s, l, r, snap := clonable(t)
	keep := diskSnapshotOf(t, s, r, kindNamed) // its layers are wanted again and again
	if err := snapshot.Remove(s.snapshotDir(snap)); err != nil {
		t.Fatal(err)
	}
	restored, booted, removed := 0, 0, 0
	for i := range 60 {
		id := diskSnapshotOf(t, s, r, kindNamed)
		name := fmt.Sprint("vm-", i)
		var made, gone, swept error
		var wg sync.WaitGroup
		wg.Go(func() {
			if i%2 == 0 {
				_, made = s.RestoreWith(t.Context(), l, id, RestoreChanges{Name: name})
				return
			}
			_, made = s.RunFromDisk(t.Context(), l, Spec{Name: name, Kernel: "/dev/null"}, id)
		})
		wg.Go(func() {
			time.Sleep(time.Duration(i%12) * time.Millisecond)
			gone = s.RemoveSnapshot(t.Context(), id)
		})
		wg.Go(func() { _, swept = s.Sweep(t.Context()) })
		wg.Wait()
		if swept != nil {
			t.Errorf("%d: the sweep: %v", i, swept)
		}
		got, err := s.load(name)
		switch {
		case made == nil && err == nil:
			if got.Snapshot != "" && !s.isThere(got.Snapshot) {
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
		} else if !errors.Is(gone, ErrSnapshotInUse) {
			t.Fatalf("%d: the removal: %v", i, gone)
		}
	}
	t.Logf("%d restored, %d booted, %d removed", restored, booted, removed)
	if restored+booted == 0 || removed == 0 {
		t.Error("nothing has met")
	}
	if !s.isThere(keep) {
		t.Error("a snapshot that nobody has removed is gone")
	}
}

func TestAttack_run_from_disk_loses_its_layers_to_the_removal_of_the_snapshot(t *testing.T) {
	noGrace(t)
	for i := range 20 {
		s, l, r, snap := clonable(t)
		var made, gone error
		var wg sync.WaitGroup
		wg.Go(func() { _, made = s.RunFromDisk(t.Context(), l, Spec{Name: "d", Kernel: "/dev/null"}, snap) })
		wg.Go(func() {
			time.Sleep(time.Duration(i%10) * 500 * time.Microsecond)
			gone = s.RemoveSnapshot(t.Context(), snap)
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
