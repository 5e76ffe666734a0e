package state

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

func tempStore(t *testing.T) *Store {
	t.Helper()
	// A short path, since that of a Unix socket is limited.
	dir, err := os.MkdirTemp("", "ds")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// withMetadata makes a VM without a process.
func withMetadata(t *testing.T, s *Store, name string, phase Phase, l *spec.Metadata) *Record {
	t.Helper()
	r := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: name}, Phase: phase, metadata: l}
	lock, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	lock.Release()
	return r
}

// snapshotOf makes a snapshot of a VM, without memory.
func snapshotOf(t *testing.T, s *Store, r *Record, kind string, at time.Time) string {
	t.Helper()
	labels, err := s.Labels(r, kind)
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	_, err = snapshot.Create(t.Context(), s.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: r.Spec.Name, VCPUs: 1, Labels: labels, Memory: NoMemory{}, Created: at,
	})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestLabel_is_kept_as_it_was_given_and_bounded(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, nil)
	if l, err := s.Metadata("a"); err != nil || l.EffectiveClass() != lifetime.Workspace || l.Owner != "" {
		t.Errorf("without one: %+v, %v", l, err)
	}
	want := spec.Metadata{Class: lifetime.Resumable, Owner: "build", Purpose: "ünit tests", Tags: []string{"b", "a", "b"}, Expires: time.Unix(1e9, 5), Keep: lifetime.Keep{Last: 3, For: 60}}
	got, err := s.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { *l = want; return nil })
	if err != nil || !slices.Equal(got.Tags, []string{"a", "b"}) || !got.Expires.Equal(time.Unix(1e9, 0)) {
		t.Fatalf("%+v, %v", got, err)
	}
	again, err := s.Metadata("a")
	if err != nil || fmt.Sprint(again) != fmt.Sprint(got) {
		t.Errorf("%+v, %v, want %+v", again, err, got)
	}
	for name, bad := range map[string]spec.Metadata{
		"class":                {Class: "eternal"},
		"owner too long":       {Owner: strings.Repeat("x", spec.MaxMetadataOwner+1)},
		"owner in two lines":   {Owner: "a\nb"},
		"purpose too long":     {Purpose: strings.Repeat("x", spec.MaxMetadataPurpose+1)},
		"purpose not UTF-8":    {Purpose: "\xff"},
		"too many tags":        {Tags: strings.Fields(strings.Repeat("x ", spec.MaxMetadataTags+1))},
		"an empty tag":         {Tags: []string{""}},
		"a tag of two words":   {Tags: []string{"a b"}},
		"a tag too long":       {Tags: []string{strings.Repeat("x", spec.MaxMetadataTag+1)}},
		"drops no path":        {Persist: lifetime.Persist{Drop: []string{"x"}}},
		"keeps too many":       {Keep: lifetime.Keep{Last: lifetime.MaxLast + 1}},
		"expires in 300 years": {Expires: time.Now().AddDate(300, 0, 0)},
	} {
		if name == "too many tags" {
			for i := range bad.Tags {
				bad.Tags[i] += fmt.Sprint(i)
			}
		}
		if _, err := s.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { *l = bad; return nil }); !errors.Is(err, spec.ErrMetadata) {
			t.Errorf("%s: got %v, want ErrMetadata", name, err)
		}
	}
	if now, err := s.Metadata("a"); err != nil || fmt.Sprint(now) != fmt.Sprint(again) {
		t.Errorf("what was refused has changed it: %+v, %v", now, err)
	}
	if _, err := s.SetMetadata(t.Context(), "nobody", func(*spec.Metadata, error) error { return nil }); !errors.Is(err, spec.ErrNotFound) {
		t.Errorf("nobody's: %v, want ErrNotFound", err)
	}
}

func TestLabel_that_is_as_large_as_it_may_be_can_be_read_again(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, nil)
	// Each "<" takes six bytes in JSON.
	wide := func(n int) string { return strings.Repeat("<", n) }
	want := spec.Metadata{Owner: wide(spec.MaxMetadataOwner), Purpose: wide(spec.MaxMetadataPurpose), Persist: lifetime.Persist{
		Drop:    []string{"/" + wide(lifetime.MaxPersistPath-1), "/a" + wide(lifetime.MaxPersistPath-2)},
		Promote: []lifetime.Promotion{{Path: "/" + wide(lifetime.MaxPersistPath-1), To: "/" + wide(lifetime.MaxPersistPath-1)}},
	}}
	for i := range spec.MaxMetadataTags {
		want.Tags = append(want.Tags, wide(spec.MaxMetadataTag-2)+fmt.Sprintf("%02d", i))
	}
	got, err := s.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { *l = want; return nil })
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.Metadata("a"); err != nil || !again.Equal(got) {
		t.Errorf("%v, of %d bytes of paths", err, lifetime.MaxPersistPaths)
	}
}

