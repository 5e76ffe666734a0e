package limits

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ownersOf makes a store with limits of owners.
func ownersOf(t *testing.T, waitSeconds int, others Owner, named map[string]Owner) (dir string) {
	t.Helper()
	dir = t.TempDir()
	setOwners(t, dir, waitSeconds, others, named)
	return dir
}

func setOwners(t *testing.T, dir string, waitSeconds int, others Owner, named map[string]Owner) {
	t.Helper()
	l := Default
	l.MemoryWaitSeconds, l.DefaultOwner, l.Owners = waitSeconds, others, named
	if err := l.Write(dir); err != nil {
		t.Fatal(err)
	}
}

func owned(t *testing.T, dir, owner string, mib int) (release func()) {
	t.Helper()
	f, err := AdmitOwner(t.Context(), dir, owner, mib, true)
	if err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() {
		if err := f(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(release)
	return release
}

// unowned checks that an owner may have no more awake, and that the error says all of these words.
func unowned(t *testing.T, dir, owner string, mib int, words ...string) {
	t.Helper()
	f, err := AdmitOwner(t.Context(), dir, owner, mib, true)
	if err == nil {
		t.Fatalf("%q: %d MiB are admitted: %v", owner, mib, f())
	}
	if !errors.Is(err, spec.ErrQuota) {
		t.Fatalf("%q: %v, want ErrQuota", owner, err)
	}
	for _, w := range append(words, "Limits.Write") {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q: no %q in %q", owner, w, err)
		}
	}
}

func uses(t *testing.T, dir, owner string, n int, mib int64) {
	t.Helper()
	if gotN, gotMiB, err := OwnerAwake(dir, owner); err != nil || gotN != n || gotMiB != mib {
		t.Errorf("%q: %d awake with %d MiB (%v), want %d with %d", owner, gotN, gotMiB, err, n, mib)
	}
}

func TestOfClass_falls_back_to_the_limits_of_each_sandbox(t *testing.T) {
	l := Default
	l.DefaultSandbox = Sandbox{DiskMiB: 100, CPUs: 0.5}
	l.Classes = map[lifetime.Class]Sandbox{lifetime.Workspace: {CPUWeight: 7}}
	dir := t.TempDir()
	if err := l.Write(dir); err != nil {
		t.Fatal(err)
	}
	l, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for class, want := range map[lifetime.Class]string{"": "7 CPU weight", lifetime.Workspace: "7 CPU weight", lifetime.Ephemeral: "100 MiB of disk, 0.5 CPUs"} {
		if got := l.OfClass(class).String(); got != want {
			t.Errorf("class %q has %s, want %s", class, got, want)
		}
	}
	for what, bad := range map[string]Limits{
		"a class that there is not": {MemoryOvercommit: 1, Classes: map[lifetime.Class]Sandbox{"x": {}}},
		"too few processors":        {MemoryOvercommit: 1, DefaultSandbox: Sandbox{CPUs: 0.001}},
		"a negative quota":          {MemoryOvercommit: 1, DefaultSandbox: Sandbox{DiskMiB: -1}},
		"too much weight":           {MemoryOvercommit: 1, Classes: map[lifetime.Class]Sandbox{lifetime.Ephemeral: {IOWeight: MaxIOWeight + 1}}},
	} {
		if err := bad.Write(dir); !errors.Is(err, ErrLimits) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestAdmitOwner_each_owner_has_its_number_and_memory(t *testing.T) {
	dir := ownersOf(t, 0, Owner{Awake: 2}, map[string]Owner{"a": {AwakeMiB: 100}, "free": {}, "": {Awake: 1}})
	owned(t, dir, "a", 60)
	unowned(t, dir, "a", 41, `"a"`, "60 MiB", "100 MiB awake")
	unowned(t, dir, "a", 101, "give it less")
	owned(t, dir, "a", 40)
	owned(t, dir, "", 1000)
	unowned(t, dir, "", 1, "without an owner", "1 awake")
	for _, owner := range []string{"b", "c"} {
		owned(t, dir, owner, 1000)
		release := owned(t, dir, owner, 2000)
		unowned(t, dir, owner, 1, "2 awake with 3000 MiB")
		release()
		owned(t, dir, owner, 1)
		uses(t, dir, owner, 2, 1001)
	}
	for range 20 {
		owned(t, dir, "free", 1<<20)
	}
	uses(t, dir, "free", 20, 20<<20)
	uses(t, dir, "a", 2, 100)
	uses(t, dir, "nobody", 0, 0)
}

func TestAdmitOwner_lowered_limits_refuse_new_ones_and_leave_those_that_are_awake(t *testing.T) {
	dir := ownersOf(t, 0, Owner{}, nil)
	var ends []func()
	for range 4 {
		ends = append(ends, owned(t, dir, "a", 10))
	}
	setOwners(t, dir, 0, Owner{}, map[string]Owner{"a": {Awake: 2}})
	unowned(t, dir, "a", 10, "4 awake with 40 MiB")
	uses(t, dir, "a", 4, 40)
	for _, end := range ends[:3] {
		unowned(t, dir, "a", 10)
		end()
	}
	owned(t, dir, "a", 10)
	unowned(t, dir, "a", 10)
}

func TestAdmitOwner_waits_until_one_sleeps_or_nobody_wants_it(t *testing.T) {
	dir := ownersOf(t, MaxMemoryWaitSeconds, Owner{Awake: 1}, nil)
	release := owned(t, dir, "a", 10)
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	ended := make(chan error, 2)
	go func() {
		_, err := AdmitOwner(ctx, dir, "a", 10, false)
		ended <- err
	}()
	cancel(gone)
	if err := <-ended; !errors.Is(err, gone) || errors.Is(err, spec.ErrQuota) {
		t.Errorf("called off: %v", err)
	}
	for _, wake := range []bool{true, false} {
		go func() {
			f, err := AdmitOwner(t.Context(), dir, "a", 10, wake)
			if err == nil {
				err = f()
			}
			ended <- err
		}()
	}
	owned(t, dir, "b", 10) // others do not wait behind them
	release()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	uses(t, dir, "a", 0, 0)
}

func TestAdmitOwner_many_at_once_never_exceed_the_limit(t *testing.T) {
	const most = 3
	dir := ownersOf(t, MaxMemoryWaitSeconds, Owner{Awake: most, AwakeMiB: most * 100}, nil)
	var awake atomic.Int64
	var all sync.WaitGroup
	for i := range 24 {
		all.Go(func() {
			for range 5 {
				f, err := AdmitOwner(t.Context(), dir, "a", 100, i%2 == 0)
				if err != nil {
					t.Error(err)
					return
				}
				if n := awake.Add(1); n > most {
					t.Errorf("%d are awake", n)
				}
				awake.Add(-1)
				if err := f(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	uses(t, dir, "a", 0, 0)
}

const holderDir = "DROWSE_TEST_HOLDER"

// TestMain is the process of a test that holds what it is admitted, if it was started as one.
func TestMain(m *testing.M) {
	dir := os.Getenv(holderDir)
	if dir == "" {
		os.Exit(m.Run())
	}
	awake, err := AdmitOwner(context.Background(), dir, "a", 10, true)
	var one func() error
	if err == nil {
		one, err = AdmitSandbox(dir, "a", func() (int, error) { return 0, nil })
	}
	if err != nil {
		panic(err)
	}
	os.Stdout.WriteString("held\n")
	for {
		time.Sleep(time.Hour) // it is killed
		runtime.KeepAlive(awake)
		runtime.KeepAlive(one)
	}
}

func TestAdmitOwner_what_a_killed_process_held_comes_back(t *testing.T) {
	dir := ownersOf(t, 0, Owner{Awake: 1, Sandboxes: 1}, nil)
	holder := exec.Command(os.Args[0])
	holder.Env = append(os.Environ(), holderDir+"="+dir)
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "held"; {
	}
	unowned(t, dir, "a", 10, "1 awake with 10 MiB")
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait() // it was killed
	owned(t, dir, "a", 10)
	release, err := AdmitSandbox(dir, "a", func() (int, error) { return 0, nil })
	if err != nil {
		t.Fatal(err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
}

func TestLimits_of_owners_are_checked_and_kept(t *testing.T) {
	for _, bad := range []Owner{{Sandboxes: -1}, {Awake: -1}, {AwakeMiB: MaxOwnerLimit + 1}, {DiskMiB: -1}} {
		for _, l := range []Limits{{MemoryOvercommit: 1, DefaultOwner: bad}, {MemoryOvercommit: 1, Owners: map[string]Owner{"a": bad}}} {
			if err := l.Write(t.TempDir()); !errors.Is(err, ErrLimits) {
				t.Errorf("%+v: %v", l, err)
			}
		}
	}
	dir := ownersOf(t, 0, Owner{Awake: 2}, map[string]Owner{"a": {Sandboxes: 3}, "": {DiskMiB: 4}})
	l, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for owner, want := range map[string]Owner{"a": {Sandboxes: 3}, "": {DiskMiB: 4}, "b": {Awake: 2}} {
		if got := l.Of(owner); got != want {
			t.Errorf("%q has %+v, want %+v", owner, got, want)
		}
	}
	if got := l.Of("a").String() + "; " + (Owner{}).String(); got != "3 sandboxes; no limit" {
		t.Error(got)
	}
	if err := os.WriteFile(filepath.Join(dir, limitsFile), []byte(`{"default_owner":{"awake":-1}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := AdmitOwner(t.Context(), dir, "a", 1, true); !errors.Is(err, ErrLimits) {
		t.Errorf("impossible limits in the file: %v", err)
	}
}
