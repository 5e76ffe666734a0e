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
	"runtime"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// paddedTar gives entries behind headers of 768 KiB each, of which the last records mean something.
func paddedTar(entries int, records func(i int) []string) []byte {
	padding := []string{"comment=" + strings.Repeat("x", 1<<19), "comment=" + strings.Repeat("x", 1<<18)} // the second one counts
	var out []byte
	for i := range entries {
		one := paxTar(append(padding[:len(padding):len(padding)], records(i)...)...)
		out = append(out, one[:len(one)-1024]...)
	}
	return append(out, make([]byte, 1024)...)
}

// heap is how much is in use after a collection of garbage.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestReadLayer_long_headers_are_not_kept(t *testing.T) {
	const entries = 32
	for name, c := range map[string]struct {
		records func(i int) []string
	}{
		"names":     {records: func(i int) []string { return []string{fmt.Sprintf("path=n%d", i)} }},
		"whiteouts": {records: func(i int) []string { return []string{fmt.Sprintf("path=.wh.n%d", i)} }},
		"below":     {records: func(i int) []string { return []string{fmt.Sprintf("path=d/.wh.n%d", i)} }},
		"xattrs":    {records: func(i int) []string { return []string{fmt.Sprintf("path=n%d", i), "SCHILY.xattr.user.a=v"} }},
	} {
		t.Run(name, func(t *testing.T) {
			stream := paddedTar(entries, c.records)
			before := heap()
			l, err := readLayer(t.Context(), bytes.NewReader(stream), tempFile(t), newBudget(1<<20, DefaultMaxFiles), true)
			if err != nil {
				t.Fatal(err)
			}
			if n := len(l.entries) + len(l.whiteouts); n != entries {
				t.Fatalf("%d entries and whiteouts, want %d", n, entries)
			}
			if kept := heap() - before; kept > entries<<20/2 {
				t.Errorf("%d entries keep %d bytes", entries, kept)
			}
			runtime.KeepAlive(l)
			runtime.KeepAlive(stream)
		})
	}
	t.Run("members of an image archive", func(t *testing.T) {
		name := filepath.Join(t.TempDir(), "x.tar")
		write(t, name, string(paddedTar(entries, func(i int) []string { return []string{fmt.Sprintf("path=n%d", i)} })))
		before := heap()
		m, err := openTarMembers(t.Context(), must(os.Open(name)))
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if kept := heap() - before; kept > entries<<20/2 {
			t.Errorf("%d members keep %d bytes", entries, kept)
		}
		runtime.KeepAlive(m)
	})
}

func TestBuild_archive_of_more_files_than_it_may_have_is_refused(t *testing.T) {
	deep := strings.Repeat("d/", 200)
	for name, c := range map[string]struct {
		stream []byte
		max    int
		want   error
	}{
		"as many entries as possible":   {stream: layerOf(t, reg("a"), reg("b"), reg("c")), max: 3},
		"an entry too many":             {stream: layerOf(t, reg("a"), reg("b"), reg("c"), reg("d")), max: 3, want: ErrTooLarge},
		"one file many times":           {stream: layerOf(t, reg("a"), reg("a"), reg("a"), reg("a")), max: 3, want: ErrTooLarge},
		"as many implied directories":   {stream: layerOf(t, reg(deep+"f")), max: 201},
		"an implied directory too many": {stream: layerOf(t, reg(deep+"f")), max: 200, want: ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", Stdin: bytes.NewReader(c.stream), MaxFiles: c.max})
			if !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if c.want != nil && !strings.Contains(fmt.Sprint(err), "--max-files") {
				t.Errorf("%v does not say how to take it", err)
			}
		})
	}
	for _, bad := range []int{-1, fstree.MaxInodes + 1} {
		if _, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", MaxFiles: bad}); !errors.Is(err, ErrInvalidOption) {
			t.Errorf("MaxFiles %d: %v", bad, err)
		}
	}
}

func TestMerge_paths_of_all_files_are_bounded(t *testing.T) {
	// A symlink makes long paths of short names: "nn/nn/f" has 8 bytes with the slash before it.
	l, err := readLayer(t.Context(), bytes.NewReader(layerOf(t, sym("l", "nn/nn"), reg("l/f=1"))), tempFile(t), newBudget(10, DefaultMaxFiles), true)
	if err != nil {
		t.Fatal(err)
	}
	const takes = 2 + 3 + 6 + 8 // l, nn, nn/nn, nn/nn/f
	for free, want := range map[int64]error{takes: nil, takes - 1: ErrTooLarge} {
		m := newMerger(DefaultMaxFiles)
		m.paths = pathPerFile*DefaultMaxFiles - free
		if err := m.apply(t.Context(), l); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("with %d bytes: got %v, want %v", free, err, want)
		}
	}
}

// cancelAt cancels when so many bytes have been read through it.
type cancelAt struct {
	r      io.Reader
	left   int
	cancel func()
}

func (c *cancelAt) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if c.left -= n; c.left <= 0 {
		c.cancel()
	}
	return n, err
}

