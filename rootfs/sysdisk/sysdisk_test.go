package sysdisk

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	erofs "github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"
)

// agent writes a file of n bytes that differ from block to block, and returns its path and content.
func agent(t *testing.T, n int) (string, []byte) {
	t.Helper()
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i) ^ byte(i>>8) ^ byte(i>>16)*7
	}
	path := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, data
}

// checkTree compares what a reader of the image sees with what should be in it.
func checkTree(t *testing.T, fsys fs.FS, want []byte) {
	t.Helper()
	got, err := fs.ReadFile(fsys, InitPath[1:])
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%s: %d bytes, %v; want the %d of the program", InitPath, len(got), err, len(want))
	}
	info, err := fs.Stat(fsys, InitPath[1:])
	// go-erofs leaves the type bits of the inode in Mode, next to Go's own: compare what is common to it and the
	// kernel.
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o755 {
		t.Errorf("%s: mode %v, %v; want 0755", InitPath, info.Mode(), err)
	}
	entries, err := fs.ReadDir(fsys, ".")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, "/"+e.Name())
	}
	wantNames := append(slices.Clone(Dirs[:]), InitPath)
	slices.Sort(wantNames)
	slices.Sort(names)
	if !slices.Equal(names, wantNames) {
		t.Errorf("root holds %q, want %q", names, wantNames)
	}
	for _, d := range Dirs {
		info, err := fs.Stat(fsys, d[1:])
		if err != nil || !info.IsDir() || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: mode %v, %v; want a folder with 0755", d, info.Mode(), err)
		}
	}
}

func TestImage_reads_back_for_all_sizes_of_last_block(t *testing.T) {
	for _, size := range []int{1, BlockSize - 1, BlockSize, BlockSize + 1, 1<<20 + 17} {
		path, want := agent(t, size)
		image, err := Ensure(t.Context(), t.TempDir(), path)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(image)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil || info.Size()%BlockSize != 0 {
			t.Errorf("image has %d bytes, not whole blocks; %v", info.Size(), err)
		}
		fsys, err := erofs.Open(f)
		if err != nil {
			t.Fatal(err)
		}
		checkTree(t, fsys, want)
	}
}

func TestEqual_programs_give_equal_bytes_and_same_name(t *testing.T) {
	var images [2][]byte
	var names [2]string
	for i := range images {
		path, _ := agent(t, 10_000)
		image, err := Ensure(t.Context(), t.TempDir(), path)
		if err != nil {
			t.Fatal(err)
		}
		names[i] = filepath.Base(image)
		if images[i], err = os.ReadFile(image); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(images[0], images[1]) || names[0] != names[1] {
		t.Errorf("images differ: %s and %s", names[0], names[1])
	}
}

func TestSecond_call_takes_cached_image_and_other_program_gets_its_own(t *testing.T) {
	cache := t.TempDir()
	path, _ := agent(t, 5000)
	first, err := Ensure(t.Context(), cache, path)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	second, err := Ensure(t.Context(), cache, path)
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(second)
	if err != nil || first != second || !os.SameFile(before, after) {
		t.Errorf("second call gave %s for %s, made anew", second, first)
	}
	other, _ := agent(t, 5001)
	third, err := Ensure(t.Context(), cache, other)
	if err != nil || third == first {
		t.Errorf("another program got %s, %v", third, err)
	}
}

func TestFailure_leaves_nothing_in_cache(t *testing.T) {
	path, _ := agent(t, 1<<20)
	empty, _ := agent(t, 0)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name  string
		ctx   context.Context
		agent string
		is    error
	}{
		{"cancelled", cancelled, path, context.Canceled},
		{"no such program", t.Context(), path + "x", fs.ErrNotExist},
		{"empty program", t.Context(), empty, nil},
		{"folder for a program", t.Context(), t.TempDir(), nil},
	} {
		cache := t.TempDir()
		_, err := Ensure(c.ctx, cache, c.agent)
		if err == nil || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.is)
		}
		files, _ := filepath.Glob(filepath.Join(cache, "*", "*"))
		if len(files) != 0 {
			t.Errorf("%s: left %q", c.name, files)
		}
	}
}

func TestProgram_that_changes_while_copied_is_refused(t *testing.T) {
	path, _ := agent(t, 5000)
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = write(t.Context(), f, path, strings.Repeat("0", 64))
	if err == nil || !strings.Contains(err.Error(), "changed") {
		t.Errorf("got %v", err)
	}
}

func TestKernel_mounts_image(t *testing.T) {
	list, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(list), "\terofs\n") {
		t.Skip("this host's kernel has no erofs")
	}
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	path, want := agent(t, 1<<20+17)
	image, err := Ensure(t.Context(), t.TempDir(), path)
	if err != nil {
		t.Fatal(err)
	}
	mnt := t.TempDir()
	if out, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", image, mnt).CombinedOutput(); err != nil {
		if strings.Contains(string(out), "loop") {
			t.Skipf("this host has no loop devices: %s", out)
		}
		t.Fatalf("mount: %v: %s", err, out)
	}
	defer func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Error(err)
		}
	}()
	checkTree(t, os.DirFS(mnt), want)
}

func TestFsck_finds_no_fault(t *testing.T) {
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("no fsck.erofs here (package erofs-utils)")
	}
	path, _ := agent(t, 1<<20+17)
	image, err := Ensure(t.Context(), t.TempDir(), path)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(fsck, image).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
