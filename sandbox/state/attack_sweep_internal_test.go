package state

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// diskSnapshotOf makes a snapshot without memory that has the disk of a VM.
func diskSnapshotOf(t *testing.T, s *Store, r *Record, kind string) string {
	t.Helper()
	labels, err := s.Labels(r, kind)
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	if _, err := snapshot.Create(t.Context(), s.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: r.Spec.Name, VCPUs: 1, Image: r.Boot.ImageID, Labels: labels, Memory: NoMemory{},
		Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: 64 << 20, Layers: r.Disk.Layers}},
	}); err != nil {
		t.Fatal(err)
	}
	return id
}

func wantLayers(t *testing.T, s *Store, want bool, layers ...string) {
	t.Helper()
	for _, l := range layers {
		if _, err := os.Stat(filepath.Join(s.LayerDir(), l)); (err == nil) != want {
			t.Errorf("layer %s is there: %v, want %v", l, err == nil, want)
		}
	}
}

func TestAttack_sweep_takes_a_named_snapshot_that_lacks_a_memory_file_for_gone(t *testing.T) {
	s := tempStore(t)
	s.Grace = 0
	r := sleepingVM(t, s, "a", 3)
	id := diskSnapshotOf(t, s, r, KindNamed)
	if err := os.Remove(filepath.Join(s.SnapshotDir(id), snapshot.MemoryName)); err != nil {
		t.Fatal(err)
	}
	if err := s.remove(t.Context(), "a", true); err != nil {
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
	// A removal deletes it, and the layers that only it needed.
	if err := s.RemoveSnapshot(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, false, r.Disk.Layers...)
}

func TestAttack_image_is_removed_under_an_incomplete_or_disk_only_snapshot(t *testing.T) {
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 1)
	r.Boot.ImageID = strings.Repeat("1", 64)
	id, only := diskSnapshotOf(t, s, r, KindNamed), diskSnapshotOf(t, s, r, KindDisk)
	if err := errors.Join(os.Remove(filepath.Join(s.SnapshotDir(id), snapshot.MemoryName)), s.remove(t.Context(), "a", true)); err != nil {
		t.Fatal(err)
	}
	users, err := s.ImageUsers(r.Boot.ImageID)
	if err != nil || len(users) != 2 {
		t.Errorf("the image is used by %v (%v), want snapshots %s and %s", users, err, id, only)
	}
}

// The record of one VM is a pipe, so that the sweep waits there while it reads records.
func TestAttack_layer_moves_from_a_record_to_a_new_snapshot_while_the_sweep_reads(t *testing.T) {
	s := tempStore(t)
	s.Grace = 0
	b := sleepingVM(t, s, "b", 2)
	// The disk has a layer of a removed VM, like that of a clone.
	gone := sleepingVM(t, s, "gone", 1)
	b.Disk = gone.Disk
	if err := s.Save(b); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(s.VMDir("gone")); err != nil {
		t.Fatal(err)
	}
	sweepThatWaits(t, s, "a", func() {
		diskSnapshotOf(t, s, b, KindNamed)
		b.Disk = disk.Stack{}
		if err := s.Save(b); err != nil {
			t.Fatal(err)
		}
	})
	wantLayers(t, s, true, gone.Disk.Layers...)
}

// sweepThatWaits sweeps a store, and calls meanwhile while the sweep reads the record of the VM with this name,
// which is a pipe. A sweep reads records in the order of their names.
func sweepThatWaits(t *testing.T, s *Store, name string, meanwhile func()) {
	t.Helper()
	text, err := EncodeRecord(withMetadata(t, s, name, Asleep, nil))
	if err != nil {
		t.Fatal(err)
	}
	path := s.RecordPath(name)
	if err := errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	swept := make(chan error, 1)
	go func() {
		_, err := s.Sweep(context.Background())
		swept <- err
	}()
	// openPipe waits for the reader.
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
		time.Sleep(5 * time.Millisecond) // otherwise one reader could get the text twice
	}
	if !done {
		t.Fatal("the sweep has read no record")
	}
}

// openPipe waits for a reader of a named pipe and opens it. It returns nil if the sweep has ended.
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
	s := tempStore(t)
	s.Grace = 0
	parent := sleepingVM(t, s, "p", 1)
	id := diskSnapshotOf(t, s, parent, KindFork)
	// The state between reading the child's record and finding the snapshot.
	child := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "c"}, Phase: Running, Parent: id, Fork: parent.Origin()}
	m := &mark{layers: holders{}, snapshots: map[string]string{}, bases: map[string]bool{}, running: map[string]bool{}, unclear: map[string]bool{}}
	lock, err := s.Create(child)
	if err != nil {
		t.Fatal(err)
	}
	lock.Release()
	m.add(s, child, false)
	have := manifests{}
	if err := s.markSnapshots(t.Context(), m, have); err != nil {
		t.Fatal(err)
	}
	if drop := m.unneeded(s, have, map[string]bool{id: true}, Exempt{}); len(drop) != 0 {
		t.Errorf("%v would be deleted", drop)
	}
}

