package sandbox

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func metadataOf(t *testing.T, s *Host, name string) spec.Metadata {
	t.Helper()
	l, err := s.State.Metadata(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestSelfWake_sets_changes_and_takes_back_the_guests_timer_and_never_the_owners(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", state.Stopped, &spec.Metadata{Owner: "team"})
	soon, later := time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond), time.Now().Add(2*time.Hour).UTC().Truncate(time.Millisecond)
	for _, at := range []time.Time{later, soon, {}, soon} {
		if err := s.State.SelfWake(t.Context(), "a", at); err != nil {
			t.Fatal(err)
		}
		if l := metadataOf(t, s, "a"); !l.Wake.At.Equal(at) || l.Wake.Every != 0 {
			t.Fatalf("asked for %v, got %+v", at, l.Wake)
		}
	}
	if e := wantTold(t, s, events.Updated, events.Updated, events.Updated, events.Updated); e.Cause != events.Guest {
		t.Fatalf("%+v", e)
	}
	if err := s.State.SelfWake(t.Context(), "a", time.Now().Add(-time.Second)); !errors.Is(err, spec.ErrMetadata) {
		t.Fatalf("a time that is over: %v", err)
	}
	for name, owners := range map[string]spec.Timer{"once": {At: later}, "at the guest's time, again and again": {At: soon, Every: 3600}} {
		if _, err := s.State.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Wake = owners; return nil }); err != nil {
			t.Fatal(err)
		}
		for _, at := range []time.Time{soon.Add(time.Minute), {}} {
			if err := s.State.SelfWake(t.Context(), "a", at); !errors.Is(err, state.ErrOwnersTimer) {
				t.Errorf("the owner's timer, %s: %v", name, err)
			}
		}
		if l := metadataOf(t, s, "a"); !l.Wake.At.Equal(owners.At) || l.Wake.Every != owners.Every {
			t.Errorf("the owner's timer, %s, is %+v", name, l.Wake)
		}
	}
}

func TestSelfWake_that_is_of_no_use_to_an_ephemeral_sandbox_is_refused(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", state.Stopped, &spec.Metadata{Class: lifetime.Ephemeral})
	if err := s.State.SelfWake(t.Context(), "a", time.Now().Add(time.Hour)); !errors.Is(err, spec.ErrMetadata) {
		t.Fatal(err)
	}
}

func TestSelfExtend_is_bounded_in_all_by_what_the_owner_has_set(t *testing.T) {
	s := tempStore(t)
	may := spec.Self{Allow: []string{"extend=2h"}}
	own := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	withMetadata(t, s, "a", state.Stopped, &spec.Metadata{Expires: own})
	hours := func(n int) int { return n * 3600 }
	if got, err := s.State.SelfExtend(t.Context(), "a", may, 60); err != nil || !got.Equal(own) {
		t.Fatalf("it was shortened: %v, %v", got, err)
	}
	wantTold(t, s)
	first, err := s.State.SelfExtend(t.Context(), "a", may, hours(2))
	if err != nil || !first.After(own) || !metadataOf(t, s, "a").Expires.Equal(first) {
		t.Fatalf("%v, %v", first, err)
	}
	if e := wantTold(t, s, events.Extended); e.Cause != events.Guest {
		t.Fatalf("%+v", e)
	}
	// The limit counts from the owner's time, not from the guest's last extension.
	if _, err := s.State.SelfExtend(t.Context(), "a", may, hours(4)); !errors.Is(err, state.ErrExtension) || !strings.Contains(err.Error(), own.Add(2*time.Hour).Format(time.RFC3339)) {
		t.Fatal(err)
	}
	if l := metadataOf(t, s, "a"); !l.Expires.Equal(first) {
		t.Fatalf("what was refused has set %v", l.Expires)
	}
	// The owner sets another time, from which the limit counts now.
	own = own.Add(24 * time.Hour)
	if _, err := s.State.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Expires = own; return nil }); err != nil {
		t.Fatal(err)
	}
	if got, err := s.State.SelfExtend(t.Context(), "a", may, hours(26)); err != nil || !got.After(own) {
		t.Fatalf("%v, %v", got, err)
	}
	withMetadata(t, s, "ever", state.Stopped, nil)
	if got, err := s.State.SelfExtend(t.Context(), "ever", may, hours(1)); err != nil || !got.IsZero() {
		t.Fatalf("one that lasts for ever: %v, %v", got, err)
	}
	withMetadata(t, s, "over", state.Stopped, &spec.Metadata{Expires: time.Now().Add(-time.Minute)})
	if _, err := s.State.SelfExtend(t.Context(), "over", may, 60); !errors.Is(err, spec.ErrExpired) {
		t.Fatalf("one that has expired: %v", err)
	}
}
