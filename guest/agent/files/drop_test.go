package files

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// drop has a dropper look at a path, or empty it.
func drop(t *testing.T, p *agentpb.DropPath, look bool) *agentpb.DroppedPath {
	t.Helper()
	d := dropper{ctx: t.Context(), path: p, out: &agentpb.DroppedPath{}}
	if err := d.run(look); err != nil {
		d.out.Problem = err.Error()
	}
	return d.out
}

// tree makes files that contain their own names, directories ("a/"), and links ("a -> b").
func tree(t *testing.T, entries ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, e := range entries {
		name, to, isLink := strings.Cut(e, " -> ")
		p := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(p), 0o755)
		switch {
		case err != nil:
		case isLink:
			err = os.Symlink(to, p)
		case strings.HasSuffix(e, "/"):
			err = os.MkdirAll(p, 0o755)
		default:
			err = os.WriteFile(p, []byte(name), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// left returns the content of a tree, without directories that are not empty.
func left(t *testing.T, root string) []string {
	t.Helper()
	out := []string{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil || rel == "." {
			return err
		}
		if d.IsDir() {
			below, err := os.ReadDir(p)
			if err != nil || len(below) > 0 {
				return err
			}
			rel += "/"
		}
		out = append(out, rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// ctime returns when an inode last changed.
func ctime(t *testing.T, p string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(p, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ctim.Nano()
}

// later waits until the clock of files has advanced, so that later changes have later times.
func later(t *testing.T) int64 {
	t.Helper()
	now, err := nextTick(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return now
}

func TestDrop_empties_a_directory_and_nothing_else(t *testing.T) {
	for _, tt := range []struct {
		name    string
		tree    []string
		path    string
		state   string
		entries uint64
		left    []string
	}{
		{"files and directories", []string{"c/a", "c/d/e/f", "c/d/g", "c/h/", "other"}, "c", agentpb.DropDirectory, 6, []string{"c/", "other"}},
		{"nothing", []string{"c/"}, "c", agentpb.DropDirectory, 0, []string{"c/"}},
		{"what is not there", []string{"other"}, "c", agentpb.DropAbsent, 0, []string{"other"}},
		{"below what is not there", []string{"other"}, "c/d", agentpb.DropAbsent, 0, []string{"other"}},
		{"links, but not what they lead to", []string{"c/l -> ../o", "c/m -> ../o/f", "c/n -> nowhere", "o/f"}, "c", agentpb.DropDirectory, 3, []string{"c/", "o/f"}},
		{"a link to a directory", []string{"c -> o", "o/f"}, "c", agentpb.DropLink, 0, []string{"c", "o/f"}},
		{"below a link to a directory", []string{"c -> o", "o/d/f"}, "c/d", agentpb.DropLink, 0, []string{"c", "o/d/f"}},
		{"a file", []string{"c"}, "c", agentpb.DropFile, 0, []string{"c"}},
		{"below a file", []string{"c"}, "c/d", agentpb.DropOther, 0, []string{"c"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := tree(t, tt.tree...)
			p := &agentpb.DropPath{Path: filepath.Join(root, tt.path)}
			if out := drop(t, p, true); out.State != tt.state && !(out.State == agentpb.DropEmpty && tt.entries == 0) {
				t.Errorf("a look says %q, want %q", out.State, tt.state)
			}
			out := drop(t, p, false)
			if out.State != tt.state || out.Entries != tt.entries || out.Problem != "" || out.Kept+out.Mounts != 0 {
				t.Errorf("dropped %+v, want %q and %d entries", out, tt.state, tt.entries)
			}
			if got := left(t, root); !slices.Equal(got, tt.left) {
				t.Errorf("left are %q, want %q", got, tt.left)
			}
		})
	}
}

func TestDrop_of_more_files_than_are_read_at_once_removes_all(t *testing.T) {
	root := t.TempDir()
	for i := range 3*dropNames + 1 {
		if err := os.WriteFile(filepath.Join(root, "f"+strings.Repeat("x", i%200)+string(rune('a'+i/200))), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out := drop(t, &agentpb.DropPath{Path: root}, false); out.Entries != 3*dropNames+1 || len(left(t, root)) != 0 {
		t.Errorf("dropped %+v, left %d", out, len(left(t, root)))
	}
}

func TestDrop_since_a_look_leaves_what_a_copy_since_then_may_not_have(t *testing.T) {
	root := tree(t, "c/old", "c/rewritten", "c/d/old", "c/d/added/old", "c/in -> old", "c/out -> ../o", "c/abs -> /etc", "c/.drowse-part-0123456789abcdef01234567",
		"moved/f", "o/f")
	if err := unix.Mkfifo(filepath.Join(root, "c/pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := filepath.Join(root, "c")
	seen := drop(t, &agentpb.DropPath{Path: c}, true)
	before := later(t)
	for _, name := range []string{"c/rewritten", "c/new", "c/d/added/new"} {
		if err := os.WriteFile(filepath.Join(root, name), []byte("now"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(filepath.Join(root, "moved"), filepath.Join(c, "moved")); err != nil {
		t.Fatal(err)
	}
	out := drop(t, &agentpb.DropPath{Path: c, BeforeNanos: before, Device: seen.Device, Inode: seen.Inode}, false)
	want := []string{"c/.drowse-part-0123456789abcdef01234567", "c/abs", "c/d/added/new", "c/d/added/old", "c/moved/f", "c/new", "c/out", "c/pipe", "c/rewritten", "o/f"}
	if got := left(t, root); !slices.Equal(got, want) {
		t.Errorf("left are\n%q, want\n%q", got, want)
	}
	if out.Entries != 3 || out.Kept != 8 || out.Problem != "" {
		t.Errorf("dropped %+v", out)
	}
}

func TestDrop_since_a_look_leaves_another_directory_of_that_name(t *testing.T) {
	root := tree(t, "c/f", "other/g")
	c := filepath.Join(root, "c")
	seen := drop(t, &agentpb.DropPath{Path: c}, true)
	if err := errors.Join(os.Rename(c, filepath.Join(root, "away")), os.Rename(filepath.Join(root, "other"), c)); err != nil {
		t.Fatal(err)
	}
	out := drop(t, &agentpb.DropPath{Path: c, BeforeNanos: later(t), Device: seen.Device, Inode: seen.Inode}, false)
	if got, want := left(t, root), []string{"away/f", "c/g"}; out.State != agentpb.DropReplaced || !slices.Equal(got, want) {
		t.Errorf("dropped %+v, left %q, want %q", out, got, want)
	}
}

func TestDrop_does_not_cross_a_mount(t *testing.T) {
	// Use a thread with its own mounts. It ends with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Skipf("mounts of its own: %v", err)
	}
	root := tree(t, "c/m/", "c/file", "c/d/f", "o/f")
	c := filepath.Join(root, "c")
	mount := func(src, dst, kind string, flags uintptr) {
		if err := unix.Mount(src, dst, kind, flags, ""); err != nil {
			t.Fatal(err)
		}
		if flags == unix.MS_BIND {
			t.Cleanup(func() { _ = unix.Unmount(dst, unix.MNT_DETACH) })
		}
	}
	mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE)
	mount(filepath.Join(root, "o"), filepath.Join(c, "m"), "", unix.MS_BIND)
	mount(filepath.Join(root, "o/f"), filepath.Join(c, "file"), "", unix.MS_BIND)
	out := drop(t, &agentpb.DropPath{Path: c}, false)
	if out.Mounts != 2 || out.Entries != 2 || out.Problem != "" {
		t.Errorf("dropped %+v", out)
	}
	if got := left(t, filepath.Join(root, "o")); !slices.Equal(got, []string{"f"}) {
		t.Errorf("behind the mounts is left %q", got)
	}
	if out := drop(t, &agentpb.DropPath{Path: filepath.Join(c, "m")}, false); out.Entries != 1 {
		t.Errorf("what is named itself may be a mount: dropped %+v", out)
	}
}

func TestDrop_goes_no_deeper_than_its_bound_and_says_so(t *testing.T) {
	root := t.TempDir()
	at := root
	if err := os.Chdir(root); err != nil { // paths would get too long
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chdir("/") })
	for range maxDropDepth + 10 {
		if err := errors.Join(os.Mkdir("d", 0o700), os.Chdir("d")); err != nil {
			t.Fatal(err)
		}
	}
	out := drop(t, &agentpb.DropPath{Path: at}, false)
	if !strings.Contains(out.Problem, "directories deep") || out.Entries != 0 {
		t.Errorf("dropped %+v", out)
	}
}

func TestDrop_ends_when_its_time_is_up(t *testing.T) {
	root := tree(t, "a", "b")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("not done within 5s"))
	d := dropper{ctx: ctx, path: &agentpb.DropPath{Path: root}, out: &agentpb.DroppedPath{}}
	if err := d.run(false); err == nil || err.Error() != "not done within 5s" {
		t.Errorf("got %v", err)
	}
}

func TestDrop_refuses_what_is_out_of_bounds(t *testing.T) {
	minute := int64(time.Minute)
	path := func(p string) []*agentpb.DropPath { return []*agentpb.DropPath{{Path: p}} }
	s := New(func() {}, nil)
	for name, m := range map[string]*agentpb.DropRequest{
		"the root":               {Paths: path("/"), LimitNanos: minute},
		"a relative path":        {Paths: path("tmp"), LimitNanos: minute},
		"a path that is unclean": {Paths: path("/tmp/../etc"), LimitNanos: minute},
		"too many paths":         {Paths: slices.Repeat(path("/tmp/none"), agentpb.MaxDropPaths+1), LimitNanos: minute},
		"no time":                {Paths: path("/tmp/none")},
		"too much time":          {Paths: path("/tmp/none"), LimitNanos: int64(agentpb.MaxDropTime) + 1},
	} {
		if _, err := s.Drop(t.Context(), m); err == nil {
			t.Errorf("%s is not refused", name)
		}
	}
}

func TestNextTick_is_between_what_was_written_before_and_after(t *testing.T) {
	p := filepath.Join(t.TempDir(), "f")
	for i := range 200 {
		// A file that is examined between changes has finer times (multigrain timestamps).
		for range i % 3 {
			if err := os.WriteFile(p, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			ctime(t, p)
		}
		if err := os.WriteFile(p, []byte("before"), 0o600); err != nil {
			t.Fatal(err)
		}
		at := later(t)
		if before := ctime(t, p); before >= at {
			t.Fatalf("round %d: a file that was written %v before a look may count as written since", i, time.Duration(before-at))
		}
		if err := os.WriteFile(p, []byte("after"), 0o600); err != nil {
			t.Fatal(err)
		}
		if after := ctime(t, p); after < at {
			t.Fatalf("round %d: a file that was written %v after a look may count as written before", i, time.Duration(at-after))
		}
	}
}
