package snapshot

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// benchRAM names a file with the RAM of a guest to measure with, in the format of QEMU's pmemsave. Without it the
// benchmarks use this test's own binary, which compresses as program text alone does.
const benchRAM = "DROWSE_BENCH_RAM"

func ramPages(b *testing.B) []byte {
	b.Helper()
	name := os.Getenv(benchRAM)
	if name == "" {
		name = os.Args[0]
	}
	data, err := os.ReadFile(name)
	if err != nil {
		b.Fatal(err)
	}
	return data[:len(data)/guestmem.PageSize*guestmem.PageSize]
}

// framesOf packs the nonzero pages of data as the writer does.
func framesOf(data []byte, pages int) (frames [][]byte, total int) {
	var cur []byte
	for i := 0; i < len(data); i += guestmem.PageSize {
		if i%(ChunkPages*guestmem.PageSize) == 0 && len(cur) > 0 {
			frames, cur = append(frames, cur), nil
		}
		p := data[i : i+guestmem.PageSize]
		if bytes.Equal(p, zeroPage[:]) {
			continue
		}
		total += len(p)
		if cur = append(cur, p...); len(cur) == pages*guestmem.PageSize {
			frames, cur = append(frames, cur), nil
		}
	}
	if len(cur) > 0 {
		frames = append(frames, cur)
	}
	return frames, total
}

// cpuTime returns the processor time of this process in microseconds. On a busy machine it says more than elapsed
// time.
func cpuTime(b *testing.B) float64 {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e3
}

// BenchmarkFrame measures the time to compress and to decompress a frame on one processor, and the ratio.
// FramePages and frameLevel were chosen by it.
func BenchmarkFrame(b *testing.B) {
	data := ramPages(b)
	for _, pages := range []int{8, 16, 32, 64} {
		frames, total := framesOf(data, pages)
		for _, level := range []zstd.EncoderLevel{zstd.SpeedFastest, zstd.SpeedDefault, zstd.SpeedBetterCompression} {
			c, err := newCompressor(level)
			if err != nil {
				b.Fatal(err)
			}
			var stored [][]byte
			var descs []Frame
			size := 0
			for _, raw := range frames {
				out, f := c.append(nil, raw)
				f.file = 1
				stored, descs, size = append(stored, out), append(descs, f), size+len(out)
			}
			name := fmt.Sprintf("pages=%d/level=%v", pages, level)
			b.Run("compress/"+name, func(b *testing.B) {
				b.SetBytes(int64(total / len(frames)))
				var buf []byte
				began := cpuTime(b)
				for i := range b.N {
					buf, _ = c.append(buf[:0], frames[i%len(frames)])
				}
				b.ReportMetric((cpuTime(b)-began)/float64(b.N), "cpu-us/frame")
				b.ReportMetric(float64(total)/float64(size), "ratio")
			})
			b.Run("decompress/"+name, func(b *testing.B) {
				d, err := NewDecoder()
				if err != nil {
					b.Fatal(err)
				}
				defer d.Release()
				b.SetBytes(int64(total / len(frames)))
				began := cpuTime(b)
				for i := range b.N {
					k := i % len(frames)
					if _, wrong := d.decode(&descs[k], stored[k]); wrong != "" {
						b.Fatal(wrong)
					}
				}
				b.ReportMetric((cpuTime(b)-began)/float64(b.N), "cpu-us/frame")
			})
		}
	}
}

func loadRAM(b *testing.B, mem *guestmem.Memory, data []byte) {
	b.Helper()
	for i := 0; i < len(data) && uint64(i) < mem.Size(); i += guestmem.PageSize {
		if p := data[i : i+guestmem.PageSize]; !bytes.Equal(p, zeroPage[:]) {
			writePage(b, mem, uint64(i/guestmem.PageSize), p)
		}
	}
}

// BenchmarkCreate writes whole snapshots and makes them durable. BenchmarkOpen opens them.
func BenchmarkCreate(b *testing.B) {
	data := ramPages(b)
	mem := testMemory(b, 4<<30)
	loadRAM(b, mem, data)
	spec := testSpec(b, mem)
	parent := b.TempDir()
	var info *Info
	for i := range b.N {
		var err error
		if info, err = Create(context.Background(), filepath.Join(parent, fmt.Sprint(i)), spec); err != nil {
			b.Fatal(err)
		}
	}
	st := info.Manifest.Stats
	b.SetBytes(int64(st.Pages * guestmem.PageSize))
	b.ReportMetric(float64(st.Pages*guestmem.PageSize)/(1<<20), "MiB-raw")
	b.ReportMetric(float64(info.SizeBytes)/(1<<20), "MiB-stored")
	b.ReportMetric(float64(info.CommitTime.Milliseconds()), "ms-commit")
}

