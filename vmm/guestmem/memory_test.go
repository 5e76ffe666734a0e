package guestmem

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func newMemory(t *testing.T, size uint64) *Memory {
	t.Helper()
	m, err := New(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func TestNew_refuses_sizes_out_of_bounds(t *testing.T) {
	for _, size := range []uint64{0, 1, MinSize - PageSize, MinSize + 1, MaxSize + PageSize, 1 << 63} {
		if _, err := New(size); !errors.Is(err, ErrSize) {
			t.Errorf("New(%d): got %v, want ErrSize", size, err)
		}
	}
}

func TestRanges_are_checked_without_overflow(t *testing.T) {
	const size = 4 << 30
	m := newMemory(t, size)
	for _, tc := range []struct {
		name string
		gpa  GPA
		n    uint64
		ok   bool
	}{
		{"first byte", 0, 1, true},
		{"all low RAM", 0, uint64(HoleStart), true},
		{"low RAM and one byte of the hole", 0, uint64(HoleStart) + 1, false},
		{"empty range at the start of the hole", HoleStart, 0, true},
		{"a byte of the hole", HoleStart, 1, false},
		{"last byte of the hole", HoleEnd - 1, 1, false},
		{"across the end of the hole", HoleEnd - 1, 2, false},
		{"first byte of high RAM", HoleEnd, 1, true},
		{"all high RAM", HoleEnd, size - uint64(HoleStart), true},
		{"high RAM and one byte more", HoleEnd, size - uint64(HoleStart) + 1, false},
		{"length that wraps", 4096, ^uint64(0) - 4095, false},
		{"address and length at the top", GPA(^uint64(0)), ^uint64(0), false},
		{"address at the top", GPA(^uint64(0)), 1, false},
	} {
		if got := m.Contains(tc.gpa, tc.n); got != tc.ok {
			t.Errorf("%s: Contains(%#x, %#x) = %v, want %v", tc.name, tc.gpa, tc.n, got, tc.ok)
		}
	}
}

func TestLinear_numbering_skips_the_hole(t *testing.T) {
	m := newMemory(t, 4<<30)
	for _, gpa := range []GPA{0, HoleStart - 1, HoleEnd, HoleEnd + (1 << 30) - 1} {
		off, err := m.Linear(gpa)
		if err != nil {
			t.Fatal(err)
		}
		back, err := m.FromLinear(off)
		if err != nil || back != gpa {
			t.Errorf("FromLinear(Linear(%#x)) = %#x, %v", gpa, back, err)
		}
	}
	if _, err := m.FromLinear(4 << 30); !errors.Is(err, ErrRange) {
		t.Errorf("FromLinear beyond RAM: got %v, want ErrRange", err)
	}
}

func TestWrite_marks_exactly_the_pages_it_touches_dirty(t *testing.T) {
	m := newMemory(t, 4<<30)
	if err := m.Write(4095, []byte{1, 2}); err != nil {
		t.Fatal(err)
	}
	if err := m.Write(HoleEnd, []byte{3}); err != nil {
		t.Fatal(err)
	}
	if err := m.StoreUint16(5*4096, 7); err != nil {
		t.Fatal(err)
	}
	if err := m.Zero(7*4096, 2*4096); err != nil {
		t.Fatal(err)
	}
	if err := m.Read(9*4096, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	want := []uint64{0, 1, 5, 7, 8, uint64(HoleStart) / PageSize}
	var got []uint64
	m.TakeDirty(func(p uint64) { got = append(got, p) })
	if len(got) != len(want) {
		t.Fatalf("dirty pages %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("dirty pages %v, want %v", got, want)
		}
	}
	m.TakeDirty(func(p uint64) { t.Errorf("page %d dirty after TakeDirty", p) })
}

func TestFile_transfers_cross_pages_and_mark_dirty(t *testing.T) {
	m := newMemory(t, MinSize)
	data := make([]byte, 10000)
	for i := range data {
		data[i] = byte(i * 7)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	rs := []Range{{GPA: 4000, Len: 1000}, {GPA: 100000, Len: 0}, {GPA: 200001, Len: 8999}}
	if err := m.PreadFull(rs, f, 1); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 9999)
	if err := errors.Join(m.Read(4000, got[:1000]), m.Read(200001, got[1000:])); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, data[1:]) {
		t.Fatal("bytes read from the file differ")
	}
	n := 0
	m.TakeDirty(func(uint64) { n++ })
	if n != 2+4 {
		t.Errorf("%d dirty pages, want 6", n)
	}
	if err := m.FillFrom(0, 20, f, 9990); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("reading beyond the end of the file: got %v", err)
	}
	m.TakeDirty(func(uint64) {})
	if err := m.PwriteFull(rs, f, 20000); err != nil {
		t.Fatal(err)
	}
	back := make([]byte, 9999)
	if _, err := f.ReadAt(back, 20000); err != nil || !bytes.Equal(back, data[1:]) {
		t.Fatalf("bytes written to the file differ (%v)", err)
	}
	m.TakeDirty(func(p uint64) { t.Errorf("writing to a file made page %d dirty", p) })
	if err := m.DrainTo(MinSize-10, 11, f, 0); !errors.Is(err, ErrRange) {
		t.Errorf("writing beyond RAM: got %v, want ErrRange", err)
	}
}

func TestVectored_socket_IO_returns_EAGAIN_as_is(t *testing.T) {
	m := newMemory(t, MinSize)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	rs := []Range{{GPA: 10, Len: 3}, {GPA: 8190, Len: 5}}
	if _, err := m.Readv(fds[0], rs); !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("reading an empty socket: got %v, want EAGAIN", err)
	}
	if _, err := unix.Write(fds[1], []byte("abcdefgh")); err != nil {
		t.Fatal(err)
	}
	if n, err := m.Readv(fds[0], rs); n != 8 || err != nil {
		t.Fatalf("Readv = %d, %v", n, err)
	}
	p := make([]byte, 5)
	if err := m.Read(8190, p); err != nil || string(p) != "defgh" {
		t.Fatalf("second range has %q, %v", p, err)
	}
	if n, err := m.Writev(fds[0], rs[1:]); n != 5 || err != nil {
		t.Fatalf("Writev = %d, %v", n, err)
	}
}

func TestDiscard_zeroes_whole_pages_only(t *testing.T) {
	m := newMemory(t, MinSize)
	if err := m.Write(0, bytes.Repeat([]byte{0xaa}, 4*4096)); err != nil {
		t.Fatal(err)
	}
	if err := m.Discard(100, 3*4096); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 4*4096)
	if err := m.Read(0, got); err != nil {
		t.Fatal(err)
	}
	for i, b := range got {
		want := byte(0xaa)
		if i >= 4096 && i < 3*4096 {
			want = 0
		}
		if b != want {
			t.Fatalf("byte %d is %#x, want %#x", i, b, want)
		}
	}
	if err := m.Discard(MinSize-4096, 8192); !errors.Is(err, ErrRange) {
		t.Errorf("discarding beyond RAM: got %v, want ErrRange", err)
	}
}

func TestUnaligned_words_are_refused(t *testing.T) {
	m := newMemory(t, MinSize)
	if _, err := m.LoadUint16(1); !errors.Is(err, ErrRange) {
		t.Errorf("LoadUint16(1): %v", err)
	}
	if err := m.StoreUint16(3, 1); !errors.Is(err, ErrRange) {
		t.Errorf("StoreUint16(3): %v", err)
	}
}
