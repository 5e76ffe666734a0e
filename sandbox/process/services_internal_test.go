package process

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
)

// A guest that reports services without end must not push out the entries of others.
func TestServiceTrail_is_bounded_and_knows_its_services(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	if err := audit.Ensure(context.Background(), path, audit.Head{VM: "v", Name: "n"}); err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	trail := &serviceTrail{trail: audit.Open(path), now: func() time.Time { return now }, known: func(name string) bool { return name == "web" }}
	entries := func() (out []audit.Entry) {
		if _, err := audit.Read(t.Context(), path, audit.ReadOptions{}, func(e audit.Entry) error { out = append(out, e); return nil }); err != nil {
			t.Fatal(err)
		}
		return out
	}
	trail.record(guest.ServiceEvent{Name: "other", Event: guest.EventStarted})
	trail.record(guest.ServiceEvent{Name: "web", Event: guest.EventStarted})
	trail.record(guest.ServiceEvent{Name: "web", Event: guest.EventEnded, Exit: 137, Signal: 9, Lost: 2})
	got := entries()
	if len(got) != 2 || got[0].Kind != audit.KindServiceStart || got[0].Process != "web" {
		t.Fatalf("recorded %+v", got)
	}
	if o := got[1].Outcome; got[1].Kind != audit.KindServiceExit || *o.Exit != 137 || o.ExitSignal != 9 || !strings.Contains(o.Error, "2 events") {
		t.Errorf("its end is %+v", got[1].Outcome)
	}
	for range 10 * serviceEvents {
		trail.record(guest.ServiceEvent{Name: "web", Event: guest.EventStarted})
	}
	if n := len(entries()); n != serviceEvents {
		t.Errorf("%d are recorded, want %d", n, serviceEvents)
	}
	now = now.Add(serviceEvery)
	trail.record(guest.ServiceEvent{Name: "web", Event: guest.EventStarted})
	trail.record(guest.ServiceEvent{Name: "web", Event: guest.EventStarted})
	got = entries()
	if len(got) != serviceEvents+1 || !strings.Contains(got[serviceEvents].Outcome.Error, "events before this one") {
		t.Errorf("%d are recorded after a while, want one more that says what is missing", len(got))
	}
}
