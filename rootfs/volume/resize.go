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

// Resize makes a volume that nobody has attached larger: size bytes, a multiple of 1 MiB,
// and the file system in it with it. A volume of that size stays as it is; one that is
// larger is refused with ErrSize. It fails with ErrInUse while anybody has the volume
// attached, and with what allow says, which is called when nobody can attach it any more.
//
// No memory of a guest belongs to the volume any more when Resize has begun to change
// it: Settled is gone, whether it succeeds or fails.
//
// The file system is made larger in a copy, since resize2fs(8) leaves neither the old nor the
// new one when it is killed. So there must be room for what the volume has allocated once
// more, unless the host's file system has reflinks. In order: the record loses Settled; the
// copy is made, grown and synced; it takes the place of the file; the record gets the
// new size. Whatever is killed or loses power in between, the volume is as before or has
// the new size; Resize may then be called again.
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

// replace puts a larger copy in place of a volume's file. Preconditions: the store's lock and
// the volume's for writing are held.
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
	defer func() { _ = s.removeAll(tmp) }() // or the next one does
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
	// Those who open the new file must find it locked as long as the record is not written.
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
	// The volume is its new file from here on.
	old := v.data
	v.data, v.size = f, size
	return errors.Join(old.Close(), s.fs.SyncDir(v.dir))
}

// checkRoom refuses at once what would fill the host's disk.
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

// reflinks says whether copies of files share their blocks on a file system of that type.
func reflinks(magic int64) bool {
	return magic == unix.XFS_SUPER_MAGIC || magic == unix.BTRFS_SUPER_MAGIC
}

// copyStep is how many bytes are copied between two looks at the context.
const copyStep = 64 << 20

// copyData makes a file with the content of a volume, and with its holes.
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
