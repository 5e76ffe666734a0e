package treetar

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// noise returns n bytes that depend on a seed.
func noise(seed byte, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func put(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// over copies src to the name "copy" in dst, as a resumed copy.
func over(t *testing.T, src, dst string, o Options) (sent, got Result, err error) {
	t.Helper()
	root, err := os.OpenRoot(dst)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	a, b := net.Pipe()
	type result struct {
		res Result
		err error
	}
	done := make(chan result)
	go func() {
		res, err := PackResumed(t.Context(), a, src, "copy")
		a.Close()
		done <- result{res, err}
	}()
	got, err = UnpackResumed(t.Context(), b, root, o)
	b.Close()
	r := <-done
	return r.res, got, errors.Join(err, r.err)
}

const large = 3 << 20

func TestResume_what_is_there_and_the_same_is_not_sent(t *testing.T) {
	data := noise(1, large)
	wrong := bytes.Clone(data)
	wrong[large/3] ^= 1
	for _, tt := range []struct {
		name  string
		there func(t *testing.T, dst string)
		kept  int64
	}{
		{"nothing", func(*testing.T, string) {}, 0},
		{"the whole file", func(t *testing.T, dst string) { put(t, dst+"/copy", data) }, large},
		{"a file of that size with one other bit", func(t *testing.T, dst string) { put(t, dst+"/copy", wrong) }, 0},
		{"a file that is shorter", func(t *testing.T, dst string) { put(t, dst+"/copy", data[:large-1]) }, 0},
		{"the beginning, unfinished", func(t *testing.T, dst string) { put(t, dst+"/"+partName("copy"), data[:large/2]) }, large / 2},
		{"a beginning with one other bit", func(t *testing.T, dst string) { put(t, dst+"/"+partName("copy"), wrong[:large/2]) }, 0},
		{"all of it, unfinished", func(t *testing.T, dst string) { put(t, dst+"/"+partName("copy"), data) }, large},
		{"more than all of it, unfinished", func(t *testing.T, dst string) {
			put(t, dst+"/"+partName("copy"), append(bytes.Clone(data), "more"...))
		}, large},
		{"an empty unfinished one", func(t *testing.T, dst string) { put(t, dst+"/"+partName("copy"), nil) }, 0},
		{"a link to elsewhere in its place", func(t *testing.T, dst string) {
			put(t, dst+"/else", data)
			if err := os.Symlink("else", dst+"/copy"); err != nil {
				t.Fatal(err)
			}
		}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			src, dst := filepath.Join(t.TempDir(), "file"), t.TempDir()
			put(t, src, data)
			when := time.Unix(1_500_000_000, 0)
			if err := errors.Join(os.Chmod(src, 0o640), os.Chtimes(src, when, when)); err != nil {
				t.Fatal(err)
			}
			tt.there(t, dst)
			sent, got, err := over(t, src, dst, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if sent.Kept != tt.kept || got.Kept != tt.kept || sent.Bytes != large-tt.kept || got.Bytes != large-tt.kept {
				t.Errorf("sent %+v, got %+v; want %d bytes to be kept", sent, got, tt.kept)
			}
			b, err := os.ReadFile(dst + "/copy")
			if err != nil || !bytes.Equal(b, data) {
				t.Errorf("the copy is another file, %v", err)
			}
			if fi, err := os.Lstat(dst + "/copy"); err != nil || fi.Mode() != 0o640 || !fi.ModTime().Equal(when) {
				t.Errorf("%v, %v", fi, err)
			}
			if parts, _ := filepath.Glob(dst + "/" + partPrefix + "*"); len(parts) > 0 {
				t.Errorf("left behind: %v", parts)
			}
		})
	}
}

func TestResume_of_a_tree_sends_what_is_missing_in_more_than_one_batch(t *testing.T) {
	src, dst := filepath.Join(t.TempDir(), "tree"), t.TempDir()
	const files = 2*maxBatch + 7
	kept := int64(0)
	name := func(i int) string {
		return strings.Repeat("d/", i%5) + "f" + string(rune('a'+i%26)) + strings.Repeat("x", i/26)
	}
	for i := range files {
		data := noise(byte(i), i)
		put(t, filepath.Join(src, name(i)), data)
		if i%2 == 0 {
			put(t, filepath.Join(dst, "copy", name(i)), data)
			kept += int64(i)
		}
	}
	put(t, dst+"/copy/other", []byte("stays"))
	put(t, src+"/"+partName("an unfinished file"), []byte("is not copied"))
	if err := os.Symlink("fa", src+"/link"); err != nil {
		t.Fatal(err)
	}
	_, got, err := over(t, src, dst, Options{Marker: Marker("tree")})
	if err != nil {
		t.Fatal(err)
	}
	if got.Kept != kept {
		t.Errorf("%d bytes were kept, want %d", got.Kept, kept)
	}
	for i := range files {
		if b, err := os.ReadFile(filepath.Join(dst, "copy", name(i))); err != nil || !bytes.Equal(b, noise(byte(i), i)) {
			t.Fatalf("file %d: %v, or other bytes", i, err)
		}
	}
	if b, err := os.ReadFile(dst + "/copy/other"); err != nil || string(b) != "stays" {
		t.Errorf("a file that was there before: %q, %v", b, err)
	}
	if got, err := os.Readlink(dst + "/copy/link"); err != nil || got != "fa" {
		t.Errorf("link to %q, %v", got, err)
	}
	err = filepath.WalkDir(dst, func(p string, d fs.DirEntry, err error) error {
		if Unfinished(d.Name()) {
			t.Errorf("left behind: %s", p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// cutReader fails after left bytes.
type cutReader struct {
	r    io.Reader
	left int
}

var errTestCut = errors.New("cut")

func (c *cutReader) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, errTestCut
	}
	n, err := c.r.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

func TestUnpack_that_is_cut_has_no_half_file_and_keeps_what_there_is_of_a_large_one(t *testing.T) {
	for _, tt := range []struct {
		name string
		size int
		cut  int
		want int64 // size of the unfinished file; -1 for none
	}{
		{"a large file of which much is there", large, large - 1000, large - 1000},
		{"a large file of which little is there", large, KeepPart - 1, -1},
		{"a small file", KeepPart - 1, KeepPart - 2, -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dst := t.TempDir()
			put(t, dst+"/f", []byte("old"))
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			if err := w.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: int64(tt.size), Mode: 0o644}); err != nil {
				t.Fatal(err)
			}
			head := b.Len()
			if _, err := w.Write(noise(1, tt.size)); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(dst)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			if _, err := Unpack(t.Context(), &cutReader{&b, head + tt.cut}, root, Options{}); !errors.Is(err, errTestCut) {
				t.Errorf("got %v", err)
			}
			if b, err := os.ReadFile(dst + "/f"); err != nil || string(b) != "old" {
				t.Errorf("under its name there are %d bytes, %v", len(b), err)
			}
			size := int64(-1)
			entries, _ := os.ReadDir(dst)
			for _, e := range entries {
				if Unfinished(e.Name()) {
					fi, err := e.Info()
					if err != nil {
						t.Fatal(err)
					}
					size = fi.Size()
				}
			}
			if size != tt.want {
				t.Errorf("%d bytes are kept, want %d", size, tt.want)
			}
		})
	}
}

func TestUnpack_that_fails_for_want_of_room_keeps_nothing(t *testing.T) {
	dst := t.TempDir()
	root, err := os.OpenRoot(dst)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	src := filepath.Join(t.TempDir(), "file")
	put(t, src, noise(1, large))
	var b bytes.Buffer
	if _, err := Pack(t.Context(), &b, src, "f"); err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(t.Context(), &b, root, Options{Limits: Limits{Bytes: large - 1}}); !errors.Is(err, ErrLimit) {
		t.Errorf("got %v, want ErrLimit", err)
	}
	if entries, _ := os.ReadDir(dst); len(entries) > 0 {
		t.Errorf("left behind: %v", entries)
	}
}

func TestUnfinishedFile_of_two_copies_at_once_is_written_by_one(t *testing.T) {
	dst := t.TempDir()
	root, err := os.OpenRoot(dst)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	in, err := openBeneath(root)
	if err != nil {
		t.Fatal(err)
	}
	defer in.close()
	spot := func() *spot {
		s, err := in.find("f")
		if err != nil {
			t.Error(err)
		}
		return s
	}
	first, err := openPart(t.Context(), spot(), true)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	waiting := spot()
	defer waiting.close()
	if _, err := openPart(ctx, waiting, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second copy at the same time: %v", err)
	}
	second := make(chan *part)
	go func() {
		p, err := openPart(t.Context(), spot(), true)
		if err != nil {
			t.Error(err)
		}
		second <- p
	}()
	if _, err := first.WriteString("first"); err != nil {
		t.Fatal(err)
	}
	if err := first.commit(); err != nil {
		t.Fatal(err)
	}
	p := <-second
	if p == nil {
		return
	}
	defer p.close()
	if _, err := p.WriteString("second"); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(dst + "/f"); err != nil || string(b) != "first" {
		t.Errorf("the finished file has %q, %v: the other copy wrote to it", b, err)
	}
}

// frames returns frames as a sender sends them.
func frames(list ...any) []byte {
	var b bytes.Buffer
	for i := 0; i < len(list); i += 2 {
		_ = writeFrame(&b, list[i].(byte), list[i+1].([]byte))
	}
	return b.Bytes()
}

func offer(name string, size uint64) []byte {
	b := binary.AppendUvarint(nil, uint64(len(name)))
	return binary.AppendUvarint(append(b, name...), size)
}

func archive(records map[string]string, name string, data []byte) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: int64(len(data)), Mode: 0o644, PAXRecords: records, Format: tar.FormatPAX})
	_, _ = w.Write(data)
	w.Close()
	return b.Bytes()
}

