package snapshot

import (
	"context"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// crashEnv makes the test binary write snapshots into the directory that it names, until it is killed.
const crashEnv = "DROWSE_SNAPSHOT_CRASH"

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashEnv); dir != "" {
		if err := crashChild(dir); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// crashRAM returns RAM in the n-th snapshot of a chain, and what has changed since the one before.
func crashRAM(n int) (*ram, *guestmem.PageSet) {
	r := newRAM(Slot{Size: 3000 * guestmem.PageSize}, Slot{GPA: 4 << 30, Size: 1000 * guestmem.PageSize})
	var changed *guestmem.PageSet
	for i := range n + 1 {
		rnd := rand.New(rand.NewPCG(uint64(i), 77))
		changed = guestmem.NewPageSet(r.total())
		for range 12 {
			first := rnd.Uint64N(r.total())
			changed.Add(first, first+30)
			for p := first; p < min(first+30, r.total()); p++ {
				r.set(p, rnd)
			}
		}
	}
	return r, changed
}

// crashNumbers returns the numbers of the snapshots in parent, in order. After crashChain of them the chain begins
// anew.
func crashNumbers(parent string) ([]int, error) {
	entries, err := os.ReadDir(parent)
	var out []int
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return out, err
}

const crashChain = 40

// crashChild continues the chain that is in parent: it writes deltas, sometimes compacts one, and removes what is
// old.
func crashChild(parent string) error {
	ctx := context.Background()
	for {
		// The parent counts steps, so that the test makes progress on a slow machine too.
		if _, err := os.Stdout.WriteString("."); err != nil {
			return err
		}
		if _, err := Clean(parent); err != nil {
			return err
		}
		have, err := crashNumbers(parent)
		if err != nil {
			return err
		}
		n := 0
		if len(have) > 0 {
			n = have[len(have)-1] + 1
		}
		if n == crashChain {
			for _, k := range have {
				if err := Remove(filepath.Join(parent, strconv.Itoa(k))); err != nil {
					return err
				}
			}
			continue
		}
		r, changed := crashRAM(n)
		spec := Spec{VCPUs: 1, Memory: r, maxFiles: 2 + n%7}
		if n > 0 {
			if spec.Base, err = Open(filepath.Join(parent, strconv.Itoa(n-1))); err != nil {
				return err
			}
			spec.Changed = changed
		}
		dir := filepath.Join(parent, strconv.Itoa(n))
		if _, err := Create(ctx, dir, spec); err != nil {
			return err
		}
		if spec.Base != nil {
			spec.Base.Close()
		}
		if n%5 == 4 {
			if _, err := Compact(ctx, dir); err != nil {
				return err
			}
		}
		if len(have) > 3 {
			if err := Remove(filepath.Join(parent, strconv.Itoa(have[0]))); err != nil {
				return err
			}
		}
	}
}

var kills = flag.Int("snapshot.kills", 0, "how often to kill a process that writes snapshots; 0: 20, or 4 with -short or -race")

// SIGKILL at any moment leaves every snapshot either whole or absent, and Clean removes the rest.
func TestA_killed_writer_leaves_every_snapshot_whole_or_not_there(t *testing.T) {
	parent := t.TempDir()
	n := *kills
	if n == 0 {
		n = racetest.Cases(20, 4)
	}
	checked, stale := 0, 0
	for i := range n {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), crashEnv+"="+parent)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, 1+i%3)); err != nil {
			t.Fatal(err)
		}
		// Any moment from here on is good enough.
		time.Sleep(time.Duration(rand.Int64N(int64(200 * time.Millisecond))))
		if err := cmd.Process.Kill(); err != nil {
			t.Fatalf("the writer has ended by itself: %v", err)
		}
		if err := cmd.Wait(); err == nil || cmd.ProcessState.Exited() {
			t.Fatalf("the writer has ended by itself: %v", cmd.ProcessState)
		}
		have, err := crashNumbers(parent)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range have {
			r, _ := crashRAM(n)
			if err := r.verify(filepath.Join(parent, strconv.Itoa(n))); err != nil {
				t.Fatalf("snapshot %d: %v", n, err)
			}
			checked++
		}
		n, err := Clean(parent)
		if err != nil {
			t.Fatal(err)
		}
		stale += n
		if left, err := os.ReadDir(parent); err != nil || len(left) != len(have) {
			t.Fatalf("%v is left after Clean (%v)", left, err)
		}
	}
	t.Logf("%d kills, %d snapshots checked, %d unfinished removed", n, checked, stale)
	if checked == 0 {
		t.Error("there never was a snapshot")
	}
}

func TestClean_does_not_disturb_a_create_at_work(t *testing.T) {
	mem := testMemory(t, guestmem.MinSize)
	writePage(t, mem, 9, []byte("x"))
	parent := t.TempDir()
	if err := os.Mkdir(filepath.Join(parent, tempPrefix+"0123456789abcdef"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(parent, "other"), 0o700); err != nil {
		t.Fatal(err)
	}
	spec := testSpec(t, mem)
	removed := -1
	spec.Memory = &hookSource{MemorySource: spec.Memory, hook: func(uint64) {
		n, err := Clean(parent)
		if err != nil {
			t.Error(err)
		}
		removed = n
	}}
	dir := filepath.Join(parent, "snap")
	if _, err := Create(context.Background(), dir, spec); err != nil {
		t.Fatal(err)
	}
	if removed != 1 {
		t.Errorf("%d directories removed, want the stale one", removed)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 2 {
		t.Errorf("%v is there, want other and snap (%v)", left, err)
	}
}
