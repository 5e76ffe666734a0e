package process

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
	"github.com/drowse-vm/drowse/snapshot"
)

func TestSelfSpec_that_cannot_be_is_refused(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]spec.Self{
		"something else":        {Allow: []string{"fork"}},
		"nothing, but said so":  {Allow: []string{""}},
		"more time of no bound": {Allow: []string{guest.SelfExtend}},
		"more time, no amount":  {Allow: []string{"extend="}},
		"more time, for ever":   {Allow: []string{"extend=99999999h"}},
		"more time twice":       {Allow: []string{"extend=1h", "extend=2h"}},
		"an amount of sleep":    {Allow: []string{"sleep=1h"}},
		"the same twice":        {Allow: []string{guest.SelfSleep, guest.SelfSleep}},
	} {
		if err := s.Validate(); !errors.Is(err, spec.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrSpec", name, err)
		}
	}
	for _, s := range []spec.Self{{}, {Allow: []string{guest.SelfSleep, guest.SelfSnapshot, guest.SelfHold, guest.SelfWake, "extend=7d"}}} {
		if err := s.Validate(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// newSelf returns the host's end for a guest with the grants allow, with a clock that pass advances.
func newSelf(t *testing.T, allow ...string) (s *self, pass func(time.Duration), trail func() []audit.Entry) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "vsock.sock")
	if err := audit.Ensure(t.Context(), audit.Path(path), audit.Head{VM: "id", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	s = &self{
		allow: spec.Self{Allow: allow}, now: func() time.Time { return now }, trail: audit.Open(audit.Path(path)), holders: &wakeLocks{},
		leaves:   func() error { return nil },
		snapshot: func(note string) (string, error) { return "snap of " + note, nil },
		sleep:    func() {},
	}
	t.Cleanup(s.end)
	return s, func(d time.Duration) { now = now.Add(d) }, func() (list []audit.Entry) {
		t.Helper()
		if _, err := audit.Read(context.Background(), audit.Path(path), audit.ReadOptions{}, func(e audit.Entry) error {
			list = append(list, e)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return list
	}
}

func TestSelf_leaves_no_snapshot_of_an_ephemeral_VM(t *testing.T) {
	t.Parallel()
	s, _, _ := newSelf(t, guest.SelfSnapshot, guest.SelfSleep)
	s.leaves = func() error { return errors.New("it is ephemeral") }
	for _, do := range []string{guest.SelfSnapshot, guest.SelfSleep} {
		if a, then := s.do(guest.SelfRequest{Do: do}); a.OK || then != nil || a.Snapshot != "" {
			t.Errorf("%s: %+v", do, a)
		}
	}
}

func TestSelf_does_what_is_allowed_and_records_it(t *testing.T) {
	t.Parallel()
	s, _, trail := newSelf(t, guest.SelfSnapshot, guest.SelfHold)
	if a, then := s.do(guest.SelfRequest{Do: guest.SelfSnapshot, Note: "x"}); !a.OK || a.Snapshot != "snap of x" || then != nil {
		t.Errorf("a snapshot: %+v", a)
	}
	if a, then := s.do(guest.SelfRequest{Do: guest.SelfSleep}); a.OK || !strings.Contains(a.Error, "--allow-self") || then != nil {
		t.Errorf("a sleep that is not allowed: %+v", a)
	}
	var got []string
	for _, e := range trail() {
		got = append(got, string(e.Kind)+" "+strings.Join(e.Argv, " "))
	}
	if strings.Join(got, "|") != "self snapshot x|self sleep" {
		t.Errorf("recorded: %q", got)
	}
	s, _, _ = newSelf(t, guest.SelfSleep)
	slept := false
	s.sleep = func() { slept = true }
	a, then := s.do(guest.SelfRequest{Do: guest.SelfSleep})
	if !a.OK || then == nil || slept {
		t.Fatalf("a sleep: %+v, and done before it was answered: %v", a, slept)
	}
	if then(); !slept {
		t.Error("it does not sleep")
	}
}

func TestSelf_serves_so_many_requests_and_records_no_more(t *testing.T) {
	t.Parallel()
	s, pass, trail := newSelf(t, guest.SelfSnapshot)
	ask := func() bool {
		a, _ := s.do(guest.SelfRequest{Do: guest.SelfSnapshot})
		return a.OK
	}
	served := func() (n int) {
		for range 1000 {
			if ask() {
				n++
			}
		}
		return n
	}
	if n := served(); n != selfBurst {
		t.Errorf("%d of 1000 in a row are served, want %d", n, selfBurst)
	}
	pass(3 * selfEvery)
	if n := served(); n != 3 {
		t.Errorf("later %d are served, want 3", n)
	}
	pass(1000 * selfEvery)
	if n := served(); n != selfBurst {
		t.Errorf("much later %d are served, want %d", n, selfBurst)
	}
	if n := len(trail()); n != 2*selfBurst+3 {
		t.Errorf("%d are recorded", n)
	}
}

func TestSelf_holds_the_VM_once_and_for_a_bounded_time(t *testing.T) {
	t.Parallel()
	s, pass, _ := newSelf(t, guest.SelfHold)
	held := func(want uint64) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			now, _ := s.holders.count()
			if now == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d hold it, want %d", now, want)
			}
		}
	}
	hold := func(seconds int) guest.SelfAnswer {
		pass(selfEvery)
		a, _ := s.do(guest.SelfRequest{Do: guest.SelfHold, Seconds: seconds})
		return a
	}
	if a := hold(MaxSelfHold + 1); a.OK {
		t.Error("it may be held for longer than the bound")
	}
	held(0)
	for range 3 {
		if a := hold(MaxSelfHold); !a.OK || a.Seconds != MaxSelfHold {
			t.Errorf("got %+v", a)
		}
	}
	held(1)
	if a := hold(0); !a.OK {
		t.Errorf("letting go: %+v", a)
	}
	held(0)
	hold(1)
	held(0) // by itself
	// A requested sleep does not wait for a hold.
	hold(MaxSelfHold)
	held(1)
	s.holders.dismiss(time.Minute)
	held(0)
}

// The guest asks for one snapshot after another to fill the disk.
func TestAttack_guest_takes_more_snapshots_of_itself_than_it_may(t *testing.T) {
	t.Parallel()
	s := statetest.TempStore(t)
	r, other := statetest.WithMetadata(t, s, "vm", state.Stopped, nil), statetest.WithMetadata(t, s, "other", state.Stopped, nil)
	// take makes what a served request leaves. See process.capture.
	take := func(r *state.Record, note string) string {
		t.Helper()
		labels, err := s.Labels(r, state.KindNamed)
		if err != nil {
			t.Fatal(err)
		}
		labels[state.LabelNote] = note
		id := spec.NewID()
		if _, err := snapshot.Create(t.Context(), s.SnapshotDir(id), snapshot.Spec{ID: id, Sandbox: r.Spec.Name, VCPUs: 1, Labels: labels, Memory: state.NoMemory{}}); err != nil {
			t.Fatal(err)
		}
		return id
	}
	// A sleeping VM takes no snapshot, so a request that passes the limit fails with ErrNotRunning.
	p := &process{store: s, r: r, asleep: true}
	ask := func() error {
		t.Helper()
		id, err := p.selfSnapshot(t.Context(), "again")
		if id != "" {
			t.Fatalf("a VM that sleeps has taken the snapshot %s", id)
		}
		return err
	}
	take(r, "of its owner")
	take(other, selfNote)
	var last string
	for n := range MaxSelfSnapshots {
		if err := ask(); !errors.Is(err, spec.ErrNotRunning) || errors.Is(err, control.ErrSelfLimit) {
			t.Fatalf("with %d snapshots: %v, want one more to be taken", n, err)
		}
		last = take(r, []string{selfNote, selfNote + ": again"}[n%2])
	}
	for range 3 {
		if err := ask(); !errors.Is(err, control.ErrSelfLimit) {
			t.Fatalf("with %d snapshots: %v, want control.ErrSelfLimit", MaxSelfSnapshots, err)
		}
	}
	// A rename does not reset the limit.
	r.Spec.Name = "renamed"
	if err := ask(); !errors.Is(err, control.ErrSelfLimit) {
		t.Errorf("under another name: %v, want control.ErrSelfLimit", err)
	}
	if err := s.RemoveSnapshot(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	if err := ask(); !errors.Is(err, spec.ErrNotRunning) {
		t.Errorf("after its owner has removed one: %v, want one more to be taken", err)
	}
}

func TestTagSnapshot_one_more_than_there_may_be_is_refused(t *testing.T) {
	t.Parallel()
	s := statetest.TempStore(t)
	id := statetest.SnapshotOf(t, s, statetest.WithMetadata(t, s, "a", state.Stopped, nil), state.KindNamed, time.Now())
	var tags []string
	for i := range state.MaxSnapshotTags + 1 {
		tags = append(tags, fmt.Sprint("t", i))
	}
	if _, err := s.TagSnapshot(id, tags); !errors.Is(err, spec.ErrMetadata) {
		t.Errorf("%d tags: %v, want ErrMetadata", len(tags), err)
	}
	if i, err := s.TagSnapshot(id, tags[:state.MaxSnapshotTags]); err != nil || len(i.Tags) != state.MaxSnapshotTags {
		t.Errorf("%d tags: %v, %v", state.MaxSnapshotTags, i.Tags, err)
	}
}

func TestSelf_wakes_and_extends_only_with_the_words_for_it(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 23, 6, 0, 0, 0, time.UTC)
	s, _, trail := newSelf(t, guest.SelfWake, "extend=1h")
	s.wake = func(got time.Time) error {
		if !got.Equal(at) {
			t.Errorf("woken at %v", got)
		}
		return nil
	}
	s.extend = func(seconds int) (time.Time, error) { return at.Add(time.Duration(seconds) * time.Second), nil }
	if a, then := s.do(guest.SelfRequest{Do: guest.SelfWake, At: at}); !a.OK || then != nil {
		t.Errorf("%+v", a)
	}
	if a, _ := s.do(guest.SelfRequest{Do: guest.SelfExtend, Seconds: 60}); !a.OK || !a.Expires.Equal(at.Add(time.Minute)) {
		t.Errorf("%+v", a)
	}
	var got []string
	for _, e := range trail() {
		got = append(got, strings.Join(e.Argv, " "))
	}
	if strings.Join(got, "|") != "wake 2026-11-23T06:00:00Z|extend 1m0s" {
		t.Errorf("recorded: %q", got)
	}
	s, _, _ = newSelf(t, guest.SelfHold)
	for _, r := range []guest.SelfRequest{{Do: guest.SelfWake, At: at}, {Do: guest.SelfExtend, Seconds: 60}} {
		if a, _ := s.do(r); a.OK {
			t.Errorf("%s was done without the word for it", r.Do)
		}
	}
}
