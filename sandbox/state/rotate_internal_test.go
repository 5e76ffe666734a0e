package state

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// rotating makes a sleeping VM with two snapshots: the good one, and the one that it sleeps in.
func rotating(t *testing.T, s *Store) (good, last string) {
	t.Helper()
	r := sleepingVM(t, s, "a", 1)
	good = snapshotOf(t, s, r, KindNamed, time.Now())
	r.Snapshot = snapshotOf(t, s, r, KindSleep, time.Now())
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	return good, r.Snapshot
}

// wakes returns the snapshot that a wake restores. With asleep the VM, which has no process, sleeps in that one first.
func wakes(t *testing.T, s *Store, asleep string) (string, error) {
	t.Helper()
	r, err := s.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	if asleep != "" {
		r.Snapshot, r.Previous = asleep, ""
		if err := s.Save(r); err != nil {
			t.Fatal(err)
		}
	}
	l, err := s.Metadata("a")
	if err != nil {
		t.Fatal(err)
	}
	if r, err = s.RotateIfDue(t.Context(), r, l.Rotate); err != nil {
		return "", err
	}
	on, err := s.Load("a")
	if err != nil || on.Snapshot != r.Snapshot || !on.Rotated.Equal(r.Rotated) {
		t.Errorf("the wake goes on with %s, and on disk is %+v, %v", r.Snapshot, on, err)
	}
	return r.Snapshot, nil
}

func setRotation(t *testing.T, s *Store, rot spec.Rotation) (spec.Metadata, error) {
	t.Helper()
	return s.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Rotate = rot; return nil })
}

func TestRotate_begins_each_wake_anew(t *testing.T) {
	s := tempStore(t)
	good, last := rotating(t, s)
	if got, err := wakes(t, s, ""); err != nil || got != last {
		t.Errorf("without a rotation it wakes from %s, %v", got, err)
	}
	l, err := setRotation(t, s, spec.Rotation{To: good[:8]})
	if err != nil || l.Rotate.To != good {
		t.Fatalf("%+v, %v, want the whole id", l.Rotate, err)
	}
	for range 3 {
		if got, err := wakes(t, s, last); err != nil || got != good {
			t.Errorf("it wakes from %s, %v, want %s", got, err, good)
		}
		if r, err := s.Load("a"); err != nil || r.Previous != last {
			t.Errorf("what it leaves is not kept: %+v, %v", r, err)
		}
		// A second wake right after it finds the VM there already.
		if got, err := wakes(t, s, ""); err != nil || got != good {
			t.Errorf("it wakes from %s, %v, want %s", got, err, good)
		}
	}
	if _, err := s.RestoreTo(t.Context(), "a", last); !errors.Is(err, spec.ErrMetadata) || !strings.Contains(err.Error(), "with Rotate") {
		t.Errorf("taking it back to where no wake leaves it: %v", err)
	}
	if err := s.RemoveSnapshot(t.Context(), good); !errors.Is(err, spec.ErrSnapshotInUse) {
		t.Errorf("removing what it begins anew from: %v, want ErrSnapshotInUse", err)
	}
	if _, err := setRotation(t, s, spec.Rotation{}); err != nil {
		t.Fatal(err)
	}
	if r, err := s.RestoreTo(t.Context(), "a", last); err != nil || r.Snapshot != last {
		t.Errorf("without the rotation: %+v, %v", r, err)
	}
	if got, err := wakes(t, s, ""); err != nil || got != last {
		t.Errorf("without the rotation it wakes from %s, %v", got, err)
	}
}

