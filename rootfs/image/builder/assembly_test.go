package builder

import (
	"archive/tar"
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
	"time"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
)

// baseOf builds an image from a tar stream.
func baseOf(t *testing.T, s *image.Store, stream []byte) *image.Image {
	t.Helper()
	img, err := Build(t.Context(), Options{Store: s, From: "tar:-", Tag: "base", Stdin: bytes.NewReader(stream)})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func assemble(t *testing.T, s *image.Store, base *image.Image) *Assembly {
	t.Helper()
	a, err := NewAssembly(t.Context(), AssemblyOptions{Store: s, Base: base})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// contextOf makes a build context. Names end in a slash for directories, have "->" for symlinks and "=" for files.
func contextOf(t *testing.T, files ...string) *os.Root {
	t.Helper()
	dir := t.TempDir()
	for _, f := range files {
		name, text, _ := strings.Cut(f, "=")
		link, to, isLink := strings.Cut(f, "->")
		var err error
		switch {
		case isLink:
			err = os.Symlink(to, filepath.Join(dir, link))
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(filepath.Join(dir, name), 0o755)
		default:
			if err = os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err == nil {
				err = os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

const passwd = "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/:/bin/sh\n"

// An image that is read back and written again must be the same, byte for byte.
func TestReadEROFS_gives_the_tree_that_was_written(t *testing.T) {
	s := newStore(t)
	hs := []tar.Header{
		imagetest.Dirh("etc/"), imagetest.Dirh("d/"), imagetest.Reg("d/f"), imagetest.Lnk("d/g", "d/f"), imagetest.Sym("d/s", "f"),
		{Name: "d/p", Typeflag: tar.TypeFifo, Mode: 0o600}, {Name: "d/c", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3},
		{Name: "d/su", Mode: 0o6755, Uid: 7, Gid: 70000}, {Name: "t/", Typeflag: tar.TypeDir, Mode: 0o1777},
		{Name: "d/x", Mode: 0o644, PAXRecords: map[string]string{"SCHILY.xattr." + "user.a": "b", "SCHILY.xattr." + erofs.ACLAccess: "\x02\x00\x00\x00"}},
		{Name: "d/big", Mode: 0o644, Size: 3 * sparse.BlockSize},
	}
	stream := imagetest.TarOf(t, map[string][]byte{"d/f": []byte("content"), "d/big": bytes.Repeat([]byte{0, 0, 1}, sparse.BlockSize)}, hs...)
	img := baseOf(t, s, stream)
	f, err := os.Open(img.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tr, err := erofs.Read(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	out := imagetest.TempFile(t)
	if err := erofs.Write(t.Context(), tr, out, nil); err != nil {
		t.Fatal(err)
	}
	if id := imagetest.HashOf(t, io.NewSectionReader(out, 0, img.Size)); id != img.ID {
		t.Errorf("written again it is %s (%v), it was %s", id, err, img.ID)
	}
}

func TestCopy_puts_files_where_a_Dockerfile_does(t *testing.T) {
	base := func(t *testing.T) []byte {
		return imagetest.LayerOf(t, imagetest.Dirh("usr/"), imagetest.Dirh("usr/bin/"), imagetest.Sym("bin", "usr/bin"), imagetest.Dirh("etc/"), imagetest.Reg("etc/passwd="+passwd), imagetest.Reg("etc/group=staff:x:50:\n"), imagetest.Reg("file=old"), imagetest.Dirh("dir/"), imagetest.Reg("dir/old=1"))
	}
	for name, c := range map[string]struct {
		files []string
		in    CopyIn
		want  string // what the base does not have
		fail  error
		says  string
	}{
		"a file to a name":                       {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/x/y"}, want: "x/ x/y=1"},
		"a file into a directory by its slash":   {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/x", DestDir: true}, want: "x/ x/a=1"},
		"a file into a directory that is there":  {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/dir"}, want: "dir/a=1"},
		"a file through a symlink":               {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/bin"}, want: "usr/bin/a=1"},
		"a file over a file":                     {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/file"}, want: "file=1"},
		"a directory gives what is in it":        {files: []string{"d/a=1", "d/e/b=2", "d/s->a"}, in: CopyIn{Sources: []string{"d"}, Dest: "/x"}, want: "x/ x/a=1 x/e/ x/e/b=2 x/s->a"},
		"an empty directory makes one":           {files: []string{"d/"}, in: CopyIn{Sources: []string{"d"}, Dest: "/x"}, want: "x/"},
		"a directory keeps what is there":        {files: []string{"dir/b=2"}, in: CopyIn{Sources: []string{"."}, Dest: "/"}, want: "dir/b=2"},
		"a directory goes where a symlink leads": {files: []string{"bin/b=2"}, in: CopyIn{Sources: []string{"."}, Dest: "/"}, want: "usr/bin/b=2"},
		"a pattern":                              {files: []string{"a.x=1", "b.x=2", "c.y=3"}, in: CopyIn{Sources: []string{"*.x"}, Dest: "/x"}, want: "x/ x/a.x=1 x/b.x=2"},
		"a symlink that is named is followed":    {files: []string{"a=1", "s->a"}, in: CopyIn{Sources: []string{"s"}, Dest: "/x"}, want: "x=1"},
		"a text":                                 {in: CopyIn{Inline: []InlineFile{{"n", "text"}}, Dest: "/x"}, want: "x=text"},
		"what is ignored is not there":           {files: []string{"d/a=1", "d/b=2"}, in: CopyIn{Sources: []string{"d"}, Dest: "/x", Ignore: func(p string) bool { return p == "d/b" }}, want: "x/ x/a=1"},
		"an exception below what is ignored":     {files: []string{"d/a=1", "d/b/c=2", "d/e/f=3"}, in: CopyIn{Sources: []string{"."}, Dest: "/x", Deep: true, Ignore: func(p string) bool { return p != "d/b/c" }}, want: "x/ x/d/ x/d/b/ x/d/b/c=2"},

		"a file that is not there":              {in: CopyIn{Sources: []string{"a"}, Dest: "/x"}, fail: fs.ErrNotExist},
		"a file that is ignored":                {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/x", Ignore: func(string) bool { return true }}, fail: fs.ErrNotExist},
		"a pattern that nothing fits":           {files: []string{"a=1"}, in: CopyIn{Sources: []string{"*.x"}, Dest: "/x"}, fail: fs.ErrNotExist},
		"a symlink out of the context":          {files: []string{"s->/etc/passwd"}, in: CopyIn{Sources: []string{"s"}, Dest: "/x"}, says: "escapes"},
		"a file below a file":                   {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/file/x"}, fail: image.ErrInvalidOption},
		"a file over a directory":               {files: []string{"d/dir=1"}, in: CopyIn{Sources: []string{"d"}, Dest: "/"}, fail: image.ErrInvalidOption},
		"a directory over a file":               {files: []string{"d/file/x=1"}, in: CopyIn{Sources: []string{"d"}, Dest: "/"}, fail: image.ErrInvalidOption},
		"an owner that the image does not know": {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "/x", Owner: "who"}, fail: image.ErrInvalidOption},
		"a name that hides another":             {files: []string{"d/.wh.a=1"}, in: CopyIn{Sources: []string{"d"}, Dest: "/x"}, fail: image.ErrUnsupportedSource},
		"a destination that is not absolute":    {files: []string{"a=1"}, in: CopyIn{Sources: []string{"a"}, Dest: "x"}, fail: image.ErrInvalidOption},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			a := assemble(t, s, baseOf(t, s, base(t)))
			m, err := a.tree(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			old := strings.Fields(strings.ReplaceAll(imagetest.Sketch(t, m.Tree), "\n", "|"))
			c.in.Context = contextOf(t, c.files...)
			if c.in.Mode == 0 {
				c.in.Mode = -1
			}
			_, err = a.Copy(t.Context(), c.in, name, false)
			if c.fail != nil || c.says != "" {
				if err == nil || c.fail != nil && !errors.Is(err, c.fail) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %v, want %v %q", err, c.fail, c.says)
				}
				if a.Layers() != 0 {
					t.Error("a copy that failed has left a layer")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if m, err = a.tree(t.Context()); err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, w := range strings.Fields(strings.ReplaceAll(imagetest.Sketch(t, m.Tree), "\n", "|")) {
				if !slices.Contains(old, w) {
					got = append(got, w)
				}
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("it has brought %q, want %q", strings.Join(got, " "), c.want)
			}
		})
	}
}

func TestCopy_gives_owners_and_permissions(t *testing.T) {
	s := newStore(t)
	base := baseOf(t, s, imagetest.LayerOf(t, imagetest.Dirh("etc/"), imagetest.Reg("etc/passwd="+passwd), imagetest.Reg("etc/group=staff:x:50:\n")))
	for name, c := range map[string]struct {
		owner    string
		mode     int64
		uid, gid uint32
		perm     fs.FileMode
	}{
		"nothing said":         {"", -1, 0, 0, 0o644},
		"by name":              {"app", -1, 1000, 1001, 0o644},
		"by name and group":    {"app:staff", 0o4750, 1000, 50, 0o750 | fs.ModeSetuid},
		"by number":            {"55", 0, 55, 55, 0},
		"by number and number": {"55:56", -1, 55, 56, 0o644},
	} {
		t.Run(name, func(t *testing.T) {
			a := assemble(t, s, base)
			if _, err := a.Copy(t.Context(), CopyIn{Context: contextOf(t, "a=1"), Sources: []string{"a"}, Dest: "/new/a", Owner: c.owner, Mode: c.mode}, "", false); err != nil {
				t.Fatal(err)
			}
			m, err := a.tree(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			n, d := m.Tree.Lookup("new/a"), m.Tree.Lookup("new")
			if n.UID != c.uid || n.GID != c.gid || n.Mode != c.perm || d.UID != c.uid || d.GID != c.gid || d.Mode != fs.ModeDir|0o755 {
				t.Errorf("file %v %d:%d in directory %v %d:%d", n.Mode, n.UID, n.GID, d.Mode, d.UID, d.GID)
			}
		})
	}
}

func TestAdd_unpacks_archives_and_nothing_else(t *testing.T) {
	s := newStore(t)
	a := assemble(t, s, nil)
	stream := imagetest.LayerOf(t, imagetest.Dirh("d/"), tar.Header{Name: "d/f=1", Mode: 0o600, Uid: 5}, imagetest.Lnk("d/g", "d/f"))
	c := contextOf(t, "plain=text", "a.tar="+string(stream))
	if _, err := a.Copy(t.Context(), CopyIn{Context: c, Sources: []string{"plain", "a.tar"}, Dest: "/x", Unpack: true, Mode: -1}, "", false); err != nil {
		t.Fatal(err)
	}
	m, err := a.tree(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := imagetest.Sketch(t, m.Tree); got != "x/ x/d/ x/d/f=1 x/d/g=1 x/plain=text" || m.Tree.Lookup("x/d/f").UID != 5 || m.Tree.Lookup("x/d/f") != m.Tree.Lookup("x/d/g") {
		t.Errorf("it is %s", got)
	}
	if _, err := a.Copy(t.Context(), CopyIn{Context: c, Sources: []string{"a.tar"}, Dest: "/y", Unpack: true, Owner: "1", Mode: -1}, "", false); !errors.Is(err, image.ErrInvalidOption) {
		t.Errorf("an owner for an archive: %v", err)
	}
}

func TestSteps_are_known_by_their_content(t *testing.T) {
	s := newStore(t)
	base := baseOf(t, s, imagetest.LayerOf(t, imagetest.Dirh("etc/"), imagetest.Reg("etc/f=1")))
	build := func(tag string, c *os.Root, noCache bool) (*image.Image, bool, bool) {
		t.Helper()
		a, err := NewAssembly(t.Context(), AssemblyOptions{Store: s, Base: base})
		if err != nil {
			t.Fatal(err)
		}
		made, changed, err := a.MakeDir(t.Context(), "/srv/app", "WORKDIR", noCache)
		if err != nil || !changed {
			t.Fatalf("the directory was not made: %v", err)
		}
		copied, err := a.Copy(t.Context(), CopyIn{Context: c, Sources: []string{"."}, Dest: "/srv/app", Mode: -1}, "COPY", noCache)
		if err != nil {
			t.Fatal(err)
		}
		img, err := a.Finish(t.Context(), image.RunConfig{Env: []string{"A=1"}, ExposedPorts: []string{"80/tcp"}}, tag)
		if err := errors.Join(err, a.Close()); err != nil {
			t.Fatal(err)
		}
		return img, made, copied
	}
	c := contextOf(t, "a=1", "b/c=2")
	first, made, copied := build("one", c, false)
	if made || copied {
		t.Errorf("the first build took something from nowhere: %v %v", made, copied)
	}
	imagetest.Fsck(t, first.Path())
	if err := c.Chtimes("a", imagetest.When, imagetest.When.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	again, made, copied := build("two", c, false)
	if !made || !copied || again.ID != first.ID || !again.Cached || !slices.Equal(again.Tags, []string{"one:latest", "two:latest"}) {
		t.Errorf("the same again: %v %v, image %s of %s with %v", made, copied, again.ShortID(), first.ShortID(), again.Tags)
	}
	if err := c.WriteFile("a", []byte("3"), 0o644); err != nil {
		t.Fatal(err)
	}
	other, made, copied := build("three", c, false)
	if !made || copied || other.ID == first.ID {
		t.Errorf("with another file: %v %v, image %s of %s", made, copied, other.ShortID(), first.ShortID())
	}
	if _, made, copied = build("four", c, true); made || copied {
		t.Errorf("without the cache: %v %v", made, copied)
	}
	// PruneSteps removes the steps of images that are gone, and keeps the others.
	for _, tag := range []string{"one", "two"} {
		if _, err := s.Remove(t.Context(), tag, nil); err != nil {
			t.Fatal(err)
		}
	}
	under := assemble(t, s, base)
	if freed, err := PruneSteps(t.Context(), s, nil); err != nil || !freed.Busy || len(freed.Names) != 0 {
		t.Errorf("pruning during a build: %+v (%v)", freed, err)
	}
	if err := under.Close(); err != nil {
		t.Fatal(err)
	}
	if freed, err := PruneSteps(t.Context(), s, nil); err != nil || freed.Busy || len(freed.Names) != 1 || freed.Bytes == 0 {
		t.Errorf("pruning: %+v (%v)", freed, err)
	}
	if _, made, copied = build("five", c, false); !made || !copied {
		t.Errorf("after pruning, of an image that is there: %v %v", made, copied)
	}
}

func TestPut_takes_what_a_guest_has_written(t *testing.T) {
	s := newStore(t)
	base := baseOf(t, s, imagetest.LayerOf(t, imagetest.Dirh("etc/"), imagetest.Reg("etc/gone=1"), imagetest.Reg("etc/resolv.conf=image"), imagetest.Dirh("o/"), imagetest.Reg("o/x=1")))
	a := assemble(t, s, base)
	key, err := a.Key("RUN one")
	if err != nil {
		t.Fatal(err)
	}
	one := imagetest.LayerOf(t, imagetest.Reg("etc/.wh.gone"), imagetest.Reg("etc/resolv.conf=guest"), imagetest.Dirh("o/"), imagetest.Reg("o/.wh..wh..opq"), imagetest.Reg("first=1"),
		tar.Header{Name: "x=1", Mode: 0o644, PAXRecords: map[string]string{"SCHILY.xattr." + "trusted.overlay.origin": "z", "SCHILY.xattr." + "user.a": "b"}})
	if err := a.Put(t.Context(), key, "RUN one", 0, bytes.NewReader(one), "etc/resolv.conf"); err != nil {
		t.Fatal(err)
	}
	look := func() string {
		t.Helper()
		m, err := a.tree(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return imagetest.Sketch(t, m.Tree)
	}
	m, err := a.tree(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if x := m.Tree.Lookup("x").Xattrs; len(x) != 1 || x["user.a"] != "b" {
		t.Errorf("attributes %q", x)
	}
	got := look()
	for want, is := range map[string]bool{"first=1": true, "etc/resolv.conf=image": true, "etc/gone=1": false, "o/x=1": false} {
		if strings.Contains(got, want) != is {
			t.Errorf("after the first command it is %s: of %s", got, want)
		}
	}
	// The second command of the same VM reports all that it has, which no longer includes what the first had made.
	if key, err = a.Key("RUN two"); err != nil {
		t.Fatal(err)
	}
	if err := a.Put(t.Context(), key, "RUN two", 0, bytes.NewReader(imagetest.LayerOf(t, imagetest.Reg("second=2"))), "etc/resolv.conf"); err != nil {
		t.Fatal(err)
	}
	if got := look(); a.Layers() != 1 || strings.Contains(got, "first") || !strings.Contains(got, "second=2") || !strings.Contains(got, "etc/gone=1") {
		t.Errorf("after the second command, with %d layers, it is %s", a.Layers(), got)
	}
}

func TestPut_refuses_what_a_guest_must_not_say(t *testing.T) {
	s := newStore(t)
	a, err := NewAssembly(t.Context(), AssemblyOptions{Store: s, MaxBytes: 1 << 20, MaxFiles: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	many := make([]tar.Header, 0, 11)
	for i := range 11 {
		many = append(many, imagetest.Reg(string(rune('a'+i))))
	}
	broken := errors.New("the guest is gone")
	for name, c := range map[string]struct {
		stream io.Reader
		want   error
	}{
		"a name above the root":     {bytes.NewReader(imagetest.LayerOf(t, imagetest.Reg("../x"))), image.ErrBadArchive},
		"a hard link to nothing":    {bytes.NewReader(imagetest.LayerOf(t, imagetest.Lnk("a", "b"))), image.ErrBadArchive},
		"an owner out of range":     {bytes.NewReader(imagetest.LayerOf(t, tar.Header{Name: "a", Uid: 1 << 33})), image.ErrBadArchive},
		"too many files":            {bytes.NewReader(imagetest.LayerOf(t, many...)), image.ErrTooLarge},
		"too many bytes":            {bytes.NewReader(imagetest.TarOf(t, map[string][]byte{"a": make([]byte, 2<<20)}, imagetest.Reg("a"))), image.ErrTooLarge},
		"no archive":                {strings.NewReader(strings.Repeat("x", 4096)), image.ErrBadArchive},
		"an end in the middle":      {bytes.NewReader(imagetest.LayerOf(t, imagetest.Reg("a=12345"))[:1030]), image.ErrBadArchive},
		"an error of the stream":    {io.MultiReader(bytes.NewReader(imagetest.LayerOf(t, imagetest.Reg("a=1"))), failingReader{broken}), broken},
		"a symlink that is a loop":  {bytes.NewReader(imagetest.LayerOf(t, imagetest.Sym("a", "a"), imagetest.Reg("a/b"))), image.ErrBadArchive},
		"something below whiteouts": {bytes.NewReader(imagetest.LayerOf(t, imagetest.Reg(".wh.a/b"))), image.ErrBadArchive},
	} {
		t.Run(name, func(t *testing.T) {
			key, err := a.Key(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := a.Put(t.Context(), key, name, 0, c.stream); !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if a.Layers() != 0 || a.Use(key) {
				t.Error("a step that failed has left a result")
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Put(ctx, strings.Repeat("0", 64), "", 0, bytes.NewReader(imagetest.LayerOf(t, imagetest.Reg("a")))); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of its context: %v", err)
	}
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

func TestBoot_makes_an_image_that_is_gone_afterwards(t *testing.T) {
	s := newStore(t)
	base := baseOf(t, s, imagetest.LayerOf(t, imagetest.Dirh("etc/"), imagetest.Reg("etc/f=1")))
	a, err := NewAssembly(t.Context(), AssemblyOptions{Store: s, Base: base})
	if err != nil {
		t.Fatal(err)
	}
	if img, err := a.Boot(t.Context()); err != nil || img.ID != base.ID {
		t.Fatalf("without a step it is %v (%v)", img, err)
	}
	if _, _, err := a.MakeDir(t.Context(), "/x", "", false); err != nil {
		t.Fatal(err)
	}
	img, err := a.Boot(t.Context())
	if err != nil || img.ID == base.ID {
		t.Fatalf("with a step it is %v (%v)", img, err)
	}
	if _, err := s.ByID(img.ID); err != nil {
		t.Error(err)
	}
	dump, _ := imagetest.DumpImage(t, img.Path())
	if _, ok := dump["x"]; !ok {
		t.Error("it does not have what the step has made")
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if list, err := s.List(); err != nil || len(list) != 1 {
		t.Errorf("there are %v (%v)", list, err)
	}
	// A prune removes an image that a dead build has left.
	b := assemble(t, s, base)
	if _, _, err := b.MakeDir(t.Context(), "/x", "", false); err != nil {
		t.Fatal(err)
	}
	if img, err = b.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.made = nil
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := PruneSteps(t.Context(), s, func(string) bool { return true }); err != nil {
		t.Error(err)
	}
	if _, err := s.ByID(img.ID); err != nil {
		t.Errorf("one that a VM uses: %v", err)
	}
	if _, err := PruneSteps(t.Context(), s, nil); err != nil {
		t.Error(err)
	}
	if _, err := s.ByID(img.ID); !errors.Is(err, image.ErrNotFound) {
		t.Errorf("one that nobody uses: %v", err)
	}
}

func TestDamaged_layer_of_a_step_is_told_and_made_anew(t *testing.T) {
	s := newStore(t)
	a := assemble(t, s, nil)
	c := contextOf(t, "a=some text")
	in := CopyIn{Context: c, Sources: []string{"a"}, Dest: "/a", Mode: -1}
	if _, err := a.Copy(t.Context(), in, "", false); err != nil {
		t.Fatal(err)
	}
	name := layerPath(s, a.layers[0].DiffID)
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	// Another stream of the same length: uncompressed zeros.
	for i := range data {
		data[i] = 0
	}
	if err := errors.Join(os.Chmod(name, 0o600), os.WriteFile(name, data, 0o600)); err != nil {
		t.Fatal(err)
	}
	b := assemble(t, s, nil)
	if cached, err := b.Copy(t.Context(), in, "", false); err != nil || !cached {
		t.Fatalf("cached %v (%v)", cached, err)
	}
	if _, err := b.Finish(t.Context(), image.RunConfig{}, "x"); !errors.Is(err, image.ErrDigest) {
		t.Errorf("error %v, want %v", err, image.ErrDigest)
	}
	d := assemble(t, s, nil)
	if cached, err := d.Copy(t.Context(), in, "", false); err != nil || cached {
		t.Errorf("afterwards: cached %v (%v)", cached, err)
	}
}

func TestFile_that_changes_while_it_is_copied_is_told_and_leaves_nothing(t *testing.T) {
	a := assemble(t, newStore(t), nil)
	c := contextOf(t, "a=1")
	in := CopyIn{Context: c, Sources: []string{"a"}, Dest: "/a", Mode: -1}
	list, _, err := a.pick(t.Context(), &in)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"2", "12", ""} {
		if err := c.WriteFile("a", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		r, err := contextContent{c, list[0]}.Open()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(r); !errors.Is(err, image.ErrChanged) {
			t.Errorf("text %q: error %v", text, err)
		}
		r.Close()
	}
}

func TestFinish_without_a_change_is_the_base(t *testing.T) {
	s := newStore(t)
	base := baseOf(t, s, imagetest.LayerOf(t, imagetest.Dirh("etc/"), imagetest.Reg("etc/f=1")))
	a := assemble(t, s, base)
	if _, err := a.Copy(t.Context(), CopyIn{Sources: []string{"a"}, Dest: "/a", Mode: -1}, "", false); !errors.Is(err, image.ErrInvalidOption) {
		t.Errorf("a copy without a context: %v", err)
	}
	img, err := a.Finish(t.Context(), base.RunConfig, "same")
	if err != nil || img.ID != base.ID || img.Source != base.Source || img.Spec != base.Spec || !slices.Equal(img.Tags, []string{"base:latest", "same:latest"}) {
		t.Errorf("it is %+v (%v)", img, err)
	}
}
