package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// crashed returns a VM that slept, woke, wrote a block durably and was killed. started returns the arguments with
// which its process was started.
func crashed(t *testing.T) (s *Host, l pool.Launcher, r *state.Record, sleep string, started func() []string) {
	t.Helper()
	s = tempStore(t)
	r = sleepingVM(t, s, "a", 1)
	r.Spec.DiskMiB, r.Spec.VCPUs, r.Spec.MemoryMiB = 64, 1, 256
	sleep = diskSnapshotOf(t, s, r, state.KindSleep)
	r.Snapshot = sleep
	write(t, s, r, 7)
	if err := s.State.Save(r); err != nil {
		t.Fatal(err)
	}
	said := filepath.Join(t.TempDir(), "args")
	l = pool.Launcher{Command: []string{"/bin/sh", "-c", `echo "$@" >> ` + said + `; printf '{"name":"a"}' >&3`, "sh"}}
	return s, l, r, sleep, func() []string {
		text, err := os.ReadFile(said)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSpace(string(text)), "\n")
	}
}

// write makes a VM that crashed after it wrote a block to a new layer of its disk.
func write(t *testing.T, s *Host, r *state.Record, word byte) {
	t.Helper()
	below, err := s.State.Absolute(r.Disk)
	if err != nil {
		t.Fatal(err)
	}
	st, err := disk.Fork(filepath.Join(s.State.LayerDir(), r.NewLayer()), below, 0)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.WriteAt(bytes.Repeat([]byte{word}, disk.BlockSize), 9*disk.BlockSize)
	if err := errors.Join(err, d.Flush(), d.Close()); err != nil {
		t.Fatal(err)
	}
	r.Disk, r.Phase, r.PID, r.Problem = s.State.Relative(st), state.Crashed, 0, "its process was killed"
}

// wantWord checks the block that write wrote.
func wantWord(t *testing.T, s *Host, st disk.Stack, want byte) {
	t.Helper()
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	got := make([]byte, 1)
	if _, err := d.ReadAt(got, 9*disk.BlockSize); err != nil || got[0] != want {
		t.Errorf("the disk says %d, want %d (%v)", got[0], want, err)
	}
}

func abandonedOf(t *testing.T, s *Host) (ids []string) {
	t.Helper()
	list, err := s.State.Snapshots()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		if i.Kind == state.KindAbandoned {
			ids = append(ids, i.ID)
		}
	}
	return ids
}

func TestAttack_automatic_wake_rolls_a_crashed_vm_back_to_its_last_sleep(t *testing.T) {
	for name, up := range map[string]func(s *Host, l pool.Launcher) error{
		"command over HTTP": func(s *Host, l pool.Launcher) error {
			_, err := s.With(l).Sandbox("a").BringUp(context.Background())
			return err
		},
		"connection, packet or timer": func(s *Host, l pool.Launcher) error {
			_, hold, err := s.With(l).Sandbox("a").wakeWithLock(context.Background())
			if hold != nil {
				hold.Release()
			}
			return err
		},
		"start": func(s *Host, l pool.Launcher) error {
			_, err := s.With(l).Sandbox("a").Start(context.Background(), StartOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, l, r, sleep, started := crashed(t)
			s.State.Grace = 0
			if err := up(s, l); err != nil {
				t.Fatal(err)
			}
			if args := started(); len(args) != 1 || strings.Contains(args[0], sleep) {
				t.Errorf("it was started by %q, want a boot of its disk", args)
			}
			if _, err := s.State.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			got, err := s.State.Load("a")
			if err != nil || !slices.Equal(got.Disk.Layers, r.Disk.Layers) {
				t.Fatalf("its record is %+v, %v", got, err)
			}
			st, err := s.State.Absolute(got.Disk)
			if err != nil {
				t.Fatal(err)
			}
			wantWord(t, s, st, 7)
		})
	}
}

