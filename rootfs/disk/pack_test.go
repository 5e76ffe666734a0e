package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func packOf(t *testing.T, path string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Pack(t.Context(), &b, path); err != nil {
		t.Fatal(err)
	}
	n, err := PackedSize(path)
	if err != nil || n != int64(b.Len()) {
		t.Fatalf("packed size is %d (%v), written were %d", n, err, b.Len())
	}
	return b.Bytes()
}

// sparse makes a file with data at the given offsets.
func sparse(t *testing.T, size int64, at ...int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for i, off := range at {
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, 5000), off); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

func TestPacked_layers_come_back_with_their_holes(t *testing.T) {
	for _, tt := range []struct {
		name string
		size int64
		at   []int64
	}{
		{"empty", 0, nil},
		{"one hole", 1 << 30, nil},
		{"data at both ends", 1 << 30, []int64{0, 1<<30 - 5000}},
		{"data here and there", 64 << 20, []int64{8192, 9 << 20, 33<<20 + 17}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			from := sparse(t, tt.size, tt.at...)
			b := packOf(t, from)
			to := filepath.Join(t.TempDir(), "back")
			if err := Unpack(t.Context(), bytes.NewReader(b), to); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(packOf(t, to), b) {
				t.Error("packed again it is different")
			}
			var a, z unix.Stat_t
			if err := errors.Join(unix.Stat(from, &a), unix.Stat(to, &z)); err != nil {
				t.Fatal(err)
			}
			if a.Size != z.Size || z.Blocks > a.Blocks+16 {
				t.Errorf("%d bytes in %d blocks became %d in %d", a.Size, a.Blocks, z.Size, z.Blocks)
			}
		})
	}
}

func TestDamaged_packed_layers_are_refused_and_leave_nothing(t *testing.T) {
	good := packOf(t, sparse(t, 1<<20, 4096, 512<<10))
	with := func(off int, v uint64, n int) []byte {
		b := bytes.Clone(good)
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], v)
		copy(b[off:off+n], w[:n])
		return b
	}
	for _, tt := range []struct {
		name string
		b    []byte
		want error
	}{
		{"nothing", nil, ErrTruncated},
		{"half a header", good[:10], ErrTruncated},
		{"half of the extents", good[:packHeader+20], ErrTruncated},
		{"half of the data", good[:len(good)/2], ErrTruncated},
		{"one byte less", good[:len(good)-1], ErrTruncated},
		{"one byte more", append(bytes.Clone(good), 0), ErrCorrupt},
		{"another magic", with(0, 0, 1), ErrCorrupt},
		{"a newer version", with(8, 2, 4), ErrVersion},
		{"four thousand million extents", with(12, 1<<32-1, 4), ErrCorrupt},
		{"a file larger than any", with(16, 1<<62, 8), ErrCorrupt},
		{"an extent beyond the end", with(packHeader, 1<<20, 8), ErrCorrupt},
		{"an extent that overflows", with(packHeader+8, 1<<64-1, 8), ErrCorrupt},
		{"an extent of nothing", with(packHeader+8, 0, 8), ErrCorrupt},
		{"extents that overlap", with(packHeader+16, 4097, 8), ErrCorrupt},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "back")
			if err := Unpack(t.Context(), bytes.NewReader(tt.b), path); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a file is left (%v)", err)
			}
		})
	}
}
