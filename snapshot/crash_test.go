package snapshot

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// crashEnv makes the test binary write one snapshot, of that name, and end.
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

func crashChild(dir string) error {
	mem, err := guestmem.New(guestmem.MinSize)
	if err != nil {
		return err
	}
	p := make([]byte, guestmem.PageSize)
	for page := uint64(0); page < 4000; page++ {
		fillPage(p, page, page%2 == 0)
		if err := mem.Write(guestmem.GPA(page*guestmem.PageSize), p); err != nil {
			return err
		}
	}
	src, err := NewGuestSource(mem)
	if err != nil {
		return err
	}
	// The parent's clock starts here.
	os.Stdout.WriteString("ready\n")
	_, err = Create(context.Background(), dir, Spec{VCPUs: 1, Memory: src})
	return err
}

// SIGKILL at any moment leaves the whole snapshot or none of that name, and
// Clean removes the rest.
func TestAKilledCreateLeavesAllOrNothing(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "snap")
	whole, none, stale := 0, 0, 0
	for range 20 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), crashEnv+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.Int64N(int64(250 * time.Millisecond))))
		// It may have ended by itself.
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		s, err := Open(dir)
		switch {
		case err == nil:
			whole++
			if err := s.Verify(context.Background()); err != nil {
				t.Fatal(err)
			}
			s.Close()
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		case errors.Is(err, ErrNotFound):
			none++
		default:
			t.Fatal(err)
		}
		n, err := Clean(parent)
		if err != nil {
			t.Fatal(err)
		}
		stale += n
		if left, err := os.ReadDir(parent); err != nil || len(left) != 0 {
			t.Fatalf("%v is left after Clean (%v)", left, err)
		}
	}
	t.Logf("%d whole, %d none, %d unfinished removed", whole, none, stale)
}

func TestCleanDoesNotDisturbACreateAtWork(t *testing.T) {
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