func TestAttack_taking_a_crashed_vm_back_deletes_what_it_had_written(t *testing.T) {
	for name, back := range map[string]func(s *Host, l pool.Launcher, sleep string) error{
		"wake": func(s *Host, l pool.Launcher, _ string) error {
			_, err := s.With(l).Sandbox("a").Wake(context.Background())
			return err
		},
		"restore": func(s *Host, _ pool.Launcher, sleep string) error {
			_, err := s.State.RestoreTo(context.Background(), "a", sleep)
			return err
		},
		"restore of one that has stopped": func(s *Host, _ pool.Launcher, sleep string) error {
			r, err := s.State.Load("a")
			if err != nil {
				return err
			}
			r.Phase = state.Stopped
			if err := s.State.Save(r); err != nil {
				return err
			}
			_, err = s.State.RestoreTo(context.Background(), "a", sleep)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, l, r, sleep, _ := crashed(t)
			s.State.Grace = 0
			if err := back(s, l, sleep); err != nil {
				t.Fatal(err)
			}
			got, err := s.State.Load("a")
			if err != nil || got.Phase != state.Asleep || len(got.Disk.Layers) != len(r.Disk.Layers)-1 {
				t.Fatalf("its record is %+v, %v", got, err)
			}
			if _, err := s.State.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			ids := abandonedOf(t, s)
			if len(ids) != 1 {
				t.Fatalf("%d disks are kept", len(ids))
			}
			st, err := s.State.SnapshotDisk(ids[0])
			if err != nil {
				t.Fatal(err)
			}
			wantWord(t, s, st, 7)
			if err := disk.Verify(st); err != nil {
				t.Errorf("no VM can boot from it: %v", err)
			}
			var told struct{ Abandoned []string }
			text, err := s.Sandbox("a").Inspect(t.Context())
			if err = errors.Join(err, json.Unmarshal(text, &told)); err != nil || !slices.Equal(told.Abandoned, ids) {
				t.Errorf("inspect says %v, %v", told, err)
			}
			top := r.Disk.Layers[len(r.Disk.Layers)-1]
			if _, err := s.State.TagSnapshot(ids[0], []string{"look"}); err != nil {
				t.Fatal(err)
			}
			for _, keep := range []bool{true, false} {
				if _, err := s.State.SweepAbandoned(t.Context()); err != nil {
					t.Fatal(err)
				}
				wantLayers(t, s, keep, top)
				if _, err := s.State.TagSnapshot(ids[0], nil); keep && err != nil {
					t.Fatal(err)
				}
			}
			wantLayers(t, s, true, got.Disk.Layers...)
		})
	}
}

func TestAttack_removed_vm_leaves_the_disks_that_it_had_left(t *testing.T) {
	s, l, r, _, _ := crashed(t)
	if _, err := s.With(l).Sandbox("a").Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Sandbox("a").Delete(t.Context(), DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if ids := abandonedOf(t, s); len(ids) != 0 {
		t.Errorf("%v are left", ids)
	}
	wantLayers(t, s, false, r.Disk.Layers...)
}

func TestAttack_guest_that_ends_again_and_again_under_a_rotation_fills_the_disk(t *testing.T) {
	s, _, r, sleep, _ := crashed(t)
	s.State.Grace = 0
	if _, err := s.State.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Rotate = spec.Rotation{To: sleep}; return nil }); err != nil {
		t.Fatal(err)
	}
	for word := range byte(4) {
		before, err := s.State.Load("a")
		if err != nil {
			t.Fatal(err)
		}
		if word > 0 {
			write(t, s, before, word)
			before.Phase = state.Stopped
			if err := s.State.Save(before); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.State.RotateIfDue(events.WithCause(t.Context(), events.Packet), before, spec.Rotation{To: sleep}); err != nil {
			t.Fatal(err)
		}
		if ids := abandonedOf(t, s); len(ids) != 1 {
			t.Errorf("%d disks are kept", len(ids))
		}
	}
	files, err := os.ReadDir(s.State.LayerDir())
	if err != nil || len(files) != len(r.Disk.Layers) {
		t.Errorf("there are %d layers (%v), want %d", len(files), err, len(r.Disk.Layers))
	}
}

func TestAttack_crashed_vm_that_was_brought_up_meanwhile_is_taken_back(t *testing.T) {
	s, l, r, _, _ := crashed(t)
	r.Phase, r.Exit = state.Stopped, &state.ExitRecord{Reason: "powered-off", Time: time.Now()}
	if err := s.State.Save(r); err != nil {
		t.Fatal(err)
	}
	if err := s.rewind(t.Context(), "a"); !errors.Is(err, ErrRunning) {
		t.Errorf("got %v, want that it is looked at again", err)
	}
	if _, err := s.With(l).Sandbox("a").Wake(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("got %v, want ErrNotRunning", err)
	}
	if got, err := s.State.Load("a"); err != nil || !slices.Equal(got.Disk.Layers, r.Disk.Layers) {
		t.Errorf("its disk is %+v, %v", got, err)
	}
}

func TestAttack_rotation_deletes_a_disk_that_somebody_has_tagged(t *testing.T) {
	s, _, _, sleep, _ := crashed(t)
	s.State.Grace = 0
	if _, err := s.State.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Rotate = spec.Rotation{To: sleep}; return nil }); err != nil {
		t.Fatal(err)
	}
	tagged := ""
	for word := range byte(2) {
		before, err := s.State.Load("a")
		if err != nil {
			t.Fatal(err)
		}
		if word > 0 {
			write(t, s, before, word)
			before.Phase = state.Stopped
			if err := s.State.Save(before); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.State.RotateIfDue(events.WithCause(t.Context(), events.Packet), before, spec.Rotation{To: sleep}); err != nil {
			t.Fatal(err)
		}
		ids := abandonedOf(t, s)
		if tagged == "" {
			tagged = ids[0]
			if _, err := s.State.TagSnapshot(tagged, []string{"keep"}); err != nil {
				t.Fatal(err)
			}
		} else if !slices.Contains(ids, tagged) {
			t.Errorf("%s is gone, there are %v", tagged, ids)
		}
	}
}