func BenchmarkOpen(b *testing.B) {
	data := ramPages(b)
	for _, mib := range []uint64{256, 4096, 16384} {
		b.Run(fmt.Sprintf("RAM=%dMiB", mib), func(b *testing.B) {
			mem := testMemory(b, mib<<20)
			loadRAM(b, mem, data[:min(len(data), 128<<20)])
			dir := filepath.Join(b.TempDir(), "snap")
			if _, err := Create(context.Background(), dir, testSpec(b, mem)); err != nil {
				b.Fatal(err)
			}
			b.ResetTimer()
			for range b.N {
				s, err := Open(dir)
				if err != nil {
					b.Fatal(err)
				}
				s.Close()
			}
		})
	}
}

// BenchmarkDelta writes deltas of RAM that has content in every chunk, without waiting for the disk. The cost of a
// delta grows with what has changed, and hardly with the size of RAM.
func BenchmarkDelta(b *testing.B) {
	for _, mib := range []uint64{256, 4096, 16384} {
		r := newRAM(Slot{Size: mib << 20})
		page := bytes.Repeat([]byte("some text "), 410)[:guestmem.PageSize]
		for p := uint64(0); p < r.total(); p += ChunkPages {
			r.pages[p] = page
		}
		parent := b.TempDir()
		if _, err := Create(context.Background(), filepath.Join(parent, "base"), r.spec()); err != nil {
			b.Fatal(err)
		}
		base := open(b, filepath.Join(parent, "base"))
		for _, dirty := range []struct {
			name       string
			pages, run uint64
		}{{"nothing", 0, 1}, {"256 single pages", 256, 1}, {"256 pages in runs of 16", 256, 16}} {
			b.Run(fmt.Sprintf("RAM=%dMiB/%s", mib, dirty.name), func(b *testing.B) {
				changed := guestmem.NewPageSet(r.total())
				for i := range dirty.pages / dirty.run {
					first := i * (r.total() / (dirty.pages / dirty.run))
					changed.Add(first, first+dirty.run)
					for p := first; p < first+dirty.run; p++ {
						noise := make([]byte, guestmem.PageSize)
						fillPage(noise, p, false)
						r.pages[p] = noise
					}
				}
				var info *Info
				for i := range b.N {
					spec := r.spec()
					spec.Base, spec.Changed = base, changed
					dir := filepath.Join(parent, fmt.Sprint(i))
					var err error
					if info, err = Create(context.Background(), dir, spec); err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					if err := os.RemoveAll(dir); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
				b.ReportMetric(float64(info.SizeBytes)/1024, "KiB-written")
			})
		}
	}
}

// BenchmarkDepth opens snapshots at the beginning and far down a chain, and reads pages of them. Only what Open
// has read is in memory.
func BenchmarkDepth(b *testing.B) {
	rnd := rand.New(rand.NewPCG(18, 1))
	r := newRAM(Slot{Size: 256 << 20})
	for p := range r.total() / 4 {
		page := make([]byte, guestmem.PageSize)
		fillPage(page, p, false)
		r.pages[4*p] = page
	}
	parent := b.TempDir()
	dir := filepath.Join(parent, "0")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		b.Fatal(err)
	}
	for depth := range 1001 {
		if depth > 0 {
			base, err := Open(dir)
			if err != nil {
				b.Fatal(err)
			}
			spec := r.spec()
			spec.Base, spec.Changed = base, guestmem.NewPageSet(r.total())
			for range 4 {
				first := rnd.Uint64N(r.total()/16) * 16
				spec.Changed.Add(first, first+16)
			}
			next := filepath.Join(parent, fmt.Sprint(depth))
			if _, err := Create(context.Background(), next, spec); err != nil {
				b.Fatal(err)
			}
			base.Close()
			if err := os.RemoveAll(dir); err != nil {
				b.Fatal(err)
			}
			dir = next
		}
		if depth != 0 && depth != 1 && depth != 1000 {
			continue
		}
		b.Run(fmt.Sprintf("depth=%d/open", depth), func(b *testing.B) {
			for range b.N {
				s, err := Open(dir)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(len(s.files)), "files")
				s.Close()
			}
		})
		b.Run(fmt.Sprintf("depth=%d/page", depth), func(b *testing.B) {
			s := open(b, dir)
			d, err := NewDecoder()
			if err != nil {
				b.Fatal(err)
			}
			defer d.Release()
			var l Leaf
			buf := make([]byte, maxLeaf)
			b.ResetTimer()
			for i := range b.N {
				page := 4 * (uint64(i) * 2654435761 % (r.total() / 4))
				if _, err := s.memory.readLeaf(int(page/ChunkPages), &l, buf); err != nil {
					b.Fatal(err)
				}
				frame, _, _ := l.Page(int(page % ChunkPages))
				if _, err := s.memory.ReadFrame(l.Frame(frame), d); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkChecksum measures the cost of verifying a frame's checksum before the frame is used.
func BenchmarkChecksum(b *testing.B) {
	p := make([]byte, 16<<10)
	b.SetBytes(int64(len(p)))
	for range b.N {
		_, _ = io.Discard.Write(p[:checksum(p)&1])
	}
}
