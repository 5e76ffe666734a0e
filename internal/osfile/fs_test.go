package osfile_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/farfiles"
	"github.com/drowse-vm/drowse/internal/test/faultfs"
)

// everywhere runs a test in each file system.
func everywhere(t *testing.T, test func(t *testing.T, fsys osfile.FS, dir string)) {
	t.Run("the machine's", func(t *testing.T) { test(t, osfile.OS, t.TempDir()) })
	t.Run("a simulated one", func(t *testing.T) {
		dir := t.TempDir()
		sim, err := faultfs.NewSim(dir)
		if err != nil {
			t.Fatal(err)
		}
		test(t, sim, dir)
	})
	t.Run("another process's", func(t *testing.T) {
		c, f, err := farfiles.Pair()
		if err != nil {
			t.Fatal(err)
		}
		far, err := farfiles.New(f)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := farfiles.Serve(c, nil)
			done <- err
		}()
		test(t, far, t.TempDir())
		if err := errors.Join(far.Close(), <-done, c.Close()); err != nil {
			t.Error(err)
		}
	})
}

// put writes a file of one line.
func put(t *testing.T, fsys osfile.FS, path, text string) {
	t.Helper()
	f, err := fsys.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte(text), 0)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

func has(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s has %q, %v; want %q", filepath.Base(path), got, err, want)
	}
}

func TestRenameNew_replaces_nothing(t *testing.T) {
	everywhere(t, func(t *testing.T, fsys osfile.FS, dir string) {
		a, b, c := filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "c")
		put(t, fsys, a, "a")
		put(t, fsys, b, "b")
		if err := fsys.RenameNew(a, b); !errors.Is(err, fs.ErrExist) {
			t.Errorf("got %v, want ErrExist", err)
		}
		if err := fsys.RenameNew(a, c); err != nil {
			t.Error(err)
		}
		has(t, b, "b")
		has(t, c, "a")
		if err := fsys.RenameNew(a, c); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("of a name that is gone: got %v, want ErrNotExist", err)
		}
	})
}

func TestExchange_swaps_two_names(t *testing.T) {
	everywhere(t, func(t *testing.T, fsys osfile.FS, dir string) {
		a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
		put(t, fsys, a, "a")
		put(t, fsys, b, "b")
		if err := fsys.Exchange(a, b); errors.Is(err, unix.EINVAL) {
			t.Skip("this file system cannot exchange names")
		} else if err != nil {
			t.Error(err)
		}
		has(t, a, "b")
		has(t, b, "a")
	})
}

func TestRemoveAll_takes_what_is_there(t *testing.T) {
	everywhere(t, func(t *testing.T, fsys osfile.FS, dir string) {
		tree := filepath.Join(dir, "tree")
		if err := errors.Join(fsys.Mkdir(tree, 0o700), fsys.Mkdir(filepath.Join(tree, "sub"), 0o700)); err != nil {
			t.Fatal(err)
		}
		put(t, fsys, filepath.Join(tree, "sub", "f"), "f")
		for range 2 { // the second time it is gone
			if err := fsys.RemoveAll(tree); err != nil {
				t.Error(err)
			}
		}
		if _, err := fsys.Stat(tree); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("it is there: %v", err)
		}
	})
}

func TestLock_is_for_one(t *testing.T) {
	everywhere(t, func(t *testing.T, fsys osfile.FS, dir string) {
		l, err := fsys.Lock(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fsys.Lock(dir); !errors.Is(err, unix.EWOULDBLOCK) {
			t.Errorf("the second one: got %v, want EWOULDBLOCK", err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l, err = fsys.Lock(dir)
		if err != nil {
			t.Fatalf("when the first one is gone: %v", err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if _, err := fsys.Lock(filepath.Join(dir, "x")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("of no file: got %v, want ErrNotExist", err)
		}
	})
}

func TestFree_is_that_of_the_file_system(t *testing.T) {
	everywhere(t, func(t *testing.T, fsys osfile.FS, dir string) {
		if n, err := fsys.Free(dir); err != nil || n == 0 {
			t.Errorf("%d bytes are free, %v", n, err)
		}
		if _, err := fsys.Free(filepath.Join(dir, "x")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("of no file: got %v, want ErrNotExist", err)
		}
	})
}

func TestSameFile_knows_links_and_open_files(t *testing.T) {
	everywhere(t, func(t *testing.T, fsys osfile.FS, dir string) {
		a, b, c := filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "c")
		put(t, fsys, a, "a")
		put(t, fsys, c, "a")
		f, err := fsys.OpenFile(a, os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		open, err1 := f.Stat()
		err2 := fsys.Link(a, b)
		link, err3 := fsys.Stat(b)
		other, err4 := fsys.Stat(c)
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			t.Fatal(err)
		}
		if !osfile.SameFile(open, link) || osfile.SameFile(open, other) {
			t.Error("the link must be the file, and the other one not")
		}
	})
}
