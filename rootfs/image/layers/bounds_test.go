package layers

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// heap returns the heap in use after a garbage collection.
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
			stream := imagetest.PaddedTar(entries, c.records)
			before := heap()
			l, err := Read(t.Context(), bytes.NewReader(stream), imagetest.TempFile(t), NewBudget(1<<20, 1<<20), true)
			if err != nil {
				t.Fatal(err)
			}
			if n := len(l.Entries) + len(l.whiteouts); n != entries {
				t.Fatalf("%d entries and whiteouts, want %d", n, entries)
			}
			if kept := heap() - before; kept > entries<<20/2 {
				t.Errorf("%d entries keep %d bytes", entries, kept)
			}
			runtime.KeepAlive(l)
			runtime.KeepAlive(stream)
		})
	}
}

func TestMerge_paths_of_all_files_are_bounded(t *testing.T) {
	// A symlink makes long paths from short names: "nn/nn/f" has 8 bytes with the slash before it.
	l, err := Read(t.Context(), bytes.NewReader(imagetest.LayerOf(t, imagetest.Sym("l", "nn/nn"), imagetest.Reg("l/f=1"))), imagetest.TempFile(t), NewBudget(10, 1<<20), true)
	if err != nil {
		t.Fatal(err)
	}
	const takes = 2 + 3 + 6 + 8 // l, nn, nn/nn, nn/nn/f
	for free, want := range map[int64]error{takes: nil, takes - 1: image.ErrTooLarge} {
		m := NewMerger(1 << 20)
		m.paths = pathPerFile*1<<20 - free
		if err := m.Apply(t.Context(), l); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("with %d bytes: got %v, want %v", free, err, want)
		}
	}
}

// cancelAt cancels when n bytes have been read through it.
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
	// A hole of 4 EiB, and no data of the archive after it.
	stream := imagetest.PaxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=1", "GNU.sparse.map=4611686018427387904,0",
		"GNU.sparse.size=4611686018427387904", "GNU.sparse.name=s")
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	r := &cancelAt{bytes.NewReader(stream), len(stream) - 1024, func() { cancel(cause) }}
	if _, err := Read(ctx, r, imagetest.TempFile(t), NewBudget(1<<62, 1<<20), true); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
}

func TestMerge_ends_with_the_context(t *testing.T) {
	for name, h := range map[string]tar.Header{"entries": imagetest.Reg("f"), "whiteouts": imagetest.Reg(".wh.f")} {
		l, err := Read(t.Context(), bytes.NewReader(imagetest.LayerOf(t, h)), imagetest.TempFile(t), NewBudget(10, 1<<20), true)
		if err != nil {
			t.Fatal(err)
		}
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		if err := NewMerger(1<<20).Apply(ctx, l); !errors.Is(err, cause) {
			t.Errorf("%s: got %v, want %v", name, err, cause)
		}
	}
}
