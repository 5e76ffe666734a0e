package initramfs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"
	"golang.org/x/sys/unix"
)

func put(t *testing.T, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func spec(t *testing.T) Spec {
	t.Helper()
	dir := t.TempDir()
	return Spec{
		Init:    put(t, dir, "agent", "program"),
		Modules: []string{put(t, dir, "z/second.ko", "needed by first"), put(t, dir, "a/first.ko", "needs second")},
	}
}

func TestArchive_holds_program_modules_in_order_and_nodes(t *testing.T) {
	path, err := Ensure(t.Context(), t.TempDir(), spec(t))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(f))
	if err != nil {
		t.Fatal(err)
	}
	type entry struct {
		mode    uint64
		content string
		dev     [2]uint64
	}
	want := map[string]entry{
		"dev": {mode: unix.S_IFDIR | 0o755}, "proc": {mode: unix.S_IFDIR | 0o755}, "sys": {mode: unix.S_IFDIR | 0o755},
		"run": {mode: unix.S_IFDIR | 0o755}, "newroot": {mode: unix.S_IFDIR | 0o755}, "modules": {mode: unix.S_IFDIR | 0o755},
		"dev/console":       {mode: unix.S_IFCHR | 0o600, dev: [2]uint64{5, 1}},
		"dev/null":          {mode: unix.S_IFCHR | 0o666, dev: [2]uint64{1, 3}},
		"init":              {mode: unix.S_IFREG | 0o755, content: "program"},
		"modules/second.ko": {mode: unix.S_IFREG | 0o644, content: "needed by first"},
		"modules/first.ko":  {mode: unix.S_IFREG | 0o644, content: "needs second"},
		"modules/order":     {mode: unix.S_IFREG | 0o644, content: "second.ko\nfirst.ko\n"},
	}
	inodes := map[uint64]string{}
	for _, r := range records {
		w, ok := want[r.Name]
		if !ok {
			t.Errorf("unexpected %s", r.Name)
			continue
		}
		delete(want, r.Name)
		content, err := io.ReadAll(io.NewSectionReader(r, 0, int64(r.FileSize)))
		if err != nil {
			t.Fatal(err)
		}
		if got := (entry{r.Mode, string(content), [2]uint64{r.Rmajor, r.Rminor}}); got != w {
			t.Errorf("%s: got %+v, want %+v", r.Name, got, w)
		}
		if r.MTime != 0 || r.UID != 0 || r.GID != 0 || r.NLink != 1 {
			t.Errorf("%s: time %d, owner %d:%d, links %d", r.Name, r.MTime, r.UID, r.GID, r.NLink)
		}
		// The kernel takes two entries of one inode for links to one file.
		if other, ok := inodes[r.Ino]; ok {
			t.Errorf("%s and %s have inode %d", r.Name, other, r.Ino)
		}
		inodes[r.Ino] = r.Name
	}
	for name := range want {
		t.Errorf("no %s", name)
	}
	// A folder must come before what is in it (init/initramfs.c does not make parents).
	names := make([]string, len(records))
	for i, r := range records {
		names[i] = r.Name
	}
	for i, n := range names {
		if dir := filepath.Dir(n); dir != "." && !slices.Contains(names[:i], dir) {
			t.Errorf("%s comes before its folder", n)
		}
	}
}

func TestEqual_content_gives_equal_bytes_and_same_name(t *testing.T) {
	var got [2][]byte
	var names [2]string
	for i := range got {
		path, err := Ensure(t.Context(), t.TempDir(), spec(t))
		if err != nil {
			t.Fatal(err)
		}
		names[i] = filepath.Base(path)
		if got[i], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(got[0], got[1]) || names[0] != names[1] {
		t.Errorf("archives differ: %s and %s", names[0], names[1])
	}
}

func TestOther_order_or_content_gives_other_name(t *testing.T) {
	s := spec(t)
	cache := t.TempDir()
	ensure := func(s Spec) string {
		path, err := Ensure(t.Context(), cache, s)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	first := ensure(s)
	if again := ensure(s); again != first {
		t.Errorf("same spec gave %s and %s", first, again)
	}
	swapped := Spec{Init: s.Init, Modules: []string{s.Modules[1], s.Modules[0]}}
	if got := ensure(swapped); got == first {
		t.Error("other order of modules gave the same archive")
	}
	put(t, filepath.Dir(s.Init), "agent", "prograM")
	if got := ensure(s); got == first {
		t.Error("other program gave the same archive")
	}
}

func TestBad_spec_is_refused_and_leaves_nothing(t *testing.T) {
	good := spec(t)
	dir := t.TempDir()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name string
		ctx  context.Context
		spec Spec
		is   error
	}{
		{"no init", t.Context(), Spec{}, ErrBadSpec},
		{"missing init", t.Context(), Spec{Init: dir + "/none"}, fs.ErrNotExist},
		{"empty init", t.Context(), Spec{Init: put(t, dir, "empty", "")}, ErrBadSpec},
		{"folder for init", t.Context(), Spec{Init: dir}, ErrBadSpec},
		{"compressed module", t.Context(), Spec{Init: good.Init, Modules: []string{put(t, dir, "a.ko.xz", "x")}}, ErrBadSpec},
		{"module with a line break", t.Context(), Spec{Init: good.Init, Modules: []string{put(t, dir, "a\nb.ko", "x")}}, ErrBadSpec},
		{"two modules of one name", t.Context(),
			Spec{Init: good.Init, Modules: []string{put(t, dir, "x/a.ko", "x"), put(t, dir, "y/a.ko", "x")}}, ErrBadSpec},
		{"too many modules", t.Context(), Spec{Init: good.Init, Modules: make([]string, MaxModules+1)}, ErrBadSpec},
		{"cancelled", cancelled, good, context.Canceled},
	} {
		cache := t.TempDir()
		if _, err := Ensure(c.ctx, cache, c.spec); !errors.Is(err, c.is) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.is)
		}
		if files, _ := filepath.Glob(filepath.Join(cache, "*", "*")); len(files) != 0 {
			t.Errorf("%s: left %q", c.name, files)
		}
	}
}

func TestFile_too_large_is_refused_before_it_is_read(t *testing.T) {
	path := filepath.Join(t.TempDir(), "large")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(MaxFile + 1); err != nil { // a hole: takes no space
		t.Fatal(err)
	}
	if _, err := Ensure(t.Context(), t.TempDir(), Spec{Init: path}); !errors.Is(err, ErrBadSpec) {
		t.Errorf("got %v", err)
	}
}

func TestFile_that_changes_while_copied_is_refused(t *testing.T) {
	s := spec(t)
	files, err := s.files(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Dir(s.Init), "agent", "PROGRAM") // of the same length
	err = write(t.Context(), io.Discard, files)
	if err == nil || !strings.Contains(err.Error(), "changed") {
		t.Errorf("got %v", err)
	}
}
