package disk

import (
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// layerStats describes the content of a layer.
type layerStats struct {
	LayerInfo
	Data, Zero int64 // bytes that the layer supplies, and bytes that it makes zero
	Allocated  int64 // bytes on the host, with map and table
}

// stats describes every layer, bottom first. It reads the tables and maps, and waits for a flush under way.
func (d *Disk) stats() ([]layerStats, error) {
	d.flushMu.Lock()
	defer d.flushMu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() {
		return nil, ErrClosed
	}
	var out []layerStats
	for _, l := range d.all() {
		s := layerStats{LayerInfo: l.info()}
		var err error
		if s.Allocated, err = allocated(l.os); err != nil {
			return nil, err
		}
		if err := l.runs(func(r run) {
			switch settled(r.state, d.env.pendingCounts(&l.hdr)) {
			case blockData:
				s.Data += r.count * BlockSize
			case blockZero:
				s.Zero += r.count * BlockSize
			}
		}); err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// allocated returns the space that a file takes on the host, in bytes.
func allocated(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, err
	}
	return st.Blocks * 512, nil
}

// rawCopy makes a raw file with the content of a disk, with holes where the disk has no data.
func rawCopy(t testing.TB, d *Disk, path string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer func() { must(t, f.Close()) }()
	must(t, f.Truncate(d.Size()))
	for off := int64(0); off < d.Size(); {
		from, at, n, err := d.ReadExtent(off, min(64*mib, d.Size()-off))
		must(t, err)
		if from != nil {
			_, err = io.Copy(io.NewOffsetWriter(f, off), io.NewSectionReader(from, at, n))
			must(t, err)
		}
		off += n
	}
}
