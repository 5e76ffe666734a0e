package fleettest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Fleet is what Conformance asks for: Sandboxes, or the client of a server in another process.
type Fleet interface {
	Get(ctx context.Context, name string) (records.Sandbox, error)
	GetOrCreate(ctx context.Context, r records.Request) (s records.Sandbox, created bool, err error)
	List(ctx context.Context, f records.Filter) (records.List, error)
	History(ctx context.Context, name string, span records.Span) (records.History, error)
	Start(ctx context.Context, name string) (records.Sandbox, error)
	Wake(ctx context.Context, name string) (records.Sandbox, error)
	Sleep(ctx context.Context, name string, o sandbox.SleepOptions) (spec.SleepResult, error)
	Promote(ctx context.Context, name string) ([]spec.Promoted, error)
	Restore(ctx context.Context, name, snapshot string) (records.Sandbox, error)
	Fork(ctx context.Context, name string, children []records.Child) ([]records.Sandbox, error)
	Rename(ctx context.Context, name, to string) (records.Sandbox, error)
	Update(ctx context.Context, name string, c records.Changes) (records.Sandbox, error)
	Extend(ctx context.Context, name string, until time.Time) (records.Sandbox, error)
	Delete(ctx context.Context, name string) (spec.Freed, error)
	Prune(ctx context.Context, dryRun bool) (records.Pruned, error)
}

// Subject is what Conformance tests: a Fleet, and what its sandboxes are like from the inside.
type Subject struct {
	Fleet Fleet
	// Spec is what a sandbox is made of.
	Spec sandbox.Spec
	// Make makes a sandbox that runs, if Fleet.Create would take too long.
	Make func(t *testing.T, spec sandbox.Spec, l spec.Metadata)
	// Write keeps a word in the memory of a sandbox that runs, and Read returns it.
	Write func(t *testing.T, name, word string)
	Read  func(t *testing.T, name string) string
	// Kill kills its process.
	Kill func(t *testing.T, name string)
}

