package disk

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/farfiles"
)

const mib = 1 << 20

func mustCreate(t testing.TB, size int64) (Stack, string) {
	t.Helper()
	dir := t.TempDir()
	s, err := Create(filepath.Join(dir, "0"), size)
	if err != nil {
		t.Fatal(err)
	}
	return s, dir
}

func mustOpen(t testing.TB, s Stack) *Disk {
	t.Helper()
	d, err := Open(s, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error is %v, want %v", err, want)
	}
}

// fillBlock returns n bytes of value seed.
func fillBlock(seed byte, n int) []byte { return bytes.Repeat([]byte{seed}, n) }

func mustWrite(t testing.TB, d *Disk, off int64, p []byte) {
	t.Helper()
	_, err := d.WriteAt(p, off)
	must(t, err)
}

func wantBytes(t testing.TB, d *Disk, off int64, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	_, err := d.ReadAt(got, off)
	must(t, err)
	if !bytes.Equal(got, want) {
		i := 0
		for got[i] == want[i] {
			i++
		}
		t.Fatalf("byte %d is %#x, want %#x", off+int64(i), got[i], want[i])
	}
}

func TestWrite_then_read_across_seals_gives_the_newest_bytes(t *testing.T) {
	s, dir := mustCreate(t, 64*mib)
	d := mustOpen(t, s)
	wantBytes(t, d, 0, make([]byte, 3*BlockSize))
	mustWrite(t, d, 0, fillBlock(1, 3*BlockSize))
	_, err := d.Seal(context.Background(), filepath.Join(dir, "1"))
	must(t, err)
	mustWrite(t, d, BlockSize+512, fillBlock(2, 512))
	want := append(fillBlock(1, BlockSize+512), fillBlock(2, 512)...)
	want = append(want, fillBlock(1, BlockSize-1024+BlockSize)...)
	wantBytes(t, d, 0, want)
	must(t, d.Flush())
	s2 := d.Stack()
	must(t, d.Close())
	d = mustOpen(t, s2)
	wantBytes(t, d, 0, want)
	must(t, d.Close())
	must(t, Verify(s2))
	// The sealed layer alone is the disk at the time of the seal.
	ro, err := Open(s, Options{ReadOnly: true})
	must(t, err)
	wantBytes(t, ro, 0, fillBlock(1, 3*BlockSize))
	must(t, ro.Close())
	_, err = Open(s, Options{})
	wantErr(t, err, ErrSealed)
	must(t, Merge(context.Background(), s2.Layers[0], s2.Layers[1]))
	must(t, Merge(context.Background(), s2.Layers[0], s2.Layers[1]))
	_, err = os.Stat(s2.Layers[0])
	wantErr(t, err, os.ErrNotExist)
	ro, err = Open(Stack{Layers: s2.Layers[1:]}, Options{ReadOnly: true})
	must(t, err)
	wantBytes(t, ro, 0, want)
	must(t, ro.Close())
}

