package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
)

// replace replaces a file like a store replaces records and metadata.
func replace(t testing.TB, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".new", []byte("{\"version\":1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func TestNotice_has_all_read_again_when_something_changes_and_not_otherwise(t *testing.T) {
	dir := t.TempDir()
	replace(t, filepath.Join(dir, "a", "vm.json"))
	n, err := newNotice(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	reads := 0
	c := noticed[int]{n: n, read: func() (int, error) { reads++; return reads, nil }}
	get := func() int {
		t.Helper()
		v, err := c.get()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	// rests waits until nothing causes another read.
	rests := func() {
		t.Helper()
		for end, last := time.Now().Add(30*time.Second), -1; ; time.Sleep(10 * time.Millisecond) {
			now := get()
			if now == last {
				break
			}
			last = now
			if time.Now().After(end) {
				t.Fatal("it is read again and again")
			}
		}
	}
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"a record is replaced", func() { replace(t, filepath.Join(dir, "a", "vm.json")) }},
		{"a VM comes", func() { replace(t, filepath.Join(dir, "b", "vm.json")) }},
		{"the metadata of one that came is replaced", func() { replace(t, filepath.Join(dir, "b", "sandbox.json")) }},
		{"one is renamed", func() {
			if err := os.Rename(filepath.Join(dir, "b"), filepath.Join(dir, "c")); err != nil {
				t.Fatal(err)
			}
		}},
		{"the metadata of one that was renamed is replaced", func() { replace(t, filepath.Join(dir, "c", "sandbox.json")) }},
		{"metadata is removed", func() {
			if err := os.Remove(filepath.Join(dir, "c", "sandbox.json")); err != nil {
				t.Fatal(err)
			}
		}},
		{"one goes", func() {
			if err := os.RemoveAll(filepath.Join(dir, "a")); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		rests()
		before := get()
		step.do()
		for end := time.Now().Add(noticeEvery / 2); get() == before; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: it is not noticed", step.name)
			}
		}
	}
	rests()
	// A blind notice causes a read each time.
	n.blind.Store(true)
	if a, b := get(), get(); a == b {
		t.Error("a notice that does not notice all is believed")
	}
}

func TestNoticed_reads_each_time_without_a_notice_and_after_an_error(t *testing.T) {
	reads, fail := 0, error(nil)
	c := noticed[int]{read: func() (int, error) { reads++; return reads, fail }}
	for want := 1; want <= 2; want++ {
		if got, _ := c.get(); got != want {
			t.Errorf("read %d times, want %d", got, want)
		}
	}
	n := &notice{}
	c.n = n
	fail = os.ErrPermission
	for want := 3; want <= 4; want++ {
		if got, err := c.get(); got != want || err == nil {
			t.Errorf("read %d times, %v, want %d", got, err, want)
		}
	}
	fail = nil
	for range 2 {
		if got, _ := c.get(); got != 5 {
			t.Errorf("read %d times, want 5", got)
		}
	}
	// noticeEvery covers changes that the notice missed.
	c.at = c.at.Add(-noticeEvery)
	if got, _ := c.get(); got != 6 {
		t.Errorf("after %v: read %d times, want 6", noticeEvery, got)
	}
	if _, err := newNotice(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a directory that is not there is watched")
	}
}

// BenchmarkTimers_look measures one look for timers with 1,000 sandboxes. The supervisor takes four each second.
func BenchmarkTimers_look(b *testing.B) {
	s, err := sandbox.Open(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	for i := range 1000 {
		dir := filepath.Join(s.State.Dir(), "vms", fmt.Sprintf("vm-%d", i))
		replace(b, filepath.Join(dir, "vm.json"))
		replace(b, filepath.Join(dir, "sandbox.json"))
	}
	n, err := newNotice(filepath.Join(s.State.Dir(), "vms"))
	if err != nil {
		b.Fatal(err)
	}
	defer n.close()
	time.Sleep(3 * settleTime)
	for name, watch := range map[string]*notice{"each time": nil, "when noticed": n} {
		b.Run(name, func(b *testing.B) {
			t := newTimers(launchedVMs{Store: s.State, stamps: &noticed[map[string]string]{read: s.State.FileStamps, n: watch}}, func(string, ...any) {})
			for b.Loop() {
				if err := t.look(b.Context(), time.Now()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