// Conformance checks what packages sandbox and fleet promise of sandboxes, with names that begin with "conf". It uses
// few operations that are expensive with real guests, and no time of its own.
func Conformance(t *testing.T, s Subject) {
	t.Helper()
	ctx, f := t.Context(), s.Fleet
	must := func(t *testing.T, got records.Sandbox, err error, want records.Status) records.Sandbox {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if got.Status != want {
			t.Fatalf("%s is %s, want %s: %s", got.Name, got.Status, want, got.Problem)
		}
		return got
	}
	const name, later = "conf", "conf-later"
	want := s.Spec
	want.Name = name
	label := spec.Metadata{Class: lifetime.Resumable, Owner: "build", Purpose: "conformance", Tags: []string{"b", "a", "b"}, Keep: lifetime.Keep{Last: 3}}

	t.Run("what is made is found by name, owner, tag and status", func(t *testing.T) {
		s.Make(t, want, label)
		got, err := f.Get(ctx, name)
		must(t, got, err, records.Running)
		if got.Owner != "build" || got.Class != lifetime.Resumable || got.Purpose != "conformance" || !slices.Equal(got.Tags, []string{"a", "b"}) || got.ID == "" {
			t.Errorf("it is %+v", got)
		}
		for _, c := range []struct {
			of    string
			f     records.Filter
			there bool
		}{
			{"its owner", records.Filter{Owner: "build"}, true},
			{"another owner", records.Filter{Owner: "tests"}, false},
			{"two of its tags", records.Filter{Tags: []string{"a", "b"}}, true},
			{"a tag too many", records.Filter{Tags: []string{"a", "c"}}, false},
			{"its status", records.Filter{Statuses: []records.Status{records.Asleep, records.Running}}, true},
			{"another status", records.Filter{Statuses: []records.Status{records.Asleep}}, false},
			{"its class", records.Filter{Class: lifetime.Resumable}, true},
			{"another class", records.Filter{Class: lifetime.Workspace}, false},
		} {
			list, err := f.List(ctx, c.f)
			if err != nil {
				t.Fatal(err)
			}
			there := slices.ContainsFunc(list.Sandboxes, func(s records.Sandbox) bool { return s.ID == got.ID })
			if there != c.there {
				t.Errorf("by %s: it is in the list: %v, want %v", c.of, there, c.there)
			}
		}
	})
	t.Run("one that is there is got and not made", func(t *testing.T) {
		again := want
		got, created, err := f.GetOrCreate(ctx, records.Request{Spec: again})
		if err != nil || created || got.Name != name {
			t.Errorf("got %+v, made: %v, %v", got, created, err)
		}
	})
	first := ""
	t.Run("a sleep says what it did, and a second one says it again", func(t *testing.T) {
		s.Write(t, name, "first")
		one, err := f.Sleep(ctx, name, sandbox.SleepOptions{})
		if err != nil {
			t.Fatal(err)
		}
		first = one.Snapshot
		two, err := f.Sleep(ctx, name, sandbox.SleepOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if one.Snapshot == "" || one.BytesStored <= 0 || one.CPUSeconds <= 0 || one.Awake.IsZero() || one.Asleep.Before(one.Awake) {
			t.Errorf("the sleep says %+v", one)
		}
		if two.Snapshot != one.Snapshot || two.BytesStored != one.BytesStored || two.CPUSeconds != one.CPUSeconds || !two.Asleep.Equal(one.Asleep) {
			t.Errorf("the second one says %+v, the first one %+v", two, one)
		}
		got, err := f.Get(ctx, name)
		must(t, got, err, records.Asleep)
	})
	t.Run("of three wakes at once all find it awake", func(t *testing.T) {
		var wg sync.WaitGroup
		errs := make([]error, 3)
		for i := range errs {
			wg.Go(func() {
				var got records.Sandbox
				if got, errs[i] = f.Wake(ctx, name); errs[i] == nil && got.Status != records.Running {
					errs[i] = errors.New("it is " + string(got.Status))
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("sleeps and wakes at once end with one state, and the last wake wins", func(t *testing.T) {
		var wg sync.WaitGroup
		var serr, werr error
		wg.Go(func() { _, serr = f.Sleep(ctx, name, sandbox.SleepOptions{}) })
		wg.Go(func() { _, werr = f.Wake(ctx, name) })
		wg.Wait()
		if err := errors.Join(serr, werr); err != nil {
			t.Fatal(err)
		}
		got, err := f.Wake(ctx, name)
		must(t, got, err, records.Running)
	})
	t.Run("it goes back to an earlier sleep, and the one that it leaves is kept", func(t *testing.T) {
		s.Write(t, name, "second")
		if _, err := f.Restore(ctx, name, first); !errors.Is(err, sandbox.ErrRunning) {
			t.Errorf("while it runs: got %v, want ErrRunning", err)
		}
		left, err := f.Sleep(ctx, name, sandbox.SleepOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			got, err := f.Restore(ctx, name, first)
			if must(t, got, err, records.Asleep); got.Snapshot != first {
				t.Errorf("it sleeps in %s, want %s", got.Snapshot, first)
			}
		}
		none := lifetime.Keep{}
		if _, err := f.Update(ctx, name, records.Changes{Keep: &none}); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Prune(ctx, false); err != nil {
			t.Fatal(err)
		}
		got, err := f.Wake(ctx, name)
		must(t, got, err, records.Running)
		if got := s.Read(t, name); got != "first" {
			t.Errorf("its memory says %q", got)
		}
		s.Kill(t, name)
		if _, err := f.Restore(ctx, name, left.Snapshot); err != nil {
			t.Errorf("the snapshot that it left is gone: %v", err)
		}
	})
	t.Run("its wakes begin anew from a snapshot, each or the first after a time, until they do not any more", func(t *testing.T) {
		left, err := f.Get(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		rotate := func(rot spec.Rotation) {
			t.Helper()
			if _, err := f.Update(ctx, name, records.Changes{Rotate: &rot}); err != nil {
				t.Fatal(err)
			}
		}
		for _, rot := range []spec.Rotation{{To: first}, {To: first, At: time.Now().Add(-time.Hour)}} {
			rotate(rot)
			got, err := f.Wake(ctx, name)
			must(t, got, err, records.Running)
			if got := s.Read(t, name); got != "first" {
				t.Errorf("%+v: its memory says %q", rot, got)
			}
			s.Kill(t, name)
			rotate(spec.Rotation{})
			got, err = f.Restore(ctx, name, left.Snapshot)
			must(t, got, err, records.Asleep)
		}
		none := strings.Repeat("0", 32)
		if _, err := f.Update(ctx, name, records.Changes{Rotate: &spec.Rotation{To: none}}); fleet.CodeOf(err) != "snapshot-not-found" {
			t.Errorf("from a snapshot that is not there: %v, want snapshot-not-found", err)
		}
	})
	t.Run("one whose process was killed is crashed, and a wake takes it back to its last sleep", func(t *testing.T) {
		got, err := f.Start(ctx, name)
		must(t, got, err, records.Running)
		s.Kill(t, name)
		got, err = f.Get(ctx, name)
		if must(t, got, err, records.Crashed); got.Problem == "" {
			t.Error("nothing says that it was killed")
		}
		got, err = f.Wake(ctx, name)
		must(t, got, err, records.Running)
		if got := s.Read(t, name); got != "second" {
			t.Errorf("its memory says %q", got)
		}
	})
	t.Run("it does not sleep with more than may persist, and sleeps when that may", func(t *testing.T) {
		little := lifetime.Persist{MaxBytes: 1}
		got, err := f.Update(ctx, name, records.Changes{Persist: &little})
		if must(t, got, err, records.Running); got.Persist.MaxBytes != 1 {
			t.Errorf("it is %+v", got)
		}
		list, err := f.List(ctx, records.Filter{Owner: "build"})
		if err != nil || len(list.Sandboxes) != 1 || list.Sandboxes[0].Persist.MaxBytes != 1 {
			t.Errorf("the list says %+v (%v)", list, err)
		}
		var e *records.Error
		// Without the guest, which would be asked to trim its disk first.
		skip := sandbox.SleepOptions{Hooks: spec.HooksSkip}
		if _, err := f.Sleep(ctx, name, skip); !errors.Is(err, spec.ErrPersistLimit) || !errors.As(err, &e) || e.Code != "persist-limit" || e.Remedy == "" {
			t.Errorf("got %v, want ErrPersistLimit with code and remedy", err)
		}
		if got := s.Read(t, name); got != "second" {
			t.Errorf("after the refusal its memory says %q", got)
		}
		bad := lifetime.Persist{Drop: []string{"cache"}}
		if _, err := f.Update(ctx, name, records.Changes{Persist: &bad}); !errors.Is(err, spec.ErrMetadata) {
			t.Errorf("a relative path to drop: got %v, want ErrMetadata", err)
		}
		got, err = f.Update(ctx, name, records.Changes{Persist: &lifetime.Persist{}})
		if must(t, got, err, records.Running); !got.Persist.Empty() {
			t.Errorf("it is %+v", got)
		}
		if _, err := f.Promote(ctx, name); !errors.Is(err, spec.ErrMetadata) {
			t.Errorf("promoting nothing: got %v, want ErrMetadata", err)
		}
	})
	t.Run("it is renamed while it sleeps, and only then", func(t *testing.T) {
		before, err := f.Get(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Rename(ctx, name, later); !errors.Is(err, sandbox.ErrRunning) {
			t.Errorf("while it runs: got %v, want ErrRunning", err)
		}
		if _, err := f.Sleep(ctx, name, sandbox.SleepOptions{}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			got, err := f.Rename(ctx, name, later)
			if must(t, got, err, records.Asleep); got.ID != before.ID || got.Owner != before.Owner || got.Name != later {
				t.Errorf("it is %+v, was %+v", got, before)
			}
		}
		if _, err := f.Get(ctx, name); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("by its old name: got %v, want ErrNotFound", err)
		}
		list, err := f.List(ctx, records.Filter{Owner: "build"})
		if err != nil || len(list.Sandboxes) != 1 || list.Sandboxes[0].Name != later {
			t.Errorf("the list says %+v (%v)", list, err)
		}
	})
	t.Run("an expired one sleeps, does not wake, and wakes when it is extended", func(t *testing.T) {
		got, err := f.Wake(ctx, later)
		must(t, got, err, records.Running)
		over := time.Now().Add(-time.Hour)
		if got, err = f.Update(ctx, later, records.Changes{Expires: &over}); err != nil {
			t.Fatal(err)
		}
		must(t, got, err, records.Running)
		p, err := f.Prune(ctx, false)
		if err != nil || len(p.Problems) != 0 || len(p.Sleep) != 1 || p.Sleep[0].Name != later {
			t.Fatalf("pruned %+v (%v)", p, err)
		}
		got, err = f.Get(ctx, later)
		must(t, got, err, records.Expired)
		for _, wake := range []func() (records.Sandbox, error){
			func() (records.Sandbox, error) { return f.Wake(ctx, later) },
			func() (records.Sandbox, error) { return f.Start(ctx, later) },
		} {
			var e *records.Error
			if _, err := wake(); !errors.Is(err, spec.ErrExpired) || !errors.As(err, &e) || e.Code != "expired" || e.Remedy == "" {
				t.Errorf("got %v, want ErrExpired with code and remedy", err)
			}
		}
		until := time.Now().Add(time.Hour)
		for range 2 {
			if got, err = f.Extend(ctx, later, until); err != nil || !got.Expires.Equal(until.UTC().Truncate(time.Second)) {
				t.Fatalf("extended: %+v (%v)", got, err)
			}
		}
		got, err = f.Start(ctx, later)
		must(t, got, err, records.Running)
	})
	children := []records.Child{{Name: "conf-1", Tags: []string{"odd"}}, {Name: "conf-2"}}
	t.Run("children have its metadata, their names and tags, and its memory", func(t *testing.T) {
		parent, err := f.Get(ctx, later)
		if err != nil {
			t.Fatal(err)
		}
		made, err := f.Fork(ctx, later, children)
		if err != nil {
			t.Fatal(err)
		}
		again, err := f.Fork(ctx, later, children)
		if err != nil || len(made) != 2 || len(again) != 2 || made[0].ID != again[0].ID || made[1].ID != again[1].ID {
			t.Fatalf("made %+v, then %+v (%v)", made, again, err)
		}
		if _, err := f.Fork(ctx, later, []records.Child{{Name: "conf-1"}, {Name: "conf-3"}}); !errors.Is(err, sandbox.ErrExists) {
			t.Errorf("with one that is there: got %v, want ErrExists", err)
		}
		for i, c := range made {
			if c.ParentID != parent.ID || c.Parent != later || c.Generation != 1 || c.ForkPoint == "" || c.Owner != "build" || c.ID == parent.ID {
				t.Errorf("child %d is %+v", i, c)
			}
		}
		if !slices.Equal(made[0].Tags, []string{"a", "b", "odd"}) || !slices.Equal(made[1].Tags, []string{"a", "b"}) {
			t.Errorf("their tags are %q and %q", made[0].Tags, made[1].Tags)
		}
		if got := s.Read(t, "conf-2"); got != "second" {
			t.Errorf("the memory of a child says %q", got)
		}
	})
	t.Run("what is deleted is gone, and can be deleted again", func(t *testing.T) {
		for range 2 {
			for _, name := range []string{"conf-1", "conf-2", later} {
				if _, err := f.Delete(ctx, name); err != nil {
					t.Error(err)
				}
			}
		}
		list, err := f.List(ctx, records.Filter{Owner: "build"})
		if err != nil || len(list.Sandboxes) != 0 {
			t.Errorf("the list says %+v (%v)", list, err)
		}
		h, err := f.History(ctx, later, records.Span{})
		if err != nil || len(h.Sleeps) < 4 || h.Sandbox.Removed.IsZero() {
			t.Errorf("its history says %+v (%v)", h, err)
		}
	})
}
