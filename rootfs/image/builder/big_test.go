package builder

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// A node is a file of the reference. Hard links are names of one node.
type node struct {
	imagetest.Entry
	names int
}

// A reference applies layers to a map of paths, as the OCI image specification says in "Applying Changesets". It
// has neither trees nor spools, and follows no links.
type reference map[string]*node

// apply applies one layer. "Whiteout files MUST only apply to resources in lower/parent layers": these come first.
func (r reference) apply(t *testing.T, layer []byte) {
	t.Helper()
	each := func(f func(h *tar.Header, p string, body io.Reader)) {
		tr := tar.NewReader(bytes.NewReader(layer))
		for {
			h, err := tr.Next()
			if err == io.EOF {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			f(h, path.Clean(h.Name), tr)
		}
	}
	below := func(dir string) (out []string) {
		for p := range r {
			if strings.HasPrefix(p, dir+"/") {
				out = append(out, p)
			}
		}
		return out
	}
	each(func(_ *tar.Header, p string, _ io.Reader) {
		dir, base := path.Split(p)
		hidden, ok := strings.CutPrefix(base, ".wh.")
		switch {
		case !ok:
		case base == ".wh..wh..opq":
			for _, q := range below(path.Clean(dir)) {
				delete(r, q)
			}
		default:
			for _, q := range append(below(dir+hidden), dir+hidden) {
				delete(r, q)
			}
		}
	})
	each(func(h *tar.Header, p string, body io.Reader) {
		if strings.HasPrefix(path.Base(p), ".wh.") {
			return
		}
		if old := r[p]; old != nil && old.Mode.IsDir() && h.Typeflag != tar.TypeDir {
			for _, q := range below(p) {
				delete(r, q)
			}
		}
		for up := path.Dir(p); up != "."; up = path.Dir(up) {
			if r[up] == nil {
				t.Fatalf("the reference knows no implied directories: %q", p)
			}
		}
		if h.Typeflag == tar.TypeLink {
			r[p] = r[path.Clean(h.Linkname)]
			return
		}
		n := &node{Entry: imagetest.Entry{Mode: h.FileInfo().Mode(), Uid: uint32(h.Uid), Gid: uint32(h.Gid), Mtime: h.ModTime}}
		x := map[string]string{}
		for k, v := range h.PAXRecords {
			if k, ok := strings.CutPrefix(k, "SCHILY.xattr."); ok {
				x[k] = v
			}
		}
		n.Xattrs = imagetest.XattrText(x)
		switch h.Typeflag {
		case tar.TypeReg:
			n.Size, n.Hash = h.Size, imagetest.HashOf(t, body)
		case tar.TypeSymlink:
			n.Mode, n.Target = fs.ModeSymlink|0o777, h.Linkname
		case tar.TypeChar, tar.TypeBlock:
			n.Major, n.Minor = uint32(h.Devmajor), uint32(h.Devminor)
		}
		r[p] = n
	})
}

// entries returns what an image of the reference must hold.
func (r reference) entries() map[string]imagetest.Entry {
	out := make(map[string]imagetest.Entry, len(r))
	for _, n := range r {
		n.names++
	}
	for p, n := range r {
		e := n.Entry
		if !e.Mode.IsDir() {
			e.Nlink = uint64(n.names)
		}
		out[p] = e
	}
	return out
}

// generate writes layers with files of all kinds. The seed makes a failure repeatable. It chooses paths from those
// that exist, so that later layers replace, hide, link to and uncover what earlier ones have.
func generate(t *testing.T, seed uint64, files, layers int) [][]byte {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 1))
	kinds := map[string]byte{} // what exists in the generator's view; the reference decides
	dirs := []string{"."}
	var paths []string
	var out [][]byte
	pick := func(list []string) string { return list[rnd.IntN(len(list))] }
	alive := func(p string) bool { return p == "." || kinds[p] == tar.TypeDir }
	content := bytes.Repeat([]byte("0123456789abcdef"), 700)
	for l := range layers {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		put := func(h tar.Header, body []byte) {
			h.Format, h.Size = tar.FormatPAX, int64(len(body))
			h.ModTime = time.Unix(1_600_000_000+int64(rnd.IntN(1e8)), int64(rnd.IntN(1e9)))
			if h.Mode == 0 {
				h.Mode = []int64{0o644, 0o755, 0o4755, 0o2711, 0o600, 0o1777}[rnd.IntN(6)]
			}
			h.Uid, h.Gid = rnd.IntN(3)*40000, rnd.IntN(3)*40000
			if rnd.IntN(20) == 0 {
				h.PAXRecords = map[string]string{"SCHILY.xattr.user.n": strings.Repeat("v", 1+rnd.IntN(300)), "SCHILY.xattr.security.capability": imagetest.CapNetRaw}
			}
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(body); err != nil {
				t.Fatal(err)
			}
		}
		remove := func(p string) {
			if kinds[p] != tar.TypeDir {
				delete(kinds, p)
				return
			}
			for q := range kinds {
				if q == p || strings.HasPrefix(q, p+"/") {
					delete(kinds, q)
				}
			}
		}
		inLayer := map[string]bool{}
		// A whiteout may come first, in the middle or last in a stream. The order does not matter, as a whiteout
		// does not apply to its own layer.
		if l > 0 {
			for range 200 {
				p := pick(paths)
				if kinds[p] == 0 || !alive(path.Dir(p)) {
					continue
				}
				if kinds[p] == tar.TypeDir && rnd.IntN(2) == 0 {
					put(tar.Header{Name: p + "/.wh..wh..opq", Typeflag: tar.TypeReg}, nil)
					for q := range kinds {
						if strings.HasPrefix(q, p+"/") {
							delete(kinds, q)
						}
					}
					continue
				}
				put(tar.Header{Name: path.Join(path.Dir(p), ".wh."+path.Base(p)), Typeflag: tar.TypeReg}, nil)
				remove(p)
			}
		}
		for i := range files / layers {
			d := pick(dirs)
			if !alive(d) {
				d = "."
			}
			p := path.Join(d, fmt.Sprintf("%c%d-%d", "abcXYZ-_."[rnd.IntN(9)], l, i))
			if l > 0 && rnd.IntN(10) == 0 { // replace an existing path
				if q := pick(paths); kinds[q] != 0 && alive(path.Dir(q)) && !inLayer[q] && (kinds[q] != tar.TypeDir || rnd.IntN(20) == 0) {
					p = q
					remove(q)
				}
			}
			kind := byte(tar.TypeReg)
			switch n := rnd.IntN(100); {
			case n < 6:
				kind = tar.TypeDir
			case n < 12:
				kind = tar.TypeSymlink
			case n < 18:
				kind = tar.TypeLink
			case n < 20:
				kind = []byte{tar.TypeChar, tar.TypeBlock, tar.TypeFifo}[rnd.IntN(3)]
			}
			h := tar.Header{Name: p, Typeflag: kind}
			var body []byte
			switch kind {
			case tar.TypeReg:
				body = content[rnd.IntN(100):][:rnd.IntN(700)]
				if rnd.IntN(50) == 0 {
					body = append(make([]byte, rnd.IntN(3)*4096), content[:rnd.IntN(len(content))]...)
				}
			case tar.TypeDir:
				h.Name += "/"
				dirs = append(dirs, p)
			case tar.TypeSymlink:
				h.Linkname, h.Mode = "../"+pick(append(paths, "nowhere")), 0o777
			case tar.TypeChar, tar.TypeBlock:
				h.Devmajor, h.Devminor = int64(rnd.IntN(4096)), int64(rnd.IntN(1<<20))
			case tar.TypeLink:
				if len(paths) == 0 {
					continue
				}
				to := pick(paths)
				if k := kinds[to]; k == 0 || k == tar.TypeDir || to == p {
					continue
				}
				h.Linkname = to
			}
			put(h, body)
			kinds[p] = kind
			inLayer[p] = true
			paths = append(paths, p)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		out = append(out, buf.Bytes())
	}
	return out
}