// hostile returns the bytes of senders that lie.
func hostile() map[string][]byte {
	zeros := make([]byte, 32)
	return map[string][]byte{
		"a frame that is too long":               {frameArchive, 0xff, 0xff, 0xff, 0xff},
		"a frame of another kind":                frames(byte('?'), []byte("x")),
		"a frame that is cut":                    {frameArchive, 0, 0, 0, 9, 'x'},
		"sums that nobody asked for":             frames(byte(frameSums), zeros),
		"an offer that is cut":                   frames(byte(frameOffer), []byte{200}),
		"an offer of a name that leads out":      frames(byte(frameOffer), offer("../out", 5)),
		"an offer of an absolute name":           frames(byte(frameOffer), offer("/out", 5)),
		"an offer of a size without end":         frames(byte(frameOffer), append([]byte{1, 'f'}, bytes.Repeat([]byte{0xff}, 20)...)),
		"the same offer twice":                   frames(byte(frameOffer), append(offer("copy", 4), offer("copy", 4)...)),
		"an offset that was not agreed":          frames(byte(frameArchive), archive(map[string]string{paxOffset: "2"}, "copy", []byte("xx"))),
		"an offset that is no number":            frames(byte(frameArchive), archive(map[string]string{paxOffset: "x"}, "copy", []byte("xx"))),
		"a negative offset":                      frames(byte(frameArchive), archive(map[string]string{paxOffset: "-4"}, "copy", []byte("xx"))),
		"too few sums":                           frames(byte(frameOffer), offer("copy", 4), byte(frameSums), zeros[:31]),
		"an offset after sums that are not good": frames(byte(frameOffer), offer("copy", 4), byte(frameSums), zeros, byte(frameArchive), archive(map[string]string{paxOffset: "4"}, "copy", nil)),
		"data without end behind the archive":    append(frames(byte(frameArchive), archive(nil, "f", nil)), bytes.Repeat(frames(byte(frameArchive), make([]byte, maxFrame)), maxTail/maxFrame+1)...),
	}
}

