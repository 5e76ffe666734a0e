package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A clock is set by tests.
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

// rig returns the sandboxes of a host with VMs in memory. The Fleet has its own clock, which starts now.
func rig(t *testing.T) (fleettest.Sandboxes, *sandboxtest.VMs, *clock) {
	t.Helper()
	c := &clock{at: time.Now()}
	v := &sandboxtest.VMs{}
	return fleettest.Of(v.Host(t), fleet.Options{Now: c.now}), v, c
}

func specOf(name string) sandbox.Spec { return sandbox.Spec{Name: name, Image: sandboxtest.Image} }

func create(t *testing.T, f fleettest.Sandboxes, name string, l spec.Metadata) records.Sandbox {
	t.Helper()
	s, err := f.Create(t.Context(), records.Request{Spec: specOf(name), Metadata: l})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// write and read access a file on the disk of a sandbox. run runs a command in it.
func write(t *testing.T, v *sandboxtest.VMs, name, text string) {
	t.Helper()
	if err := v.Guest(name).WriteFile("/root/word", []byte(text)); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, v *sandboxtest.VMs, name string) string {
	t.Helper()
	text, err := v.Guest(name).ReadFile("/root/word")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func run(t *testing.T, f fleettest.Sandboxes, name string, argv ...string) {
	t.Helper()
	var exit *guest.ExitError
	if _, err := f.Host.Sandbox(name).Exec(t.Context(), guest.Cmd{Argv: argv}); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
}

func TestOf_many_who_get_or_create_one_makes_it(t *testing.T) {
	v := &sandboxtest.VMs{}
	var boots atomic.Int32
	v.Fail = func(string, string) error { boots.Add(1); return nil }
	f := fleettest.Of(v.Host(t), fleet.Options{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	made, ids := 0, map[string]bool{}
	for range 16 {
		wg.Go(func() {
			s, created, err := f.GetOrCreate(t.Context(), records.Request{Spec: specOf("one")})
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
	if made != 1 || len(ids) != 1 || boots.Load() != 1 {
		t.Errorf("%d made it, %d booted, with ids %v", made, boots.Load(), ids)
	}
}

func TestMany_wakes_make_one_VM(t *testing.T) {
	v := &sandboxtest.VMs{}
	var wakes atomic.Int32
	v.Fail = func(op, _ string) error {
		if op == "restore" {
			wakes.Add(1)
		}
		return nil
	}
	f := fleettest.Of(v.Host(t), fleet.Options{})
	create(t, f, "one", spec.Metadata{})
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
	if wakes.Load() != 1 {
		t.Errorf("it was woken %d times", wakes.Load())
	}
}

func TestErrors_have_code_cause_and_remedy(t *testing.T) {
	full := errors.New("no space left on device")
	v := &sandboxtest.VMs{Fail: func(_, name string) error {
		if name == "full" {
			return full
		}
		return nil
	}}
	f := fleettest.Of(v.Host(t), fleet.Options{})
	create(t, f, "runs", spec.Metadata{})
	create(t, f, "short", spec.Metadata{Class: lifetime.Ephemeral})
	create(t, f, "sleeps", spec.Metadata{})
	tests := map[string]struct {
		do   func(context.Context) error
		code records.Code
		is   error
	}{
		"creating a name twice": {func(ctx context.Context) error {
			_, err := f.Create(ctx, records.Request{Spec: specOf("runs")})
			return err
		}, "exists", sandbox.ErrExists},
		"creating without an image": {func(ctx context.Context) error { _, err := f.Create(ctx, records.Request{}); return err }, "invalid", sandbox.ErrSpec},
		"creating what has expired": {func(ctx context.Context) error {
			_, err := f.Create(ctx, records.Request{Spec: specOf("x"), Metadata: spec.Metadata{Expires: time.Now().Add(-time.Hour)}})
			return err
		}, "metadata", spec.ErrMetadata},
		"creating an ephemeral one that idles": {func(ctx context.Context) error {
			s := specOf("x")
			s.Idle.SleepSeconds = 1
			_, err := f.Create(ctx, records.Request{Spec: s, Metadata: spec.Metadata{Class: lifetime.Ephemeral}})
			return err
		}, "metadata", spec.ErrMetadata},
		"creating a class that is none": {func(ctx context.Context) error {
			_, err := f.Create(ctx, records.Request{Spec: specOf("x"), Metadata: spec.Metadata{Class: "eternal"}})
			return err
		}, "metadata", spec.ErrMetadata},
		"getting nobody": {func(ctx context.Context) error { _, err := f.Get(ctx, "nobody"); return err }, "not-found", sandbox.ErrNotFound},
		"getting or creating without a name": {func(ctx context.Context) error {
			_, _, err := f.GetOrCreate(ctx, records.Request{Spec: sandbox.Spec{Image: sandboxtest.Image}})
			return err
		}, "invalid", sandbox.ErrSpec},
		"putting an ephemeral one to sleep": {func(ctx context.Context) error { _, err := f.Sleep(ctx, "short", sandbox.SleepOptions{}); return err }, "metadata", spec.ErrMetadata},
		"promoting of one that sleeps": {func(ctx context.Context) error {
			if _, err := f.Sleep(ctx, "sleeps", sandbox.SleepOptions{}); err != nil {
				return err
			}
			persist := lifetime.Persist{Promote: []lifetime.Promotion{{Path: "/out", To: "/srv"}}}
			if _, err := f.Update(ctx, "sleeps", records.Changes{Persist: &persist}); err != nil {
				return err
			}
			_, err := f.Promote(ctx, "sleeps")
			return err
		}, "not-running", sandbox.ErrNotRunning},
		"promoting of nobody": {func(ctx context.Context) error { _, err := f.Promote(ctx, "nobody"); return err }, "not-found", sandbox.ErrNotFound},
		"changing one that runs": {func(ctx context.Context) error {
			_, err := f.Update(ctx, "runs", records.Changes{Spec: spec.Changes{Idle: &spec.Idle{SleepSeconds: 5}}})
			return err
		}, "running", sandbox.ErrRunning},
		"forking into no child": {func(ctx context.Context) error { _, err := f.Fork(ctx, "runs", nil); return err }, "invalid", sandbox.ErrSpec},
		"a history of nobody":   {func(ctx context.Context) error { _, err := f.History(ctx, "nobody", records.Span{}); return err }, "not-found", sandbox.ErrNotFound},
		"a page that is too long": {func(ctx context.Context) error {
			_, err := f.List(ctx, records.Filter{Limit: records.MaxPage + 1})
			return err
		}, "invalid", records.ErrInvalid},
		"what fails below": {func(ctx context.Context) error {
			_, err := f.Create(ctx, records.Request{Spec: specOf("full")})
			return err
		}, records.CodeOther, nil},
		"a call that was called off": {func(ctx context.Context) error {
			ctx, stop := context.WithCancel(ctx)
			stop()
			_, err := f.Wake(ctx, "runs")
			return err
		}, records.CodeCanceled, context.Canceled},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := tt.do(t.Context())
			var e *records.Error
			if !errors.As(err, &e) {
				t.Fatalf("got %v, which is no *Error", err)
			}
			if e.Code != tt.code || tt.is != nil && !errors.Is(err, tt.is) || e.Op == "" || (e.Remedy == "") != (e.Code == records.CodeOther) {
				t.Errorf("got %+v, want code %q and cause %v", e, tt.code, tt.is)
			}
		})
	}
}

func TestPrune_does_what_metadata_says(t *testing.T) {
	f, _, c := rig(t)
	in := func(d time.Duration) time.Time { return c.now().Add(d) }
	create(t, f, "workspace", spec.Metadata{Expires: in(time.Hour)})
	create(t, f, "resumable", spec.Metadata{Class: lifetime.Resumable, Expires: in(time.Hour), Keep: lifetime.Keep{Expired: 3600}})
	create(t, f, "ephemeral", spec.Metadata{Class: lifetime.Ephemeral, Expires: in(time.Hour)})
	ended := create(t, f, "ended", spec.Metadata{Class: lifetime.Ephemeral})
	create(t, f, "lasting", spec.Metadata{})
	run(t, f, "ended", "true")
	if _, err := f.History(t.Context(), "ended", records.Span{}); err != nil {
		t.Fatal(err)
	}
	if err := f.Host.Sandbox("ended").Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
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
	prune := func(dry bool) records.Pruned {
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
	create(t, f, "a", spec.Metadata{})
	write(t, vms, "a", "slept")
	if _, err := f.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, up := range []func() error{
		func() error { _, err := f.Start(t.Context(), "a"); return err },
		func() error { _, err := f.Host.Sandbox("a").BringUp(t.Context()); return err },
	} {
		if _, err := f.Start(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		write(t, vms, "a", "since")
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
		if got := read(t, vms, "a"); got != "since" {
			t.Errorf("it has %q, and what was written is lost", got)
		}
	}
}

func TestAttack_supervisor_prunes_the_disks_that_were_left(t *testing.T) {
	f, vms, _ := rig(t)
	create(t, f, "a", spec.Metadata{})
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
		list, err := f.Host.State.Snapshots()
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

func TestRetention_keeps_the_last_the_young_and_the_tagged(t *testing.T) {
	f, _, _ := rig(t)
	create(t, f, "s", spec.Metadata{Keep: lifetime.Keep{Last: 2, For: 3600}})
	var slept []string
	for i := range 7 {
		res, err := f.Sleep(t.Context(), "s", sandbox.SleepOptions{})
		if err != nil {
			t.Fatal(err)
		}
		slept = append(slept, res.Snapshot)
		if i == 0 {
			if _, err := f.Host.State.TagSnapshot(res.Snapshot, []string{"release"}); err != nil {
				t.Fatal(err)
			}
		}
		if i < 6 {
			if _, err := f.Wake(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
		}
	}
	left := func() (out []int) {
		if _, err := f.Prune(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		infos, err := f.Host.State.Snapshots()
		if err != nil {
			t.Fatal(err)
		}
		for i, id := range slept {
			if slices.ContainsFunc(infos, func(s spec.SnapshotInfo) bool { return s.ID == id }) {
				out = append(out, i)
			}
		}
		return out
	}
	if got := left(); !slices.Equal(got, []int{0, 1, 2, 3, 4, 5, 6}) {
		t.Errorf("of sleeps of the last hour %v are left", got)
	}
	if _, err := f.Update(t.Context(), "s", records.Changes{Keep: &lifetime.Keep{Last: 2}}); err != nil {
		t.Fatal(err)
	}
	// The tagged one and the last two are left. It sleeps in the last one.
	if got := left(); !slices.Equal(got, []int{0, 5, 6}) {
		t.Errorf("of those, with two to be kept, %v are left", got)
	}
	if _, err := f.Host.State.TagSnapshot(slept[0], nil); err != nil {
		t.Fatal(err)
	}
	if got := left(); !slices.Equal(got, []int{5, 6}) {
		t.Errorf("without its tag %v are left", got)
	}
}

func TestWho_extends_before_the_pruning_keeps_it(t *testing.T) {
	f, _, c := rig(t)
	create(t, f, "s", spec.Metadata{Class: lifetime.Ephemeral, Expires: c.now().Add(time.Hour)})
	c.add(2 * time.Hour)
	// The extension comes after Prune has read the metadata, and before it acts.
	var extend sync.Once
	other := fleet.New(f.Host, fleet.Options{Now: func() time.Time {
		extend.Do(func() {
			if _, err := f.Extend(t.Context(), "s", c.now().Add(time.Hour)); err != nil {
				t.Error(err)
			}
		})
		return c.now()
	}})
	p, err := other.Prune(t.Context(), false)
	if err != nil || len(p.Remove) != 1 {
		t.Errorf("pruned %+v (%v)", p, err)
	}
	if s, err := f.Get(t.Context(), "s"); err != nil || s.Status != records.Running {
		t.Errorf("it is %+v (%v)", s, err)
	}
}

func TestHistory_has_what_was_run_and_slept(t *testing.T) {
	exit := func(_ context.Context, p *fakeguest.Process) int {
		n, err := strconv.Atoi(p.Args[1])
		if err != nil {
			return 127
		}
		return n
	}
	v := &sandboxtest.VMs{Commands: map[string]fakeguest.Command{"exit": exit}}
	f := fleettest.Of(v.Host(t), fleet.Options{})
	create(t, f, "s", spec.Metadata{Owner: "build"})
	for i := range 5 {
		run(t, f, "s", "exit", strconv.Itoa(i))
	}
	for range 2 { // the second time must give the same
		h, err := f.History(t.Context(), "s", records.Span{Limit: 3})
		if err != nil || len(h.Runs) != 3 || *h.Runs[0].Exit != 4 || h.Runs[0].Command[1] != "4" {
			t.Fatalf("history %+v (%v)", h, err)
		}
		if h, err = f.History(t.Context(), "s", records.Span{Before: h.Runs[2].Begun}); err != nil || len(h.Runs) != 2 || *h.Runs[1].Exit != 0 {
			t.Fatalf("the next page: %+v (%v)", h, err)
		}
	}
	id := create(t, f, "t", spec.Metadata{}).ID
	run(t, f, "t", "exit", "7")
	if _, err := f.Delete(t.Context(), "t"); err != nil {
		t.Fatal(err)
	}
	create(t, f, "t", spec.Metadata{})
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

func TestList_of_a_fleet_that_has_read_before_is_that_of_a_new_one(t *testing.T) {
	f, vms, _ := rig(t)
	kept := fleet.New(f.Host, fleet.Options{})
	create(t, f, "a", spec.Metadata{Owner: "build"})
	gone := create(t, f, "gone", spec.Metadata{})
	same := func(what string) {
		t.Helper()
		got, err := kept.List(t.Context(), records.Filter{})
		want, werr := fleet.New(f.Host, fleet.Options{}).List(t.Context(), records.Filter{})
		if err != nil || werr != nil || len(got.Problems) != 0 {
			t.Fatal(err, werr, got.Problems)
		}
		if g, w := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); g != w {
			t.Errorf("%s: it says\n%s\nand a new one\n%s", what, g, w)
		}
		for _, s := range got.Sandboxes { // changes the caller's copy
			if len(s.Tags) > 0 {
				s.Tags[0] = "changed"
			}
		}
	}
	same("at first")
	if _, err := f.Delete(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	create(t, f, "gone", spec.Metadata{Owner: "tests", Tags: []string{"a"}})
	same("when one was replaced")
	if _, err := f.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Rename(t.Context(), "a", "b"); err != nil {
		t.Fatal(err)
	}
	create(t, f, "a", spec.Metadata{})
	same("when one was renamed and its name taken")
	owner := "other"
	if _, err := f.Update(t.Context(), "b", records.Changes{Owner: &owner}); err != nil {
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

func TestPages_together_are_the_list(t *testing.T) {
	f, _, _ := rig(t)
	for i := range 25 {
		create(t, f, fmt.Sprintf("s%02d", i), spec.Metadata{Owner: []string{"build", "tests"}[i%2]})
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