func TestLayers_of_many_files_become_what_the_specification_says(t *testing.T) {
	const layers = 5
	files := racetest.Cases(50_000, 10_000)
	streams := generate(t, 7, files, layers)
	want := reference{}
	for _, l := range streams {
		want.apply(t, l)
	}
	r := recipe{layers: streams, pack: []string{"gzip", "zstd", "", "gzip", "zstd"}}
	img := build(t, "oci-archive:"+r.layout(t).archive(t))
	// Build again, in another store and with other compression.
	r.pack = []string{"zstd", "", "gzip", "gzip", ""}
	if again := build(t, "oci-archive:"+r.layout(t).archive(t)); again.ID != img.ID {
		t.Errorf("a second build gives %.12s, the first %.12s", again.ID, img.ID)
	}
	entries := want.entries()
	if len(entries) < files/2 {
		t.Fatalf("only %d paths are left of %d: the generator removes too much", len(entries), files)
	}
	got, inodes := imagetest.DumpImage(t, img.Path())
	imagetest.Compare(t, "image", entries, got, append([]string{"."}, vmFiles...)...)
	// Names of one node share an inode number, and different nodes have different numbers.
	byInode := map[int64]*node{}
	for p, n := range want {
		if other := byInode[inodes[p]]; other != nil && other != n {
			t.Fatalf("%q shares inode %d with another file", p, inodes[p])
		}
		byInode[inodes[p]] = n
	}
	distinct := map[*node]bool{}
	for _, n := range want {
		distinct[n] = true
	}
	if len(byInode) != len(distinct) {
		t.Errorf("%d inodes for %d files", len(byInode), len(distinct))
	}
}
