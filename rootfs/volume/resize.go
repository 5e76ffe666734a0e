package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// ErrNoSpace: the host's file system has no room for the larger copy of a volume.
var ErrNoSpace = errors.New("no space for a copy of the volume")

// Resize enlarges a volume that is not attached, and its file system, to size bytes, a
// multiple of 1 MiB. A volume of that size stays unchanged; a larger one is refused with
// ErrSize. Resize fails with ErrInUse while the volume is attached, and with the error of
// allow, which it calls once the volume cannot be attached any more.
//
// Once Resize has begun to change the volume, no memory of a guest belongs to it any more:
// Settled is gone, whether Resize succeeds or fails.
//
// The file system grows in a copy, since a killed resize2fs(8) leaves neither the old nor
// the new one. So there must be room for a second copy of what the volume has allocated,
// unless the host's file system has reflinks. In order: the record loses Settled; the copy
// is made, grown and synced; it replaces the file; the record gets the new size. After a
// kill or a loss of power in between, the volume is unchanged or has the new size. Then
// Resize may be called again.
func (s *Store) Resize(ctx context.Context, name string, size int64, allow func(*Record) error) (_ *Record, err error) {
	defer failed("resizing", name, &err)
	if err := errors.Join(checkName(name), checkSize(size)); err != nil {
		return nil, err
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	v, err := s.attach(name, false)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, v.Close()) }()
	now := v.Record()
	if size < v.size {
		return nil, fmt.Errorf("%w: it has %d MiB and cannot shrink to %d: make a smaller one and copy its files", ErrSize, v.size>>20, size>>20)
	}
	if allow != nil {
		if err := allow(&now); err != nil {
			return nil, err
		}
	}
	if size > v.size {
		if err := s.replace(ctx, v, size); err != nil {
			return nil, err
		}
	} else if kept, err := readRecord(s.fs, v.dir); err == nil && kept.Size == size {
		return kept, nil
	}
	now = v.Record()
	now.Size = size
	if err := writeRecord(s.fs, v.dir, &now); err != nil {
		return nil, err
	}
	return &now, nil
}

// replace replaces a volume's file with a larger copy. Preconditions: the store's lock and the volume's for
// writing are held.
func (s *Store) replace(ctx context.Context, v *Volume, size int64) (err error) {
	if err := s.checkRoom(v); err != nil {
		return err
	}
	if err := v.begin(); err != nil {
		return err
	}
	tmp := filepath.Join(s.dir, tempPrefix+newID())
	if err := s.fs.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	defer func() { _ = s.removeAll(tmp) }() // or the next lock does
	path := filepath.Join(tmp, dataName)
	if err := s.copyData(ctx, v, path); err != nil {
		return fmt.Errorf("copying it: %w", err)
	}
	if err := s.grow(ctx, path, size); err != nil {
		return err
	}
	if err := s.syncFile(path); err != nil {
		return err
	}
	// A process that opens the new file must find it locked until the record is written.
	f, err := s.fs.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := osfile.TryLock(f.OS(), osfile.Exclusive); err != nil {
		return errors.Join(fmt.Errorf("locking its copy: %w", err), f.Close())
	}
	if err := s.fs.Rename(path, filepath.Join(v.dir, dataName)); err != nil {
		return errors.Join(err, f.Close())
	}
	// From here on the volume is its new file.
	old := v.data
	v.data, v.size = f, size
	return errors.Join(old.Close(), s.fs.SyncDir(v.dir))
}

// checkRoom refuses at once a copy that would fill the host's disk.
func (s *Store) checkRoom(v *Volume) error {
	var room unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Fstatfs(int(v.data.OS().Fd()), &room), unix.Fstat(int(v.data.OS().Fd()), &st)); err != nil {
		return err
	}
	free, need := int64(room.Bavail)*room.Bsize, st.Blocks*512
	if free < need && !reflinks(room.Type) {
		return fmt.Errorf("%w: it takes %d MiB and there are %d: free some", ErrNoSpace, need>>20, free>>20)
	}
	return nil
}

// reflinks reports whether copies of files share their blocks on a file system of that type.
func reflinks(magic int64) bool {
	return magic == unix.XFS_SUPER_MAGIC || magic == unix.BTRFS_SUPER_MAGIC
}

// copyStep is how many bytes are copied between two checks of the context.
const copyStep = 64 << 20

// copyData makes a file with the content and the holes of a volume.
func (s *Store) copyData(ctx context.Context, v *Volume, path string) (err error) {
	f, err := s.fs.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(v.size); err != nil {
		return err
	}
	buf := make([]byte, 1<<20)
	for off := int64(0); off < v.size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		data, end := osfile.NextData(v.data.OS(), off, v.size)
		off = min(end, data+copyStep)
		if err := osfile.CopyRange(f, data, v.data, data, off-data, buf); err != nil {
			return err
		}
	}
	return nil
}