// deaf is a connection to a sender that has sent everything and does not listen.
type deaf struct{ io.Reader }

func (deaf) Write(p []byte) (int, error) { return len(p), nil }

func TestUnpackResumed_refuses_a_sender_that_lies(t *testing.T) {
	for name, said := range hostile() {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir+"/in/copy", []byte("here"))
			root, err := os.OpenRoot(dir + "/in")
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			_, err = UnpackResumed(t.Context(), deaf{bytes.NewReader(said)}, root, Options{})
			if err == nil {
				t.Error("it was taken")
			}
			if b, _ := os.ReadFile(dir + "/in/copy"); string(b) != "here" {
				t.Errorf("the file that was there is %q now", b)
			}
			if entries, _ := os.ReadDir(dir); len(entries) != 1 {
				t.Errorf("something is outside: %v", entries)
			}
		})
	}
}

func TestPackResumed_refuses_a_receiver_that_lies(t *testing.T) {
	src := filepath.Join(t.TempDir(), "file")
	put(t, src, []byte("some bytes"))
	for name, said := range map[string][]byte{
		"nothing":                   {},
		"more than there is":        frames(byte(frameHave), binary.AppendUvarint(nil, 11)),
		"too few":                   frames(byte(frameHave), []byte{}),
		"too many":                  frames(byte(frameHave), []byte{1, 1}),
		"a frame of another kind":   frames(byte(frameSame), []byte{1}),
		"more results than sums":    frames(byte(frameHave), []byte{4}, byte(frameSame), []byte{1, 1}),
		"an end instead of results": frames(byte(frameHave), []byte{4}),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := PackResumed(t.Context(), deaf{bytes.NewReader(said)}, src, "f"); err == nil {
				t.Error("it was taken")
			}
		})
	}
}

