package process

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/jail"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// jailCycles is how many confined processes come and go, by $DROWSE_TEST_JAIL_CYCLES.
func jailCycles(t *testing.T) int {
	n := 40
	if text := os.Getenv("DROWSE_TEST_JAIL_CYCLES"); text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// leftovers are what confined processes may leave in this one. Those of other tests come and go meanwhile.
func leftovers(t *testing.T) map[string]int {
	t.Helper()
	n := map[string]int{}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	n["mounts"] = strings.Count(string(mounts), "\n")
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n["descriptors"] = len(fds)
	children, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range children {
		text, _ := os.ReadFile(path) // the thread may have ended
		n["children"] += len(strings.Fields(string(text)))
	}
	return n
}

// cgroupsOf returns the names of the cgroups that a process has to itself.
func cgroupsOf(t *testing.T, pid int) (names []string) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(string(text)) {
		if name := filepath.Base(strings.TrimSpace(line)); strings.HasPrefix(name, "drowse-") {
			names = append(names, name)
		}
	}
	return names
}

// empty returns the cgroups of these names that have no process. Another confined process may have taken a user id.
func empty(names map[string]bool) (left []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && names[d.Name()] {
			if procs, err := os.ReadFile(filepath.Join(path, "cgroup.procs")); err == nil && len(procs) == 0 {
				left = append(left, path)
			}
		}
		return nil // groups of others come and go
	})
	return left
}

func TestConfined_processes_come_and_go_and_leave_nothing(t *testing.T) {
	confinedChild(t) // opens what stays open
	shape := spec.Shape{MemoryMiB: 64, VCPUs: 1}
	dir := t.TempDir()
	before := leftovers(t)
	const atOnce = 4
	var wg sync.WaitGroup
	var mu sync.Mutex // guards cgroups
	cgroups := map[string]bool{}
	cycles := jailCycles(t)
	for worker := range atOnce {
		wg.Go(func() {
			for i := worker; i < cycles; i += atOnce {
				c := jail.Config{Program: []string{asProcess}, Output: os.Stderr}
				switch i % 3 {
				case 1:
					c.Shape = &shape
				case 2:
					c.Shares = []spec.Share{{Source: dir, Path: "/share"}}
				}
				j, lacks, err := newJail(t.Context(), c)
				if err != nil || lacks != "" {
					t.Error(lacks, err)
					return
				}
				mu.Lock()
				for _, name := range cgroupsOf(t, j.PID()) {
					cgroups[name] = true
				}
				mu.Unlock()
				if err := j.Close(); err != nil {
					t.Error(err)
					return
				}
				if i%500 == 499 {
					fmt.Println(i+1, "confined processes have come and gone")
				}
			}
		})
	}
	wg.Wait()
	left := empty(cgroups)
	for range 100 { // one that was just made has no process yet
		if len(left) == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
		left = empty(cgroups)
	}
	if len(cgroups) == 0 || len(left) > 0 {
		t.Errorf("%d of %d cgroups are left: %.3q", len(left), len(cgroups), left)
	}
	for what, n := range leftovers(t) {
		if n != before[what] {
			t.Errorf("%d %s after %d confined processes, %d before", n, what, cycles, before[what])
		}
	}
}
