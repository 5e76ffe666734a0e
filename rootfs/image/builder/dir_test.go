package builder

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// sampleDir makes a directory tree with each kind of file that the caller has the rights to make.
func sampleDir(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	imagetest.Write(t, filepath.Join(root, "etc/passwd"), "root:x:0:0::/root:/bin/sh\n")
	imagetest.Write(t, filepath.Join(root, "etc/machine-id"), "0123456789abcdef0123456789abcdef\n")
	imagetest.Write(t, filepath.Join(root, "etc/hostname"), "kept\n")
	imagetest.Write(t, filepath.Join(root, "bin/su"), "setuid")
	imagetest.Write(t, filepath.Join(root, "empty"), "")
	must(os.Chmod(filepath.Join(root, "bin/su"), 0o755|os.ModeSetuid))
	must(os.Link(filepath.Join(root, "bin/su"), filepath.Join(root, "bin/also-su")))
	must(os.Symlink("../etc/passwd", filepath.Join(root, "bin/link")))
	must(os.Mkdir(filepath.Join(root, "empty-dir"), 0o700))
	must(os.Mkdir(filepath.Join(root, "sticky"), 0o777))
	must(os.Chmod(filepath.Join(root, "sticky"), 0o777|os.ModeSticky))
	must(unix.Mkfifo(filepath.Join(root, "fifo"), 0o600))
	must(os.Chtimes(filepath.Join(root, "etc/passwd"), time.Time{}, imagetest.When))
	if err := unix.Lsetxattr(filepath.Join(root, "etc/passwd"), "user.note", []byte("a note"), 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		must(os.Lchown(filepath.Join(root, "etc/passwd"), 12, 345678))
		must(os.Lchown(filepath.Join(root, "bin/link"), 7, 8))
		must(unix.Mknod(filepath.Join(root, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		must(unix.Mknod(filepath.Join(root, "disk"), unix.S_IFBLK|0o600, int(unix.Mkdev(259, 70000))))
		must(unix.Lsetxattr(filepath.Join(root, "bin/link"), "trusted.on-a-symlink", []byte("x"), 0))
		imagetest.Write(t, filepath.Join(root, "bin/ping"), "ping")
		must(unix.Lsetxattr(filepath.Join(root, "bin/ping"), "security.capability", []byte(imagetest.CapNetRaw), 0))
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(err)
	t.Cleanup(func() { unix.Close(fd) })
	t.Chdir(root) // socket addresses are short
	must(unix.Bind(fd, &unix.SockaddrUnix{Name: "socket"}))
	return root
}

func testStore(t *testing.T) *image.Store {
	t.Helper()
	s, err := image.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantVM adds to the dump of a directory what addVMFiles adds to its image.
func wantVM(want map[string]imagetest.Entry, empty string) {
	delete(want, "socket")
	root := want["."]
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"dev", 0o755}, {"proc", 0o555}, {"sys", 0o555}, {"run", 0o755}, {"tmp", 0o777 | os.ModeSticky}} {
		want[d.name] = imagetest.Entry{Mode: os.ModeDir | d.mode, Mtime: root.Mtime}
	}
	for _, f := range []string{"etc/resolv.conf", "etc/machine-id"} {
		want[f] = imagetest.Entry{Mode: 0o644, Mtime: root.Mtime, Hash: empty, Nlink: 1}
	}
}

func TestDirectory_becomes_the_same_image(t *testing.T) {
	root, s := sampleDir(t), testStore(t)
	img, err := Build(t.Context(), Options{Store: s, From: "dir:" + root, Tag: "sample"})
	if err != nil {
		t.Fatal(err)
	}
	want, _ := imagetest.DumpHost(t, root)
	wantVM(want, imagetest.HashOf(t, strings.NewReader("")))
	imagetest.CheckImage(t, img.Path(), want)
	if img.Skipped != (fstree.Skipped{Sockets: 1}) {
		t.Errorf("skipped %+v, want one socket", img.Skipped)
	}
	checkHash(t, img)

	// The same content gives the same image, also through a symlink.
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	again, err := Build(t.Context(), Options{Store: s, From: "dir:" + link, Tag: "other"})
	if err != nil {
		t.Fatal(err)
	}
	if again.ID != img.ID || !slices.Equal(again.Tags, []string{"other:latest", "sample:latest"}) {
		t.Errorf("second build gave %s with tags %v, want %s with both tags", again.ShortID(), again.Tags, img.ShortID())
	}
}

func TestMounts_below_a_directory_are_not_entered(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	root, s := sampleDir(t), testStore(t)
	imagetest.Write(t, filepath.Join(root, "bound/inside"), "not to be seen")
	imagetest.Write(t, filepath.Join(root, "from/secret"), "not to be seen either")
	for _, m := range [][2]string{{"from", "bound"}, {"etc/passwd", "empty"}} { // mount a directory, and a file
		target := filepath.Join(root, m[1])
		if err := unix.Mount(filepath.Join(root, m[0]), target, "", unix.MS_BIND, ""); err != nil {
			t.Skipf("bind mounts are not possible here: %v", err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
	img, err := Build(t.Context(), Options{Store: s, From: "dir:" + root})
	if err != nil {
		t.Fatal(err)
	}
	got, _ := imagetest.DumpImage(t, img.Path())
	if _, ok := got["bound/secret"]; ok || !got["bound"].Mode.IsDir() {
		t.Errorf("the bind mount was entered: %v", slices.Sorted(maps.Keys(got)))
	}
	if e := got["empty"]; !e.Mode.IsRegular() || e.Size != 0 || e.Nlink != 1 {
		t.Errorf("the file with a mount on it is %v, want an empty file", e)
	}
	if img.Skipped.Mounts != 2 {
		t.Errorf("skipped %+v, want 2 mounts", img.Skipped)
	}
}

func TestFile_that_changes_while_read_is_an_error(t *testing.T) {
	for name, change := range map[string]func(p string) error{
		"vanishes": os.Remove,
		"shrinks":  func(p string) error { return os.Truncate(p, 10) },
		"grows":    func(p string) error { return os.WriteFile(p, make([]byte, 20000), 0o644) },
		"is rewritten in place": func(p string) error {
			return errors.Join(os.WriteFile(p, make([]byte, 10000), 0o644), os.Chtimes(p, imagetest.When, imagetest.When))
		},
		"is replaced by a FIFO": func(p string) error { return errors.Join(os.Remove(p), unix.Mkfifo(p, 0o600)) },
		"is replaced by a symlink": func(p string) error {
			return errors.Join(os.Rename(p, p+".old"), os.Symlink(p+".old", p))
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, s := t.TempDir(), testStore(t)
			p := filepath.Join(root, "file")
			imagetest.Write(t, p, strings.Repeat("x", 10000))
			_, err := Build(t.Context(), Options{Store: s, From: "dir:" + root, Progress: func(stage string, done, _ int64) {
				if stage == image.StageRead && done == 10000 {
					if err := change(p); err != nil {
						t.Error(err)
					}
				}
			}})
			if err == nil || (!errors.Is(err, image.ErrChanged) && name != "is replaced by a symlink") || !strings.Contains(err.Error(), p) {
				t.Errorf("got %v, want an error that is ErrChanged and names %s", err, p)
			}
			wantEmpty(t, s)
		})
	}
}

// wantEmpty fails the test if the store holds an image or garbage.
func wantEmpty(t *testing.T, s *image.Store) {
	t.Helper()
	for _, d := range []string{"images", "tmp"} {
		entries, err := os.ReadDir(filepath.Join(s.Dir(), d))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			t.Errorf("%s/%s was left in the store", d, e.Name())
		}
	}
}

func TestBad_directory_source_is_refused(t *testing.T) {
	dir := t.TempDir()
	imagetest.Write(t, filepath.Join(dir, "file"), "not a directory")
	imagetest.Write(t, filepath.Join(dir, "d/big"), strings.Repeat("x", 1000))
	old := filepath.Join(dir, "old/file")
	imagetest.Write(t, old, "old")
	if err := os.Chtimes(old, time.Time{}, time.Unix(-1000, 0)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		from string
		max  int64
		want error
		text string
	}{
		"missing":          {from: "dir:" + dir + "/none", want: os.ErrNotExist, text: dir + "/none"},
		"a file":           {from: "dir:" + dir + "/file", want: image.ErrUnsupportedSource, text: "not a directory"},
		"too large":        {from: "dir:" + dir + "/d", max: 999, want: image.ErrTooLarge, text: "999"},
		"date before 1970": {from: "dir:" + dir + "/old", text: "1970"},
	} {
		t.Run(name, func(t *testing.T) {
			s := testStore(t)
			_, err := Build(t.Context(), Options{Store: s, From: c.from, MaxBytes: c.max})
			if err == nil || (c.want != nil && !errors.Is(err, c.want)) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v, want %v with %q", err, c.want, c.text)
			}
			wantEmpty(t, s)
		})
	}
}

func TestCancelled_directory_build_leaves_nothing(t *testing.T) {
	root, s := sampleDir(t), testStore(t)
	for _, at := range []string{image.StageRead, image.StageWrite, image.StageHash} {
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := fmt.Errorf("cancelled at %s", at)
		_, err := Build(ctx, Options{Store: s, From: "dir:" + root, Progress: func(stage string, _, _ int64) {
			if stage == at {
				cancel(cause)
			}
		}})
		cancel(nil)
		if !errors.Is(err, cause) {
			t.Errorf("at %s: got %v", at, err)
		}
		wantEmpty(t, s)
	}
}

// The size of the file needs more than 32 bits, for which EROFS uses another inode form. It has data before, at
// and after that limit.
func TestSparse_file_of_more_than4_gi_b_keeps_data_and_holes(t *testing.T) {
	root := t.TempDir()
	f, err := os.Create(filepath.Join(root, "huge"))
	if err != nil {
		t.Fatal(err)
	}
	const size = 4<<30 + 12345
	marks := []int64{0, 1 << 30, 4<<30 - 3, size - 6}
	for _, off := range marks {
		if _, err := f.WriteAt([]byte("marked"), off); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	// Do not use Build: hashing so many zeros takes long.
	tr, err := readDir(t.Context(), root, DefaultMaxBytes, nil)
	if err != nil {
		t.Fatal(err)
	}
	out := imagetest.TempFile(t)
	if err := erofs.Write(t.Context(), tr, out, nil); err != nil {
		t.Fatal(err)
	}
	st, err := out.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if used := imagetest.DiskUse(t, out.Name()); st.Size() < size || used > 1<<20 {
		t.Errorf("image of %d bytes takes %d on disk, want at least %d and at most 1 MiB", st.Size(), used, int64(size))
	}
	imagetest.Fsck(t, out.Name())
	dir, why := imagetest.MountImage(t, out.Name())
	if why != "" {
		t.Skip(why)
	}
	got, err := os.Open(filepath.Join(dir, "huge"))
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	if st, err := got.Stat(); err != nil || st.Size() != size {
		t.Fatalf("size %v (%v), want %d", st.Size(), err, int64(size))
	}
	buf := make([]byte, 8)
	for _, off := range marks {
		if _, err := got.ReadAt(buf[:6], off); err != nil || string(buf[:6]) != "marked" {
			t.Errorf("at %d: %q (%v)", off, buf[:6], err)
		}
	}
	if _, err := got.ReadAt(buf, 3<<30); err != nil || string(buf) != strings.Repeat("\x00", 8) {
		t.Errorf("in the hole: %q (%v)", buf, err)
	}
}