func FuzzUnpackResumed(f *testing.F) {
	for _, said := range hostile() {
		if len(said) < 64<<10 {
			f.Add(said)
		}
	}
	f.Add(frames(byte(frameOffer), offer("d/f", 4), byte(frameArchive), archive(nil, "d/f", []byte("data"))))
	f.Add(frames(byte(frameOffer), offer("r/linked", 4), byte(frameSums), make([]byte, 32), byte(frameArchive), entries(f, []string{"r/a/", "r/a/x -> ..", "r/a/x/bait"})))
	s := newScene(f)
	f.Fuzz(func(t *testing.T, said []byte) {
		s.again(t, len(said)%2 == 0)
		if len(said)%2 == 1 {
			put(t, s.dst+"/"+copied, []byte("here"))
		}
		_, wrong := unpackIn(t, s, Options{Limits: Limits{Bytes: 1 << 20, Entries: 100}}, func(root *os.Root, o Options) error {
			res, err := UnpackResumed(t.Context(), deaf{bytes.NewReader(said)}, root, o)
			if res.Bytes > o.Bytes {
				t.Errorf("%d bytes were taken", res.Bytes)
			}
			return err
		})
		for _, w := range wrong {
			t.Error(w)
		}
	})
}

func TestUnpack_keeps_no_more_names_of_directories_than_it_may(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for range 3 {
		if err := w.WriteHeader(&tar.Header{Name: "d/" + strings.Repeat("x", 98), Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for limit, want := range map[int64]error{300: nil, 299: ErrLimit} {
		root, err := os.OpenRoot(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		if _, err := Unpack(t.Context(), bytes.NewReader(b.Bytes()), root, Options{Limits: Limits{Names: limit}}); !errors.Is(err, want) {
			t.Errorf("with %d bytes: got %v, want %v", limit, err, want)
		}
	}
}
