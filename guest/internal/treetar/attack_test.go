package treetar

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// copied is the name of each copy in these tests.
const copied = "copy"

// A scene is a directory on the host that a tree is copied into. The user has files beside the copy and above it,
// and files in it from before.
type scene struct {
	top, dst string
	was      map[string]string // outside
	broken   bool              // something other than the copy has changed
}

func newScene(t testing.TB) *scene {
	t.Helper()
	s := &scene{top: t.TempDir()}
	s.dst = s.top + "/in/dst"
	s.begin(t)
	return s
}

func (s *scene) begin(t testing.TB) {
	t.Helper()
	for _, f := range []string{"/bait", "/a/bait", "/in/bait", "/in/dst/bait", "/in/dst/a/bait", "/in/dst/a/b/bait"} {
		put(t, s.top+f, []byte("safe"))
	}
	s.symlink(t, "../..", "/in/dst/up")
	s.was = s.outside(t)
}

// again removes the last copy. With merged it makes a directory that the next copy is merged into.
func (s *scene) again(t testing.TB, merged bool) {
	t.Helper()
	away := []string{s.dst + "/" + copied, s.dst + "/" + partName(copied)}
	if s.broken {
		away = []string{s.top + "/bait", s.top + "/a", s.top + "/in"}
	}
	for _, p := range away {
		if err := os.RemoveAll(p); err != nil {
			t.Fatal(err)
		}
	}
	if s.broken {
		s.begin(t)
		s.broken = false
	}
	if !merged {
		return
	}
	put(t, s.dst+"/copy/a/bait", []byte("safe"))
	put(t, s.dst+"/copy/bait", []byte("safe"))
	s.symlink(t, "../..", "/in/dst/copy/up")
	s.symlink(t, s.top+"/a", "/in/dst/copy/b")
	if err := os.Link(s.top+"/a/bait", s.dst+"/copy/linked"); err != nil {
		t.Fatal(err)
	}
}

func (s *scene) symlink(t testing.TB, target, at string) {
	t.Helper()
	if err := os.Symlink(target, s.top+at); err != nil {
		t.Fatal(err)
	}
}