func TestLabel_of_a_child_has_what_does_not_persist_and_shares_nothing_with_its_parents(t *testing.T) {
	l := spec.Metadata{Wake: spec.Timer{At: time.Unix(1e9, 0)}, Persist: lifetime.Persist{Drop: []string{"/a"}, Promote: []lifetime.Promotion{{Path: "/b", To: "/c"}}, MaxBytes: 7}}
	if l.Empty() != false || (spec.Metadata{Persist: lifetime.Persist{MaxBytes: 1}}).Empty() {
		t.Error("metadata that says what does not persist counts as none")
	}
	c := l.ForChild()
	if c.Wake != (spec.Timer{}) || c.Persist.MaxBytes != 7 || !slices.Equal(c.Persist.Drop, l.Persist.Drop) || !slices.Equal(c.Persist.Promote, l.Persist.Promote) {
		t.Errorf("the child's says %+v", c)
	}
	c.Persist.Drop[0], c.Persist.Promote[0].To = "/x", "/x"
	if l.Persist.Drop[0] != "/a" || l.Persist.Promote[0].To != "/c" {
		t.Errorf("the parent's says %+v now", l.Persist)
	}
}

func TestLabel_that_is_damaged_removes_nothing_and_is_in_nobodys_way(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "no JSON": "{", "a newer version": `{"version":2}`, "an unknown field": `{"version":1,"eternal":true}`,
		"out of bounds": `{"version":1,"keep":{"last":-1}}`, "too long": `{"version":1,"owner":"` + strings.Repeat("x", maxMetadata) + `"}`,
	} {
		t.Run(name, func(t *testing.T) {
			s := tempStore(t)
			r := withMetadata(t, s, "a", Asleep, &spec.Metadata{Class: lifetime.Ephemeral, Expires: time.Unix(1, 0)})
			old := snapshotOf(t, s, r, KindSleep, time.Unix(1, 0))
			if err := os.WriteFile(filepath.Join(s.VMDir("a"), metadataFile), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Metadata("a"); !errors.Is(err, spec.ErrMetadata) || !strings.Contains(err.Error(), "with Reset") {
				t.Errorf("got %v, want ErrMetadata with the remedy", err)
			}
			if _, err := s.Lasting("a"); err != nil {
				t.Errorf("it is not to be woken: %v", err)
			}
			if freed, err := s.Sweep(t.Context()); err != nil || freed.Snapshots != 0 {
				t.Errorf("swept %+v, %v", freed, err)
			}
			if !s.IsThere(old) {
				t.Error("its sleep is gone")
			}
			told := false
			if _, err := s.SetMetadata(t.Context(), "a", func(l *spec.Metadata, unreadable error) error {
				told = unreadable != nil
				*l = spec.Metadata{}
				return nil
			}); err != nil || !told {
				t.Errorf("it cannot be written anew: %v", err)
			}
			if l, err := s.Metadata("a"); err != nil || l.Class != "" {
				t.Errorf("%+v, %v", l, err)
			}
		})
	}
}

