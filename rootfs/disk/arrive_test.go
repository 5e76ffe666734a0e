package disk

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// pieces makes a file from packed bytes that come in pieces, in any order. It returns the file.
func pieces(t *testing.T, r *rand.Rand, b []byte, size int) (*Packed, *os.File) {
	t.Helper()
	n := PackedHead(nil)
	n = PackedHead(b[:n])
	p, err := ReadPacked(bytes.NewReader(b[:n]), int64(len(b)))
	must(t, err)
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	must(t, err)
	t.Cleanup(func() { f.Close() })
	must(t, f.Truncate(p.FileSize()))
	for _, i := range r.Perm(len(b)/size + 1) {
		must(t, p.WriteAt(f, b[i*size:min((i+1)*size, len(b))], int64(i*size)))
	}
	return p, f
}

func TestPacked_layer_that_comes_in_pieces_is_the_layer(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, from := range []string{
		sparse(t, 0), sparse(t, 1<<20), sparse(t, 1<<20, 0), sparse(t, 1<<20, 8192, 300<<10, 1<<20-5000),
	} {
		b := packOf(t, from)
		want, err := os.ReadFile(from)
		must(t, err)
		for _, size := range []int{7, 4096, 1 << 20} {
			p, f := pieces(t, r, b, size)
			got, err := os.ReadFile(f.Name())
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("in pieces of %d bytes it differs, %v", size, err)
			}
			for range 100 {
				at := r.IntN(len(b))
				q := make([]byte, r.IntN(len(b)-at)+1)
				must(t, p.ReadAt(f, q, int64(at)))
				if !bytes.Equal(q, b[at:at+len(q)]) {
					t.Fatalf("%d bytes at %d differ", len(q), at)
				}
			}
			if err := p.WriteAt(f, []byte{1}, int64(len(b))); !errors.Is(err, ErrTruncated) {
				t.Errorf("bytes behind its end: %v", err)
			}
		}
	}
}

// Range names exactly the bytes that a range of the file has: with these alone it reads right.
func TestPacked_range_is_what_a_range_of_the_file_needs(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	from := sparse(t, 1<<20, 8192, 300<<10, 600<<10, 1<<20-5000)
	b := packOf(t, from)
	want, err := os.ReadFile(from)
	must(t, err)
	p, err := ReadPacked(bytes.NewReader(b), int64(len(b)))
	must(t, err)
	for range 500 {
		off := r.Int64N(p.FileSize())
		n := r.Int64N(p.FileSize()-off) + 1
		first, end := p.Range(off, n)
		f, err := os.Create(filepath.Join(t.TempDir(), "file"))
		must(t, err)
		must(t, f.Truncate(p.FileSize()))
		must(t, p.WriteAt(f, b[first:end], first))
		got := make([]byte, n)
		_, err = f.ReadAt(got, off)
		must(t, errors.Join(err, f.Close()))
		if !bytes.Equal(got, want[off:off+n]) || end-first > n {
			t.Fatalf("%d bytes at %d: [%d, %d) of the packed ones are not what they need", n, off, first, end)
		}
	}
	if first, end := p.Range(100<<10, 4096); first != end {
		t.Errorf("a hole needs [%d, %d)", first, end)
	}
}

func TestPacked_head_that_is_damaged_is_refused(t *testing.T) {
	b := packOf(t, sparse(t, 1<<20, 4096))
	for name, harm := range map[string]func() ([]byte, int64){
		"another size": func() ([]byte, int64) { return b, int64(len(b)) + 1 },
		"no head":      func() ([]byte, int64) { return b[:10], int64(len(b)) },
		"half a head":  func() ([]byte, int64) { return b[:packHeader+3], int64(len(b)) },
		"no layer":     func() ([]byte, int64) { return bytes.Repeat([]byte{9}, len(b)), int64(len(b)) },
	} {
		head, size := harm()
		if _, err := ReadPacked(bytes.NewReader(head), size); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTruncated) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := PackedHead(bytes.Repeat([]byte{255}, packHeader)); n > packHeader+packExtent*maxPackExtents {
		t.Errorf("a head of %d bytes", n)
	}
}

