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

// leftovers are what a confined process has of the host: user ids, cgroups, mounts, and this process's descriptors,
// threads not counted.
func leftovers(t *testing.T) map[string]int {
	t.Helper()
	n := map[string]int{}
	ids, err := filepath.Glob("/run/drowse/uids/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if st, err := os.Stat(id); err == nil && st.Size() > 0 { // a free one is empty, or gone
			n["user ids"]++
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), "drowse-") {
			n["cgroups"]++
		}
		return nil // groups of others come and go
	})
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

func TestConfined_processes_come_and_go_and_leave_nothing(t *testing.T) {
	confinedChild(t) // opens what stays open
	shape := spec.Shape{MemoryMiB: 64, VCPUs: 1}
	dir := t.TempDir()
	before := leftovers(t)
	const atOnce = 4
	var wg sync.WaitGroup
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
	for what, n := range leftovers(t) {
		if n != before[what] {
			t.Errorf("%d %s after %d confined processes, %d before", n, what, cycles, before[what])
		}
	}
}