func TestLabel_of_a_killed_command_is_not_the_next_ones(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, &spec.Metadata{Owner: "build", Class: lifetime.Ephemeral})
	if err := os.Remove(s.RecordPath("a")); err != nil {
		t.Fatal(err)
	}
	withMetadata(t, s, "a", Stopped, nil)
	if l, err := s.Metadata("a"); err != nil || l.Owner != "" || l.Class != "" {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestSetLabel_by_many_loses_no_change(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, nil)
	var wg sync.WaitGroup
	for i := range spec.MaxMetadataTags {
		wg.Go(func() {
			if _, err := s.SetMetadata(t.Context(), "a", func(l *spec.Metadata, _ error) error { l.Tags = append(l.Tags, fmt.Sprint("t", i)); return nil }); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if l, err := s.Metadata("a"); err != nil || len(l.Tags) != spec.MaxMetadataTags {
		t.Errorf("%d tags, %v", len(l.Tags), err)
	}
}

// metadataWriterEnv makes the test binary a writer of metadata.
const metadataWriterEnv = "DROWSE_TEST_LABEL_WRITER"

// TestHelper_writes_metadata is not a test but a process of the next one.
func TestHelper_writes_metadata(t *testing.T) {
	dir := os.Getenv(metadataWriterEnv)
	if dir == "" {
		return
	}
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	for {
		l, err := s.SetMetadata(context.Background(), "a", func(l *spec.Metadata, unreadable error) error { l.Keep.For++; return unreadable })
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("committed", l.Keep.For)
	}
}

func TestSetLabel_by_processes_that_are_killed_loses_no_committed_change(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, nil)
	var mu sync.Mutex
	last, n := int64(0), 0
	for round := range 3 {
		var wg sync.WaitGroup
		for w := range 3 {
			cmd := exec.Command(os.Args[0], "-test.run=^TestHelper_writes_metadata$")
			cmd.Env = append(os.Environ(), metadataWriterEnv+"="+s.Dir())
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				lines := bufio.NewScanner(out)
				for i := 0; lines.Scan(); i++ {
					var v int64
					if _, err := fmt.Sscanf(lines.Text(), "committed %d", &v); err != nil {
						t.Error(lines.Text())
						break
					}
					mu.Lock()
					last, n = max(last, v), n+1
					mu.Unlock()
					if i == 3+2*w+round {
						if err := cmd.Process.Kill(); err != nil {
							t.Error(err)
						}
					}
				}
				_ = cmd.Wait()
			})
		}
		wg.Wait()
	}
	// Each change adds one, so a lost one would make the last number too small.
	if l, err := s.Metadata("a"); err != nil || l.Keep.For < last || last < int64(n) {
		t.Errorf("%d changes were committed, the last one is %d, and %+v is there (%v)", n, last, l.Keep, err)
	}
}

