package disk

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
)

func BenchmarkReadExtent(b *testing.B) {
	for _, layers := range []int{1, 100} {
		b.Run(fmt.Sprintf("layers=%d", layers), func(b *testing.B) {
			s, dir := mustCreate(b, 64*mib)
			d := mustOpen(b, s)
			for l := range layers {
				for i := range int64(16) {
					mustWrite(b, d, (i*977+int64(l)*131)%16384*BlockSize, fillBlock(1, BlockSize))
				}
				_, err := d.Seal(b.Context(), filepath.Join(dir, fmt.Sprint("s", l)))
				must(b, err)
			}
			b.ReportAllocs()
			var off int64
			for b.Loop() {
				off = (off + 7919*BlockSize) % (64 * mib)
				if _, _, _, err := d.ReadExtent(off, BlockSize); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkWriteExtent measures WriteExtent and Wrote, without the write between them.
func BenchmarkWriteExtent(b *testing.B) {
	b.Run("overwrite", func(b *testing.B) {
		s, _ := mustCreate(b, 64*mib)
		d := mustOpen(b, s)
		mustWrite(b, d, 0, fillBlock(1, mib))
		b.ReportAllocs()
		for b.Loop() {
			_, _, n, err := d.WriteExtent(4*BlockSize, BlockSize)
			if err != nil {
				b.Fatal(err)
			}
			if err := d.Wrote(4*BlockSize, n, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("allocate", func(b *testing.B) {
		s, _ := mustCreate(b, 8<<30)
		d := mustOpen(b, s)
		b.ReportAllocs()
		var off int64
		for b.Loop() {
			_, _, n, err := d.WriteExtent(off, BlockSize)
			if err != nil {
				b.Fatal(err)
			}
			if err := d.Wrote(off, n, nil); err != nil {
				b.Fatal(err)
			}
			off = (off + BlockSize) % (8 << 30)
		}
	})
}

// BenchmarkSeal measures Seal after much and after little unflushed data was written.
func BenchmarkSeal(b *testing.B) {
	for _, data := range []int64{mib, 64 * mib} {
		b.Run(fmt.Sprintf("data=%dMiB", data/mib), func(b *testing.B) {
			s, dir := mustCreate(b, 8<<30)
			d := mustOpen(b, s)
			buf := fillBlock(1, mib)
			var took time.Duration
			n := 0
			for b.Loop() {
				for off := int64(0); off < data; off += mib {
					mustWrite(b, d, off, buf)
				}
				n++
				start := time.Now()
				_, err := d.Seal(b.Context(), filepath.Join(dir, fmt.Sprint("s", n)))
				took += time.Since(start)
				must(b, err)
			}
			b.ReportMetric(float64(took.Nanoseconds())/float64(n), "ns/seal")
		})
	}
}

// noSync is the machine's file system without its slow syncs. Long chains are built fast with it.
type noSync struct{ osfile.FS }

type noSyncFile struct{ osfile.File }

func (noSyncFile) Sync() error           { return nil }
func (noSyncFile) Datasync() error       { return nil }
func (noSync) SyncDir(name string) error { return nil }

func (n noSync) OpenFile(name string, flag int, perm os.FileMode) (osfile.File, error) {
	f, err := n.FS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return noSyncFile{f}, nil
}

// BenchmarkOpen opens a chain in which each layer has 64 scattered blocks.
func BenchmarkOpen(b *testing.B) {
	for _, layers := range []int{1, 100, 1000} {
		b.Run(fmt.Sprintf("layers=%d", layers), func(b *testing.B) {
			dir := b.TempDir()
			e := env{fs: noSync{osfile.OS}, boot: hostBoot()}
			s, err := e.createDisk(filepath.Join(dir, "top"), Stack{}, header{size: 8 << 30}, true)
			must(b, err)
			d, err := e.open(s, Options{})
			must(b, err)
			for l := range layers - 1 {
				for i := range int64(64) {
					mustWrite(b, d, (i*31357+int64(l)*7919)%(8<<30/BlockSize)*BlockSize, fillBlock(1, BlockSize))
				}
				_, err := d.Seal(b.Context(), filepath.Join(dir, fmt.Sprint("l", l)))
				must(b, err)
			}
			s = d.Stack()
			must(b, d.Close())
			b.ReportAllocs()
			for b.Loop() {
				d, err := Open(s, Options{ReadOnly: true})
				must(b, err)
				must(b, d.Close())
			}
		})
	}
}
