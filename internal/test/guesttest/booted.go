package guesttest

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
)

// Booted is a VM that is booted once for all tests of this process: a boot of an interpreted kernel takes more
// than 20 seconds of processor time. Each test gets its own store with a copy of the sleeping VM, and wakes it,
// forks it, or makes clones of its snapshot. Tests of a boot itself boot their own VM with Env.Run.
type Booted struct {
	Spec sandbox.Spec
	// Prepare, if not nil, does something in the VM before it goes to sleep.
	Prepare func(e *Env)

	once sync.Once
	dir  string // with the copy; "" if there is none
}

// kept are the parts of a store that a sleeping VM needs, except for what all stores of the tests share.
var kept = []string{"vms", "snapshots", "layers", "templates"}

var (
	bootedDirs []string
	bootedLock sync.Mutex // guards bootedDirs while tests run
)

// New makes a store with a sleeping copy of the VM, for a test.
func (b *Booted) New(t testing.TB) *Env {
	t.Helper()
	e := New(t) // first: it skips the test on a host without guests
	b.once.Do(func() { b.boot(t) })
	if b.dir == "" {
		t.Fatalf("%s could not be booted: the first test of those that need it says why", b.Spec.Name)
	}
	copyStore(t, b.dir, e.Store.State.Dir())
	return e
}

func (b *Booted) boot(t testing.TB) {
	t.Helper()
	e := New(t)
	e.Run(b.Spec)
	if b.Prepare != nil {
		b.Prepare(e)
	}
	e.Sleep(b.Spec.Name)
	dir, err := os.MkdirTemp("", "booted-")
	if err != nil {
		t.Fatal(err)
	}
	bootedLock.Lock()
	bootedDirs = append(bootedDirs, dir)
	bootedLock.Unlock()
	copyStore(t, e.Store.State.Dir(), dir)
	b.dir = dir
}

func isThere(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// copyStore copies files with their holes: a layer of a disk has the size of the disk.
func copyStore(t testing.TB, from, to string) {
	t.Helper()
	args := []string{"--archive", "--sparse=always"}
	for _, sub := range kept {
		if dir := filepath.Join(from, sub); isThere(dir) {
			args = append(args, dir)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "cp", append(args, to)...).CombinedOutput(); err != nil {
		t.Fatalf("copying a store: %v: %s", err, out)
	}
}