func TestConcurrent_writers_seals_and_flushes_keep_every_block(t *testing.T) {
	s, dir := mustCreate(t, 64*mib)
	d := mustOpen(t, s)
	const writers, blocks = 4, 64
	var wg, bg sync.WaitGroup
	stop := make(chan struct{})
	background := func(f func(i int) error) {
		bg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(2 * time.Millisecond):
				}
				if err := f(i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	background(func(int) error { return d.Flush() })
	background(func(i int) error {
		_, err := d.Seal(t.Context(), filepath.Join(dir, fmt.Sprintf("sealed-%d", i)))
		return err
	})
	background(func(int) error { _, err := d.stats(); return err })
	background(func(i int) error { return d.Discard(48*mib+int64(i%100)*BlockSize, mib) })
	background(func(i int) error {
		// Write parts of the blocks between the writers' own: sectors of one block from many goroutines.
		_, err := d.WriteAt(fillBlock(0xee, 512), 32*mib+int64(i%8)*512)
		return err
	})
	for w := range writers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 7))
			want := make([]byte, blocks)
			// The writers' blocks interleave, so that they share words of the index and pages of the map.
			at := func(b int) int64 { return (int64(b)*writers + int64(w)) * BlockSize }
			got := make([]byte, BlockSize)
			for range 1500 {
				b := r.IntN(blocks)
				switch r.IntN(6) {
				case 0:
					if err := d.WriteZeroes(at(b), BlockSize, r.IntN(2) == 0); err != nil {
						t.Error(err)
						return
					}
					want[b] = 0
				case 1, 2:
					v := byte(1 + r.IntN(255))
					f, off, n, err := d.WriteExtent(at(b), BlockSize)
					if err != nil || n != BlockSize {
						t.Errorf("extent: %d, %v", n, err)
						return
					}
					_, err = f.WriteAt(fillBlock(v, BlockSize), off)
					if err := d.Wrote(at(b), n, err); err != nil {
						t.Error(err)
						return
					}
					want[b] = v
				default:
					f, off, n, err := d.ReadExtent(at(b), BlockSize)
					if err != nil || n != BlockSize {
						t.Errorf("extent: %d, %v", n, err)
						return
					}
					if f == nil {
						clear(got)
					} else if _, err := f.ReadAt(got, off); err != nil {
						t.Error(err)
						return
					}
					if !bytes.Equal(got, fillBlock(want[b], BlockSize)) {
						t.Errorf("writer %d: block %d starts with %#x, want %#x", w, b, got[0], want[b])
						return
					}
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	bg.Wait()
	must(t, d.Close())
	must(t, Verify(d.Stack()))
}

func TestSectors_of_one_block_written_at_once_all_arrive(t *testing.T) {
	s, dir := mustCreate(t, 4*mib)
	d := mustOpen(t, s)
	mustWrite(t, d, 0, fillBlock(0xaa, mib))
	_, err := d.Seal(t.Context(), filepath.Join(dir, "1"))
	must(t, err)
	for b := range int64(128) {
		var wg sync.WaitGroup
		for i := range int64(8) {
			if i == 3 {
				continue // keeps what the layer below has
			}
			wg.Go(func() {
				if _, err := d.WriteAt(fillBlock(byte(i+1), 512), b*BlockSize+i*512); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i := range int64(8) {
			want := byte(i + 1)
			if i == 3 {
				want = 0xaa
			}
			wantBytes(t, d, b*BlockSize+i*512, fillBlock(want, 512))
		}
	}
}

func TestSeal_waits_for_the_write_under_way_and_can_be_cancelled(t *testing.T) {
	s, dir := mustCreate(t, 4*mib)
	d := mustOpen(t, s)
	f, off, n, err := d.WriteExtent(0, BlockSize)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = d.Seal(ctx, filepath.Join(dir, "1"))
	wantErr(t, err, context.DeadlineExceeded)
	done := make(chan error)
	go func() { _, err := d.Seal(t.Context(), filepath.Join(dir, "1")); done <- err }()
	_, err = f.WriteAt(fillBlock(5, BlockSize), off)
	must(t, d.Wrote(0, n, err))
	must(t, <-done)
	wantBytes(t, d, 0, fillBlock(5, BlockSize))
	st, err := d.stats()
	must(t, err)
	if st[0].Data != BlockSize || st[1].Data != 0 || st[0].State != "frozen" {
		t.Errorf("layers are %+v, want the block in the frozen one", st)
	}
	must(t, d.Flush())
	st, err = d.stats()
	must(t, err)
	if st[0].State != "sealed" {
		t.Errorf("after a flush the layer is %s, want sealed", st[0].State)
	}
}

// A guest that is not paused must not get a write into a layer that no record names yet.
func TestSeal_then_keeps_writes_out_until_the_new_layer_is_remembered(t *testing.T) {
	s, dir := mustCreate(t, 4*mib)
	d := mustOpen(t, s)
	top := filepath.Join(dir, "1")
	wrote := make(chan error, 1)
	var remembered Stack
	_, err := d.SealThen(t.Context(), top, func(st Stack) error {
		remembered = st
		go func() {
			_, err := d.WriteAt(fillBlock(7, BlockSize), 0)
			wrote <- err
		}()
		if d.gate.places.TryAcquire(1) {
			t.Error("the gate is open for writes before the layer is remembered")
		}
		wantBytes(t, d, 0, make([]byte, BlockSize)) // reads continue
		return nil
	})
	must(t, err)
	must(t, <-wrote)
	if remembered.Top() != top || len(remembered.Layers) != 2 {
		t.Errorf("remembered %+v", remembered)
	}
	wantBytes(t, d, 0, fillBlock(7, BlockSize))

	// The disk continues when the record cannot be written.
	refused := errors.New("no record")
	_, err = d.SealThen(t.Context(), filepath.Join(dir, "2"), func(Stack) error { return refused })
	wantErr(t, err, refused)
	mustWrite(t, d, BlockSize, fillBlock(8, BlockSize))
	must(t, d.Flush())
	wantBytes(t, d, 0, fillBlock(7, BlockSize))
	wantBytes(t, d, BlockSize, fillBlock(8, BlockSize))
}

func TestFailed_write_keeps_the_old_content(t *testing.T) {
	s, dir := mustCreate(t, 4*mib)
	d := mustOpen(t, s)
	mustWrite(t, d, 0, fillBlock(1, BlockSize))
	_, err := d.Seal(t.Context(), filepath.Join(dir, "1"))
	must(t, err)
	f, off, n, err := d.WriteExtent(0, BlockSize)
	must(t, err)
	_, err = f.WriteAt(fillBlock(2, BlockSize/2), off)
	must(t, err)
	wantErr(t, d.Wrote(0, n, unix.ENOSPC), ErrNoSpace)
	wantBytes(t, d, 0, fillBlock(1, BlockSize))
	if err := d.Wrote(0, n, nil); err == nil {
		t.Error("a second Wrote for one extent was accepted")
	}
}

func TestDiscard_masks_lower_layers_and_gives_space_back(t *testing.T) {
	s, dir := mustCreate(t, 64*mib)
	d := mustOpen(t, s)
	mustWrite(t, d, 0, fillBlock(1, 8*mib))
	must(t, d.Flush())
	_, err := d.Seal(t.Context(), filepath.Join(dir, "1"))
	must(t, err)
	mustWrite(t, d, 0, fillBlock(2, 4*mib))
	must(t, d.Flush())
	before, err := d.stats()
	must(t, err)
	must(t, d.Discard(512, 6*mib))
	wantBytes(t, d, 0, fillBlock(2, BlockSize)) // part of a block: kept
	wantBytes(t, d, BlockSize, make([]byte, 6*mib-BlockSize))
	wantBytes(t, d, 6*mib, fillBlock(1, mib))
	must(t, d.Flush())
	after, err := d.stats()
	must(t, err)
	if freed := before[1].Allocated - after[1].Allocated; freed < 3*mib {
		t.Errorf("the top went from %d to %d bytes on the host, want about 4 MiB less", before[1].Allocated, after[1].Allocated)
	}
	if after[0].Allocated < before[0].Allocated-mib || after[0].Data != 8*mib {
		t.Errorf("the sealed layer changed: %+v", after[0])
	}
}

func TestData_counts_each_block_once_and_none_that_was_discarded(t *testing.T) {
	s, dir := mustCreate(t, 64*mib)
	d := mustOpen(t, s)
	want := func(n int64) {
		t.Helper()
		if got := d.Data(); got != n {
			t.Errorf("the disk has %d bytes of data, want %d", got, n)
		}
	}
	want(0)
	mustWrite(t, d, 0, fillBlock(1, 8*mib))
	mustWrite(t, d, 20*mib, fillBlock(1, 512)) // part of a block counts as one
	want(8*mib + BlockSize)
	must(t, d.Flush())
	_, err := d.Seal(t.Context(), filepath.Join(dir, "1"))
	must(t, err)
	mustWrite(t, d, 4*mib, fillBlock(2, 8*mib))
	want(12*mib + BlockSize)
	must(t, d.Discard(0, 6*mib))
	want(6*mib + BlockSize)
	must(t, d.Flush())
	s = d.Stack()
	must(t, d.Close())
	d = mustOpen(t, s)
	want(6*mib + BlockSize)
}

func TestWrite_zeroes_without_unmap_keeps_the_space(t *testing.T) {
	s, _ := mustCreate(t, 64*mib)
	d := mustOpen(t, s)
	must(t, d.WriteZeroes(0, 4*mib, false))
	wantBytes(t, d, 0, make([]byte, 4*mib))
	must(t, d.Flush())
	st, err := d.stats()
	must(t, err)
	if st[0].Allocated < 4*mib || st[0].Data != 4*mib {
		t.Errorf("the layer has %+v, want 4 MiB of space", st[0])
	}
}

func TestRead_only_disk_refuses_changes(t *testing.T) {
	s, dir := mustCreate(t, 2*BlockSize)
	w := mustOpen(t, s)
	mustWrite(t, w, 0, fillBlock(7, 2*BlockSize))
	must(t, w.CloseSealed())
	d, err := Open(s, Options{ReadOnly: true})
	must(t, err)
	defer func() { must(t, d.Close()) }()
	wantBytes(t, d, 0, fillBlock(7, 2*BlockSize))
	_, _, _, err = d.WriteExtent(0, 512)
	wantErr(t, err, ErrReadOnly)
	wantErr(t, d.Discard(0, 512), ErrReadOnly)
	wantErr(t, d.WriteZeroes(0, 512, true), ErrReadOnly)
	_, err = d.Seal(t.Context(), filepath.Join(dir, "1"))
	wantErr(t, err, ErrReadOnly)
	must(t, d.Flush())
}

func TestForks_share_sealed_layers_and_do_not_see_each_other(t *testing.T) {
	s, dir := mustCreate(t, 4*mib)
	parent := mustOpen(t, s)
	mustWrite(t, parent, 0, fillBlock(1, mib))
	_, err := parent.Seal(t.Context(), filepath.Join(dir, "parent"))
	must(t, err)
	// The disk is not flushed: a fork of a running disk needs no sync.
	var forks []*Disk
	for i := range 3 {
		fs, err := Fork(filepath.Join(dir, fmt.Sprintf("fork-%d", i)), s, 0)
		must(t, err)
		f := mustOpen(t, fs)
		mustWrite(t, f, int64(i)*BlockSize, fillBlock(byte(10+i), BlockSize))
		forks = append(forks, f)
	}
	mustWrite(t, parent, 3*BlockSize, fillBlock(20, BlockSize))
	var wg sync.WaitGroup
	for _, d := range append(forks, parent) { // each of them makes the shared layer durable
		wg.Go(func() {
			if err := d.Flush(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, f := range forks {
		want := fillBlock(1, mib)
		copy(want[i*BlockSize:], fillBlock(byte(10+i), BlockSize))
		wantBytes(t, f, 0, want)
		must(t, f.Close())
		must(t, Verify(f.Stack()))
	}
	bigger, err := Fork(filepath.Join(dir, "bigger"), s, 8*mib)
	must(t, err)
	d := mustOpen(t, bigger)
	wantBytes(t, d, 0, append(fillBlock(1, mib), make([]byte, 7*mib)...))
	mustWrite(t, d, 7*mib, fillBlock(3, mib))
	wantBytes(t, d, 7*mib, fillBlock(3, mib))
	_, err = Fork(filepath.Join(dir, "smaller"), s, 2*mib)
	wantErr(t, err, ErrSize)
	_, err = Fork(filepath.Join(dir, "of-open"), parent.Stack(), 0)
	wantErr(t, err, ErrInUse)
}

// A child of this process has copies of the descriptors until it calls execve(2).
func TestClose_unlocks_layers_that_a_starting_child_has_copies_of(t *testing.T) {
	s, _ := mustCreate(t, 4*mib)
	d := mustOpen(t, s)
	copied, err := unix.FcntlInt((*d.layers.Load())[0].os.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(copied)
	must(t, d.Close())
	must(t, mustOpen(t, s).Close())
}

func TestTop_is_locked_against_a_second_writer_and_merges_against_readers(t *testing.T) {
	s, dir := mustCreate(t, 4*mib)
	d := mustOpen(t, s)
	_, err := Open(s, Options{})
	wantErr(t, err, ErrInUse)
	_, err = d.Seal(t.Context(), filepath.Join(dir, "1"))
	must(t, err)
	must(t, d.Flush())
	wantErr(t, Merge(t.Context(), s.Top(), d.Stack().Top()), ErrInUse)
	must(t, d.Close())
	ro, err := Open(s, Options{ReadOnly: true})
	must(t, err)
	wantErr(t, Merge(t.Context(), s.Top(), d.Stack().Top()), ErrInUse)
	must(t, ro.Close())
	must(t, Merge(t.Context(), s.Top(), d.Stack().Top()))
}

func TestRanges_outside_of_the_disk_are_refused(t *testing.T) {
	s, _ := mustCreate(t, mib)
	d := mustOpen(t, s)
	const big = math.MaxInt64
	for _, r := range [][2]int64{{-1, 1}, {0, 0}, {0, -1}, {0, mib + 1}, {mib, 1}, {mib - 1, 2}, {big, 1}, {1, big}, {big, big}, {math.MinInt64, math.MinInt64}} {
		_, _, _, err := d.ReadExtent(r[0], r[1])
		wantErr(t, err, ErrRange)
		_, _, _, err = d.WriteExtent(r[0], r[1])
		wantErr(t, err, ErrRange)
		wantErr(t, d.Discard(r[0], r[1]), ErrRange)
		wantErr(t, d.WriteZeroes(r[0], r[1], true), ErrRange)
	}
	for _, size := range []int64{0, -BlockSize, 1, BlockSize + 512, MaxSize + BlockSize} {
		_, err := Create(filepath.Join(t.TempDir(), "x"), size)
		wantErr(t, err, ErrSize)
	}
}

func TestClosed_disk_answers_err_closed(t *testing.T) {
	s, dir := mustCreate(t, mib)
	d := mustOpen(t, s)
	must(t, d.Close())
	must(t, d.Close())
	_, _, _, err := d.ReadExtent(0, 1)
	wantErr(t, err, ErrClosed)
	_, _, _, err = d.WriteExtent(0, BlockSize)
	wantErr(t, err, ErrClosed)
	wantErr(t, d.Discard(0, BlockSize), ErrClosed)
	wantErr(t, d.Flush(), ErrClosed)
	_, err = d.Seal(t.Context(), filepath.Join(dir, "1"))
	wantErr(t, err, ErrClosed)
	_, err = d.stats()
	wantErr(t, err, ErrClosed)
}

func TestUnflushed_writes_of_another_boot_are_dropped_block_by_block(t *testing.T) {
	dir := t.TempDir()
	s, err := env{fs: osfile.OS, boot: testBoot}.createDisk(filepath.Join(dir, "0"), Stack{}, header{size: mib}, true)
	must(t, err)
	d, err := env{fs: osfile.OS, boot: testBoot}.open(s, Options{})
	must(t, err)
	mustWrite(t, d, 0, fillBlock(1, BlockSize))
	must(t, d.Flush())
	mustWrite(t, d, BlockSize, fillBlock(2, BlockSize))
	must(t, d.closeFiles()) // as SIGKILL does
	ro, err := env{fs: osfile.OS, boot: testBoot}.open(s, Options{ReadOnly: true})
	must(t, err)
	wantBytes(t, ro, 0, append(fillBlock(1, BlockSize), fillBlock(2, BlockSize)...))
	must(t, ro.Close())
	for _, boot := range [][bootIDSize]byte{{2}, {}} {
		ro, err := env{fs: osfile.OS, boot: boot}.open(s, Options{ReadOnly: true})
		must(t, err)
		wantBytes(t, ro, 0, append(fillBlock(1, BlockSize), make([]byte, BlockSize)...))
		must(t, ro.Close())
	}
	next := env{fs: osfile.OS, boot: [bootIDSize]byte{2}}
	d, err = next.open(s, Options{})
	must(t, err)
	must(t, d.closeFiles())
	// Data that was dropped once does not come back.
	ro, err = next.open(s, Options{ReadOnly: true})
	must(t, err)
	wantBytes(t, ro, BlockSize, make([]byte, BlockSize))
	must(t, ro.Close())
}

func TestFull_list_of_pending_blocks_flushes_by_itself(t *testing.T) {
	s, _ := mustCreate(t, 128*mib)
	d := mustOpen(t, s)
	for i := range int64(pendingRanges + 10) {
		mustWrite(t, d, i*2*BlockSize, fillBlock(1, BlockSize))
	}
	d.mu.Lock()
	n := len(d.pending)
	d.mu.Unlock()
	if n > 20 {
		t.Errorf("%d ranges are pending, want only those after the flush", n)
	}
}

func TestDamaged_layers_are_refused_with_typed_errors(t *testing.T) {
	s, dir := mustCreate(t, mib)
	d := mustOpen(t, s)
	mustWrite(t, d, 0, fillBlock(1, 5*BlockSize))
	_, err := d.Seal(t.Context(), filepath.Join(dir, "1"))
	must(t, err)
	mustWrite(t, d, 0, fillBlock(2, BlockSize))
	must(t, d.Close())
	s = d.Stack()
	low, top := s.Layers[0], s.Layers[1]
	patch := func(path string, off int64, p ...byte) func() {
		return func() {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			must(t, err)
			_, err = f.WriteAt(p, off)
			must(t, errors.Join(err, f.Close()))
		}
	}
	both := func(path string, change func(h *header)) func() {
		return func() {
			p, err := os.ReadFile(path)
			must(t, err)
			h, err := decodeHeader(p)
			must(t, err)
			change(&h)
			var buf [headerSize]byte
			h.encode(buf[:])
			patch(path, 0, buf[:]...)()
			patch(path, slotStride, buf[:]...)()
		}
	}
	h := header{size: mib}
	cases := []struct {
		name   string
		damage func()
		want   error
	}{
		{"no magic in either slot", func() { patch(low, 0, 0)(); patch(low, slotStride, 0)() }, ErrCorrupt},
		{"one bit flipped in both slots", func() { patch(low, 30, 0xff)(); patch(low, slotStride+30, 0xff)() }, ErrCorrupt},
		{"newer version in one slot", func() {
			p, err := os.ReadFile(low)
			must(t, err)
			p = p[:headerSize]
			p[8]++
			binary.LittleEndian.PutUint32(p[508:], crc32.Checksum(p[:508], crcTable))
			patch(low, 0, p...)()
		}, ErrVersion},
		{"unknown flag", both(low, func(h *header) { h.flags |= 1 << 30 }), ErrVersion},
		{"over a raw file", both(low, func(h *header) { h.flags |= 1 << 0 }), ErrVersion},
		{"unknown state", both(low, func(h *header) { h.state = 9 }), ErrVersion},
		{"flipped bit in the table", patch(low, h.endOfData(), 1), ErrCorrupt},
		{"table over the data", both(low, func(h *header) { h.tableOff = 4096 }), ErrCorrupt},
		{"table longer than the disk", both(low, func(h *header) { h.tableLen = 1 << 40 }), ErrCorrupt},
		{"table checksum of another table", both(low, func(h *header) { h.tableCRC++ }), ErrCorrupt},
		{"unknown state of a block in the map", patch(top, mapOffset+3, 77), ErrCorrupt},
		{"sealed layer without its table", func() { must(t, os.Truncate(low, h.endOfData())) }, ErrTruncated},
		{"top shorter than its data", func() { must(t, os.Truncate(top, h.endOfData()-1)) }, ErrTruncated},
		{"empty file", func() { must(t, os.Truncate(top, 0)) }, ErrTruncated},
		{"missing lower layer", func() { must(t, os.Remove(low)) }, ErrMissingParent},
		{"other lower layer", both(low, func(h *header) { h.id[0]++ }), ErrMissingParent},
		{"lower layer of a larger disk", both(top, func(h *header) { h.size -= BlockSize }), ErrCorrupt},
		{"its own parent", both(top, func(h *header) { h.parent = h.id }), ErrCorrupt},
		{"impossible size", both(top, func(h *header) { h.size = 1 << 60 }), ErrCorrupt},
	}
	saved := map[string][]byte{}
	for _, p := range s.Layers {
		b, err := os.ReadFile(p)
		must(t, err)
		saved[p] = b
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			c.damage()
			wantErr(t, Verify(s), c.want)
			_, err := Open(s, Options{})
			wantErr(t, err, c.want)
			for p, b := range saved {
				must(t, os.WriteFile(p, b, 0o600))
			}
			must(t, Verify(s))
		})
	}
	t.Run("one damaged slot is not missed", func(t *testing.T) {
		for _, slot := range []int64{0, slotStride} {
			patch(low, slot+100, 0xff)()
			must(t, Verify(s))
			ro, err := Open(s, Options{ReadOnly: true})
			must(t, err)
			wantBytes(t, ro, BlockSize, fillBlock(1, 4*BlockSize))
			must(t, ro.Close())
			must(t, os.WriteFile(low, saved[low], 0o600))
		}
	})
	t.Run("order and repetition matter", func(t *testing.T) {
		wantErr(t, Verify(Stack{Layers: []string{top, low}}), ErrMissingParent)
		wantErr(t, Verify(Stack{Layers: []string{low, low}}), ErrMissingParent)
		wantErr(t, Verify(Stack{Layers: []string{top}}), ErrMissingParent)
		wantErr(t, Verify(Stack{}), ErrMissingParent)
	})
	t.Run("an existing file is not overwritten", func(t *testing.T) {
		_, err := Create(low, mib)
		wantErr(t, err, os.ErrExist)
		_, err = Import(t.Context(), low, top)
		wantErr(t, err, os.ErrExist)
		must(t, Verify(s))
	})
}

func TestDisk_leaks_no_file_descriptor(t *testing.T) {
	count := func() int {
		ents, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(ents)
	}
	s, dir := mustCreate(t, mib)
	before := count()
	for i := range 5 {
		d, err := Open(s, Options{})
		must(t, err)
		_, err = d.Seal(t.Context(), filepath.Join(dir, fmt.Sprint("l", i)))
		must(t, err)
		_, err = Open(d.Stack(), Options{})
		wantErr(t, err, ErrInUse)
		must(t, d.Close())
		s = d.Stack()
		_, err = Open(Stack{Layers: s.Layers[1:]}, Options{})
		wantErr(t, err, ErrMissingParent)
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
}

func TestIndex_reads_back_what_was_set_over_chunk_borders(t *testing.T) {
	const blocks = 3*chunkBlocks + 5
	r := rand.New(rand.NewPCG(1, 2))
	x := newIndex(blocks)
	want := make([]source, blocks)
	for range 2000 {
		a, b := r.Int64N(blocks), r.Int64N(blocks)
		if a > b {
			a, b = b, a
		}
		if r.IntN(2) == 0 {
			b = min(b, a+r.Int64N(9))
		}
		s := source(r.IntN(4))
		if r.IntN(50) == 0 {
			s = 0xffff
		}
		x.set(a, b-a, s)
		for i := a; i < b; i++ {
			want[i] = s
		}
		b = r.Int64N(blocks)
		if x.get(b) != want[b] {
			t.Fatalf("block %d is %d, want %d", b, x.get(b), want[b])
		}
		n := int64(0)
		for b+n < blocks && want[b+n] == want[b] {
			n++
		}
		if got := x.runLen(b, blocks, want[b]); got != n {
			t.Fatalf("run from %d is %d, want %d", b, got, n)
		}
	}
}

// Another process opens its files, as for a process that may open none.
func TestA_disk_makes_its_layers_in_its_file_system(t *testing.T) {
	s, dir := mustCreate(t, 64*mib)
	c, f, err := farfiles.Pair()
	must(t, err)
	far, err := farfiles.New(f)
	must(t, err)
	type result struct {
		calls map[string]int
		err   error
	}
	done := make(chan result, 1)
	go func() {
		calls, err := farfiles.Serve(c, nil)
		done <- result{calls, err}
	}()
	for i := range 3 {
		d, err := Open(s, Options{FS: far})
		must(t, err)
		if _, err := Open(s, Options{}); !errors.Is(err, ErrInUse) {
			t.Errorf("a second time for writing: got %v, want ErrInUse", err)
		}
		mustWrite(t, d, int64(i)*BlockSize, fillBlock(byte(1+i), BlockSize))
		top := filepath.Join(dir, fmt.Sprint(i+1))
		must(t, d.Prepare(top))
		_, err = d.Seal(context.Background(), top)
		must(t, err)
		must(t, d.Flush())
		if st, err := d.Statfs(); err != nil || st.Blocks == 0 {
			t.Errorf("%d blocks, %v", st.Blocks, err)
		}
		s = d.Stack()
		must(t, d.Close())
	}
	must(t, far.Close())
	got := <-done
	must(t, errors.Join(got.err, c.Close()))
	if got.calls["rename"] != 3 || got.calls["open"] < 3*3 {
		t.Errorf("the other process was asked for %v", got.calls)
	}
	d := mustOpen(t, s)
	for i := range 3 {
		wantBytes(t, d, int64(i)*BlockSize, fillBlock(byte(1+i), BlockSize))
	}
}

func TestUnused_is_a_top_that_no_disk_has_written_to(t *testing.T) {
	t.Parallel()
	const size = 64 * BlockSize
	for name, tc := range map[string]struct {
		use  func(*testing.T, *Disk)
		size int64
		want bool
	}{
		"new":                     {want: true},
		"opened":                  {use: func(t *testing.T, d *Disk) {}, want: true},
		"opened and flushed":      {use: func(t *testing.T, d *Disk) { must(t, d.Flush()) }, want: true},
		"written":                 {use: func(t *testing.T, d *Disk) { _, err := d.WriteAt(fillBlock(7, BlockSize), 0); must(t, err) }},
		"written at the very end": {use: func(t *testing.T, d *Disk) { _, err := d.WriteAt(fillBlock(7, 512), size-512); must(t, err) }},
		"zeroed":                  {use: func(t *testing.T, d *Disk) { must(t, d.WriteZeroes(0, BlockSize, true)) }},
		"larger":                  {size: 2 * size},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lower, dir := mustCreate(t, size)
			d := mustOpen(t, lower)
			_, err := d.WriteAt(fillBlock(1, BlockSize), 0)
			must(t, err)
			_, err = d.Seal(t.Context(), filepath.Join(dir, "other"))
			must(t, err)
			must(t, d.Flush())
			must(t, d.Close())
			path := filepath.Join(dir, "top")
			st, err := Fork(path, lower, tc.size)
			must(t, err)
			if tc.use != nil {
				top := mustOpen(t, st)
				if _, err := Unused(path, lower); !errors.Is(err, ErrInUse) {
					t.Errorf("while it is open: %v, want ErrInUse", err)
				}
				tc.use(t, top)
				must(t, top.Close())
			}
			if got, err := Unused(path, lower); got != tc.want || err != nil {
				t.Errorf("%v, %v, want %v", got, err, tc.want)
			}
			for what, of := range map[string]Stack{"itself": st, "what is below": {Layers: []string{filepath.Join(dir, "other")}}} {
				if got, err := Unused(path, of); got || err != nil {
					t.Errorf("above %s: %v, %v", what, got, err)
				}
			}
			if got, err := Unused(path+"none", lower); got || err != nil {
				t.Errorf("a layer that is missing: %v, %v", got, err)
			}
		})
	}
}
