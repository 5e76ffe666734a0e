package layers

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// buildTar makes an image file of a tar stream alone.
func buildTar(t *testing.T, stream []byte) *os.File {
	t.Helper()
	tr, err := ReadTree(t.Context(), bytes.NewReader(stream), imagetest.TempFile(t), NewBudget(64<<30, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	out := imagetest.TempFile(t)
	if err := erofs.Write(t.Context(), tr, out, nil); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestTar_with_every_kind_of_file_becomes_the_same_image(t *testing.T) {
	stream := imagetest.Everything(t)
	out := buildTar(t, stream)
	imagetest.CheckImage(t, out.Name(), imagetest.DumpTar(t, bytes.NewReader(stream)))

	_, inodes := imagetest.DumpImage(t, out.Name())
	for _, pair := range [][2]string{{"bin/su", "bin/su-again"}, {"bin/su", "a-first-name-of-su"}, {"link", "link-of-link"}} {
		if inodes[pair[0]] != inodes[pair[1]] {
			t.Errorf("%s and %s have inodes %d and %d, want one", pair[0], pair[1], inodes[pair[0]], inodes[pair[1]])
		}
	}
}

func TestSame_tree_gives_the_same_bytes(t *testing.T) {
	stream := imagetest.Everything(t)
	a, err := os.ReadFile(buildTar(t, stream).Name())
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(buildTar(t, stream).Name())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a, b) {
		t.Error("two images of the same stream differ")
	}
}

func TestZeros_take_no_disk_space(t *testing.T) {
	out := buildTar(t, imagetest.TarOf(t, map[string][]byte{"zeros": make([]byte, 32<<20)}, tar.Header{Name: "zeros", Mode: 0o644}))
	st, err := out.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if used := imagetest.DiskUse(t, out.Name()); st.Size() < 32<<20 || used > 1<<20 {
		t.Errorf("image of %d bytes takes %d on disk, want at least 32 MiB and at most 1 MiB", st.Size(), used)
	}
}

func TestTar_is_refused(t *testing.T) {
	good := imagetest.Everything(t)
	one := func(h tar.Header) []byte { return imagetest.TarOf(t, nil, h) }
	for name, c := range map[string]struct {
		stream []byte
		max    int64
		want   error
	}{
		"cut in a header":            {stream: good[:len(good)/2-len(good)/2%512+100], want: image.ErrBadArchive},
		"cut in a file":              {stream: good[:3<<20], want: image.ErrBadArchive},
		"garbage":                    {stream: bytes.Repeat([]byte("garbage!"), 1000), want: image.ErrBadArchive},
		"path that leaves the root":  {stream: one(tar.Header{Name: "a/../../b"}), want: image.ErrBadArchive},
		"name of 256 bytes":          {stream: one(tar.Header{Name: strings.Repeat("n", 256)}), want: image.ErrBadArchive},
		"path of 5000 bytes":         {stream: one(tar.Header{Name: strings.Repeat("n/", 2500) + "x"}), want: image.ErrBadArchive},
		"hard link to nothing":       {stream: one(tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "x"}), want: image.ErrBadArchive},
		"hard link to a directory":   {stream: one(tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "/"}), want: image.ErrBadArchive},
		"file as the root":           {stream: one(tar.Header{Name: "./"[:1]}), want: image.ErrBadArchive},
		"device number out of range": {stream: one(tar.Header{Name: "d", Typeflag: tar.TypeChar, Devmajor: 5000}), want: image.ErrBadArchive},
		"owner out of range":         {stream: one(tar.Header{Name: "f", Uid: 1 << 33}), want: image.ErrBadArchive},
		"symlink to a path of 5000 bytes": {stream: one(tar.Header{Name: "s", Typeflag: tar.TypeSymlink,
			Linkname: strings.Repeat("x", 5000)}), want: image.ErrBadArchive},
		"64 KiB of xattrs": {stream: one(tar.Header{Name: "f", PAXRecords: map[string]string{
			"SCHILY.xattr.user.a": strings.Repeat("a", 40<<10), "SCHILY.xattr.user.b": strings.Repeat("b", 30<<10)}}), want: image.ErrBadArchive},
		"file below a file":  {stream: imagetest.TarOf(t, nil, tar.Header{Name: "f"}, tar.Header{Name: "f/g"}), want: image.ErrBadArchive},
		"more than MaxBytes": {stream: good, max: 1 << 20, want: image.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			if c.max == 0 {
				c.max = 64 << 30
			}
			_, err := ReadTree(t.Context(), bytes.NewReader(c.stream), imagetest.TempFile(t), NewBudget(c.max, 1<<20))
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
}

func TestRead_error_of_the_stream_is_passed_on(t *testing.T) {
	cause := errors.New("the wire broke")
	r := io.MultiReader(bytes.NewReader(imagetest.Everything(t)[:100000]), errReader{cause})
	_, err := ReadTree(t.Context(), r, imagetest.TempFile(t), NewBudget(64<<30, 1<<20))
	if !errors.Is(err, cause) || errors.Is(err, image.ErrBadArchive) {
		t.Errorf("got %v, want %v and not that the archive is bad", err, cause)
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestLater_entry_replaces_earlier_and_keeps_children(t *testing.T) {
	stream := imagetest.TarOf(t, map[string][]byte{"d/f": []byte("1")},
		tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o700}, tar.Header{Name: "d/f", Mode: 0o600},
		tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o711}, tar.Header{Name: "d/f", Typeflag: tar.TypeSymlink, Linkname: "x"})
	got, _ := imagetest.DumpImage(t, buildTar(t, stream).Name())
	if got["d"].Mode.Perm() != 0o711 || got["d/f"].Target != "x" || len(got) != 3 {
		t.Errorf("got %v", got)
	}
}

func TestForeign_xattrs_are_counted_and_left_out(t *testing.T) {
	tr, err := ReadTree(t.Context(), bytes.NewReader(imagetest.TarOf(t, nil, tar.Header{Name: "f", PAXRecords: map[string]string{
		"SCHILY.xattr.btrfs.compression": "zstd", "SCHILY.xattr.user.kept": "1", "SCHILY.xattr.user.": "no name"}})),
		imagetest.TempFile(t), NewBudget(64<<30, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	if n := tr.Lookup("f"); tr.Skipped.Xattrs != 2 || len(n.Xattrs) != 1 || n.Xattrs["user.kept"] != "1" {
		t.Errorf("skipped %+v, kept %v", tr.Skipped, n.Xattrs)
	}
}

func TestCancelled_write_fails_with_the_cause(t *testing.T) {
	tr, err := ReadTree(t.Context(), bytes.NewReader(imagetest.Everything(t)), imagetest.TempFile(t), NewBudget(64<<30, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	err = erofs.Write(ctx, tr, imagetest.TempFile(t), func(done, _ int64) {
		if done > 1<<20 {
			cancel(cause)
		}
	})
	if !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
}

func TestFull_disk_is_told_as_such(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no /dev/full here: %v", err)
	}
	defer full.Close()
	_, err = ReadTree(t.Context(), bytes.NewReader(imagetest.Everything(t)), full, NewBudget(64<<30, 1<<20))
	if !errors.Is(err, ErrSpool) || errors.Is(err, image.ErrBadArchive) {
		t.Errorf("got %v, want that the spool cannot be written", err)
	}
}
