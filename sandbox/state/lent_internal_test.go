package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// notDue makes the store put off sweeps that nobody asks for.
func notDue(s *Store) { s.swept(lastSweep{int64(time.Hour), FewToSweep + 1}) }

func TestRemove_reads_nothing_of_other_VMs_while_no_sweep_is_due(t *testing.T) {
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 3)
	sleep := diskSnapshotOf(t, s, r, KindSleep)
	r.Snapshot = sleep
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	// A pipe in place of a record blocks its readers.
	if err := errors.Join(os.Mkdir(s.VMDir("other"), 0o700), unix.Mkfifo(s.RecordPath("other"), 0o600)); err != nil {
		t.Fatal(err)
	}
	notDue(s)
	done := make(chan error, 1)
	go func() { done <- s.remove(t.Context(), "a", false) }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it reads the record of another VM")
	}
	wantLayers(t, s, false, r.Disk.Layers...)
	if s.IsThere(sleep) {
		t.Error("its sleep is still there")
	}
}

func TestRemove_leaves_what_others_have_of_the_VM(t *testing.T) {
	for name, borrow := range map[string]func(t *testing.T, s *Store, r *Record) (snapshot string){
		"a clone has its disk": func(t *testing.T, s *Store, r *Record) string {
			c := sleepingVM(t, s, "c", 1)
			c.Disk.Layers = append(r.Disk.Layers[:len(r.Disk.Layers):len(r.Disk.Layers)], c.Disk.Layers...)
			if err := s.Save(c); err != nil {
				t.Fatal(err)
			}
			return ""
		},
		"a clone comes back from its sleep": func(t *testing.T, s *Store, r *Record) string {
			id := diskSnapshotOf(t, s, r, KindSleep)
			r.Snapshot = id
			c := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "c"}, Phase: Asleep, Snapshot: id, Parent: id, Disk: r.Disk}
			l, err := s.Create(c)
			if err = errors.Join(err, s.Save(r)); err != nil {
				t.Fatal(err)
			}
			l.Release()
			return id
		},
		"a snapshot of it has a name": func(t *testing.T, s *Store, r *Record) string { return diskSnapshotOf(t, s, r, KindNamed) },
		"a sleep of it has a tag": func(t *testing.T, s *Store, r *Record) string {
			id := diskSnapshotOf(t, s, r, KindSleep)
			r.Snapshot = id
			if err := s.Save(r); err != nil {
				t.Fatal(err)
			}
			if _, err := s.TagSnapshot(id, []string{"release"}); err != nil {
				t.Fatal(err)
			}
			return id
		},
		"its record has forgotten a sleep": func(t *testing.T, s *Store, r *Record) string {
			id := diskSnapshotOf(t, s, r, KindSleep)
			if err := s.AddSleep(r, SleepRecord{Snapshot: id}); err != nil {
				t.Fatal(err)
			}
			for range MaxSleeps {
				if err := s.AddSleep(r, SleepRecord{Snapshot: spec.NewID()}); err != nil {
					t.Fatal(err)
				}
			}
			if len(r.Sleeps) != MaxSleeps {
				t.Fatalf("it has %d sleeps", len(r.Sleeps))
			}
			return id
		},
	} {
		for _, older := range []bool{false, true} {
			if older && name == "its record has forgotten a sleep" {
				continue // a sweep deletes it with its VM
			}
			t.Run(fmt.Sprintf("%s, store of an older version %v", name, older), func(t *testing.T) {
				s := tempStore(t)
				r := sleepingVM(t, s, "a", 2)
				snap := borrow(t, s, r)
				if older {
					if err := os.RemoveAll(s.lentPath("")); err != nil {
						t.Fatal(err)
					}
				}
				notDue(s)
				if err := s.remove(t.Context(), "a", false); err != nil {
					t.Fatal(err)
				}
				wantLayers(t, s, true, r.Disk.Layers...)
				if snap != "" && !s.IsThere(snap) {
					t.Error("the snapshot is gone")
				}
			})
		}
	}
}

// A store of an older version gets its notes from a sweep. They go with what they are about.
func TestSweep_notes_what_is_lent_and_forgets_it(t *testing.T) {
	s := tempStore(t)
	a, c := sleepingVM(t, s, "a", 2), sleepingVM(t, s, "c", 1)
	id := diskSnapshotOf(t, s, a, KindSleep)
	c.Snapshot, c.Disk.Layers = id, append(a.Disk.Layers[:2:2], c.Disk.Layers...)
	if err := errors.Join(s.Save(c), os.RemoveAll(s.lentPath(""))); err != nil {
		t.Fatal(err)
	}
	want := func(when string, ids ...string) {
		t.Helper()
		if _, err := s.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		got, err := filepath.Glob(s.lentPath("*"))
		if err != nil || len(got) != len(ids) {
			t.Errorf("%s: it has %v (%v), want %v", when, got, err, ids)
		}
		for _, id := range ids {
			if !s.lent(id) {
				t.Errorf("%s: it has no note of %s", when, id)
			}
		}
	}
	want("of an older version", lentComplete, a.ID, id)
	want("again", lentComplete, a.ID, id)
	if err := s.remove(t.Context(), "c", false); err != nil {
		t.Fatal(err)
	}
	want("without the clone", lentComplete, a.ID)
	if err := s.remove(t.Context(), "a", false); err != nil {
		t.Fatal(err)
	}
	want("without both", lentComplete)
}

// A VM is woken while a sweep reads records, and its process is about to make a snapshot.
func TestAttack_sweep_forgets_what_a_VM_lends_meanwhile(t *testing.T) {
	s := tempStore(t)
	a := sleepingVM(t, s, "a", 2)
	sweepThatWaits(t, s, "b", func() {
		if _, err := s.Labels(a, KindNamed); err != nil {
			t.Fatal(err)
		}
	})
	if !s.lent(a.ID) {
		t.Error("the note is gone, and with it the snapshot's layers when the VM is removed")
	}
}

func TestSweep_that_cannot_read_all_does_not_say_that_all_is_noted(t *testing.T) {
	s := tempStore(t)
	sleepingVM(t, s, "a", 1)
	if err := errors.Join(os.RemoveAll(s.lentPath("")), os.WriteFile(s.RecordPath("a"), []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context()); err == nil {
		t.Error("an unreadable record is no error")
	}
	if s.lent(lentComplete) {
		t.Error("it says so")
	}
}

func TestSweepDue_by_how_long_the_last_took(t *testing.T) {
	s := tempStore(t)
	for name, tt := range map[string]struct {
		last string
		ago  time.Duration
		due  bool
	}{
		"of few":            {`{"ns":1000000000,"looked":64}`, 0, true},
		"just now":          {`{"ns":1000000000,"looked":65}`, 0, false},
		"long ago":          {`{"ns":1000000000,"looked":65}`, 21 * time.Second, true},
		"in the future":     {`{"ns":1000000000,"looked":65}`, -time.Hour, true},
		"damaged":           {`{"ns":`, 0, true},
		"an hour long, now": {`{"ns":3600000000000,"looked":1000000}`, time.Hour, false},
	} {
		if err := os.WriteFile(s.sweptPath(), []byte(tt.last), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(-tt.ago)
		if err := os.Chtimes(s.sweptPath(), at, at); err != nil {
			t.Fatal(err)
		}
		if got := s.sweepDue(); got != tt.due {
			t.Errorf("%s: %v", name, got)
		}
	}
}
