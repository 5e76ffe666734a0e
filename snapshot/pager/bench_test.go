package pager

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// benchRAM names a file with the RAM of a guest; see package snapshot.
const benchRAM = "DROWSE_BENCH_RAM"

func benchSnapshot(b *testing.B, size uint64) string {
	b.Helper()
	name := os.Getenv(benchRAM)
	if name == "" {
		name = os.Args[0]
	}
	data, err := os.ReadFile(name)
	if err != nil {
		b.Fatal(err)
	}
	data = data[:min(len(data), 256<<20)/pageSize*pageSize]
	mem := newMemory(b, size)
	for i := 0; i < len(data); i += pageSize {
		p := data[i : i+pageSize]
		if *(*[pageSize]byte)(p) == [pageSize]byte{} {
			continue
		}
		if err := mem.Write(guestmem.GPA(i), p); err != nil {
			b.Fatal(err)
		}
	}
	src, err := snapshot.NewGuestSource(mem)
	if err != nil {
		b.Fatal(err)
	}
	defer src.Close()
	return create(b, src)
}

// BenchmarkNew measures what a resume pays before its first KVM_RUN: opening the snapshot, reserving RAM and
// registering it. The content is the same for all sizes of RAM.
func BenchmarkNew(b *testing.B) {
	for _, mib := range []uint64{256, 4096, 16384} {
		b.Run(fmt.Sprintf("RAM=%dMiB", mib), func(b *testing.B) {
			dir := benchSnapshot(b, mib<<20)
			b.ResetTimer()
			for range b.N {
				s, err := snapshot.Open(dir)
				if err != nil {
					b.Fatal(err)
				}
				mem, err := guestmem.New(mib << 20)
				if err != nil {
					b.Fatal(err)
				}
				p, err := New(mem, s.Memory(), Options{})
				if err != nil {
					b.Fatal(err)
				}
				p.Start()
				b.StopTimer()
				p.Close()
				mem.Close()
				s.Close()
				b.StartTimer()
			}
		})
	}
}

// BenchmarkFault touches one page of each frame, by a system call, or by Go code through Ensure.
func BenchmarkFault(b *testing.B) {
	dir := benchSnapshot(b, 256<<20)
	s := openSnapshot(b, dir)
	var pages []uint64
	for c := range s.Memory().Chunks() {
		l, err := s.Memory().Leaf(c)
		if err != nil {
			b.Fatal(err)
		}
		seen := map[int]bool{}
		for i := 0; l != nil && i < chunkPages; i++ {
			if f, _, ok := l.Page(i); ok && !seen[f] {
				seen[f] = true
				pages = append(pages, uint64(c*chunkPages+i))
			}
		}
	}
	for _, how := range []string{"system call", "Ensure"} {
		b.Run(how, func(b *testing.B) {
			o := newToucher(b)
			buf := make([]byte, 1)
			var p *Pager
			var mem *guestmem.Memory
			for i := range b.N {
				if i%len(pages) == 0 {
					b.StopTimer()
					if p != nil {
						p.Close()
						mem.Close()
					}
					mem = newMemory(b, s.Manifest().RAM())
					var err error
					if p, err = New(mem, s.Memory(), Options{}); err != nil {
						b.Fatal(err)
					}
					p.Start()
					b.StartTimer()
				}
				gpa := guestmem.GPA(pages[i%len(pages)] * pageSize)
				var err error
				if how == "Ensure" {
					err = mem.Read(gpa, buf)
				} else {
					err = mem.DrainTo(gpa, 1, o.f, 0)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			p.Close()
		})
	}
}

// BenchmarkEnsurePresent measures Ensure for a page that is present.
func BenchmarkEnsurePresent(b *testing.B) {
	dir := makeSnapshot(b, 64<<20, smallRAM)
	p, _ := restore(b, dir, Options{})
	for range b.N {
		if err := p.Ensure(4096, 64); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLoad measures the speed of loading everything on one processor.
func BenchmarkLoad(b *testing.B) {
	dir := benchSnapshot(b, 256<<20)
	s := openSnapshot(b, dir)
	for range b.N {
		b.StopTimer()
		mem := newMemory(b, s.Manifest().RAM())
		p, err := New(mem, s.Memory(), Options{})
		if err != nil {
			b.Fatal(err)
		}
		p.Start()
		b.StartTimer()
		if err := p.Load(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		b.SetBytes(int64(p.Stats().PagesCopied.Load() * pageSize))
		p.Close()
		mem.Close()
		b.StartTimer()
	}
}

// BenchmarkZeros touches every zero page of RAM. Some are in chunks that are registered because another page of
// them has content, others in chunks that are left to the kernel.
func BenchmarkZeros(b *testing.B) {
	const chunks = 32
	var one []part
	for c := range uint64(chunks) {
		one = append(one, part{c * chunkPages, c*chunkPages + 1})
	}
	for _, tc := range []struct {
		name  string
		parts []part
	}{{"registered", one}, {"left to the kernel", one[:1]}} {
		b.Run(tc.name, func(b *testing.B) {
			s := openSnapshot(b, makeSnapshot(b, chunks*chunkBytes, tc.parts))
			o := newToucher(b)
			for range b.N {
				b.StopTimer()
				mem := newMemory(b, chunks*chunkBytes)
				p, err := New(mem, s.Memory(), Options{})
				if err != nil {
					b.Fatal(err)
				}
				p.Start()
				b.StartTimer()
				for page := uint64(chunkPages + 1); page < chunks*chunkPages; page++ {
					if page%chunkPages == 0 {
						continue
					}
					if err := o.write(mem, guestmem.GPA(page*pageSize), []byte{1}); err != nil {
						b.Fatal(err)
					}
				}
				b.StopTimer()
				p.Close()
				mem.Close()
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64((chunks-1)*(chunkPages-1)), "ns/page")
		})
	}
}