func TestAttack_sleep_between_the_records_and_the_snapshots_of_a_sweep(t *testing.T) {
	s := tempStore(t)
	s.Grace = 0
	r := sleepingVM(t, s, "a", 1)
	r.Snapshot = diskSnapshotOf(t, s, r, KindSleep)
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	var next string
	sweepThatWaits(t, s, "b", func() { // the sweep has read the record of a
		next = diskSnapshotOf(t, s, r, KindSleep)
		r.Snapshot = next // it woke, and sleeps again
		if err := s.Save(r); err != nil {
			t.Fatal(err)
		}
	})
	if _, err := snapshot.ReadManifest(s.SnapshotDir(next)); err != nil {
		t.Errorf("what it sleeps in is gone: %v", err)
	}
}

func TestAttack_unreadable_record_stops_all_collection(t *testing.T) {
	for name, damage := range map[string]func(text []byte) []byte{
		"of a newer version":        func(b []byte) []byte { return bytes.Replace(b, []byte(`"version": 1`), []byte(`"version": 9`), 1) },
		"with a field of a newer":   func(b []byte) []byte { return bytes.Replace(b, []byte(`{`), []byte(`{"soul":true,`), 1) },
		"cut off":                   func(b []byte) []byte { return b[:len(b)-20] },
		"empty, with a trail alone": func([]byte) []byte { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			s := tempStore(t)
			s.Grace = 0
			below := sleepingVM(t, s, "below", 1)
			r := sleepingVM(t, s, "a", 1)
			sleep := diskSnapshotOf(t, s, r, KindSleep)
			r.Snapshot = sleep
			// Its disk lies over a layer of a removed VM.
			top := filepath.Join(s.LayerDir(), r.NewLayer())
			under, err := s.Absolute(below.Disk)
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
			r.Disk = s.Relative(st)
			text, err := EncodeRecord(r)
			if err == nil {
				err = errors.Join(os.WriteFile(s.RecordPath("a"), damage(text), 0o600), os.RemoveAll(s.VMDir("below")))
			}
			if err != nil {
				t.Fatal(err)
			}
			junk := sleepingVM(t, s, "junk", 2)
			orphan := diskSnapshotOf(t, s, junk, KindSleep)
			if err := os.RemoveAll(s.VMDir("junk")); err != nil {
				t.Fatal(err)
			}
			_, err = s.Sweep(t.Context())
			if !errors.Is(err, spec.ErrRecord) {
				t.Errorf("it is not reported: %v", err)
			}
			wantLayers(t, s, true, r.Disk.Layers...)
			if !s.IsThere(sleep) {
				t.Error("what it slept in is gone")
			}
			wantLayers(t, s, false, junk.Disk.Layers...)
			if s.IsThere(orphan) {
				t.Error("the sleep of a VM that is gone is still there")
			}
		})
	}
}

func TestAttack_young_files_are_swept_before_somebody_names_them(t *testing.T) {
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 2)
	old, young := r.Disk.Layers[0], r.Disk.Layers[1]
	sleep := diskSnapshotOf(t, s, r, KindSleep)
	past := time.Now().Add(-2 * graceTime)
	if err := errors.Join(os.Chtimes(filepath.Join(s.LayerDir(), old), past, past), os.RemoveAll(s.VMDir("a"))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, true, old, young) // the snapshot names both
	if !s.IsThere(sleep) {
		t.Fatal("a snapshot of this moment is gone")
	}
	if err := snapshot.Remove(s.SnapshotDir(sleep)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, false, old)
	wantLayers(t, s, true, young)
}

func TestAttack_layer_that_somebody_has_open_is_swept(t *testing.T) {
	s := tempStore(t)
	s.Grace = 0
	r := sleepingVM(t, s, "a", 1)
	st, err := s.Absolute(r.Disk)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.remove(t.Context(), "a", true); err != nil {
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

func TestAttack_vm_that_is_renamed_during_a_sweep_is_swept(t *testing.T) {
	s := tempStore(t)
	s.Grace = 0
	r := sleepingVM(t, s, "z", 1)
	r.Snapshot = diskSnapshotOf(t, s, r, KindSleep)
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	renamed := make(chan error, 1)
	sweepThatWaits(t, s, "b", func() { // the sweep has listed z
		go func() { renamed <- s.Rename(context.Background(), "z", "y") }()
		select {
		case err := <-renamed:
			renamed <- err
		case <-time.After(200 * time.Millisecond): // it waits for the sweep
		}
	})
	if err := <-renamed; err != nil {
		t.Fatal(err)
	}
	if got, err := s.Get("y"); err != nil || got.Snapshot != r.Snapshot {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := snapshot.ReadManifest(s.SnapshotDir(r.Snapshot)); err != nil {
		t.Errorf("what it sleeps in is gone: %v", err)
	}
	wantLayers(t, s, true, r.Disk.Layers...)
}