// outside describes everything except the copy and its unfinished file beside it.
func (s *scene) outside(t testing.TB) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(s.top, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if p == s.dst+"/"+copied {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if p == s.dst+"/"+partName(copied) && d.Type().IsRegular() {
			return nil
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		what := fi.Mode().String()
		if p != s.dst { // it has a new name in it
			what += fi.ModTime().String()
		}
		switch fi.Mode().Type() {
		case 0:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			what += string(b)
		case fs.ModeSymlink:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			what += to
		}
		out[p] = what
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func difference(before, after map[string]string) (list []string) {
	for p, was := range before {
		if is := after[p]; is != was {
			list = append(list, fmt.Sprintf("%s was %q, is %q", p, was, is))
		}
	}
	for p, is := range after {
		if _, ok := before[p]; !ok {
			list = append(list, fmt.Sprintf("%s is new: %q", p, is))
		}
	}
	slices.Sort(list)
	return list
}

// leading returns the links in a copy that lead out of it by the kernel's path resolution, and whatever is neither
// file, directory nor link.
func (s *scene) leading(t testing.TB) (list []string) {
	t.Helper()
	top := s.dst + "/" + copied
	fd, err := unix.Open(top, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		if fi, err := os.Lstat(top); err == nil && !fi.Mode().IsRegular() {
			list = append(list, fmt.Sprintf("the copy is %v", fi.Mode()))
		}
		return list
	}
	defer unix.Close(fd)
	err = filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(top, p)
		switch d.Type() {
		case 0, fs.ModeDir:
		case fs.ModeSymlink:
			at, err := unix.Openat2(fd, rel, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH})
			if err == nil {
				unix.Close(at)
			}
			if errors.Is(err, unix.EXDEV) {
				to, _ := os.Readlink(p)
				list = append(list, rel+" -> "+to)
			}
		default:
			list = append(list, fmt.Sprintf("%s: %v", rel, d.Type()))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// entries makes an archive. Names end in a slash for directories. "a -> b" is a symbolic link, "a = b" a hard
// link, and any other entry a file that contains "evil".
func entries(t testing.TB, list []string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range list {
		h := &tar.Header{Name: e, Typeflag: tar.TypeReg, Mode: 0o4777, Size: 4, ModTime: time.Unix(1, 0), Format: tar.FormatPAX}
		if name, to, ok := strings.Cut(e, " -> "); ok {
			h.Name, h.Linkname, h.Typeflag, h.Size = name, to, tar.TypeSymlink, 0
		} else if name, to, ok := strings.Cut(e, " = "); ok {
			h.Name, h.Linkname, h.Typeflag, h.Size = name, to, tar.TypeLink, 0
		} else if strings.HasSuffix(e, "/") {
			h.Typeflag, h.Size = tar.TypeDir, 0
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("evil")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// unpackers maps names to ways to unpack an archive.
var unpackers = map[string]func(t testing.TB, archive []byte, root *os.Root, o Options) error{
	"in one go": func(t testing.TB, archive []byte, root *os.Root, o Options) error {
		_, err := Unpack(t.Context(), bytes.NewReader(archive), root, o)
		return err
	},
	"resumed": func(t testing.TB, archive []byte, root *os.Root, o Options) error {
		var b bytes.Buffer
		_, _ = (archiveWriter{&b}).Write(archive)
		_, err := UnpackResumed(t.Context(), deaf{&b}, root, o)
		return err
	},
}

// unpackIn unpacks an archive in a scene and returns the forbidden changes that it has made.
func unpackIn(t testing.TB, s *scene, o Options, unpack func(root *os.Root, o Options) error) (err error, wrong []string) {
	t.Helper()
	root, err := os.OpenRoot(s.dst)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	o.Rename = copied
	err = unpack(root, o)
	wrong = difference(s.was, s.outside(t))
	s.broken = len(wrong) > 0
	return err, wrong
}

func TestAttack_archive_link_through_a_link_overwrites_a_neighbour(t *testing.T) {
	for name, tt := range map[string]struct {
		list []string
		ok   bool // Unpack accepts the archive
	}{
		"a link made below a link that leads up":        {[]string{"r/", "r/a/", "r/a/b/", "r/a/b/x -> ../..", "r/a/b/x/y -> ..", "r/y/bait"}, false},
		"a directory made below a link":                 {[]string{"r/a/", "r/a/x -> ..", "r/a/x/../bait", "r/a/x/d/", "r/a/x/d/bait"}, false},
		"a hard link made below a link":                 {[]string{"r/a/", "r/f", "r/a/x -> ..", "r/a/x/h = r/f"}, false},
		"a hard link to a file behind a link":           {[]string{"r/a/", "r/f", "r/a/x -> ..", "r/h = r/a/x/f"}, false},
		"a link where a directory is":                   {[]string{"r/a/", "r/a/b/", "r/a/b/f", "r/a/b -> ..", "r/a/b/bait"}, false},
		"a directory where a link is, and then a file":  {[]string{"r/a/", "r/a/x -> ..", "r/a/x/", "r/a/x/f"}, true},
		"a link where a directory was, and a file last": {[]string{"r/", "r/x -> a/b", "r/x", "r/a/", "r/a/b/"}, true},
		"links that lead to each other":                 {[]string{"r/", "r/x -> y/..", "r/y -> a/b", "r/a/", "r/a/b/", "r/a/b/z -> ../../x"}, true},
		"the copy itself is a link":                     {[]string{"r -> ..", "r/bait"}, true},
		"links of the user's":                           {[]string{"r/", "r/up/bait"}, false},
		"links of the user's, after its directory":      {[]string{"r/", "r/up/", "r/up/bait"}, true},
	} {
		for _, way := range slices.Sorted(maps.Keys(unpackers)) {
			t.Run(name+", "+way, func(t *testing.T) {
				s := newScene(t)
				s.again(t, strings.HasPrefix(name, "links of"))
				archive := entries(t, tt.list)
				err, wrong := unpackIn(t, s, Options{}, func(root *os.Root, o Options) error { return unpackers[way](t, archive, root, o) })
				for _, w := range wrong {
					t.Error(w)
				}
				if tt.ok && err != nil {
					t.Errorf("it was refused: %v", err)
				}
				if !tt.ok && !errors.Is(err, ErrUnsafe) && !errors.Is(err, fs.ErrExist) {
					t.Errorf("got %v, want it to be refused", err)
				}
				if list := s.leading(t); len(list) > 0 && !strings.HasPrefix(name, "links of") {
					t.Errorf("these lead out of the copy: %q", list)
				}
			})
		}
	}
}

// A resumed copy sets the attributes of the files that exist. A file that also has a name outside would change
// there as well.
func TestAttack_resumed_copy_changes_the_mode_of_a_file_that_is_linked_outside(t *testing.T) {
	s := newScene(t)
	s.again(t, true)
	said := frames(byte(frameOffer), offer("r/linked", 4))
	sum := sha256.Sum256([]byte("safe"))
	said = append(said, frames(byte(frameSums), sum[:], byte(frameArchive), archive(map[string]string{paxOffset: "4"}, "r/linked", nil))...)
	_, wrong := unpackIn(t, s, Options{}, func(root *os.Root, o Options) error {
		_, err := UnpackResumed(t.Context(), deaf{bytes.NewReader(said)}, root, o)
		return err
	})
	for _, w := range wrong {
		t.Error(w)
	}
}

// randomEntries returns entries of an archive with a few names in all arrangements: each is another's name or
// below it. next(n) chooses one of n.
func randomEntries(next func(n int) int) (list []string) {
	elements := []string{"a", "b", "bait", "a", "b", "up", "linked", "..", partName("a"), partName(copied)}
	targets := []string{"..", "../..", "..", "../..", "a", "b", "a/b", "../a", "a/..", "up", "/", "../../.."}
	names := []string{"r"}
	name := func() string {
		at := names[next(len(names))]
		if next(8) > 0 {
			at += "/" + elements[next(len(elements))]
		}
		return at
	}
	for range 1 + next(12) {
		at := name()
		names = append(names, at)
		switch next(6) {
		case 0, 1:
			list = append(list, at+"/")
		case 2, 3:
			list = append(list, at+" -> "+targets[next(len(targets))])
		case 4:
			list = append(list, at+" = "+name())
		default:
			list = append(list, at)
		}
	}
	if next(16) == 1 {
		list = append(list, []string{"../bait", "/bait", "r/../../bait", "bait", "."}[next(5)])
	}
	return list
}

// holds unpacks an archive into a new place or over what exists. It checks that nothing else has changed and that
// no link of a new copy leads out.
func (s *scene) holds(t testing.TB, archive []byte, way string, merged bool) error {
	t.Helper()
	s.again(t, merged)
	err, wrong := unpackIn(t, s, Options{Limits: Limits{Bytes: 1 << 20, Entries: 100}}, func(root *os.Root, o Options) error {
		return unpackers[way](t, archive, root, o)
	})
	for _, w := range wrong {
		t.Error(w)
	}
	if list := s.leading(t); !merged && len(list) > 0 {
		t.Errorf("these lead out of the copy: %q", list)
	}
	return err
}

func TestAttack_no_archive_changes_anything_but_its_copy(t *testing.T) {
	const archives = 500
	r := rand.New(rand.NewPCG(2, 2))
	s := newScene(t)
	taken := 0
	for i := range archives {
		list := randomEntries(r.IntN)
		way := []string{"in one go", "resumed"}[i%2]
		if err := s.holds(t, entries(t, list), way, i%4 < 2); err == nil {
			taken++
		}
		if t.Failed() {
			t.Fatalf("archive %d, %s: %q", i, way, list)
		}
	}
	// Otherwise the archives would not test what Unpack makes.
	if taken < archives/10 {
		t.Errorf("%d of %d archives were taken", taken, archives)
	}
}

// FuzzUnpack unpacks archives of entries that the input chooses, or, with an odd first byte, the rest of the input.
func FuzzUnpack(f *testing.F) {
	f.Add([]byte{0, 3, 1, 0, 2, 4, 1, 1, 5, 0, 9, 7, 3, 2})
	for _, list := range [][]string{
		{"r/", "r/a/", "r/a/b/", "r/a/b/x -> ../..", "r/a/b/x/y -> ..", "r/y/bait"},
		{"r/a/", "r/f", "r/a/x -> ..", "r/h = r/a/x/f"},
	} {
		f.Add(append([]byte{1}, entries(f, list)...))
		f.Add(append([]byte{3}, entries(f, list)...))
	}
	s := newScene(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 || len(in) > 64<<10 {
			return
		}
		how, in := in[0], in[1:]
		archive := in
		if how&1 == 0 {
			archive = entries(t, randomEntries(func(n int) int {
				if len(in) == 0 {
					return 0
				}
				b := int(in[0])
				in = in[1:]
				return b % n
			}))
		}
		_ = s.holds(t, archive, []string{"in one go", "resumed"}[how>>1&1], how>>2&1 == 1)
	})
}

func TestUnpack_links_come_last_and_the_last_entry_of_a_name_counts(t *testing.T) {
	s := newScene(t)
	list := []string{"r/", "r/l -> a/b", "r/f", "r/f -> l", "r/g -> l", "r/g", "r/d -> l", "r/d/", "r/a/"}
	err, wrong := unpackIn(t, s, Options{}, func(root *os.Root, o Options) error {
		_, err := Unpack(t.Context(), bytes.NewReader(entries(t, list)), root, o)
		return err
	})
	if err != nil || len(wrong) > 0 {
		t.Fatal(err, wrong)
	}
	for name, want := range map[string]fs.FileMode{"l": fs.ModeSymlink, "f": fs.ModeSymlink, "g": 0, "d": fs.ModeDir} {
		if fi, err := os.Lstat(path.Join(s.dst, copied, name)); err != nil || fi.Mode().Type() != want {
			t.Errorf("%s: %v, %v; want %v", name, fi, err, want)
		}
	}
}

// swapper replaces a directory of a tree by a link to elsewhere when its name is written, as a guest that shares
// the tree may do.
type swapper struct {
	b    bytes.Buffer
	swap func()
}

func (s *swapper) Write(p []byte) (int, error) {
	if s.swap != nil && bytes.Contains(p, []byte("copy/d/")) {
		s.swap()
		s.swap = nil
	}
	return s.b.Write(p)
}

func TestAttack_copy_of_a_tree_that_a_guest_changes_reads_what_is_elsewhere(t *testing.T) {
	for name, pack := range map[string]func(t *testing.T, w *swapper, src string) error{
		"in one go": func(t *testing.T, w *swapper, src string) error {
			_, err := Pack(t.Context(), w, src, "copy")
			return err
		},
		"resumed": func(t *testing.T, w *swapper, src string) error {
			nothing := frames(byte(frameHave), []byte{0})
			_, err := PackResumed(t.Context(), struct {
				io.Reader
				io.Writer
			}{bytes.NewReader(nothing), w}, src, "copy")
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			put(t, top+"/elsewhere/f", []byte("secret"))
			put(t, top+"/tree/d/f", []byte("shared"))
			w := &swapper{swap: func() {
				if err := errors.Join(os.Rename(top+"/tree/d", top+"/away"), os.Symlink(top+"/elsewhere", top+"/tree/d")); err != nil {
					t.Error(err)
				}
			}}
			if err := pack(t, w, top+"/tree"); !errors.Is(err, ErrUnsafe) && err != nil {
				t.Errorf("got %v", err)
			}
			if w.swap != nil {
				t.Error("the directory was not replaced")
			}
			if bytes.Contains(w.b.Bytes(), []byte("secret")) {
				t.Error("a file beside the tree was packed")
			}
		})
	}
}

// A name of 200 directories is one entry, and makes 200 files of the host.
func TestAttack_names_of_an_archive_make_more_directories_than_it_may_have_entries(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for i := range 10 {
		name := copied + fmt.Sprintf("/%d", i) + strings.Repeat("/d", 198) + "/f"
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Format: tar.FormatPAX}); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	const most = 300
	for what, l := range map[string]Limits{"entries": {Entries: most}, "bytes that each takes": {Bytes: most << 13, Entry: 1 << 13}} {
		dir := t.TempDir()
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		if _, err := Unpack(t.Context(), bytes.NewReader(b.Bytes()), root, Options{Limits: l}); !errors.Is(err, ErrLimit) {
			t.Errorf("%s: got %v, want ErrLimit", what, err)
		}
		files := 0
		if err := filepath.WalkDir(dir, func(string, fs.DirEntry, error) error { files++; return nil }); err != nil || files > most+1 {
			t.Errorf("%s: %d files were made (%v), of at most %d", what, files, err, most)
		}
	}
}
