package osfile_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/faultfs"
)

// check looks at a file that is alone in its directory.
func check(t *testing.T, path, want string, perm fs.FileMode) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil || string(data) != want {
		t.Errorf("it has %q, %v; want %q", data, err, want)
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != perm {
		t.Errorf("its mode is %v, %v; want %v", st.Mode(), err, perm)
	}
	if all, err := os.ReadDir(filepath.Dir(path)); err != nil || len(all) != 1 {
		t.Errorf("beside it: %v, %v", all, err)
	}
}

func TestWriteFile_replaces_content_and_mode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := osfile.WriteFile(path, []byte("first and longer"), 0o666); err != nil {
		t.Fatal(err)
	}
	check(t, path, "first and longer", 0o666) // whatever the umask is
	if err := osfile.WriteFile(path, []byte("second"), 0o600); err != nil {
		t.Fatal(err)
	}
	check(t, path, "second", 0o600)
}

func TestReplace_that_fails_leaves_the_old_file(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := osfile.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	failing := errors.New("full")
	err := osfile.Replace(path, 0o644, func(f *os.File) error {
		if _, err := f.WriteString("half of the n"); err != nil {
			return err
		}
		return failing
	})
	if !errors.Is(err, failing) {
		t.Errorf("got %v", err)
	}
	check(t, path, "old", 0o600)
}

func TestWriteNew_leaves_what_is_there(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := osfile.WriteNew(path, []byte("first"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := osfile.WriteNew(path, []byte("second"), 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("got %v, want fs.ErrExist", err)
	}
	check(t, path, "first", 0o600)
}

func TestWriteFileIn_has_the_old_or_the_new_file_after_a_crash_at_any_call(t *testing.T) {
	for calls := 0; ; calls++ {
		root := t.TempDir()
		path := filepath.Join(root, "f")
		if err := osfile.WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		sim, err := faultfs.NewSim(root)
		if err != nil {
			t.Fatal(err)
		}
		sim.CutAfter(calls)
		werr := osfile.WriteFileIn(sim, path, []byte("new"), 0o600)
		for seed := range uint64(10) {
			after := t.TempDir()
			if err := sim.Crash(seed, after); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(after, "f"))
			if s := string(got); err != nil || s != "new" && (s != "old" || werr == nil) {
				t.Fatalf("power cut after %d calls, seed %d, %v: it has %q, %v", calls, seed, werr, s, err)
			}
		}
		if werr == nil {
			if calls < 5 { // open, write, sync, rename, sync the directory
				t.Errorf("it has made only %d calls", calls)
			}
			return
		}
	}
}

func TestWriteFileIn_leaves_nothing_beside_the_old_file_when_a_call_fails(t *testing.T) {
	for _, op := range []faultfs.Op{faultfs.OpOpen, faultfs.OpWrite, faultfs.OpSync, faultfs.OpRename, faultfs.OpSyncDir} {
		root := t.TempDir()
		path := filepath.Join(root, "f")
		if err := osfile.WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		sim, err := faultfs.NewSim(root)
		if err != nil {
			t.Fatal(err)
		}
		sim.Inject(faultfs.Fault{Op: op, Nth: 1, Err: unix.EIO})
		if err := osfile.WriteFileIn(sim, path, []byte("new"), 0o600); !errors.Is(err, unix.EIO) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, want EIO alone", op, err)
		}
		want := "old"
		if op == faultfs.OpSyncDir {
			want = "new" // it is not known which one is there after a crash
		}
		check(t, path, want, 0o600)
	}
}
