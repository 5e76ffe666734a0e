package devicetest

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Disk is a blk.Backend on one raw file, to write to.
type Disk struct {
	f    *os.File
	size int64
}

// NewDisk makes a disk of a file, which it closes when the test ends.
func NewDisk(t testing.TB, f *os.File) *Disk {
	t.Helper()
	t.Cleanup(func() { f.Close() })
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return &Disk{f, info.Size()}
}

// Size implements blk.Backend.
func (d *Disk) Size() int64 { return d.size }

// ReadOnly implements blk.Backend.
func (d *Disk) ReadOnly() bool { return false }

// ReadExtent implements blk.Backend.
func (d *Disk) ReadExtent(off, n int64) (*os.File, int64, int64, error) { return d.f, off, n, nil }

// WriteExtent implements blk.Backend.
func (d *Disk) WriteExtent(off, n int64) (*os.File, int64, int64, error) { return d.f, off, n, nil }

// Wrote implements blk.Backend.
func (d *Disk) Wrote(_, _ int64, err error) error { return err }

// Flush implements blk.Backend.
func (d *Disk) Flush() error {
	if err := unix.Fdatasync(int(d.f.Fd())); err != nil {
		return fmt.Errorf("%w: fdatasync: %v", unix.EIO, err)
	}
	return nil
}

// Discard implements blk.Backend.
func (d *Disk) Discard(off, n int64) error { return d.WriteZeroes(off, n, true) }

// WriteZeroes implements blk.Backend.
func (d *Disk) WriteZeroes(off, n int64, mayUnmap bool) error {
	mode := uint32(unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE)
	if mayUnmap {
		mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	}
	err := unix.Fallocate(int(d.f.Fd()), mode, off, n)
	if errors.Is(err, unix.EOPNOTSUPP) {
		_, err = d.f.WriteAt(make([]byte, n), off)
	}
	return err
}
