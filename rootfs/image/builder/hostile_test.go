package builder

import (
	"archive/tar"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
)

// A canary is a directory of the host with a file. Archives try to reach both.
type canary struct{ dir, file string }

func newCanary(t *testing.T) canary {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "outside")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	c := canary{dir, filepath.Join(dir, "canary")}
	if err := os.WriteFile(c.file, []byte("sings"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(dir, time.Unix(1e9, 0), time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	return c
}

// look fails the test if the directory has changed in any way. A new file would have changed its time.
func (c canary) look(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(c.file)
	if err != nil || string(text) != "sings" {
		t.Errorf("the host's file holds %q, %v", text, err)
	}
	if info, err := os.Lstat(c.file); err != nil || info.Mode() != 0o640 {
		t.Errorf("the host's file is %v, %v", info.Mode(), err)
	}
	entries, err := os.ReadDir(c.dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("in the host's directory there is %v, %v", entries, err)
	}
	if info, err := os.Lstat(c.dir); err != nil || info.Mode().Perm() != 0o750 || !info.ModTime().Equal(time.Unix(1e9, 0)) {
		t.Errorf("the host's directory is %v of %v, %v", info.Mode(), info.ModTime(), err)
	}
}

// The archives try to write where they must not, or more than they may. Build refuses each, or makes an image that
// contains all of it.
func TestBuild_hostile_archive_is_refused_or_contained_and_nothing_is_written_outside(t *testing.T) {
	can := newCanary(t)
	random := make([]byte, 8)
	if _, err := rand.Read(random); err != nil {
		t.Fatal(err)
	}
	// No file of the host has this name.
	unique := "drowse-escape-" + hex.EncodeToString(random)
	up := strings.Repeat("../", 40)
	inside := strings.TrimPrefix(can.dir, "/")
	L := func(hs ...tar.Header) []byte { return imagetest.LayerOf(t, hs...) }
	many := make([]tar.Header, 0, 300)
	for i := range cap(many) {
		many = append(many, imagetest.Reg(fmt.Sprintf("f%d", i)))
	}
	for name, c := range map[string]struct {
		layers [][]byte
		want   error  // nil: contained
		path   string // path in the resulting image
	}{
		"an absolute path":                           {layers: [][]byte{L(imagetest.Reg(can.dir + "/" + unique))}, path: inside + "/" + unique},
		"an absolute path of many slashes":           {layers: [][]byte{L(imagetest.Reg("///" + can.dir + "//" + unique))}, path: inside + "/" + unique},
		"an absolute path of a file that exists":     {layers: [][]byte{L(imagetest.Reg(can.file + "=caught"))}, path: inside + "/canary"},
		"dots":                                       {layers: [][]byte{L(imagetest.Reg(up + inside + "/" + unique))}, want: image.ErrBadArchive},
		"dots in the middle":                         {layers: [][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/"+up+inside+"/"+unique))}, want: image.ErrBadArchive},
		"dots behind an absolute path":               {layers: [][]byte{L(imagetest.Reg("/a/../../" + unique))}, want: image.ErrBadArchive},
		"an absolute symlink, then a file":           {layers: [][]byte{L(imagetest.Sym("s", can.dir), imagetest.Reg("s/"+unique))}, path: inside + "/" + unique},
		"a symlink of dots, then a file":             {layers: [][]byte{L(imagetest.Sym("s", up+inside), imagetest.Reg("s/"+unique))}, path: inside + "/" + unique},
		"a symlink, and a file in the next layer":    {layers: [][]byte{L(imagetest.Sym("s", can.dir)), L(imagetest.Reg("s/" + unique))}, path: inside + "/" + unique},
		"a symlink to a file, written through":       {layers: [][]byte{L(imagetest.Sym("s", can.file), imagetest.Reg("s=caught"))}, path: "s"},
		"a symlink by a symlink":                     {layers: [][]byte{L(imagetest.Sym("a", "b"), imagetest.Sym("b", can.dir), imagetest.Reg("a/"+unique))}, path: inside + "/" + unique},
		"a symlink that takes a directory's place":   {layers: [][]byte{L(imagetest.Dirh("d/"), imagetest.Sym("d", can.dir), imagetest.Reg("d/"+unique))}, path: inside + "/" + unique},
		"a directory in place of a symlink":          {layers: [][]byte{L(imagetest.Sym("s", can.dir)), L(tar.Header{Name: "s/", Typeflag: tar.TypeDir, Mode: 0o777}, imagetest.Reg("s/"+unique))}, path: "s/" + unique},
		"a hard link to the host":                    {layers: [][]byte{L(imagetest.Lnk("l", can.file))}, want: image.ErrBadArchive},
		"a hard link of dots":                        {layers: [][]byte{L(imagetest.Lnk("l", up+inside+"/canary"))}, want: image.ErrBadArchive},
		"a hard link by a symlink":                   {layers: [][]byte{L(imagetest.Sym("s", can.dir), imagetest.Lnk("l", "s/canary"))}, want: image.ErrBadArchive},
		"a hard link by a symlink, then written":     {layers: [][]byte{L(imagetest.Sym("s", can.file), imagetest.Lnk("l", "s"), imagetest.Reg("l=caught"))}, path: "l"},
		"a whiteout by a symlink":                    {layers: [][]byte{L(imagetest.Sym("s", can.dir)), L(imagetest.Reg("s/.wh.canary"), imagetest.Reg("ok"))}, path: "ok"},
		"an opaque directory by a symlink":           {layers: [][]byte{L(imagetest.Sym("s", can.dir)), L(imagetest.Reg("s/.wh..wh..opq"), imagetest.Reg("ok"))}, path: "ok"},
		"a whiteout of dots":                         {layers: [][]byte{L(imagetest.Reg("a/.wh..."))}, want: image.ErrBadArchive},
		"one name four times, of all kinds":          {layers: [][]byte{L(imagetest.Reg("n=1"), imagetest.Sym("n", can.file), imagetest.Reg("n=2"), imagetest.Dirh("n/"), imagetest.Reg("n/in"))}, path: "n/in"},
		"a device of the host's disk":                {layers: [][]byte{L(tar.Header{Name: can.dir + "/" + unique, Typeflag: tar.TypeBlock, Devmajor: 8, Mode: 0o666})}, path: inside + "/" + unique},
		"a fifo in place of a file of the host":      {layers: [][]byte{L(tar.Header{Name: can.file, Typeflag: tar.TypeFifo, Mode: 0o666})}, path: inside + "/canary"},
		"attributes that an overlay would follow":    {layers: [][]byte{imagetest.TarOf(t, nil, tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": can.dir}})}, path: "d"},
		"a name with a line feed and an escape":      {layers: [][]byte{L(imagetest.Reg("a\n\x1b[2J" + unique))}, path: "a\n\x1b[2J" + unique},
		"symlinks in a ring":                         {layers: [][]byte{L(imagetest.Sym("a", "b"), imagetest.Sym("b", "a"), imagetest.Reg("a/x"))}, want: image.ErrBadArchive},
		"a file of 80 MiB that is 80 KiB on the way": {layers: [][]byte{bombOf(t, 80<<20)}, want: image.ErrTooLarge},
		"a sparse file of 8 EiB":                     {layers: [][]byte{imagetest.PaxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=1", "GNU.sparse.map=0,0", "GNU.sparse.size=9223372036854775807")}, want: image.ErrTooLarge},
		"a size of 8 EiB":                            {layers: [][]byte{imagetest.RawTar("f", '0', "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff", "x", nil)}, want: image.ErrTooLarge},
		"more files than allowed":                    {layers: [][]byte{L(many...)}, want: image.ErrTooLarge},
		"more files than allowed, of one name":       {layers: [][]byte{L(repeat(imagetest.Reg("f"), 300)...)}, want: image.ErrTooLarge},
		"directories without end":                    {layers: [][]byte{L(imagetest.Reg(strings.Repeat("d/", layers.MaxDepth) + "f"))}, want: image.ErrBadArchive},
	} {
		t.Run(name, func(t *testing.T) {
			r := recipe{layers: c.layers, pack: []string{"gzip", "gzip"}}
			write := func(f ociFiles) string { return f.archive(t) }
			sources := []string{"oci-archive:" + write(r.layout(t)), "docker-archive:" + write(r.dockerArchive(t, "x:1"))}
			// The tar file of a root has no whiteouts: there such names are files.
			if len(c.layers) == 1 && name != "a whiteout of dots" {
				file := filepath.Join(t.TempDir(), "root.tar")
				if err := os.WriteFile(file, imagetest.Pack(t, "gzip", c.layers[0]), 0o600); err != nil {
					t.Fatal(err)
				}
				sources = append(sources, "tar:"+file)
			}
			for _, from := range sources {
				outside := t.TempDir()
				s, err := image.OpenStore(filepath.Join(outside, "store"))
				if err != nil {
					t.Fatal(err)
				}
				img, err := Build(t.Context(), Options{Store: s, From: from, Tag: "x:1", MaxBytes: 64 << 20, MaxFiles: 200})
				switch {
				case c.want != nil:
					if !errors.Is(err, c.want) {
						t.Errorf("%s: got %v, want %v", from, err, c.want)
					}
					nothingLeft(t, s, outside)
				case err != nil:
					t.Errorf("%s: %v", from, err)
				default:
					got, _ := imagetest.DumpImage(t, img.Path())
					if _, ok := got[c.path]; !ok {
						t.Errorf("%s: %q is not in the image", from, c.path)
					}
				}
				can.look(t)
				for _, dir := range []string{"/", os.TempDir(), ".", outside, filepath.Dir(outside)} {
					if _, err := os.Lstat(filepath.Join(dir, unique)); !errors.Is(err, os.ErrNotExist) {
						t.Errorf("%s: it is in %s (%v)", from, dir, err)
					}
				}
			}
		})
	}
}

func repeat(h tar.Header, n int) []tar.Header {
	out := make([]tar.Header, n)
	for i := range out {
		out[i] = h
	}
	return out
}

// bombOf returns a layer of one file of zeros.
func bombOf(t *testing.T, size int) []byte {
	t.Helper()
	return imagetest.TarOf(t, map[string][]byte{"zeros": make([]byte, size)}, imagetest.Reg("zeros"))
}
