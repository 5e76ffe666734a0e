package guest_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
)

func TestFiles_content_mode_and_time_make_the_round_trip(t *testing.T) {
	c := startVM(t).dial(t)
	path := filepath.Join(t.TempDir(), "a", "b", "file")
	data := make([]byte, 3<<20+17)
	rand.Read(data)
	mtime := time.Unix(1500000000, 5000)
	for _, atomic := range []bool{false, true} {
		err := c.WriteFile(t.Context(), path, bytes.NewReader(data), guest.WriteOptions{Perm: 0o640, ModTime: mtime, Parents: true, Atomic: atomic})
		if err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		if n, err := c.ReadFile(t.Context(), path, &got, 0, 0); err != nil || n != int64(len(data)) || !bytes.Equal(got.Bytes(), data) {
			t.Errorf("read %d bytes, %v; or other bytes than were written", n, err)
		}
		fi, err := c.Stat(t.Context(), path)
		if err != nil || fi.Mode != 0o640 || fi.Size != int64(len(data)) || !fi.ModTime.Equal(mtime) || fi.Name != "file" {
			t.Errorf("stat %+v, %v", fi, err)
		}
		got.Reset()
		if _, err := c.ReadFile(t.Context(), path, &got, 100, 50); err != nil || !bytes.Equal(got.Bytes(), data[100:150]) {
			t.Errorf("50 bytes from 100 on: %v", err)
		}
		data = data[:1<<20] // the second file is shorter than the one it replaces
	}
	if e, _ := os.ReadDir(filepath.Dir(path)); len(e) != 1 {
		t.Errorf("temporary files are left: %v", e)
	}
}

func TestWriteFile_atomic_leaves_the_old_file_when_the_source_fails(t *testing.T) {
	c := startVM(t).dial(t)
	path := filepath.Join(t.TempDir(), "file")
	write(t, path, "old", 0o644)
	broken := errors.New("the source broke")
	r := io.MultiReader(strings.NewReader(strings.Repeat("new", 100000)), iotest.ErrReader(broken))
	if err := c.WriteFile(t.Context(), path, r, guest.WriteOptions{Atomic: true}); !errors.Is(err, broken) {
		t.Errorf("error %v, want the source's", err)
	}
	eventually(t, "nothing but the old file is left", func() bool {
		b, _ := os.ReadFile(path)
		e, _ := os.ReadDir(filepath.Dir(path))
		return string(b) == "old" && len(e) == 1
	})
}

func TestWriteFile_offset_and_append_keep_what_is_there(t *testing.T) {
	c := startVM(t).dial(t)
	path := filepath.Join(t.TempDir(), "file")
	write(t, path, "0123456789", 0o644)
	if err := c.WriteFile(t.Context(), path, strings.NewReader("ab"), guest.WriteOptions{Offset: 3}); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteFile(t.Context(), path, strings.NewReader("END"), guest.WriteOptions{Append: true}); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); string(b) != "012ab56789END" {
		t.Errorf("got %q", b)
	}
	if err := c.WriteFile(t.Context(), path, strings.NewReader("x"), guest.WriteOptions{Offset: 3, Atomic: true}); err == nil {
		t.Error("atomic at an offset was accepted")
	}
}

