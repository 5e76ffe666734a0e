package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

var when = time.Date(2024, 2, 29, 12, 34, 56, 123456789, time.UTC)

// tarOf writes a tar stream of headers, each with the content data[header name], at the mtime when.
func tarOf(t *testing.T, data map[string][]byte, headers ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range headers {
		if h.ModTime.IsZero() {
			h.ModTime = when
		}
		h.Format = tar.FormatPAX
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		var content []byte
		if h.Typeflag == tar.TypeReg {
			content = data[h.Name]
		}
		h.Size = int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func tempFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// capNetRaw is security.capability with cap_net_raw+ep, as ping has it (struct vfs_cap_data, revision 2).
const capNetRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// aclUser is a POSIX ACL (version 2): user::rw- user:1000:r-- group::r-- mask::r-- other::r--.
const aclUser = "\x02\x00\x00\x00" + "\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\xe8\x03\x00\x00" +
	"\x04\x00\x04\x00\xff\xff\xff\xff" + "\x10\x00\x04\x00\xff\xff\xff\xff" + "\x20\x00\x04\x00\xff\xff\xff\xff"

// everything is a tar stream with one of each kind of file that a root filesystem may hold.
func everything(t *testing.T) []byte {
	data := map[string][]byte{
		"./bin/su": []byte("#!setuid"), "./bin/ping": []byte("ping"), "./etc/acl": []byte("acl"),
		"./block": bytes.Repeat([]byte("0123456789abcdef"), 256), // one block exactly
		"./big":   append(make([]byte, 5<<20), bytes.Repeat([]byte("tail"), 3001)...),
		"./zeros": make([]byte, 1<<20),
	}
	dir, sym, chr, blk, fifo, lnk := byte(tar.TypeDir), byte(tar.TypeSymlink), byte(tar.TypeChar), byte(tar.TypeBlock),
		byte(tar.TypeFifo), byte(tar.TypeLink)
	hs := []tar.Header{
		{Name: "./", Typeflag: dir, Mode: 0o755},
		{Name: "./bin/", Typeflag: dir, Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.user.note": "of a dir"}},
		{Name: "./bin/su", Mode: 0o4755},
		{Name: "./bin/ping", Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": capNetRaw}},
		{Name: "./bin/su-again", Typeflag: lnk, Linkname: "./bin/su"},
		{Name: "./a-first-name-of-su", Typeflag: lnk, Linkname: "bin/su-again"},
		{Name: "./wall", Mode: 0o2755, Gid: 5},
		{Name: "./tmp/", Typeflag: dir, Mode: 0o1777},
		{Name: "./empty-dir/", Typeflag: dir, Mode: 0o700, Uid: 1000, Gid: 100000},
		{Name: "./empty", Mode: 0o640, Uid: 4294967294, Gid: 70000},
		{Name: "./etc/", Typeflag: dir, Mode: 0o755},
		{Name: "./etc/acl", Mode: 0o644, PAXRecords: map[string]string{
			"SCHILY.xattr.system.posix_acl_access": aclUser, "SCHILY.xattr.user.long": strings.Repeat("v", 6000),
			"SCHILY.xattr.trusted.x": "t"}},
		{Name: "./link", Typeflag: sym, Linkname: "bin/su"},
		{Name: "./dangling", Typeflag: sym, Linkname: "/" + strings.Repeat("far/", 1000)},
		{Name: "./link-of-link", Typeflag: lnk, Linkname: "./link"},
		{Name: "./null", Typeflag: chr, Mode: 0o666, Devmajor: 1, Devminor: 3},
		{Name: "./high", Typeflag: chr, Mode: 0o600, Devmajor: 4000, Devminor: 1000000},
		{Name: "./disk", Typeflag: blk, Mode: 0o660, Gid: 6, Devmajor: 259, Devminor: 300},
		{Name: "./fifo", Typeflag: fifo, Mode: 0o622},
		{Name: "./block", Mode: 0o644}, {Name: "./big", Mode: 0o600}, {Name: "./zeros", Mode: 0o600},
		{Name: "./epoch", Mode: 0o644, ModTime: time.Unix(0, 0)},
		{Name: "./future", Mode: 0o644, ModTime: time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)},
		{Name: "./" + strings.Repeat("n", 255), Mode: 0o644},
		{Name: "./latin-\xe9 and\nnewline", Mode: 0o644},
		{Name: "./many/", Typeflag: dir, Mode: 0o755},
	}
	for i := range 1000 { // a directory of many blocks, names on both sides of "." and ".."
		name := fmt.Sprintf("./many/%c%03d-%s", "-.Az"[i%4], i, strings.Repeat("x", i%200))
		hs = append(hs, tar.Header{Name: name, Mode: 0o644})
		data[name] = bytes.Repeat([]byte{byte(i)}, i*7)
		if i%100 == 0 {
			hs = append(hs, tar.Header{Name: name + ".link", Typeflag: lnk, Linkname: name})
		}
	}
	deep := "./deep"
	for range 300 {
		deep += "/d"
		hs = append(hs, tar.Header{Name: deep + "/", Typeflag: dir, Mode: 0o755})
	}
	hs = append(hs, tar.Header{Name: "./deep/", Typeflag: dir, Mode: 0o711})
	return tarOf(t, data, hs...)
}

// buildTar makes an image file of a tar stream and nothing else.
func buildTar(t *testing.T, stream []byte) *os.File {
	t.Helper()
	tr, err := readTree(t.Context(), bytes.NewReader(stream), tempFile(t), newBudget(DefaultMaxBytes, DefaultMaxFiles))
	if err != nil {
		t.Fatal(err)
	}
	out := tempFile(t)
	if err := erofs.Write(t.Context(), tr, out, nil); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestTarWithEveryKindOfFileBecomesTheSameImage(t *testing.T) {
	stream := everything(t)
	out := buildTar(t, stream)
	checkImage(t, out.Name(), dumpTar(t, bytes.NewReader(stream)))

	_, inodes := dumpImage(t, out.Name())
	for _, pair := range [][2]string{{"bin/su", "bin/su-again"}, {"bin/su", "a-first-name-of-su"}, {"link", "link-of-link"}} {
		if inodes[pair[0]] != inodes[pair[1]] {
			t.Errorf("%s and %s have inodes %d and %d, want one", pair[0], pair[1], inodes[pair[0]], inodes[pair[1]])
		}
	}
}

func TestSameTreeGivesTheSameBytes(t *testing.T) {
	stream := everything(t)
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

func TestZerosTakeNoDiskSpace(t *testing.T) {
	out := buildTar(t, tarOf(t, map[string][]byte{"zeros": make([]byte, 32<<20)}, tar.Header{Name: "zeros", Mode: 0o644}))
	st, err := out.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if used := diskUse(t, out.Name()); st.Size() < 32<<20 || used > 1<<20 {
		t.Errorf("image of %d bytes takes %d on disk, want at least 32 MiB and at most 1 MiB", st.Size(), used)
	}
}

func TestTarIsRefused(t *testing.T) {
	good := everything(t)
	one := func(h tar.Header) []byte { return tarOf(t, nil, h) }
	for name, c := range map[string]struct {
		stream []byte
		max    int64
		want   error
	}{
		"cut in a header":            {stream: good[:len(good)/2-len(good)/2%512+100], want: ErrBadArchive},
		"cut in a file":              {stream: good[:3<<20], want: ErrBadArchive},
		"garbage":                    {stream: bytes.Repeat([]byte("garbage!"), 1000), want: ErrBadArchive},
		"path that leaves the root":  {stream: one(tar.Header{Name: "a/../../b"}), want: ErrBadArchive},
		"name of 256 bytes":          {stream: one(tar.Header{Name: strings.Repeat("n", 256)}), want: ErrBadArchive},
		"path of 5000 bytes":         {stream: one(tar.Header{Name: strings.Repeat("n/", 2500) + "x"}), want: ErrBadArchive},
		"hard link to nothing":       {stream: one(tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "x"}), want: ErrBadArchive},
		"hard link to a directory":   {stream: one(tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "/"}), want: ErrBadArchive},
		"file as the root":           {stream: one(tar.Header{Name: "./"[:1]}), want: ErrBadArchive},
		"device number out of range": {stream: one(tar.Header{Name: "d", Typeflag: tar.TypeChar, Devmajor: 5000}), want: ErrBadArchive},
		"owner out of range":         {stream: one(tar.Header{Name: "f", Uid: 1 << 33}), want: ErrBadArchive},
		"symlink to a path of 5000 bytes": {stream: one(tar.Header{Name: "s", Typeflag: tar.TypeSymlink,
			Linkname: strings.Repeat("x", 5000)}), want: ErrBadArchive},
		"64 KiB of xattrs": {stream: one(tar.Header{Name: "f", PAXRecords: map[string]string{
			"SCHILY.xattr.user.a": strings.Repeat("a", 40<<10), "SCHILY.xattr.user.b": strings.Repeat("b", 30<<10)}}), want: ErrBadArchive},
		"file below a file":  {stream: tarOf(t, nil, tar.Header{Name: "f"}, tar.Header{Name: "f/g"}), want: ErrBadArchive},
		"more than MaxBytes": {stream: good, max: 1 << 20, want: ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			if c.max == 0 {
				c.max = DefaultMaxBytes
			}
			_, err := readTree(t.Context(), bytes.NewReader(c.stream), tempFile(t), newBudget(c.max, DefaultMaxFiles))
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
}

func TestReadErrorOfTheStreamIsPassedOn(t *testing.T) {
	cause := errors.New("the wire broke")
	r := io.MultiReader(bytes.NewReader(everything(t)[:100000]), errReader{cause})
	_, err := readTree(t.Context(), r, tempFile(t), newBudget(DefaultMaxBytes, DefaultMaxFiles))
	if !errors.Is(err, cause) || errors.Is(err, ErrBadArchive) {
		t.Errorf("got %v, want %v and not that the archive is bad", err, cause)
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestLaterEntryReplacesEarlierAndKeepsChildren(t *testing.T) {
	stream := tarOf(t, map[string][]byte{"d/f": []byte("1")},
		tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o700}, tar.Header{Name: "d/f", Mode: 0o600},
		tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o711}, tar.Header{Name: "d/f", Typeflag: tar.TypeSymlink, Linkname: "x"})
	got, _ := dumpImage(t, buildTar(t, stream).Name())
	if got["d"].mode.Perm() != 0o711 || got["d/f"].target != "x" || len(got) != 3 {
		t.Errorf("got %v", got)
	}
}

func TestForeignXattrsAreCountedAndLeftOut(t *testing.T) {
	tr, err := readTree(t.Context(), bytes.NewReader(tarOf(t, nil, tar.Header{Name: "f", PAXRecords: map[string]string{
		"SCHILY.xattr.btrfs.compression": "zstd", "SCHILY.xattr.user.kept": "1", "SCHILY.xattr.user.": "no name"}})),
		tempFile(t), newBudget(DefaultMaxBytes, DefaultMaxFiles))
	if err != nil {
		t.Fatal(err)
	}
	if n := tr.Lookup("f"); tr.Skipped.Xattrs != 2 || len(n.Xattrs) != 1 || n.Xattrs["user.kept"] != "1" {
		t.Errorf("skipped %+v, kept %v", tr.Skipped, n.Xattrs)
	}
}

func TestCancelledWriteFailsWithTheCause(t *testing.T) {
	tr, err := readTree(t.Context(), bytes.NewReader(everything(t)), tempFile(t), newBudget(DefaultMaxBytes, DefaultMaxFiles))
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	err = erofs.Write(ctx, tr, tempFile(t), func(done, _ int64) {
		if done > 1<<20 {
			cancel(cause)
		}
	})
	if !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
}

func TestFullDiskIsToldAsSuch(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no /dev/full here: %v", err)
	}
	defer full.Close()
	_, err = readTree(t.Context(), bytes.NewReader(everything(t)), full, newBudget(DefaultMaxBytes, DefaultMaxFiles))
	if !errors.Is(err, errSpool) || errors.Is(err, ErrBadArchive) {
		t.Errorf("got %v, want that the spool cannot be written", err)
	}
}

func TestDebianTrimLeavesWhatIsNeeded(t *testing.T) {
	names := []string{
		"var/lib/apt/lists/x_Packages", "var/cache/apt/pkgcache.bin", "var/cache/apt/archives/x.deb", "var/lib/dpkg/status-old",
		"etc/apt/apt.conf.d/99mmdebstrap", "var/log/dpkg.log", "tmp/x", "run/x", // gone
		"var/lib/apt/lists/partial/", "var/cache/apt/archives/partial/", "run/lock/", "var/lib/dpkg/status",
		"etc/apt/apt.conf.d/70debconf", "var/log/lastlog", // stay
		"usr/share/doc/p/changelog.gz", "usr/share/man/man1/p.1.gz", // gone with noDocs
		"usr/share/doc/p/copyright",
	}
	gone, docs := names[:8], names[14:16]
	for _, noDocs := range []bool{false, true} {
		tr := fstree.New()
		for _, n := range names {
			i := &fstree.Inode{Mode: 0o644}
			if strings.HasSuffix(n, "/") {
				i.Mode = os.ModeDir | 0o755
			}
			if err := tr.Add(n, i); err != nil {
				t.Fatal(err)
			}
		}
		debianTrim(tr, noDocs)
		for i, n := range names {
			want := i >= len(gone) && (!noDocs || (n != docs[0] && n != docs[1]))
			if got := tr.Lookup(n) != nil; got != want {
				t.Errorf("noDocs %v: %s is there: %v, want %v", noDocs, n, got, want)
			}
		}
	}
}

func diskUse(t *testing.T, name string) int64 {
	t.Helper()
	st, err := statx(name)
	if err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * 512
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