// comingDisk is a disk over two sealed layers, of which the lower is still being written.
func comingDisk(t *testing.T, await func(off, n int64) error) (*Disk, Stack) {
	t.Helper()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	st, err := Create(path("a"), 1<<20)
	must(t, err)
	for _, name := range []string{"b", "c"} {
		d, err := Open(st, Options{})
		must(t, err)
		if len(st.Layers) == 1 {
			_, err = d.WriteAt(bytes.Repeat([]byte{1}, 8*BlockSize), 0)
		} else {
			_, err = d.WriteAt(bytes.Repeat([]byte{2}, BlockSize), BlockSize)
		}
		must(t, errors.Join(err, d.CloseSealed()))
		st, err = Fork(path(name), st, 0)
		must(t, err)
	}
	d, err := Open(st, Options{Coming: func(p string) func(off, n int64) error {
		if p == path("a") {
			return await
		}
		return nil
	}})
	must(t, err)
	t.Cleanup(func() { must(t, d.Close()) })
	return d, st
}

func TestDisk_waits_for_what_is_read_of_a_layer_that_is_being_written(t *testing.T) {
	var asked [][2]int64
	fail := errors.New("it does not come")
	var err error
	d, st := comingDisk(t, func(off, n int64) error {
		asked = append(asked, [2]int64{off, n})
		return err
	})
	data := int64(8192 + 4096) // of a disk of 256 blocks
	p := make([]byte, 3*BlockSize)
	_, rerr := d.ReadAt(p, 0)
	must(t, rerr)
	if want := [][2]int64{{data, BlockSize}, {data + 2*BlockSize, BlockSize}}; !slices.Equal(asked, want) {
		t.Errorf("it waited for %v, want %v", asked, want)
	}
	// Not for zeros, what is written, and what a whole block replaces.
	asked = nil
	_, werr := d.WriteAt(bytes.Repeat([]byte{3}, BlockSize), 3*BlockSize)
	must(t, werr)
	_, rerr = d.ReadAt(p[:BlockSize], 3*BlockSize)
	must(t, rerr)
	_, rerr = d.ReadAt(p[:BlockSize], 100*BlockSize)
	must(t, errors.Join(rerr, d.Discard(4*BlockSize, BlockSize), d.Flush()))
	if len(asked) > 0 {
		t.Errorf("it waited for %v", asked)
	}
	// A part of a block needs the rest of it. What fails then changes nothing.
	err = fail
	if _, werr := d.WriteAt([]byte{4}, 5*BlockSize); !errors.Is(werr, fail) {
		t.Errorf("a part of a block that is not there was written: %v", werr)
	}
	if _, rerr := d.ReadAt(p, 5*BlockSize); !errors.Is(rerr, fail) {
		t.Errorf("a block that is not there was read: %v", rerr)
	}
	if _, _, _, rerr := d.ReadExtent(5*BlockSize, BlockSize); !errors.Is(rerr, fail) {
		t.Errorf("a block that is not there is somewhere: %v", rerr)
	}
	err = nil
	_, werr = d.WriteAt([]byte{4}, 5*BlockSize)
	must(t, werr)
	_, rerr = d.ReadAt(p[:2], 5*BlockSize)
	if must(t, rerr); p[0] != 4 || p[1] != 1 {
		t.Errorf("the block begins with %v", p[:2])
	}
	// What is being written takes nothing of the disk's quota.
	before, aerr := d.Allocated()
	must(t, aerr)
	f, aerr := os.OpenFile(st.Layers[0], os.O_RDWR, 0)
	must(t, aerr)
	_, aerr = osfile.NewFile(f).WriteAt(bytes.Repeat([]byte{5}, 64<<10), data+512<<10)
	must(t, errors.Join(aerr, f.Sync(), f.Close()))
	if after, err := d.Allocated(); err != nil || after != before {
		t.Errorf("the disk takes %d bytes, and took %d, %v", after, before, err)
	}
}
