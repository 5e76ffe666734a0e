package blk

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Backend is a disk. Offsets and lengths are in bytes, inside [0, Size()), and
// multiples of 512. The device calls it from one goroutine at a time.
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

// ErrLocked means that another VM has the file open.
var ErrLocked = errors.New("the disk image is in use by another VM")

// File is a [Backend] on one raw image: a regular file or a block device.
type File struct {
	f        *os.File
	size     int64
	readOnly bool
}

// OpenFile opens a raw image and locks it with flock(2): any number of readers, or one writer. It fails with
// ErrLocked if it cannot get the lock. The size must be a positive multiple of 512 bytes.
func OpenFile(path string, readOnly bool) (*File, error) {
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	f, err := os.OpenFile(path, flags|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a disk image: %w", err)
	}
	return NewFile(f, readOnly)
}

// NewFile is OpenFile for an image that is open already, for reading if readOnly, or else also for writing. It takes
// f over, and closes it if it fails.
func NewFile(f *os.File, readOnly bool) (*File, error) {
	lock := unix.LOCK_EX
	if readOnly {
		lock = unix.LOCK_SH
	}
	b, err := lockFile(f, lock)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening the disk image %s: %w", f.Name(), err), f.Close())
	}
	b.readOnly = readOnly
	return b, nil
}

// lockFile calls flock itself: device packages import only the device infrastructure of this module.
func lockFile(f *os.File, lock int) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if m := info.Mode(); !m.IsRegular() && (m&os.ModeDevice == 0 || m&os.ModeCharDevice != 0) {
		return nil, errors.New("it is neither a regular file nor a block device")
	}
	if err := unix.Flock(int(f.Fd()), lock|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: stop that VM, or open the image read-only in all of them", ErrLocked)
		}
		return nil, fmt.Errorf("locking it: %w", err)
	}
	// Unlike stat(2), seeking also finds the size of a block device.
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, fmt.Errorf("finding its size: %w", err)
	}
	if size == 0 || size%SectorSize != 0 {
		return nil, fmt.Errorf("its size of %d bytes is not a positive multiple of %d: pad it with truncate(1)", size, SectorSize)
	}
	return &File{f: f, size: size}, nil
}

// Close releases the file and its lock.
func (b *File) Close() error { return b.f.Close() }

// Size implements [Backend].
func (b *File) Size() int64 { return b.size }

// ReadOnly implements [Backend].
func (b *File) ReadOnly() bool { return b.readOnly }

// ReadExtent implements [Backend].
func (b *File) ReadExtent(off, n int64) (*os.File, int64, int64, error) { return b.f, off, n, nil }

// WriteExtent implements [Backend].
func (b *File) WriteExtent(off, n int64) (*os.File, int64, int64, error) {
	if b.readOnly {
		return nil, 0, 0, unix.EROFS
	}
	return b.f, off, n, nil
}

// Wrote implements [Backend].
func (b *File) Wrote(_, _ int64, err error) error { return err }

// Flush implements [Backend].
func (b *File) Flush() error {
	if b.readOnly {
		return nil
	}
	if err := retry(func() error { return unix.Fdatasync(int(b.f.Fd())) }); err != nil {
		// Always EIO: the kernel forgets a failed write-back, so the request must not be tried again.
		return fmt.Errorf("%w: fdatasync: %v", unix.EIO, err)
	}
	return nil
}

// Discard implements [Backend]. It does nothing where the file system cannot punch holes.
func (b *File) Discard(off, n int64) error {
	err := b.allocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// WriteZeroes implements [Backend].
func (b *File) WriteZeroes(off, n int64, mayUnmap bool) error {
	mode := uint32(unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE)
	if mayUnmap {
		mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	}
	err := b.allocate(mode, off, n)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	for n > 0 {
		k, err := b.f.WriteAt(zeros[:min(n, int64(len(zeros)))], off)
		if err != nil {
			return err
		}
		off, n = off+int64(k), n-int64(k)
	}
	return nil
}

var zeros [64 << 10]byte

func (b *File) allocate(mode uint32, off, n int64) error {
	if b.readOnly {
		return unix.EROFS
	}
	return os.NewSyscallError("fallocate", retry(func() error {
		return unix.Fallocate(int(b.f.Fd()), mode, off, n)
	}))
}

func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
