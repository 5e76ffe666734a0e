//go:build workloads

package jailproofs

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
)

var days = flag.Int("days", 3, "how many days a VM sleeps, at once and then with a wake on each day")

// clockSays is what a witness says of its clocks, in nanoseconds. Back counts how often one that must not went back.
type clockSays struct {
	Monotonic, Boottime, Wall int64
	Back                      int
}

// certificate is what a witness says of the certificate of a proxy, which it has verified. Times are Unix seconds.
type certificate struct {
	Serial    string
	NotBefore int64 `json:"not_before"`
	NotAfter  int64 `json:"not_after"`
}

// sleeper is a VM with a witness, and what that said last.
type sleeper struct {
	t    *testing.T
	e    *guesttest.Env
	last clockSays
	// certificates are the serial numbers of those seen.
	certificates map[string]bool
}

// wallTimer is when a timer of the guest's wall clock is due that is armed before each sleep.
const wallTimer = 12 * time.Hour

// over has the VM sleep while the host's clock moves, and checks its clocks, timers and connections after the wake.
func (s *sleeper) over(what string, by time.Duration) {
	s.t.Helper()
	s.ask(fmt.Sprintf("arm %d", int(wallTimer.Seconds())), &map[string]string{})
	s.e.Sleep("base")
	moveClock(s.t, by)
	s.e.Wake("base")
	s.check(what, by)
}

func (s *sleeper) ask(request string, answer any) {
	s.t.Helper()
	if err := ask(s.t.Context(), s.e, "base", request, answer); err != nil {
		s.t.Fatal(err)
	}
}

func (s *sleeper) check(what string, by time.Duration) {
	s.t.Helper()
	var now clockSays
	before := time.Now()
	s.ask("clock", &now)
	after := time.Now()
	wall := time.Unix(0, now.Wall)
	if wall.Before(before.Add(-time.Second)) || wall.After(after.Add(time.Second)) {
		s.t.Errorf("%s: the guest's clock says %v, the host's %v to %v", what, wall, before, after)
	}
	if now.Back != 0 || now.Monotonic <= s.last.Monotonic || now.Boottime <= s.last.Boottime {
		s.t.Errorf("%s: a clock went back: %+v, before %+v", what, now, s.last)
	}
	// The timers of one second go on; those of the wall clock are due, or not.
	want := map[string]string{"monotonic": "fired", "boottime": "fired", "wall": "armed", "canceled": "canceled"}
	switch {
	case by >= wallTimer:
		want["wall"] = "fired"
	case by == 0:
		delete(want, "canceled") // the guest's TSC may have gone on, and its clock be right as it is
	}
	var is map[string]string
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		s.ask("fired", &is)
		if is["monotonic"] == want["monotonic"] && is["boottime"] == want["boottime"] && (is["wall"] == want["wall"]) || time.Now().After(end) {
			break
		}
	}
	for name, state := range want {
		if is[name] != state {
			s.t.Errorf("%s: the timer %s is %s, want %s", what, name, is[name], state)
		}
	}
	var cert certificate
	s.ask("tls "+proxied, &cert)
	if at := after.Unix(); cert.NotBefore > at || cert.NotAfter < at {
		s.t.Errorf("%s: the proxy's certificate holds from %d to %d, and it is %d", what, cert.NotBefore, cert.NotAfter, at)
	}
	s.certificates[cert.Serial] = true
	s.t.Logf("%s: the guest's clock is %v off; since the last look monotonic time went on by %v and boot time by %v; the certificate holds until %s",
		what, wall.Sub(before.Add(after.Sub(before)/2)).Round(time.Millisecond), time.Duration(now.Monotonic-s.last.Monotonic).Round(time.Millisecond),
		time.Duration(now.Boottime-s.last.Boottime).Round(time.Millisecond), time.Unix(cert.NotAfter, 0).UTC().Format(time.DateTime))
	s.last = now
}

func TestDays_of_sleep_leave_clocks_timers_and_certificates_right(t *testing.T) {
	onlyEmulated(t)
	e := guesttest.New(t)
	startWitness(t, e, "base")
	s := &sleeper{t: t, e: e, certificates: map[string]bool{}}
	begin := time.Now() // with a monotonic reading
	moved := time.Duration(0)
	over := func(what string, by time.Duration) {
		t.Helper()
		s.over(what, by)
		moved += by
	}
	defer func() { moveClock(t, -moved) }()

	s.ask("clock", &s.last)
	over("no time at all", 0)
	over(fmt.Sprintf("%d days", *days), time.Duration(*days)*24*time.Hour)
	for i := range *days {
		over(fmt.Sprintf("day %d", i+1), 24*time.Hour)
	}
	over("an hour back", -time.Hour)
	over("no time, with snapshots of a later time", 0)
	snap := e.Sleep("base").Snapshot

	// A clone of a snapshot that is as old.
	moveClock(t, time.Duration(*days)*24*time.Hour)
	moved += time.Duration(*days) * 24 * time.Hour
	if _, err := e.Store.With(e.Launcher).Clone(t.Context(), snap, sandbox.CloneOptions{Name: "clone"}); err != nil {
		t.Fatal(err)
	}
	var id identity
	before := time.Now()
	if err := ask(t.Context(), e, "clone", "identity", &id); err != nil {
		t.Fatal(err)
	}
	if wall := time.Unix(0, id.Wall); wall.Before(before.Add(-time.Second)) || wall.After(time.Now().Add(time.Second)) {
		t.Errorf("the clone's clock says %v, the host's %v", wall, before)
	}
	// This process's timers and the machine's monotonic clock know nothing of it.
	t.Logf("the host's clock was moved by %v in %v; the proxy has shown %d certificates", moved, time.Since(begin).Round(time.Second), len(s.certificates))
}
