package blk

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Backend is a disk. Offsets and lengths are in bytes, inside [0, Size()), and
// multiples of 512. The device calls it from one goroutine at a time. A request that fails with [devices.ErrLater] is
// not answered, and waits as those do for which there is no space.
type Backend interface {
	// Size returns the size of the disk in bytes. It does not change.
	Size() int64
	// ReadOnly reports whether writes, discards and zeroing fail.
	ReadOnly() bool
	// ReadExtent returns where to read the first length bytes of [off, off+n): at fileOff in f, or nowhere if f is
	// nil, because they are zeros. length is from 1 to n.
	ReadExtent(off, n int64) (f *os.File, fileOff, length int64, err error)
	// WriteExtent returns where to write the first length bytes of [off, off+n). The device follows each success
	// with exactly one Wrote.
	WriteExtent(off, n int64) (f *os.File, fileOff, length int64, err error)
	// Wrote ends the write of an extent. err is nil, or the reason why the file did not take the bytes. The error
	// that Wrote returns is the outcome of the write.
	Wrote(off, n int64, err error) error
	// Flush makes all earlier writes durable.
	Flush() error
	// Discard declares that the content of a range no longer matters.
	Discard(off, n int64) error
	// WriteZeroes makes a range read as zeros. mayUnmap allows the backend to free the space.
	WriteZeroes(off, n int64, mayUnmap bool) error
}

// ErrLocked means that someone writes to the file.
var ErrLocked = errors.New("the disk image is being written")

// Image is a read-only [Backend] on one raw image: a regular file or a block device.
type Image struct {
	f    *os.File
	size int64
}

// NewImage locks an open image with flock(2), which any number of readers share. It fails with ErrLocked if it cannot
// get the lock. The size must be a positive multiple of 512 bytes. NewImage takes f over, and closes it if it fails.
func NewImage(f *os.File) (*Image, error) {
	size, err := lockImage(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening the disk image %s: %w", f.Name(), err), f.Close())
	}
	return &Image{f: f, size: size}, nil
}

// lockImage calls flock itself: device packages import only the device infrastructure of this module.
func lockImage(f *os.File) (size int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if m := info.Mode(); !m.IsRegular() && (m&os.ModeDevice == 0 || m&os.ModeCharDevice != 0) {
		return 0, errors.New("it is neither a regular file nor a block device")
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return 0, fmt.Errorf("%w: wait until that is done", ErrLocked)
		}
		return 0, fmt.Errorf("locking it: %w", err)
	}
	// Unlike stat(2), seeking also finds the size of a block device.
	if size, err = f.Seek(0, io.SeekEnd); err != nil {
		return 0, fmt.Errorf("finding its size: %w", err)
	}
	if size == 0 || size%SectorSize != 0 {
		return 0, fmt.Errorf("its size of %d bytes is not a positive multiple of %d: pad it with truncate(1)", size, SectorSize)
	}
	return size, nil
}

// Close releases the file and its lock.
func (b *Image) Close() error { return b.f.Close() }

// Size implements [Backend].
func (b *Image) Size() int64 { return b.size }

// ReadOnly implements [Backend].
func (b *Image) ReadOnly() bool { return true }

// ReadExtent implements [Backend].
func (b *Image) ReadExtent(off, n int64) (*os.File, int64, int64, error) { return b.f, off, n, nil }

// WriteExtent implements [Backend].
func (b *Image) WriteExtent(int64, int64) (*os.File, int64, int64, error) {
	return nil, 0, 0, unix.EROFS
}

// Wrote implements [Backend].
func (b *Image) Wrote(_, _ int64, err error) error { return err }

// Flush implements [Backend].
func (b *Image) Flush() error { return nil }

// Discard implements [Backend].
func (b *Image) Discard(int64, int64) error { return unix.EROFS }

// WriteZeroes implements [Backend].
func (b *Image) WriteZeroes(int64, int64, bool) error { return unix.EROFS }
