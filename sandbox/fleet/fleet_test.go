package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is one that tests set.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// rig is a Fleet over VMs in memory, with a clock of its own.
func rig(t *testing.T) (*fleet.Fleet, *fleettest.VMs, *clock) {
	t.Helper()
	c := &clock{at: time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)}
	vms := fleettest.New()
	vms.Now = c.now
	return fleet.New(vms, fleet.Options{Now: c.now}), vms, c
}

func specOf(name string) sandbox.Spec { return sandbox.Spec{Name: name, Image: "debian"} }

func create(t *testing.T, f *fleet.Fleet, name string, l state.Metadata) fleet.Sandbox {
	t.Helper()
	s, err := f.Create(t.Context(), fleet.Request{Spec: specOf(name), Metadata: l})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConformanceOfVMsInMemory(t *testing.T) {
	vms := fleettest.New()
	f := fleet.New(vms, fleet.Options{})
	fleettest.Conformance(t, fleettest.Subject{
		Fleet: f, Spec: sandbox.Spec{Image: "debian"},
		Make: func(t *testing.T, spec sandbox.Spec, l state.Metadata) {
			if _, err := f.Create(t.Context(), fleet.Request{Spec: spec, Metadata: l}); err != nil {
				t.Fatal(err)
			}
		},
		Write: func(t *testing.T, name, word string) {
			if err := vms.Write(name, word); err != nil {
				t.Fatal(err)
			}
		},
		Read: func(t *testing.T, name string) string {
			word, err := vms.Read(name)
			if err != nil {
				t.Fatal(err)
			}
			return word
		},
		Kill: func(_ *testing.T, name string) { vms.Kill(name) },
	})
}

func TestOfManyWhoGetOrCreateOneMakesIt(t *testing.T) {
	f, vms, _ := rig(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	made, ids := 0, map[string]bool{}
	for range 16 {
		wg.Go(func() {
			s, created, err := f.GetOrCreate(t.Context(), fleet.Request{Spec: specOf("one")})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			if created {
				made++
			}
			ids[s.ID] = true
		})
	}
	wg.Wait()
	if boots, _ := vms.Counts(); made != 1 || len(ids) != 1 || boots != 1 {
		t.Errorf("%d made it, %d booted, with ids %v", made, boots, ids)
	}
}

func TestManyWakesMakeOneVM(t *testing.T) {
	f, vms, _ := rig(t)
	create(t, f, "one", state.Metadata{})
	if _, err := f.Sleep(t.Context(), "one", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := f.Wake(t.Context(), "one"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if _, wakes := vms.Counts(); wakes != 1 {
		t.Errorf("it was woken %d times", wakes)
	}
}

func TestErrorsHaveCodeCauseAndRemedy(t *testing.T) {
	f, vms, c := rig(t)
	create(t, f, "runs", state.Metadata{})
	create(t, f, "short", state.Metadata{Class: lifetime.Ephemeral})
	create(t, f, "sleeps", state.Metadata{Persist: lifetime.Persist{Promote: []lifetime.Promotion{{Path: "/out", To: "/srv"}}}})
	full := errors.New("no space left on device")
	vms.Fail = func(op, name string) error {
		if name == "full" {
			return full
		}
		return nil
	}
	tests := map[string]struct {
		do   func(context.Context) error
		code fleet.Code
		is   error
	}{
		"creating a name twice": {func(ctx context.Context) error {
			_, err := f.Create(ctx, fleet.Request{Spec: specOf("runs")})
			return err
		}, "exists", sandbox.ErrExists},
		"creating without an image": {func(ctx context.Context) error { _, err := f.Create(ctx, fleet.Request{}); return err }, "invalid", sandbox.ErrSpec},
		"creating what has expired": {func(ctx context.Context) error {
			_, err := f.Create(ctx, fleet.Request{Spec: specOf("x"), Metadata: state.Metadata{Expires: c.now()}})
			return err
		}, "metadata", state.ErrMetadata},
		"creating an ephemeral one that idles": {func(ctx context.Context) error {
			s := specOf("x")
			s.Idle.SleepSeconds = 1
			_, err := f.Create(ctx, fleet.Request{Spec: s, Metadata: state.Metadata{Class: lifetime.Ephemeral}})
			return err
		}, "metadata", state.ErrMetadata},
		"creating a class that is none": {func(ctx context.Context) error {
			_, err := f.Create(ctx, fleet.Request{Spec: specOf("x"), Metadata: state.Metadata{Class: "eternal"}})
			return err
		}, "metadata", state.ErrMetadata},
		"getting nobody": {func(ctx context.Context) error { _, err := f.Get(ctx, "nobody"); return err }, "not-found", sandbox.ErrNotFound},
		"getting or creating without a name": {func(ctx context.Context) error {
			_, _, err := f.GetOrCreate(ctx, fleet.Request{Spec: sandbox.Spec{Image: "debian"}})
			return err
		}, "invalid", sandbox.ErrSpec},
		"putting an ephemeral one to sleep": {func(ctx context.Context) error { _, err := f.Sleep(ctx, "short", sandbox.SleepOptions{}); return err }, "metadata", state.ErrMetadata},
		"removing one that runs":            {func(ctx context.Context) error { _, err := f.Remove(ctx, "runs", false); return err }, "running", sandbox.ErrRunning},
		"promoting of one that sleeps": {func(ctx context.Context) error {
			if _, err := f.Sleep(ctx, "sleeps", sandbox.SleepOptions{}); err != nil {
				return err
			}
			_, err := f.Promote(ctx, "sleeps")
			return err
		}, "not-running", sandbox.ErrNotRunning},
		"promoting of nobody": {func(ctx context.Context) error { _, err := f.Promote(ctx, "nobody"); return err }, "not-found", sandbox.ErrNotFound},
		"removing nobody":     {func(ctx context.Context) error { _, err := f.Remove(ctx, "nobody", true); return err }, "not-found", sandbox.ErrNotFound},
		"changing one that runs": {func(ctx context.Context) error {
			_, err := f.Update(ctx, "runs", fleet.Changes{Spec: spec.Changes{Idle: &spec.Idle{SleepSeconds: 5}}})
			return err
		}, "running", sandbox.ErrRunning},
		"forking into no child": {func(ctx context.Context) error { _, err := f.Fork(ctx, "runs", nil); return err }, "invalid", sandbox.ErrSpec},
		"a history of nobody":   {func(ctx context.Context) error { _, err := f.History(ctx, "nobody", records.Span{}); return err }, "not-found", sandbox.ErrNotFound},
		"a page that is too long": {func(ctx context.Context) error {
			_, err := f.List(ctx, records.Filter{Limit: records.MaxPage + 1})
			return err
		}, "invalid", records.ErrInvalid},
		"what fails below": {func(ctx context.Context) error {
			_, err := f.Create(ctx, fleet.Request{Spec: specOf("full")})
			return err
		}, fleet.CodeOther, full},
		"a call that was called off": {func(ctx context.Context) error {
			ctx, stop := context.WithCancel(ctx)
			stop()
			_, err := f.Wake(ctx, "runs")
			return err
		}, fleet.CodeCanceled, context.Canceled},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := tt.do(t.Context())
			var e *fleet.Error
			if !errors.As(err, &e) {
				t.Fatalf("got %v, which is no *Error", err)
			}
			if e.Code != tt.code || !errors.Is(err, tt.is) || e.Op == "" || (e.Remedy == "") != (e.Code == fleet.CodeOther) {
				t.Errorf("got %+v, want code %q and cause %v", e, tt.code, tt.is)
			}
		})
	}
}

func TestPruneDoesWhatMetadataSays(t *testing.T) {
	f, vms, c := rig(t)
	in := func(d time.Duration) time.Time { return c.now().Add(d) }
	create(t, f, "workspace", state.Metadata{Expires: in(time.Hour)})
	create(t, f, "resumable", state.Metadata{Class: lifetime.Resumable, Expires: in(time.Hour), Keep: lifetime.Keep{Expired: 3600}})
	create(t, f, "ephemeral", state.Metadata{Class: lifetime.Ephemeral, Expires: in(time.Hour)})
	ended := create(t, f, "ended", state.Metadata{Class: lifetime.Ephemeral})
	create(t, f, "lasting", state.Metadata{})
	if err := vms.Ran("ended", 0, "true"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.History(t.Context(), "ended", records.Span{}); err != nil {
		t.Fatal(err)
	}
	vms.End("ended")
	names := func() string {
		list, err := f.List(t.Context(), records.Filter{})
		if err != nil || len(list.Problems) != 0 {
			t.Fatal(list.Problems, err)
		}
		var out []string
		for _, s := range list.Sandboxes {
			out = append(out, s.Name+" "+string(s.Status))
		}
		return strings.Join(out, ", ")
	}
	prune := func(dry bool) fleet.Pruned {
		p, err := f.Prune(t.Context(), dry)
		if err != nil || len(p.Problems) != 0 {
			t.Fatal(p.Problems, err)
		}
		return p
	}
	if p := prune(true); !p.DryRun || len(p.Remove) != 1 || p.Remove[0].ID != ended.ID || names() != "ended stopped, ephemeral running, lasting running, resumable running, workspace running" {
		t.Errorf("a dry run: %+v, and then there are %s", p, names())
	}
	if prune(false); names() != "ephemeral running, lasting running, resumable running, workspace running" {
		t.Errorf("before the hour there are %s", names())
	}
	if _, err := f.History(t.Context(), ended.ID, records.Span{}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of an ephemeral one something is left: %v", err)
	}
	c.add(time.Hour)
	if prune(false); names() != "lasting running, resumable expired, workspace expired" {
		t.Errorf("after an hour there are %s", names())
	}
	c.add(time.Hour)
	if p := prune(false); len(p.Remove) != 1 || p.Freed.Snapshots != 1 || p.Bytes == 0 || names() != "lasting running, workspace expired" {
		t.Errorf("after two hours: %+v, and there are %s", p, names())
	}
	c.add(state.HistoryTime + time.Hour)
	if p := prune(false); p.Histories != 1 {
		t.Errorf("%d histories were forgotten, want 1", p.Histories)
	}
}

func TestAttack_crashed_sandbox_passes_for_one_that_sleeps(t *testing.T) {
	f, vms, _ := rig(t)
	create(t, f, "a", state.Metadata{})
	written := func(text string) {
		t.Helper()
		if err := vms.Write("a", text); err != nil {
			t.Fatal(err)
		}
	}
	written("slept")
	if _, err := f.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, up := range []func() error{
		func() error { _, err := f.Start(t.Context(), "a"); return err },
		func() error { _, err := vms.BringUp(t.Context(), "a"); return err },
	} {
		if _, err := f.Start(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		written("since")
		vms.Kill("a")
		if s, err := f.Get(t.Context(), "a"); err != nil || s.Status != records.Crashed || s.Problem == "" {
			t.Errorf("it is %q, %q (%v)", s.Status, s.Problem, err)
		}
		list, err := f.List(t.Context(), records.Filter{Statuses: []records.Status{records.Crashed}})
		if err != nil || len(list.Sandboxes) != 1 {
			t.Errorf("the list has %+v (%v)", list, err)
		}
		if err := up(); err != nil {
			t.Fatal(err)
		}
		if got, err := vms.Read("a"); err != nil || got != "since" {
			t.Errorf("it has %q (%v), and what was written is lost", got, err)
		}
	}
}

func TestAttack_supervisor_prunes_the_disks_that_were_left(t *testing.T) {
	f, vms, _ := rig(t)
	create(t, f, "a", state.Metadata{})
	if _, err := f.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Wake(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	vms.Kill("a")
	if _, err := f.Wake(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	left := func() (n int) {
		t.Helper()
		list, err := vms.Snapshots()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			if s.Kind == "abandoned" {
				n++
			}
		}
		return n
	}
	if p, err := f.Keep(t.Context()); err != nil || len(p.Abandoned) != 0 || left() != 1 {
		t.Errorf("kept by itself: %+v (%v), %d are left", p, err, left())
	}
	if p, err := f.Prune(t.Context(), true); err != nil || len(p.Abandoned) != 1 || p.Freed.Snapshots != 1 || left() != 1 {
		t.Errorf("a dry run: %+v (%v), %d are left", p, err, left())
	}
	if p, err := f.Prune(t.Context(), false); err != nil || len(p.Abandoned) != 1 || left() != 0 {
		t.Errorf("pruned: %+v (%v), %d are left", p, err, left())
	}
}

func TestRetentionKeepsTheLastTheYoungAndTheTagged(t *testing.T) {
	f, vms, c := rig(t)
	create(t, f, "s", state.Metadata{Keep: lifetime.Keep{Last: 2, For: 3600}})
	var slept []string
	for range 6 {
		res, err := f.Sleep(t.Context(), "s", sandbox.SleepOptions{})
		if err != nil {
			t.Fatal(err)
		}
		slept = append(slept, res.Snapshot)
		if len(slept) == 1 {
			if _, err := f.TagSnapshot(t.Context(), res.Snapshot, []string{"release"}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := f.Wake(t.Context(), "s"); err != nil {
			t.Fatal(err)
		}
		c.add(25 * time.Minute)
	}
	if _, err := f.Sleep(t.Context(), "s", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	left := func() (out []int) {
		infos, err := vms.Snapshots()
		if err != nil {
			t.Fatal(err)
		}
		for i, id := range slept {
			if slices.ContainsFunc(infos, func(s state.SnapshotInfo) bool { return s.ID == id }) {
				out = append(out, i)
			}
		}
		return out
	}
	// The tagged one; two that are younger than an hour, one of which is among the last two.
	if got := left(); !slices.Equal(got, []int{0, 4, 5}) {
		t.Errorf("of the sleeps %v are left", got)
	}
	c.add(24 * time.Hour)
	if _, err := f.Prune(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if got := left(); !slices.Equal(got, []int{0, 5}) {
		t.Errorf("a day later %v are left", got)
	}
	if _, err := f.TagSnapshot(t.Context(), slept[0], nil); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Prune(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if got := left(); !slices.Equal(got, []int{5}) {
		t.Errorf("without its tag %v are left", got)
	}
}

func TestWhoExtendsBeforeThePruningKeepsIt(t *testing.T) {
	f, vms, c := rig(t)
	create(t, f, "s", state.Metadata{Class: lifetime.Ephemeral, Expires: c.now().Add(time.Hour)})
	c.add(2 * time.Hour)
	// The extension comes after the decision and before the step.
	vms.Fail = func(op, _ string) error {
		if op == "remove" {
			t.Error("it is removed")
		}
		return nil
	}
	other := fleet.New(hook{vms, func() {
		if _, err := f.Extend(t.Context(), "s", c.now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
	}}, fleet.Options{Now: c.now})
	p, err := other.Prune(t.Context(), false)
	if err != nil || len(p.Remove) != 1 {
		t.Errorf("pruned %+v (%v)", p, err)
	}
	if s, err := f.Get(t.Context(), "s"); err != nil || s.Status != records.Running {
		t.Errorf("it is %+v (%v)", s, err)
	}
}

// hook calls f before the first change of metadata.
type hook struct {
	fleet.VMs
	f func()
}

func (h hook) SetMetadata(ctx context.Context, name string, change func(*state.Metadata, error) error) (state.Metadata, error) {
	h.f()
	return h.VMs.SetMetadata(ctx, name, change)
}

func TestHistoryHasWhatWasRunAndSlept(t *testing.T) {
	f, vms, c := rig(t)
	create(t, f, "s", state.Metadata{Owner: "build"})
	for i := range 5 {
		if err := vms.Ran("s", i, "sh", "-c", fmt.Sprint("exit ", i)); err != nil {
			t.Fatal(err)
		}
		c.add(time.Second)
	}
	for range 2 { // twice is no more
		h, err := f.History(t.Context(), "s", records.Span{Limit: 3})
		if err != nil || len(h.Runs) != 3 || *h.Runs[0].Exit != 4 || h.Runs[0].CPUSeconds != 0.001 || h.Runs[0].Command[2] != "exit 4" {
			t.Fatalf("history %+v (%v)", h, err)
		}
		if h, err = f.History(t.Context(), "s", records.Span{Before: h.Runs[2].Begun}); err != nil || len(h.Runs) != 2 || *h.Runs[1].Exit != 0 {
			t.Fatalf("the next page: %+v (%v)", h, err)
		}
	}
	id := create(t, f, "t", state.Metadata{}).ID
	if err := vms.Ran("t", 7, "false"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Delete(t.Context(), "t"); err != nil {
		t.Fatal(err)
	}
	create(t, f, "t", state.Metadata{})
	if h, err := f.History(t.Context(), "t", records.Span{}); err != nil || len(h.Runs) != 0 || h.Sandbox.ID == id {
		t.Errorf("the new one has a history of %+v (%v)", h, err)
	}
	there, err := f.Get(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	if h, err := f.History(t.Context(), there.ID, records.Span{}); err != nil || h.Sandbox.Name != "t" || !h.Sandbox.Removed.IsZero() {
		t.Errorf("by its id, the new one has a history of %+v (%v)", h, err)
	}
	if h, err := f.History(t.Context(), id, records.Span{}); err != nil || len(h.Runs) != 1 || h.Sandbox.Removed.IsZero() {
		t.Errorf("the one before has a history of %+v (%v)", h, err)
	}
}

func TestListOfAFleetThatHasReadBeforeIsThatOfANewOne(t *testing.T) {
	vms := fleettest.New()
	f, kept := fleet.New(vms, fleet.Options{}), fleet.New(vms, fleet.Options{})
	create(t, f, "a", state.Metadata{Owner: "build"})
	gone := create(t, f, "gone", state.Metadata{})
	same := func(what string) {
		t.Helper()
		got, err := kept.List(t.Context(), records.Filter{})
		want, werr := fleet.New(vms, fleet.Options{}).List(t.Context(), records.Filter{})
		if err != nil || werr != nil || len(got.Problems) != 0 {
			t.Fatal(err, werr, got.Problems)
		}
		if g, w := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); g != w {
			t.Errorf("%s: it says\n%s\nand a new one\n%s", what, g, w)
		}
		for _, s := range got.Sandboxes { // the caller's own
			if len(s.Tags) > 0 {
				s.Tags[0] = "changed"
			}
		}
	}
	same("at first")
	if _, err := f.Delete(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	create(t, f, "gone", state.Metadata{Owner: "tests", Tags: []string{"a"}})
	same("when one was replaced")
	if _, err := f.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Rename(t.Context(), "a", "b"); err != nil {
		t.Fatal(err)
	}
	create(t, f, "a", state.Metadata{})
	same("when one was renamed and its name taken")
	owner := "other"
	if _, err := f.Update(t.Context(), "b", fleet.Changes{Owner: &owner}); err != nil {
		t.Fatal(err)
	}
	same("when the metadata of one that sleeps was changed")
	vms.Kill("gone")
	same("when one was killed")
	same("when nothing has changed")
	if h, err := kept.History(t.Context(), gone.ID, records.Span{}); err != nil || h.Sandbox.Removed.IsZero() {
		t.Errorf("what was replaced is %+v (%v)", h, err)
	}
}

// reads counts how often the record of a VM is read.
type reads struct {
	fleet.VMs
	n int
}

func (r *reads) Get(name string) (*state.Record, error) {
	r.n++
	return r.VMs.Get(name)
}

func TestListReadsNothingAgainThatSleepsAndHasNotChanged(t *testing.T) {
	vms := &reads{VMs: fleettest.New()}
	f := fleet.New(vms, fleet.Options{})
	for _, name := range []string{"a", "b", "c"} {
		create(t, f, name, state.Metadata{})
	}
	for _, name := range []string{"a", "b"} {
		if _, err := f.Sleep(t.Context(), name, sandbox.SleepOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	read := func() int {
		before := vms.n
		list, err := f.List(t.Context(), records.Filter{})
		if err != nil || len(list.Sandboxes) != 3 {
			t.Fatalf("the list has %+v (%v)", list, err)
		}
		return vms.n - before
	}
	if first, second := read(), read(); first != 3 || second != 1 {
		t.Errorf("the first list reads %d records, the second %d: want 3, and then the one that runs", first, second)
	}
}

func TestPagesTogetherAreTheList(t *testing.T) {
	f, _, _ := rig(t)
	for i := range 25 {
		create(t, f, fmt.Sprintf("s%02d", i), state.Metadata{Owner: []string{"build", "tests"}[i%2]})
	}
	var names []string
	filter := records.Filter{Owner: "build", Limit: 4}
	for {
		page, err := f.List(t.Context(), filter)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page.Sandboxes {
			names = append(names, s.Name)
		}
		if filter.After = page.Next; page.Next == "" {
			break
		}
	}
	if len(names) != 13 || !slices.IsSorted(names) || len(slices.Compact(names)) != 13 {
		t.Errorf("the pages have %v", names)
	}
}
