package sandboxtest_test

import (
	"flag"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var cycles = flag.Int("cycles", 20, "how many sandboxes are made, used, put to sleep, woken, forked and removed")

// held is what this process and a store hold.
func held(t *testing.T, dir string) map[string]int {
	t.Helper()
	n := map[string]int{"goroutines": runtime.NumGoroutine()}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n["descriptors"] = len(fds)
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(locks)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == strconv.Itoa(os.Getpid()) {
			n["locks"]++
		}
	}
	if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, path)
		top, _, _ := strings.Cut(rel, string(filepath.Separator))
		n["files in "+top]++
		return err
	}); err != nil {
		t.Fatal(err)
	}
	// Histories of what was removed, and events, stay, and have their own bounds.
	delete(n, "files in removed")
	delete(n, "files in events")
	return n
}

func TestSandboxes_that_come_and_go_leave_nothing(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	cycle := func() {
		t.Helper()
		s := sandbox.Spec{Image: sandboxtest.Image, Name: "a", MemoryMiB: 64}
		meta := spec.Metadata{Class: lifetime.Resumable, Owner: "o"}
		b, err := h.Create(t.Context(), s, sandbox.CreateOptions{Metadata: &meta})
		if err != nil {
			t.Fatal(err)
		}
		c, err := b.Agent(t.Context())
		if err == nil {
			_, err = c.Exec(t.Context(), guest.Cmd{Argv: []string{"true"}})
			c.Close()
		}
		if err == nil {
			_, err = b.Sleep(t.Context(), spec.SleepOptions{})
		}
		if err == nil {
			_, err = b.Wake(t.Context())
		}
		if err == nil {
			_, err = b.Fork(t.Context(), sandbox.ForkOptions{Name: "b"})
		}
		for _, name := range []string{"a", "b"} {
			if err == nil {
				err = h.Sandbox(name).Delete(t.Context(), sandbox.DeleteOptions{Force: true})
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 5 { // what is made once is there
		cycle()
	}
	before := held(t, h.State.Dir())
	for range *cycles {
		cycle()
	}
	var after map[string]int
	for range 200 { // what ends in the background
		if after = held(t, h.State.Dir()); maps.Equal(before, after) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	for what, n := range after {
		if n > before[what] {
			t.Errorf("%s: %d, and %d before %d cycles", what, n, before[what], *cycles)
		}
	}
}