func TestWriteFile_replaces_the_attributes_below_a_prefix(t *testing.T) {
	c := startVM(t).dial(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	write(t, path, "old", 0o644)
	if err := errors.Join(unix.Setxattr(path, "user.app.old", []byte("x"), 0), unix.Setxattr(path, "user.other", []byte("stays"), 0)); err != nil {
		t.Skip("a file system without attributes: ", err)
	}
	for _, atomic := range []bool{false, true} {
		a := &guest.Attributes{Prefix: "user.app.", Values: map[string][]byte{"user.app.k": []byte("v\xff"), "user.app.empty": {}}}
		if err := c.WriteFile(t.Context(), path, strings.NewReader("new"), guest.WriteOptions{Attributes: a, Atomic: atomic}); err != nil {
			t.Fatal(err)
		}
		want := "map[user.app.empty: user.app.k:v\xff]"
		if !atomic { // an atomic write makes another file
			want = "map[user.app.empty: user.app.k:v\xff user.other:stays]"
		}
		list, err := c.ReadDir(t.Context(), dir)
		if err != nil || len(list) != 1 || fmt.Sprintf("%s", list[0].Attributes) != want {
			t.Errorf("atomic %v: %v, %v, want %s", atomic, list, err, want)
		}
		if err := c.WriteFile(t.Context(), path, strings.NewReader("again"), guest.WriteOptions{Atomic: atomic}); err != nil {
			t.Fatal(err)
		}
		fi, err := c.Stat(t.Context(), path)
		if _, stays := fi.Attributes["user.app.k"]; err != nil || stays == atomic {
			t.Errorf("atomic %v, written without: %s, %v", atomic, fi.Attributes, err)
		}
	}
	if err := c.WriteFile(t.Context(), path, strings.NewReader(""), guest.WriteOptions{Attributes: &guest.Attributes{Prefix: "user."}}); err != nil {
		t.Fatal(err)
	}
	if fi, err := c.Stat(t.Context(), path); err != nil || len(fi.Attributes) != 0 {
		t.Errorf("all replaced by none: %s, %v", fi.Attributes, err)
	}
	for name, a := range map[string]guest.Attributes{
		"a prefix of the system's": {Prefix: "security.", Values: map[string][]byte{"security.capability": {1}}},
		"a name not below it":      {Prefix: "user.app.", Values: map[string][]byte{"user.b": {1}}},
		"too many bytes":           {Prefix: "user.app.", Values: map[string][]byte{"user.app.b": make([]byte, 8<<10)}},
	} {
		var re *guest.RemoteError
		if err := c.WriteFile(t.Context(), path, strings.NewReader("lost"), guest.WriteOptions{Attributes: &a}); !errors.As(err, &re) {
			t.Errorf("%s: %v, want a remote error", name, err)
		}
	}
	if b, _ := os.ReadFile(path); len(b) != 0 {
		t.Errorf("a refused write has changed the file: %q", b)
	}
	// More than an answer has room for is left out, and the file is still there. ext4 has no room for so many.
	path = filepath.Join(shm(t), "file")
	write(t, path, "", 0o644)
	for i := range 3 {
		if err := unix.Setxattr(path, fmt.Sprintf("user.%d", i), make([]byte, 3<<10), 0); err != nil {
			t.Skip("a file system without room for attributes: ", err)
		}
	}
	if fi, err := c.Stat(t.Context(), path); err != nil || len(fi.Attributes) != 2 {
		t.Errorf("9 KiB of attributes: %d, %v", len(fi.Attributes), err)
	}
}

// shm returns a directory of a tmpfs.
func shm(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func TestReadFile_a_slow_reader_gets_it_all(t *testing.T) {
	c := startVM(t).dial(t)
	path := filepath.Join(t.TempDir(), "file")
	write(t, path, strings.Repeat("x", 8<<20), 0o644)
	n := 0
	_, err := c.ReadFile(t.Context(), path, writerFunc(func(p []byte) (int, error) {
		if n == 0 {
			time.Sleep(1500 * time.Millisecond) // longer than ttrpc waits for a reader
		}
		n += len(p)
		return len(p), nil
	}), 0, 0)
	if err != nil || n != 8<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestFiles_operations_change_the_tree_and_fail_as_they_should(t *testing.T) {
	c := startVM(t).dial(t)
	dir := t.TempDir()
	ctx := t.Context()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ok(c.Mkdir(ctx, dir+"/a/b", 0o750, true))
	ok(c.Symlink(ctx, "b/c", dir+"/a/link"))
	if s, err := c.Readlink(ctx, dir+"/a/link"); err != nil || s != "b/c" {
		t.Errorf("link to %q, %v", s, err)
	}
	if fi, err := c.Lstat(ctx, dir+"/a/link"); err != nil || fi.Mode.Type() != fs.ModeSymlink || fi.Link != "b/c" {
		t.Errorf("lstat %+v, %v", fi, err)
	}
	ok(c.WriteFile(ctx, dir+"/a/b/c", strings.NewReader("x"), guest.WriteOptions{}))
	ok(c.Rename(ctx, dir+"/a/b/c", dir+"/a/b/d"))
	ok(c.Remove(ctx, dir+"/a/link", false))
	for _, tt := range []struct {
		name string
		err  error
		want error
	}{
		{"mkdir where one is", c.Mkdir(ctx, dir+"/a", 0, false), fs.ErrExist},
		{"remove what is not there", c.Remove(ctx, dir+"/zz", false), fs.ErrNotExist},
		{"rename what is not there", c.Rename(ctx, dir+"/zz", dir+"/y"), guest.ErrNotFound},
	} {
		if !errors.Is(tt.err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, tt.err, tt.want)
		}
	}
	var re *guest.RemoteError
	for name, err := range map[string]error{
		"remove of a full directory": c.Remove(ctx, dir+"/a", false),
		"remove of the root":         c.Remove(ctx, "/", true),
		"relative path":              c.Mkdir(ctx, "x", 0, false),
		"zero byte":                  c.Mkdir(ctx, "/x\x00y", 0, false),
		"path too long":              c.Mkdir(ctx, "/"+strings.Repeat("x", 4095), 0, false),
	} {
		if !errors.As(err, &re) {
			t.Errorf("%s: %v, want a remote error", name, err)
		}
	}
	ok(c.Remove(ctx, dir+"/a", true))
	if _, err := os.Stat(dir + "/a"); !os.IsNotExist(err) {
		t.Error("the tree is still there")
	}
}

func TestReadDir_lists_more_than_one_answer_holds(t *testing.T) {
	c := startVM(t).dial(t)
	dir := t.TempDir()
	for i := range 700 {
		write(t, fmt.Sprintf("%s/f%04d", dir, i), "", 0o644)
	}
	got, err := c.ReadDir(t.Context(), dir)
	if err != nil || len(got) != 700 {
		t.Fatalf("%d entries, %v", len(got), err)
	}
	for i, fi := range got {
		if fi.Name != fmt.Sprintf("f%04d", i) {
			t.Fatalf("entry %d is %q", i, fi.Name)
		}
	}
	if _, err := c.ReadDir(t.Context(), dir+"/zz"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}

// sample makes a tree with everything that a copy must preserve.
func sample(t *testing.T) string {
	t.Helper()
	src := filepath.Join(t.TempDir(), "tree")
	write(t, src+"/run.sh", "#!/bin/sh\n", 0o755)
	write(t, src+"/sub/secret", "s", 0o600)
	write(t, src+"/sub/big", strings.Repeat("0123456789", 100000), 0o644)
	write(t, src+"/empty/.keep", "", 0o644)
	for _, l := range [][2]string{{"sub/big", "/inside"}, {"../run.sh", "/sub/up"}, {"/etc/passwd", "/abs"}, {"../../out", "/sub/out"}} {
		if err := os.Symlink(l[0], src+l[1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(src+"/empty", 0o555); err != nil {
		t.Fatal(err)
	}
	when := time.Unix(1400000000, 0)
	for _, f := range []string{"/run.sh", "/empty", "/sub"} {
		if err := os.Chtimes(src+f, when, when); err != nil {
			t.Fatal(err)
		}
	}
	return src
}

// tree describes a tree for comparison.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		fmt.Fprintf(&b, "%s %v", rel, fi.Mode())
		switch {
		case fi.Mode().IsRegular():
			text, _ := os.ReadFile(p)
			fmt.Fprintf(&b, " %d %x %d", len(text), text[:min(8, len(text))], fi.ModTime().Unix())
		case fi.IsDir():
			if rel != "." {
				fmt.Fprintf(&b, " %d", fi.ModTime().Unix())
			}
		default:
			link, _ := os.Readlink(p)
			fmt.Fprintf(&b, " -> %s", link)
		}
		b.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestCopy_in_and_out_gives_the_same_tree(t *testing.T) {
	c := startVM(t).dial(t)
	src := sample(t)
	inside, outside := t.TempDir(), t.TempDir()
	var moved int64
	res, err := c.CopyIn(t.Context(), src, inside+"/copy", guest.CopyOptions{Progress: func(n int64) { moved = n }})
	if err != nil {
		t.Fatal(err)
	}
	if moved < res.Bytes {
		t.Errorf("the progress ended at %d of %d bytes", moved, res.Bytes)
	}
	if res.Bytes != 1000011 || res.Entries != 11 {
		t.Errorf("copied in %+v", res)
	}
	if got, want := tree(t, inside+"/copy"), tree(t, src); got != want {
		t.Errorf("in the guest:\n%swant:\n%s", got, want)
	}
	if _, err := c.CopyOut(t.Context(), inside+"/copy", outside, guest.CopyOptions{KeepLinks: true, Progress: func(n int64) { moved = n }}); err != nil {
		t.Fatal(err)
	}
	if moved < res.Bytes {
		t.Errorf("the progress ended at %d of %d bytes", moved, res.Bytes)
	}
	if got, want := tree(t, outside+"/copy"), tree(t, src); got != want {
		t.Errorf("back on the host:\n%swant:\n%s", got, want)
	}
	res, err = c.CopyOut(t.Context(), inside+"/copy", outside+"/named", guest.CopyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if res.SkippedCount != 2 || strings.Join(res.Skipped, " ") != "named/abs named/sub/out" {
		t.Errorf("skipped %q", res.Skipped)
	}
	if _, err := os.Lstat(outside + "/named/sub/up"); err != nil {
		t.Errorf("a link within the tree: %v", err)
	}
}

func TestCopy_a_single_file_goes_by_the_rules_of_cp(t *testing.T) {
	c := startVM(t).dial(t)
	dir := t.TempDir()
	write(t, dir+"/f", "text", 0o600)
	for _, tt := range []struct{ dst, want string }{
		{dir + "/g", dir + "/g"},
		{t.TempDir(), "/f"},
	} {
		want := tt.want
		if want == "/f" {
			want = tt.dst + "/f"
		}
		if _, err := c.CopyIn(t.Context(), dir+"/f", tt.dst, guest.CopyOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.CopyOut(t.Context(), want, tt.dst, guest.CopyOptions{}); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(want); err != nil || string(b) != "text" {
			t.Errorf("%s: %q, %v", want, b, err)
		}
	}
	if _, err := c.CopyIn(t.Context(), dir+"/f", dir+"/no/such/dir/f", guest.CopyOptions{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("into a directory that is not there: %v", err)
	}
	if _, err := c.CopyOut(t.Context(), dir+"/no-such-file", dir+"/h", guest.CopyOptions{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a file that is not there: %v", err)
	}
}

func TestCopy_holds_to_its_limits(t *testing.T) {
	c := startVM(t).dial(t)
	src := sample(t)
	for name, o := range map[string]guest.CopyOptions{"bytes": {MaxBytes: 1000}, "entries": {MaxEntries: 3}} {
		if _, err := c.CopyOut(t.Context(), src, t.TempDir(), o); !errors.Is(err, guest.ErrLimit) {
			t.Errorf("%s, copied out: %v, want ErrLimit", name, err)
		}
		var re *guest.RemoteError
		if _, err := c.CopyIn(t.Context(), src, t.TempDir(), o); !errors.As(err, &re) {
			t.Errorf("%s, copied in: %v, want a remote error", name, err)
		}
	}
}

func TestCopy_ends_with_its_context(t *testing.T) {
	c := startVM(t).dial(t)
	src := t.TempDir()
	write(t, src+"/big", strings.Repeat("x", 32<<20), 0o644)
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	go func() {
		_, _ = io.CopyN(w, zeros{}, 1<<20)
		cancel()
		w.Close()
	}()
	err := c.WriteFile(ctx, src+"/f", r, guest.WriteOptions{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	r.Close()
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// hostileTar makes an archive of the given entries.
func hostileTar(entries ...*tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if h.Typeflag == tar.TypeReg {
			h.Size = 4
		}
		h.Mode = 0o644
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		if h.Typeflag == tar.TypeReg {
			_, _ = w.Write([]byte("evil"))
		}
	}
	w.Close()
	return b.Bytes()
}