func TestRename_that_is_cut_off_anywhere_leaves_one_of_both_names(t *testing.T) {
	for cut, step := range map[string]func(t *testing.T, s *Store, r *Record){
		"before the directory is renamed": func(t *testing.T, s *Store, r *Record) {
			r.NextName = "b"
			if err := s.Save(r); err != nil {
				t.Fatal(err)
			}
		},
		"after the directory is renamed": func(t *testing.T, s *Store, r *Record) {
			r.NextName = "b"
			if err := s.Save(r); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(s.VMDir("a"), s.VMDir("b")); err != nil {
				t.Fatal(err)
			}
		},
		"at its end": func(t *testing.T, s *Store, r *Record) {
			if err := s.Rename(t.Context(), "a", "b"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(cut, func(t *testing.T) {
			s := tempStore(t)
			before := withMetadata(t, s, "a", Stopped, &spec.Metadata{Owner: "build"})
			step(t, s, before)
			list, err := s.List()
			if err != nil || len(list) != 1 || list[0].ID != before.ID {
				t.Fatalf("there are %+v, %v", list, err)
			}
			// A repeated call completes the rename.
			if err := s.Rename(t.Context(), "a", "b"); err != nil {
				t.Fatal(err)
			}
			r, err := s.Get("b")
			if err != nil || r.ID != before.ID || r.Spec.Name != "b" || r.Former != "a" || r.NextName != "" {
				t.Errorf("%+v, %v", r, err)
			}
			if l, err := s.Metadata("b"); err != nil || l.Owner != "build" {
				t.Errorf("its metadata is %+v, %v", l, err)
			}
			if _, err := s.Get("a"); !errors.Is(err, spec.ErrNotFound) {
				t.Errorf("by its old name: %v", err)
			}
			// The old name is free.
			withMetadata(t, s, "a", Stopped, nil)
		})
	}
}

func TestRename_is_refused(t *testing.T) {
	s := tempStore(t)
	withMetadata(t, s, "a", Stopped, nil)
	taken := withMetadata(t, s, "taken", Stopped, nil)
	for to, want := range map[string]error{"taken": spec.ErrExists, "No Name": spec.ErrInvalid, strings.Repeat("x", 41): spec.ErrInvalid} {
		if err := s.Rename(t.Context(), "a", to); !errors.Is(err, want) {
			t.Errorf("to %q: got %v, want %v", to, err, want)
		}
	}
	if err := s.Rename(t.Context(), "nobody", "b"); !errors.Is(err, spec.ErrNotFound) {
		t.Errorf("of nobody: %v", err)
	}
	if r, err := s.Get("a"); err != nil || r.NextName != "" || r.Spec.Name != "a" {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := s.Get("taken"); err != nil || r.ID != taken.ID {
		t.Errorf("%+v, %v", r, err)
	}
	running := startingVM(t, Running, os.Getpid(), 0)
	holder(t, running)
	if err := running.Rename(t.Context(), "a", "b"); !errors.Is(err, spec.ErrRunning) {
		t.Errorf("of one that runs: %v, want ErrRunning", err)
	}
	if _, err := running.RestoreTo(t.Context(), "a", snapshotOf(t, running, &Record{Version: RecordVersion, Spec: spec.VM{Name: "a"}}, KindSleep, time.Now())); !errors.Is(err, spec.ErrRunning) {
		t.Errorf("taking back one that runs: %v, want ErrRunning", err)
	}
	if err := running.ChangeSpec(t.Context(), "a", spec.Changes{Idle: &spec.Idle{SleepSeconds: 5}}); !errors.Is(err, spec.ErrRunning) {
		t.Errorf("changing one that runs: %v, want ErrRunning", err)
	}
}

func TestSweep_keeps_the_sleeps_that_a_label_keeps(t *testing.T) {
	now := time.Now()
	for name, tt := range map[string]struct {
		label *spec.Metadata
		want  []int // indexes of sleeps 0, 1, 2 and 3 hours old; the VM wakes from the first
	}{
		"without metadata the one it comes back from": {nil, []int{0}},
		"the last two":                  {&spec.Metadata{Keep: lifetime.Keep{Last: 2}}, []int{0, 1}},
		"those of two hours and a half": {&spec.Metadata{Keep: lifetime.Keep{For: 9000}}, []int{0, 1, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			s := tempStore(t)
			r := withMetadata(t, s, "a", Asleep, tt.label)
			var ids []string
			for i := range 4 {
				ids = append(ids, snapshotOf(t, s, r, KindSleep, now.Add(-time.Duration(i)*time.Hour)))
			}
			r.Snapshot = ids[0]
			if err := s.Save(r); err != nil {
				t.Fatal(err)
			}
			if _, err := s.TagSnapshot(ids[3], []string{"release"}); err != nil {
				t.Fatal(err)
			}
			left := func() (out []int) {
				if _, err := s.Sweep(t.Context()); err != nil {
					t.Fatal(err)
				}
				for i, id := range ids {
					if s.IsThere(id) {
						out = append(out, i)
					}
				}
				return out
			}
			if got := left(); !slices.Equal(got, append(slices.Clone(tt.want), 3)) {
				t.Errorf("with the oldest one tagged %v are left", got)
			}
			if _, err := s.TagSnapshot(ids[3], nil); err != nil {
				t.Fatal(err)
			}
			if got := left(); !slices.Equal(got, tt.want) {
				t.Errorf("%v are left, want %v", got, tt.want)
			}
			if err := s.remove(t.Context(), "a", false); err != nil {
				t.Fatal(err)
			}
			if got := left(); len(got) != 0 {
				t.Errorf("without the VM %v are left", got)
			}
		})
	}
}

func TestRestoreTo_keeps_what_it_leaves_until_the_next_sleep(t *testing.T) {
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 1)
	r.Spec.VCPUs, r.Spec.MemoryMiB = 1, 256
	then := *r
	then.Spec.MemoryMiB = 128
	then.Disk = disk.Stack{}
	first := snapshotOf(t, s, &then, KindNamed, time.Now())
	r.Snapshot = snapshotOf(t, s, r, KindSleep, time.Now())
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	left := r.Snapshot
	for range 2 {
		got, err := s.RestoreTo(t.Context(), "a", first)
		if err != nil || got.Snapshot != first || got.Previous != left || got.Phase != Asleep || got.Spec.MemoryMiB != 128 {
			t.Fatalf("%+v, %v", got, err)
		}
		if _, err := s.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.RemoveSnapshot(t.Context(), left); !errors.Is(err, spec.ErrSnapshotInUse) {
		t.Errorf("removing what it has left: %v, want ErrSnapshotInUse", err)
	}
	if got, err := s.RestoreTo(t.Context(), "a", left); err != nil || got.Snapshot != left {
		t.Errorf("going back to it: %+v, %v", got, err)
	}
	other := withMetadata(t, s, "b", Asleep, nil)
	if _, err := s.RestoreTo(t.Context(), "a", snapshotOf(t, s, other, KindNamed, time.Now())); !errors.Is(err, spec.ErrForeignSnapshot) {
		t.Errorf("to another VM's: %v, want ErrForeignSnapshot", err)
	}
	if _, err := s.RestoreTo(t.Context(), "a", snapshotOf(t, s, r, KindDisk, time.Now())); !errors.Is(err, spec.ErrDiskOnly) {
		t.Errorf("to one of the disk: %v, want ErrDiskOnly", err)
	}
}

func TestSetSpec_changes_the_size_only_of_what_boots(t *testing.T) {
	s := tempStore(t)
	r := withMetadata(t, s, "a", Stopped, nil)
	r.Spec = spec.VM{Name: "a", Image: "x", VCPUs: 1, MemoryMiB: 256, DiskMiB: 128}
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	two, many := 2, 99
	if err := s.ChangeSpec(t.Context(), "a", spec.Changes{VCPUs: &two, Idle: &spec.Idle{SleepSeconds: 7}}); err != nil {
		t.Fatal(err)
	}
	if err := s.ChangeSpec(t.Context(), "a", spec.Changes{VCPUs: &many}); !errors.Is(err, spec.ErrInvalid) {
		t.Errorf("99 CPUs: %v, want ErrSpec", err)
	}
	r, err := s.Get("a")
	if err != nil || r.Spec.VCPUs != 2 || r.Spec.Idle.SleepSeconds != 7 {
		t.Fatalf("%+v, %v", r, err)
	}
	r.Phase = Asleep
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	one := 1
	if err := s.ChangeSpec(t.Context(), "a", spec.Changes{VCPUs: &one}); !errors.Is(err, spec.ErrInvalid) {
		t.Errorf("of one that sleeps: %v, want ErrSpec", err)
	}
	if err := s.ChangeSpec(t.Context(), "a", spec.Changes{VCPUs: &two, Idle: &spec.Idle{}}); err != nil {
		t.Error(err)
	}
}

func FuzzParseMetadata(f *testing.F) {
	for _, s := range []string{"", "{}", `{"version":1}`, `{"version":1,"class":"resumable","owner":"a","tags":["x"],"expires":"2026-11-22T12:00:00Z","keep":{"last":1}}`, `{"version":1,"expires":"9999-12-31T23:59:59Z"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := parseMetadata(data)
		if err == nil {
			if err := l.Check(); err != nil {
				t.Fatalf("%q is read as %+v, which is refused: %v", data, l, err)
			}
		} else if !errors.Is(err, spec.ErrMetadata) {
			t.Fatal(err)
		}
	})
}

// BenchmarkMetadata measures what lifetime.Persist costs every sleep: one look at the metadata.
func BenchmarkMetadata(b *testing.B) {
	dir := b.TempDir()
	s, err := OpenStore(dir)
	if err != nil {
		b.Fatal(err)
	}
	r := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a"}, Phase: Stopped, metadata: &spec.Metadata{Owner: "build"}}
	lock, err := s.Create(r)
	if err != nil {
		b.Fatal(err)
	}
	lock.Release()
	for b.Loop() {
		if _, err := s.Metadata("a"); err != nil {
			b.Fatal(err)
		}
	}
}

func TestRestoreTo_another_snapshot_still_keeps_where_the_VM_slept(t *testing.T) {
	s := tempStore(t)
	r := sleepingVM(t, s, "a", 1)
	r.Spec.VCPUs, r.Spec.MemoryMiB = 1, 256
	then := *r
	then.Disk = disk.Stack{}
	first, second := snapshotOf(t, s, &then, KindNamed, time.Now()), snapshotOf(t, s, &then, KindNamed, time.Now())
	r.Snapshot = snapshotOf(t, s, r, KindSleep, time.Now())
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{first, second} {
		if got, err := s.RestoreTo(t.Context(), "a", to); err != nil || got.Previous != r.Snapshot {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := s.RestoreTo(t.Context(), "a", r.Snapshot); err != nil || got.Snapshot != r.Snapshot {
		t.Errorf("going back to it: %+v, %v", got, err)
	}
}
