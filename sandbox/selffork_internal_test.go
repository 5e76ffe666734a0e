package sandbox

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestExpired_is_neither_woken_nor_booted(t *testing.T) {
	s := tempStore(t)
	for _, phase := range []state.Phase{state.Asleep, state.Stopped, state.Crashed} {
		name := string(phase)
		r := withMetadata(t, s, name, phase, &spec.Metadata{Expires: time.Now().Add(-time.Second)})
		r.Snapshot = snapshotOf(t, s, r, state.KindSleep, time.Now())
		if err := s.State.Save(r); err != nil {
			t.Fatal(err)
		}
		if _, err := s.With(pool.Launcher{}).Sandbox(name).Wake(t.Context()); !errors.Is(err, spec.ErrExpired) {
			t.Errorf("waking one that is %s: got %v, want ErrExpired", phase, err)
		}
		if _, err := s.With(pool.Launcher{}).Sandbox(name).Start(t.Context(), StartOptions{}); !errors.Is(err, spec.ErrExpired) {
			t.Errorf("booting one that is %s: got %v, want ErrExpired", phase, err)
		}
	}
}

func TestSelfSpec_forks_are_bounded_and_children_have_none(t *testing.T) {
	t.Parallel()
	for _, wrong := range []string{"fork", "fork=", "fork=0", "fork=-1", "fork=65", "fork=2x", "sleep=2"} {
		if err := (spec.Self{Allow: []string{wrong}}).Validate(); !errors.Is(err, ErrSpec) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
	s := spec.Self{Allow: []string{guest.SelfSleep, "fork=3", "extend=2h"}}
	if err := s.Validate(); err != nil || s.Forks() != 3 || !s.Allows(guest.SelfFork) {
		t.Fatalf("%v, %d forks", err, s.Forks())
	}
	if c := s.Childless(); c.Forks() != 0 || c.Allows(guest.SelfFork) || strings.Join(c.Allow, " ") != "sleep extend=2h" {
		t.Errorf("a child has %v", c.Allow)
	}
	if s.Forks() != 3 {
		t.Error("the parent has lost its own")
	}
	if (spec.Self{}).Forks() != 0 {
		t.Error("without a grant there are forks")
	}
}

// quickForks shortens the timeouts of fork requests.
func quickForks(t *testing.T) {
	t.Helper()
	begin, all, poll := spec.SelfForkBegin, state.SelfForkTime, state.SelfForkPoll
	spec.SelfForkBegin, state.SelfForkTime, state.SelfForkPoll = 300*time.Millisecond, 2*time.Second, time.Millisecond
	t.Cleanup(func() { spec.SelfForkBegin, state.SelfForkTime, state.SelfForkPoll = begin, all, poll })
}

func askedFork(t *testing.T, s *Host, change func(*spec.AskedFork)) {
	t.Helper()
	if _, err := s.State.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { change(&l.Asked.Fork); return nil }); err != nil {
		t.Error(err)
	}
}

func TestSelfFork_waits_for_whoever_makes_it(t *testing.T) {
	quickForks(t)
	for name, c := range map[string]struct {
		make func(*spec.AskedFork) // serves the request; nil: never served
		want string
		err  error
	}{
		"made":            {make: func(a *spec.AskedFork) { a.Begun, a.Child = true, "child" }, want: "child"},
		"refused":         {make: func(a *spec.AskedFork) { a.Begun, a.Error = true, "no more" }, err: errors.New("no more")},
		"nobody":          {err: state.ErrNoForker},
		"begun, no end":   {make: func(a *spec.AskedFork) { a.Begun = true }, err: errors.New("longer than")},
		"written anew":    {make: func(a *spec.AskedFork) { *a = spec.AskedFork{} }, err: errors.New("anew")},
		"of another call": {make: func(a *spec.AskedFork) { a.ID, a.Child = "other", "others" }, err: errors.New("anew")},
	} {
		t.Run(name, func(t *testing.T) {
			s := tempStore(t)
			withMetadata(t, s, "a", state.Stopped, &spec.Metadata{Owner: "team"})
			ctx, cancel := context.WithCancel(t.Context())
			served := make(chan struct{})
			go func() {
				defer close(served)
				for c.make != nil && ctx.Err() == nil {
					if l, err := s.State.Metadata("a"); err == nil && l.Asked.Fork.Wanted(time.Now()) {
						askedFork(t, s, c.make)
						return
					}
					time.Sleep(time.Millisecond)
				}
			}()
			child, err := s.State.SelfFork(t.Context(), "a")
			cancel()
			<-served
			if child != c.want || (err == nil) != (c.err == nil) || err != nil && !errors.Is(err, c.err) && !strings.Contains(err.Error(), c.err.Error()) {
				t.Errorf("%q, %v", child, err)
			}
			if l := metadataOf(t, s, "a"); l.Asked.Fork != (spec.AskedFork{}) && l.Asked.Fork.ID != "other" || l.Owner != "team" {
				t.Errorf("it leaves %+v", l)
			}
		})
	}
}