func TestReadLayer_hole_of_a_sparse_file_ends_with_the_context(t *testing.T) {
	// A hole of 4 EiB, and no byte of the archive behind it.
	stream := paxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=1", "GNU.sparse.map=4611686018427387904,0",
		"GNU.sparse.size=4611686018427387904", "GNU.sparse.name=s")
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	r := &cancelAt{bytes.NewReader(stream), len(stream) - 1024, func() { cancel(cause) }}
	if _, err := readLayer(ctx, r, tempFile(t), newBudget(1<<62, DefaultMaxFiles), true); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
}

func TestMerge_ends_with_the_context(t *testing.T) {
	for name, h := range map[string]tar.Header{"entries": reg("f"), "whiteouts": reg(".wh.f")} {
		l, err := readLayer(t.Context(), bytes.NewReader(layerOf(t, h)), tempFile(t), newBudget(10, DefaultMaxFiles), true)
		if err != nil {
			t.Fatal(err)
		}
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		if err := newMerger(DefaultMaxFiles).apply(ctx, l); !errors.Is(err, cause) {
			t.Errorf("%s: got %v, want %v", name, err, cause)
		}
	}
}

func TestDpkgStatus_of_somebody_else_is_bounded(t *testing.T) {
	installed := func(n, length int) string {
		return strings.Repeat("Package: "+strings.Repeat("<", length)+"\nStatus: install ok installed\n\n", n)
	}
	for name, c := range map[string]struct {
		text string
		n    int
		want error
	}{
		"a million stanzas of nothing":  {text: strings.Repeat("a:\n\n", 1<<20)},
		"a field of a million lines":    {text: "Package: p\nStatus: install ok installed\nDescription: d\n" + strings.Repeat(" x\n", 1<<20), n: 1},
		"as many packages as possible":  {text: installed(maxInstalled, 32), n: maxInstalled},
		"a package too many":            {text: installed(maxInstalled+1, 1), want: ErrTooLarge},
		"more of names than possible":   {text: installed(2, maxInstalledText/2+1), want: ErrTooLarge},
		"packages that are not there":   {text: strings.Repeat("Package: p\nStatus: deinstall ok config-files\n\n", maxInstalled+1)},
		"no newline at the end of it":   {text: "Package: p\nStatus: install ok installed", n: 1},
		"two stanzas and no name":       {text: "Status: hold ok installed\n\n\n\nStatus: hold ok installed\n", n: 2},
		"a status that goes on further": {text: "Package: p\nStatus: install ok\n installed\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseDpkgStatus(c.text)
			if len(got) != c.n || !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Fatalf("%d packages, %v; want %d, %v", len(got), err, c.n, c.want)
			}
			// What is taken can be read again from the record, whatever JSON makes of its bytes.
			img := &Image{Version: RecordVersion, ID: strings.Repeat("a", 64), Packages: got, dir: filepath.Join(t.TempDir(), strings.Repeat("a", 64))}
			must(0, os.Mkdir(filepath.Dir(img.Path()), 0o755))
			must(0, writeRecord(img))
			if again, err := readRecord(filepath.Dir(img.Path())); err != nil || len(again.Packages) != c.n {
				t.Errorf("the record cannot be read: %v", err)
			}
		})
	}
}

func TestWriteRecord_that_nobody_could_read_is_refused(t *testing.T) {
	img := &Image{Version: RecordVersion, ID: strings.Repeat("a", 64), Include: []string{strings.Repeat("x", maxRecordBytes)}, dir: t.TempDir()}
	if err := writeRecord(img); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	if left := must(os.ReadDir(filepath.Dir(img.Path()))); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestBuild_architecture_is_not_any_text(t *testing.T) {
	for text, want := range map[string]string{"armhf\namd64\n": "armhf", "\x1b[2Jx\n": runtime.GOARCH, strings.Repeat("x", 33): runtime.GOARCH, "": runtime.GOARCH} {
		stream := tarOf(t, map[string][]byte{"var/lib/dpkg/arch": []byte(text)}, reg("var/lib/dpkg/arch"))
		img, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", Stdin: bytes.NewReader(stream)})
		if err != nil || img.Architecture != want {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
	// An image of layers has said so in its configuration.
	r := recipe{layers: [][]byte{tarOf(t, map[string][]byte{"var/lib/dpkg/arch": []byte("i386\n")}, reg("var/lib/dpkg/arch"))}}
	if img := build(t, "oci:"+r.layout(t).dir(t)); img.Architecture != "amd64" {
		t.Errorf("of layers: %q", img.Architecture)
	}
}

func TestBuild_tar_of_an_image_archive_says_which_kind_it_is(t *testing.T) {
	r := small(t)
	for name, c := range map[string]struct {
		stream []byte
		says   string // "" when it is taken
	}{
		"of an OCI layout":                        {r.layout(t).tar(t), "oci-archive:"},
		"of docker's":                             {r.dockerArchive(t, "a:b").tar(t), "docker-archive:"},
		"a root filesystem with such names":       {layerOf(t, reg("oci-layout"), reg("index.json"), reg("manifest.json"), reg("etc/f")), ""},
		"a root filesystem without the usual one": {layerOf(t, reg("app/index.json"), reg("oci-layout")), ""},
	} {
		_, err := Build(t.Context(), Options{Store: newStore(t), From: "tar:-", Stdin: bytes.NewReader(c.stream)})
		if c.says == "" && err != nil || c.says != "" && (!errors.Is(err, ErrUnsupportedSource) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
	}
}
