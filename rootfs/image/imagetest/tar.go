package imagetest

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// PaddedTar gives entries behind headers of 768 KiB each, of which the last records mean something.
func PaddedTar(entries int, records func(i int) []string) []byte {
	// The second one counts.
	padding := []string{"comment=" + strings.Repeat("x", 1<<19), "comment=" + strings.Repeat("x", 1<<18)}
	var out []byte
	for i := range entries {
		one := PaxTar(append(padding[:len(padding):len(padding)], records(i)...)...)
		out = append(out, one[:len(one)-1024]...)
	}
	return append(out, make([]byte, 1024)...)
}

func Must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func Must2[T, U any](v T, _ U) T { return v }

// LayerOf writes a layer. Regular files hold what stands behind "=" in their name.
func LayerOf(t *testing.T, hs ...tar.Header) []byte {
	t.Helper()
	data := map[string][]byte{}
	for i := range hs {
		if name, text, ok := strings.Cut(hs[i].Name, "="); ok {
			hs[i].Name = name
			data[name] = []byte(text)
		}
	}
	return TarOf(t, data, hs...)
}

// RawTar writes one header by hand, which package archive/tar would refuse to write, and its content.
func RawTar(name string, typeflag byte, size string, content string, spoil func(h []byte)) []byte {
	h := make([]byte, 512)
	copy(h, name)
	copy(h[100:], "0000644\x000000000\x000000000\x00")
	copy(h[124:], size)
	copy(h[136:], "14000000000\x00")
	h[156] = typeflag
	copy(h[257:], "ustar\x0000")
	if spoil != nil {
		spoil(h)
	}
	copy(h[148:], "        ")
	sum := 0
	for _, b := range h {
		sum += int(b)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	body := append([]byte(content), make([]byte, (512-len(content)%512)%512)...)
	return append(append(h, body...), make([]byte, 1024)...)
}

// PaxTar writes PAX records before a file.
func PaxTar(records ...string) []byte {
	var b strings.Builder
	for _, r := range records {
		n := len(r) + 3
		for len(fmt.Sprint(n))+len(r)+2 != n {
			n = len(fmt.Sprint(n)) + len(r) + 2
		}
		fmt.Fprintf(&b, "%d %s\n", n, r)
	}
	pax := RawTar("pax", 'x', fmt.Sprintf("%011o\x00", b.Len()), b.String(), nil)
	return append(pax[:len(pax)-1024], RawTar("f", '0', "00000000000\x00", "", nil)...)
}

func Pack(t *testing.T, how string, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	switch how {
	case "":
		return b
	case "gzip":
		w := gzip.NewWriter(&out)
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	case "zstd":
		w, err := zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	default:
		t.Fatalf("no such compression: %q", how)
	}
	return out.Bytes()
}

func Reg(name string) tar.Header { return tar.Header{Name: name, Mode: 0o644} }

func Dirh(name string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}
}

func Lnk(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}
}

func Sym(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
}

var When = time.Date(2024, 2, 29, 12, 34, 56, 123456789, time.UTC)

// TarOf writes a tar stream of headers, each with the content data[header name], at the mtime when.
func TarOf(t *testing.T, data map[string][]byte, headers ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range headers {
		if h.ModTime.IsZero() {
			h.ModTime = When
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

func TempFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// CapNetRaw is security.capability with cap_net_raw+ep, as ping has it (struct vfs_cap_data, revision 2).
const CapNetRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// aclUser is a POSIX ACL (version 2): user::rw- user:1000:r-- group::r-- mask::r-- other::r--.
const aclUser = "\x02\x00\x00\x00" + "\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\xe8\x03\x00\x00" +
	"\x04\x00\x04\x00\xff\xff\xff\xff" + "\x10\x00\x04\x00\xff\xff\xff\xff" + "\x20\x00\x04\x00\xff\xff\xff\xff"

// Everything is a tar stream with one of each kind of file that a root filesystem may hold.
func Everything(t *testing.T) []byte {
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
		{Name: "./bin/ping", Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": CapNetRaw}},
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
	return TarOf(t, data, hs...)
}

func DiskUse(t *testing.T, name string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(name, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * 512
}

func Write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
