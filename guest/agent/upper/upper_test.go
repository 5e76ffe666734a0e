package upper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// overlay is a real overlay that is attached to no directory.
type overlay struct {
	t    *testing.T
	tree *Tree
	root string // merged
}

// newOverlay makes an overlay over an image with some files.
func newOverlay(t *testing.T, options ...string) *overlay {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("overlays with whiteouts need root")
	}
	dir := t.TempDir()
	p := func(name string) string { return filepath.Join(dir, name) }
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"lower/d/sub", "lower/empty", "upper", "work"} {
		ok(os.MkdirAll(p(d), 0o755))
	}
	for _, f := range []string{"lower/f", "lower/d/x", "lower/d/y", "lower/d/sub/z", "lower/d0"} {
		ok(os.WriteFile(p(f), []byte("image"), 0o644))
	}
	ok(os.Link(p("lower/f"), p("lower/link")))
	ok(os.Symlink("d", p("lower/s")))
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Skipf("this kernel has no overlay: %v", err)
	}
	defer unix.Close(fs)
	for k, v := range map[string]string{"lowerdir": p("lower"), "upperdir": p("upper"), "workdir": p("work")} {
		ok(unix.FsconfigSetString(fs, k, v))
	}
	for _, o := range options {
		k, v, _ := strings.Cut(o, "=")
		if err := unix.FsconfigSetString(fs, k, v); err != nil {
			t.Skipf("this kernel's overlay has no %s: %v", o, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		t.Skipf("no overlay over %s: %v", dir, err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	ok(err)
	t.Cleanup(func() { unix.Close(fd) })
	tree, err := OpenAt(p("upper"), p("lower"))
	ok(err)
	t.Cleanup(tree.Close)
	return &overlay{t: t, tree: tree, root: fmt.Sprintf("/proc/self/fd/%d", fd)}
}

// do fails the test if a change in the overlay has failed.
func (o *overlay) do(errs ...error) {
	o.t.Helper()
	if err := errors.Join(errs...); err != nil {
		o.t.Fatal(err)
	}
}

func (o *overlay) p(name string) string { return filepath.Join(o.root, name) }
func (o *overlay) write(name, text string) error {
	return os.WriteFile(o.p(name), []byte(text), 0o644)
}

func (o *overlay) look(b Budget) *View {
	o.t.Helper()
	v, err := o.tree.Look(o.t.Context(), "", b)
	o.do(err)
	// Change times have the resolution of the kernel's tick.
	time.Sleep(2 * Tick())
	return v
}

func text(changes []*agentpb.DiskChange) (out []string) {
	for _, c := range changes {
		line := string(" +~-"[c.Op]) + string(c.Path)
		if len(c.From) > 0 {
			line += " from " + string(c.From)
		}
		out = append(out, line)
	}
	return out
}

func (o *overlay) compare(before *View) Difference {
	o.t.Helper()
	d, err := o.tree.Compare(o.t.Context(), before, o.look(Budget{}), "", 1000)
	o.do(err)
	return d
}

func TestCompare_tells_what_a_command_has_done(t *testing.T) {
	for name, c := range map[string]struct {
		before func(o *overlay)
		do     func(o *overlay)
		want   []string // since before
		image  []string // since the image
	}{
		"nothing": {do: func(*overlay) {}},
		"a new file in a directory of the image": {
			do: func(o *overlay) { o.do(o.write("d/new", "1")) }, want: []string{"+/d/new"}, image: []string{"+/d/new"}},
		"a file of the image is written to": {
			do: func(o *overlay) { o.do(o.write("d/x", "other")) }, want: []string{"~/d/x"}, image: []string{"~/d/x"}},
		"a file of the image is replaced by rename": {
			do:   func(o *overlay) { o.do(o.write("d/tmp", "n"), os.Rename(o.p("d/tmp"), o.p("d/x"))) },
			want: []string{"~/d/x"}, image: []string{"~/d/x"}},
		"a file of the image is renamed": {
			do:   func(o *overlay) { o.do(os.Rename(o.p("d/x"), o.p("d/x2"))) },
			want: []string{"-/d/x", "+/d/x2"}, image: []string{"-/d/x", "+/d/x2"}},
		"one of two names in the image is written to": {
			do: func(o *overlay) { o.do(o.write("link", "other")) }, want: []string{"~/link"}, image: []string{"~/link"}},
		"a tree of the image is removed": {
			do: func(o *overlay) { o.do(os.RemoveAll(o.p("d"))) }, want: []string{"-/d"}, image: []string{"-/d"}},
		"a tree of the image is removed and made anew": {
			do: func(o *overlay) {
				o.do(os.RemoveAll(o.p("d")), os.Mkdir(o.p("d"), 0o755), o.write("d/x", "again"), o.write("d/n", ""))
			},
			want: []string{"+/d/n", "-/d/sub", "~/d/x", "-/d/y"}, image: []string{"+/d/n", "-/d/sub", "~/d/x", "-/d/y"}},
		"a directory of the image becomes a file, and a link a directory": {
			do: func(o *overlay) {
				o.do(os.RemoveAll(o.p("d")), o.write("d", "file"), os.Remove(o.p("s")), os.Mkdir(o.p("s"), 0o755), o.write("s/x", "not d/x"))
			},
			want: []string{"~/d", "~/s", "+/s/x"}, image: []string{"~/d", "~/s", "+/s/x"}},
		"the mode of a directory": {
			do: func(o *overlay) { o.do(os.Chmod(o.p("empty"), 0o700)) }, want: []string{"~/empty"}, image: []string{"~/empty"}},
		"what was written before is not told again": {
			before: func(o *overlay) { o.do(o.write("d/old", "1"), o.write("f", "2"), os.Remove(o.p("d/y"))) },
			do:     func(o *overlay) { o.do(o.write("d/new", "1")) },
			want:   []string{"+/d/new"}, image: []string{"+/d/new", "+/d/old", "-/d/y", "~/f"}},
		"the same size again, at once": {
			before: func(o *overlay) { o.do(o.write("n", "one")) },
			do:     func(o *overlay) { o.do(o.write("n", "two")) },
			want:   []string{"~/n"}, image: []string{"+/n"}},
		"a file with its times put back": {
			before: func(o *overlay) { o.do(o.write("n", "one"), os.Chtimes(o.p("n"), time.Unix(9, 0), time.Unix(9, 0))) },
			do:     func(o *overlay) { o.do(o.write("n", "two"), os.Chtimes(o.p("n"), time.Unix(9, 0), time.Unix(9, 0))) },
			want:   []string{"~/n"}, image: []string{"+/n"}},
		"a sparse file grows": {
			before: func(o *overlay) { o.do(o.write("n", "")) },
			do:     func(o *overlay) { o.do(os.Truncate(o.p("n"), 1<<40)) },
			want:   []string{"~/n"}, image: []string{"+/n"}},
		"what was added is removed, and what was removed comes back": {
			before: func(o *overlay) { o.do(o.write("n", "1"), os.RemoveAll(o.p("d"))) },
			do:     func(o *overlay) { o.do(os.Remove(o.p("n")), os.Mkdir(o.p("d"), 0o755), o.write("d/x", "1")) },
			want:   []string{"+/d", "+/d/x", "-/n"}, image: []string{"-/d/sub", "~/d/x", "-/d/y"}},
		"a new tree is moved, with what is in it": {
			before: func(o *overlay) { o.do(os.Mkdir(o.p("t"), 0o755), o.write("t/a", "1")) },
			do:     func(o *overlay) { o.do(os.Rename(o.p("t"), o.p("u"))) },
			want:   []string{"-/t", "+/u", "+/u/a"}, image: []string{"+/u", "+/u/a"}},
		"a hidden directory loses a name of its own": {
			before: func(o *overlay) {
				o.do(os.RemoveAll(o.p("d")), os.Mkdir(o.p("d"), 0o755), o.write("d/x", "again"))
			},
			do:   func(o *overlay) { o.do(os.Remove(o.p("d/x"))) },
			want: []string{"-/d/x"}, image: []string{"-/d/sub", "-/d/x", "-/d/y"}},
		"names that are prefixes of each other, and hostile ones": {
			do: func(o *overlay) {
				o.do(o.write("d-", ""), o.write("d/a\n\x1b[2J\xff", ""), o.write("d!", ""))
			},
			want: []string{"+/d/a\n\x1b[2J\xff", "+/d!", "+/d-"}, image: []string{"+/d/a\n\x1b[2J\xff", "+/d!", "+/d-"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOverlay(t)
			if c.before != nil {
				c.before(o)
			}
			before := o.look(Budget{})
			c.do(o)
			d := o.compare(before)
			if got := text(d.Changes); !slices.Equal(got, c.want) || d.More != 0 || d.Partial != "" || d.Until != "" {
				t.Errorf("since before:\n%q\nwant\n%q\n(%d more, until %q, partial %q)", got, c.want, d.More, d.Until, d.Partial)
			}
			if got := text(o.compare(Untouched()).Changes); !slices.Equal(got, c.image) {
				t.Errorf("since the image:\n%q\nwant\n%q", got, c.image)
			}
			// Read the same in parts of any size.
			var parts []string
			for after, n := "", 0; ; n++ {
				v, err := o.tree.Look(t.Context(), after, Budget{Entries: 1})
				o.do(err)
				d, err := o.tree.Compare(t.Context(), Untouched(), v, after, 1000)
				o.do(err)
				parts = append(parts, text(d.Changes)...)
				if d.Until == "" {
					break
				}
				if agentpb.ComparePaths(d.Until, after) <= 0 || n > 1000 {
					t.Fatalf("it stands still at %q", d.Until)
				}
				after = d.Until
			}
			if !slices.Equal(parts, c.image) {
				t.Errorf("in parts:\n%q\nwant\n%q", parts, c.image)
			}
		})
	}
}

func TestCompare_tells_a_directory_of_the_image_that_was_moved_as_a_whole(t *testing.T) {
	o := newOverlay(t, "redirect_dir=on", "metacopy=on")
	o.do(os.Rename(o.p("d"), o.p("moved")), o.write("moved/new", "1"), os.Chmod(o.p("f"), 0o600))
	d := o.compare(Untouched())
	want := []string{"-/d", "~/f", "+/moved from /d", "+/moved/new"}
	if got := text(d.Changes); !slices.Equal(got, want) || d.Partial == "" {
		t.Errorf("got %q (partial: %q), want %q, and that something is not told", got, d.Partial, want)
	}
	for _, c := range d.Changes {
		if string(c.Path) == "/f" && c.Size != int64(len("image")) {
			t.Errorf("a file of attributes alone has %d bytes", c.Size)
		}
	}
}

func TestCompare_of_views_that_end_early_tells_of_what_both_have(t *testing.T) {
	o := newOverlay(t)
	for i := range 9 {
		o.do(o.write(fmt.Sprintf("n%d", i), "1"))
	}
	before := o.look(Budget{Entries: 5})
	o.do(os.Remove(o.p("n2")), o.write("n3", "22"), os.Remove(o.p("n8")), o.write("n0a", ""))
	now := o.look(Budget{Until: before.Last()})
	d, err := o.tree.Compare(t.Context(), before, now, "", 2)
	o.do(err)
	if got, want := text(d.Changes), []string{"+/n0a", "-/n2"}; !slices.Equal(got, want) || d.More != 1 || d.Until != "n4" {
		t.Errorf("got %q, %d more, until %q", got, d.More, d.Until)
	}
}
