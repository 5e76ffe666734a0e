package state

import (
	"errors"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestTimer_after_it_has_fired(t *testing.T) {
	at := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		timer spec.Timer
		now   time.Time
		want  spec.Timer
	}{
		"once":                        {spec.Timer{At: at}, at, spec.Timer{}},
		"daily, on time":              {spec.Timer{At: at, Every: 86400}, at.Add(time.Second), spec.Timer{At: at.Add(24 * time.Hour), Every: 86400}},
		"daily, three days late":      {spec.Timer{At: at, Every: 86400}, at.Add(73 * time.Hour), spec.Timer{At: at.Add(96 * time.Hour), Every: 86400}},
		"at the very next time":       {spec.Timer{At: at, Every: 60}, at.Add(time.Minute), spec.Timer{At: at.Add(2 * time.Minute), Every: 60}},
		"with a clock that went back": {spec.Timer{At: at, Every: 60}, at.Add(-time.Hour), spec.Timer{At: at, Every: 60}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.timer.After(c.now); got != c.want {
				t.Fatalf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestTimer_fires_once_and_is_told_of_and_a_changed_one_stays(t *testing.T) {
	s := tempStore(t)
	at := time.Now().Add(-time.Minute).UTC().Truncate(time.Millisecond)
	withMetadata(t, s, "a", Stopped, &spec.Metadata{Wake: spec.Timer{At: at, Every: 3600}})
	for range 2 {
		if err := s.TimerFired(t.Context(), "a", spec.Timer{At: at, Every: 3600}, spec.ErrNotRunning); err != nil {
			t.Fatal(err)
		}
	}
	e := wantTold(t, s, events.TimerFired)
	if e.Cause != events.Timer || e.Details.Problem == "" {
		t.Fatalf("%+v", e)
	}
	l, err := s.Metadata("a")
	if err != nil || !l.Wake.At.Equal(at.Add(time.Hour)) || l.Wake.Every != 3600 {
		t.Fatalf("%+v, %v", l.Wake, err)
	}
}

func TestTimer_that_cannot_be_is_refused(t *testing.T) {
	for name, w := range map[string]spec.Timer{
		"no first time":   {Every: 60},
		"a negative time": {At: time.Now(), Every: -1},
		"the year 3000":   {At: time.Date(3000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		t.Run(name, func(t *testing.T) {
			if err := (spec.Metadata{Wake: w}).Check(); !errors.Is(err, spec.ErrMetadata) {
				t.Fatal(err)
			}
		})
	}
}