func TestRotate_begins_anew_once_for_each_time(t *testing.T) {
	s := tempStore(t)
	good, last := rotating(t, s)
	at := time.Now().Add(-90 * time.Minute).UTC().Truncate(time.Millisecond)
	if _, err := setRotation(t, s, spec.Rotation{To: good, At: time.Now().Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if got, err := wakes(t, s, ""); err != nil || got != last {
		t.Errorf("before the time it wakes from %s, %v", got, err)
	}
	if _, err := setRotation(t, s, spec.Rotation{To: good, At: at, Every: 3600}); err != nil {
		t.Fatal(err)
	}
	if got, err := wakes(t, s, ""); err != nil || got != good {
		t.Errorf("at the time it wakes from %s, %v", got, err)
	}
	l, err := s.Metadata("a")
	if err != nil || !l.Rotate.At.Equal(at.Add(2*time.Hour)) || l.Rotate.To != good {
		t.Errorf("next is %+v, %v: what was missed is to be left out", l.Rotate, err)
	}
	if got, err := wakes(t, s, last); err != nil || got != last {
		t.Errorf("the wake after that is from %s, %v", got, err)
	}
	// Without a period the rotation happens once.
	if _, err := setRotation(t, s, spec.Rotation{To: good, At: at}); err != nil {
		t.Fatal(err)
	}
	r, err := s.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	r.Rotated = time.Time{}
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	if got, err := wakes(t, s, last); err != nil || got != good {
		t.Errorf("at the time it wakes from %s, %v", got, err)
	}
	if l, err := s.Metadata("a"); err != nil || l.Rotate != (spec.Rotation{}) {
		t.Errorf("left is %+v, %v", l.Rotate, err)
	}
}

// If the process is killed after it took the VM back and before it updated the metadata, the next wake must not
// lose later work.
func TestRotate_that_was_killed_half_way_is_not_done_twice(t *testing.T) {
	for name, every := range map[string]int64{"once": 0, "again and again": 3600} {
		t.Run(name, func(t *testing.T) {
			s := tempStore(t)
			good, last := rotating(t, s)
			at := time.Now().Add(-time.Minute).UTC().Truncate(time.Millisecond)
			if _, err := setRotation(t, s, spec.Rotation{To: good, At: at, Every: every}); err != nil {
				t.Fatal(err)
			}
			r, err := s.restoreTo(t.Context(), "a", good, func(r *Record) { r.Rotated = at })
			if err != nil || r.Snapshot != good {
				t.Fatalf("%+v, %v", r, err)
			}
			if got, err := wakes(t, s, last); err != nil || got != last {
				t.Errorf("it wakes from %s, %v, want what it slept in since", got, err)
			}
			l, err := s.Metadata("a")
			if want := at.Add(time.Hour); err != nil || every > 0 && !l.Rotate.At.Equal(want) || every == 0 && l.Rotate != (spec.Rotation{}) {
				t.Errorf("left is %+v, %v", l.Rotate, err)
			}
		})
	}
}

func TestSetLabel_refuses_a_rotation_that_no_wake_could_do(t *testing.T) {
	s := tempStore(t)
	good, _ := rotating(t, s)
	r, err := s.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	other := withMetadata(t, s, "b", Asleep, nil)
	if _, err := setRotation(t, s, spec.Rotation{To: good}); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		rot  spec.Rotation
		want error
	}{
		"no such snapshot":        {spec.Rotation{To: "beef"}, snapshot.ErrNotFound},
		"another VM's":            {spec.Rotation{To: snapshotOf(t, s, other, KindNamed, time.Now())}, spec.ErrForeignSnapshot},
		"one of the disk":         {spec.Rotation{To: snapshotOf(t, s, r, KindDisk, time.Now())}, spec.ErrDiskOnly},
		"one that a fork made":    {spec.Rotation{To: snapshotOf(t, s, r, KindFork, time.Now())}, spec.ErrMetadata},
		"no snapshot, but a time": {spec.Rotation{At: time.Now()}, spec.ErrMetadata},
		"an id without end":       {spec.Rotation{To: strings.Repeat("a", 65)}, snapshot.ErrNotFound},
		"no time, but a period":   {spec.Rotation{To: good, Every: 60}, spec.ErrMetadata},
		"a negative period":       {spec.Rotation{To: good, At: time.Now(), Every: -1}, spec.ErrMetadata},
	} {
		if _, err := setRotation(t, s, tt.rot); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if l, err := s.Metadata("a"); err != nil || l.Rotate != (spec.Rotation{To: good}) {
		t.Errorf("what was refused has changed it: %+v, %v", l.Rotate, err)
	}
	r.Spec.Volumes = []spec.VolumeMount{{Name: "v", Path: "/data"}}
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	if _, err := setRotation(t, s, spec.Rotation{}); err != nil {
		t.Fatal(err)
	}
	if _, err := setRotation(t, s, spec.Rotation{To: good}); !errors.Is(err, spec.ErrMetadata) {
		t.Errorf("one that writes to a volume: %v, want ErrMetadata", err)
	}
	if err := (&Record{}).SetMetadata(&spec.Metadata{Rotate: spec.Rotation{To: good}}); !errors.Is(err, spec.ErrMetadata) {
		t.Errorf("one that is yet to be made: %v, want ErrMetadata", err)
	}
	if (spec.Metadata{Rotate: spec.Rotation{To: good}}).ForChild().Rotate != (spec.Rotation{}) {
		t.Error("a fork begins anew from its parent's snapshot")
	}
}

func TestSweep_keeps_what_a_rotation_names(t *testing.T) {
	s := tempStore(t)
	_, last := rotating(t, s)
	r, err := s.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	old := snapshotOf(t, s, r, KindSleep, time.Unix(1, 0))
	if _, err := setRotation(t, s, spec.Rotation{To: old}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []bool{true, false} {
		if _, err := s.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := s.FindSnapshot(old); (err == nil) != want {
			t.Errorf("named %v: %v", want, err)
		}
		if _, err := s.FindSnapshot(last); err != nil {
			t.Error(err)
		}
		if _, err := setRotation(t, s, spec.Rotation{}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRotate_is_told_of(t *testing.T) {
	s := tempStore(t)
	good, _ := rotating(t, s)
	if _, err := setRotation(t, s, spec.Rotation{To: good}); err != nil {
		t.Fatal(err)
	}
	if _, err := wakes(t, s, ""); err != nil {
		t.Fatal(err)
	}
	if types, e := told(t, s); e.Type != events.Restored || e.Cause != events.Rotation || e.Details.Snapshot != good {
		t.Errorf("told: %v, the last %+v", types, e)
	}
}