func TestSelfFork_is_taken_back_when_the_VM_ends(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", state.Stopped, nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := s.State.SelfFork(ctx, "a")
		ended <- err
	}()
	for metadataOf(t, s, "a").Asked.Fork.ID == "" {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it has ended with %v", err)
	}
	if a := metadataOf(t, s, "a").Asked.Fork; a != (spec.AskedFork{}) {
		t.Errorf("it leaves %+v", a)
	}
}

func TestForkAsked_makes_only_what_somebody_waits_for(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", state.Stopped, nil)
	now := time.Now()
	for name, a := range map[string]spec.AskedFork{
		"nothing": {}, "begun": {ID: "1", At: now, Begun: true}, "past": {ID: "1", At: now.Add(-time.Hour)}, "to come": {ID: "1", At: now.Add(time.Hour)},
	} {
		askedFork(t, s, func(f *spec.AskedFork) { *f = a })
		if err := s.With(pool.Launcher{}).Sandbox("a").ForkAsked(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := metadataOf(t, s, "a").Asked.Fork; got.Child != "" || got.Error != "" || got.Begun != a.Begun {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestForkAsked_tells_the_guest_why_not_and_nothing_of_the_host(t *testing.T) {
	s := tempStore(t)
	ask := func() (spec.AskedFork, error) {
		t.Helper()
		askedFork(t, s, func(a *spec.AskedFork) { *a = spec.AskedFork{ID: spec.NewID(), At: time.Now()} })
		err := s.With(pool.Launcher{}).Sandbox("a").ForkAsked(t.Context())
		return metadataOf(t, s, "a").Asked.Fork, err
	}
	withMetadata(t, s, "a", state.Stopped, nil)
	r, err := s.State.Get("a")
	if err != nil {
		t.Fatal(err)
	}
	grant := func(allow ...string) {
		t.Helper()
		r.Spec.Self.Allow, r.Spec.Image = allow, "image"
		if err := s.State.Save(r); err != nil {
			t.Fatal(err)
		}
	}
	if a, err := ask(); !errors.Is(err, control.ErrSelfLimit) || !strings.Contains(a.Error, control.ErrSelfLimit.Error()) {
		t.Errorf("without a grant: %+v, %v", a, err)
	}
	grant("fork=1")
	if a, err := ask(); !errors.Is(err, ErrNotRunning) || !strings.Contains(a.Error, ErrNotRunning.Error()) || strings.Contains(a.Error, "stopped") {
		t.Errorf("of a VM that has stopped: %+v, %v", a, err)
	}
	for i, other := range []state.Origin{{ParentID: r.ID}, {ParentID: "another", Asked: true}, {ParentID: r.ID, Asked: true}} {
		withMetadata(t, s, []string{"by-its-owner", "anothers", "its-own"}[i], state.Stopped, nil)
		c, err := s.State.Get([]string{"by-its-owner", "anothers", "its-own"}[i])
		if err != nil {
			t.Fatal(err)
		}
		c.Fork = &other
		if err := s.State.Save(c); err != nil {
			t.Fatal(err)
		}
		want := ErrNotRunning
		if other.Asked && other.ParentID == r.ID {
			want = control.ErrSelfLimit
		}
		if a, err := ask(); !errors.Is(err, want) || a.Child != "" || !a.Begun {
			t.Errorf("with a child %+v: %+v, %v", other, a, err)
		}
	}
	if text := whyNoFork(errors.New("writing /var/lib/x: no space")); strings.Contains(text, "/var") {
		t.Errorf("the guest is told %q", text)
	}
}

func TestForks_that_a_guest_asks_for_cannot_ask_themselves_and_take_no_request_along(t *testing.T) {
	s := tempStore(t)
	wake := time.Now().Add(time.Hour)
	withMetadata(t, s, "a", state.Stopped, &spec.Metadata{Owner: "team", Wake: spec.Timer{At: wake}, Asked: spec.Asked{Wake: wake, Expires: wake, From: wake, Fork: spec.AskedFork{ID: "1", At: time.Now()}}})
	r, err := s.State.Get("a")
	if err != nil {
		t.Fatal(err)
	}
	r.Spec.Self.Allow, r.Spec.Image = []string{"fork=2", guest.SelfHold}, "image"
	for _, asked := range []bool{false, true} {
		f := &forker{store: s, parent: r, asked: asked}
		if err := f.choose(ForkOptions{Count: 1}); err != nil {
			t.Fatal(err)
		}
		child := f.specs[0]
		if got := child.Self.Forks() > 0; got == asked || !child.Self.Allows(guest.SelfHold) {
			t.Errorf("asked for by the guest %v: a child may ask for %v", asked, child.Self.Allow)
		}
		l := f.labels[child.Name]
		if l == nil || l.Asked.Fork != (spec.AskedFork{}) || !l.Asked.Wake.IsZero() || l.Wake != (spec.Timer{}) || !l.Asked.From.Equal(wake) || l.Owner != "team" {
			t.Errorf("the child's metadata is %+v", l)
		}
	}
	if r.Spec.Self.Forks() != 2 {
		t.Error("the parent has lost its grant")
	}
}
