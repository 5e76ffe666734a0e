package state

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// told returns the types of a store's events, and the last event.
func told(t *testing.T, s *Store) (types []events.Type, last events.Event) {
	t.Helper()
	if _, err := s.Events().Read(t.Context(), events.ReadOptions{}, func(e events.Event) error {
		types, last = append(types, e.Type), e
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return types, last
}

func wantTold(t *testing.T, s *Store, want ...events.Type) events.Event {
	t.Helper()
	types, last := told(t, s)
	if !slices.Equal(types, want) {
		t.Fatalf("told %v, want %v", types, want)
	}
	return last
}

func TestEvents_of_a_killed_process_are_one_however_many_look(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Running, &spec.Metadata{Owner: "team", Tags: []string{"x"}})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := s.Get("a"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if r, err := s.Get("a"); err != nil || r.Phase != Crashed {
		t.Fatalf("%+v, %v", r, err)
	}
	e := wantTold(t, s, events.Crashed)
	if e.Sandbox != "a" || e.Cause != events.Killed || e.Owner != "team" || !slices.Equal(e.Tags, []string{"x"}) {
		t.Fatalf("%+v", e)
	}
}

func TestEvents_of_changes_say_what_they_are_and_by_whom(t *testing.T) {
	s := tempStore(t)
	ctx := events.WithCause(t.Context(), events.API)
	withMetadata(t, s, "a", Stopped, &spec.Metadata{Expires: time.Now().Add(time.Hour).UTC().Truncate(time.Second)})
	set := func(change func(*spec.Metadata)) {
		t.Helper()
		if _, err := s.SetMetadata(ctx, "a", func(l *spec.Metadata, _ error) error { change(l); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	set(func(*spec.Metadata) {}) // nothing changes
	wantTold(t, s)
	set(func(l *spec.Metadata) { l.Owner = "team" })
	wantTold(t, s, events.Updated)
	set(func(l *spec.Metadata) { l.Expires = l.Expires.Add(time.Hour) })
	wantTold(t, s, events.Updated, events.Extended)
	if err := s.Rename(ctx, "a", "b"); err != nil {
		t.Fatal(err)
	}
	if e := wantTold(t, s, events.Updated, events.Extended, events.Renamed); e.Sandbox != "b" || e.Details.From != "a" || e.Cause != events.API {
		t.Fatalf("%+v", e)
	}
	if err := s.remove(ctx, "b", false); err != nil {
		t.Fatal(err)
	}
	if e := wantTold(t, s, events.Updated, events.Extended, events.Renamed, events.Removed); e.Owner != "team" {
		t.Fatalf("%+v", e)
	}
}

// A sandbox that is gone counts as removed even if files of it are left, since a second removal is impossible.
func TestEvents_tell_of_a_removal_once_though_what_it_leaves_cannot_be_deleted(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, s *Store){
		"a record that can be read":    func(*testing.T, *Store) {},
		"a record that cannot be read": func(t *testing.T, s *Store) { writeRecord(t, s, "a") },
	} {
		t.Run(name, func(t *testing.T) {
			s := tempStore(t)
			withMetadata(t, s, "a", Stopped, &spec.Metadata{Owner: "team"})
			withMetadata(t, s, "b", Stopped, nil)
			damage(t, s)
			writeRecord(t, s, "b") // blocks deletion of whatever b may need
			freed, err := s.Remove(t.Context(), "a", true)
			if !errors.Is(err, spec.ErrRecord) {
				t.Fatalf("got %v, want ErrRecord of the other one", err)
			}
			if _, err := s.Load("a"); !errors.Is(err, spec.ErrNotFound) {
				t.Fatalf("it is still there: %v", err)
			}
			if e := wantTold(t, s, events.Removed); e.Sandbox != "a" || e.Details.Bytes != freed.Bytes || freed.Bytes == 0 {
				t.Fatalf("%+v, freed %+v", e, freed)
			}
			if _, err := s.Remove(t.Context(), "a", true); !errors.Is(err, spec.ErrNotFound) {
				t.Fatal(err)
			}
			wantTold(t, s, events.Removed)
		})
	}
}

// A failed removal makes no event.
func TestEvents_do_not_tell_of_a_removal_that_was_called_off(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, nil)
	l, err := s.Lock("a")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Remove(ctx, "a", false); err == nil {
		t.Fatal("it was removed while it was locked")
	}
	wantTold(t, s)
}

// writeRecord overwrites a VM's record with something that is not a record.
func writeRecord(t *testing.T, s *Store, name string) {
	t.Helper()
	if err := os.WriteFile(s.RecordPath(name), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestEvents_of_an_ephemeral_sandbox_do_not_say_whose_it_was(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, &spec.Metadata{Class: lifetime.Ephemeral, Owner: "team", Tags: []string{"x"}, Purpose: "p"})
	if err := s.remove(t.Context(), "a", false); err != nil {
		t.Fatal(err)
	}
	if e := wantTold(t, s, events.Removed); e.Owner != "" || len(e.Tags) > 0 || e.Cause != events.Library {
		t.Fatalf("%+v", e)
	}
}

func TestEvents_tell_of_an_expiry_once_for_each_time(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, &spec.Metadata{Expires: time.Now().Add(-time.Minute)})
	withMetadata(t, s, "b", Stopped, &spec.Metadata{Expires: time.Now().Add(time.Hour)})
	withMetadata(t, s, "c", Stopped, nil)
	for range 3 {
		for _, name := range []string{"a", "b", "c", "none"} {
			if err := s.TellExpired(t.Context(), name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if e := wantTold(t, s, events.Expired); e.Sandbox != "a" || e.Cause != events.Expiry || e.Details.Expires.IsZero() {
		t.Fatalf("%+v", e)
	}
	if _, err := s.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Expires = l.Expires.Add(time.Second); return nil }); err != nil {
		t.Fatal(err)
	}
	if err := s.TellExpired(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	wantTold(t, s, events.Expired, events.Extended, events.Expired)
}

func TestEventWriter_writes_in_order_and_nothing_after_its_end(t *testing.T) {
	s := tempStore(t)
	tl := s.NewEventWriter(slog.New(slog.DiscardHandler))
	tl.Put(events.Event{Type: events.Woken, Sandbox: "a"})
	tl.Put(events.Event{Type: events.Slept, Sandbox: "a"})
	tl.Close()
	tl.Put(events.Event{Type: events.Stopped, Sandbox: "a"})
	wantTold(t, s, events.Woken, events.Slept)
}

// An unwritable journal does not make operations fail.
func TestEvents_that_cannot_be_written_fail_nothing(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, nil)
	if err := os.WriteFile(s.Events().Dir(), nil, 0o600); err != nil { // a file in place of the directory
		t.Fatal(err)
	}
	if err := s.remove(context.Background(), "a", false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load("a"); !errors.Is(err, spec.ErrNotFound) {
		t.Fatal(err)
	}
}
