package volume

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
)

// NamePattern is the pattern of a volume's name.
const NamePattern = `^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`

var nameRE = lazyregexp.New(NamePattern)

func checkName(name string) error {
	if !nameRE.MatchString(name) {
		return fmt.Errorf("%w: %q: use 1 to 40 lower-case letters, digits and inner hyphens", ErrName, name)
	}
	return nil
}

// Limits of a volume's size, in bytes.
const (
	MinSize = disk.MinExt4Size
	MaxSize = 1 << 40
)

// ErrSize means that a volume cannot have that size.
var ErrSize = errors.New("bad size of a volume")

func checkSize(size int64) error {
	if size < MinSize || size > MaxSize || size%(1<<20) != 0 {
		return fmt.Errorf("%w: %d bytes: use %d to %d MiB", ErrSize, size, MinSize>>20, MaxSize>>20)
	}
	return nil
}

// idBytes is the length of a volume's id.
const idBytes = 16

// Label is the label of a volume's file system.
const Label = "drowse-volume"

// Store is a directory of volumes. Any number of processes may use it at the same time.
//
//	NAME/data, NAME/volume.json   a volume
//	.lock                         held while a volume is made, resized or removed
//	.tmp-*                        volumes being made or removed, or left so by a dead process,
//	                              and the larger copy of a volume being resized
type Store struct {
	dir string
	fs  osfile.FS
	// format makes the file system in a new file.
	format func(ctx context.Context, path string, size int64) error
	// grow enlarges a file and its file system.
	grow func(ctx context.Context, path string, size int64) error
}

// Open names a directory of volumes. Create makes the directory with the first volume.
func Open(dir string) *Store {
	return &Store{dir: dir, fs: osfile.OS, grow: disk.GrowRaw, format: func(ctx context.Context, path string, size int64) error {
		return disk.FormatRaw(ctx, path, Label, size)
	}}
}

const (
	lockName   = ".lock"
	tempPrefix = ".tmp-"
)

// lock keeps all others from making, resizing and removing volumes, and removes what killed processes have left.
func (s *Store) lock(ctx context.Context) (unlock func(), err error) {
	if err := s.fs.Mkdir(s.dir, 0o700); err == nil {
		err = s.fs.SyncDir(filepath.Dir(s.dir))
		if err != nil {
			return nil, err
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	f, err := s.fs.OpenFile(filepath.Join(s.dir, lockName), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := osfile.Lock(ctx, f.OS(), osfile.Exclusive); err != nil {
		return nil, errors.Join(fmt.Errorf("locking the volumes: %w", err), f.Close())
	}
	if err := s.tidy(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // closing unlocks
}

// tidy removes unfinished volumes. Precondition: the lock is held.
func (s *Store) tidy() error {
	entries, err := s.fs.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			if err := s.removeAll(filepath.Join(s.dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeAll removes a directory of files.
func (s *Store) removeAll(dir string) error {
	entries, err := s.fs.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := s.fs.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return s.fs.Remove(dir)
}

func newID() string {
	var b [idBytes]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Create makes a volume of size bytes, a multiple of 1 MiB, with an empty ext4. It takes disk space only for what
// is written. After a crash it exists whole or not.
func (s *Store) Create(ctx context.Context, name string, size int64) (_ *Record, err error) {
	defer failed("making", name, &err)
	if err := errors.Join(checkName(name), checkSize(size)); err != nil {
		return nil, err
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	dir := filepath.Join(s.dir, name)
	if _, err := s.fs.Stat(dir); err == nil {
		return nil, fmt.Errorf("%w: choose another, or remove it with Volumes().Remove of %q", ErrExists, name)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	r := &Record{Version: Version, ID: newID(), Name: name, Size: size, Created: time.Now().UTC()}
	tmp := filepath.Join(s.dir, tempPrefix+r.ID)
	if err := s.fs.Mkdir(tmp, 0o700); err != nil {
		return nil, err
	}
	err = s.fill(ctx, tmp, r)
	if err == nil {
		err = s.fs.Rename(tmp, dir)
	}
	if err != nil {
		_ = s.removeAll(tmp) // or the next lock does
		return nil, err
	}
	return r, s.fs.SyncDir(s.dir)
}

// fill makes the files of a volume durably.
func (s *Store) fill(ctx context.Context, dir string, r *Record) error {
	path := filepath.Join(dir, dataName)
	if err := s.format(ctx, path, r.Size); err != nil {
		return err
	}
	if err := s.syncFile(path); err != nil {
		return err
	}
	return writeRecord(s.fs, dir, r)
}

// syncFile makes a file durable.
func (s *Store) syncFile(path string) error {
	f, err := s.fs.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// failed, deferred, adds the operation and the volume to an error.
func failed(doing, name string, err *error) {
	if *err != nil {
		*err = fmt.Errorf("%s volume %s: %w", doing, name, *err)
	}
}

// Get returns the record of a volume.
func (s *Store) Get(name string) (*Record, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	r, err := readRecord(s.fs, filepath.Join(s.dir, name))
	if errors.Is(err, ErrNotFound) {
		return nil, fmt.Errorf("%w: %s: see Volumes().List, or make it with Volumes().Create of %q", ErrNotFound, name, name)
	}
	if err != nil {
		return nil, err
	}
	if st, err := s.fs.Stat(filepath.Join(s.dir, name, dataName)); err == nil {
		r.adopt(st.Size())
	}
	return r, nil
}

// List returns all volumes in the order of their names. It reports a volume that it cannot read, and still returns
// the others.
func (s *Store) List() ([]*Record, error) {
	entries, err := s.fs.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing volumes: %w", err)
	}
	var (
		out  []*Record
		errs []error
	)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		r, err := s.Get(e.Name())
		switch {
		case errors.Is(err, ErrNotFound): // being removed
		case err != nil:
			errs = append(errs, err)
		default:
			out = append(out, r)
		}
	}
	return out, errors.Join(errs...)
}

// Allocated returns how many bytes a volume takes on the host's disk.
func (s *Store) Allocated(name string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(s.dir, name, dataName), &st); err != nil {
		return 0, err
	}
	return st.Blocks * 512, nil
}

// Remove deletes a volume that is not attached, unless allow returns an error. Remove calls allow once the volume
// cannot be attached any more.
func (s *Store) Remove(ctx context.Context, name string, allow func(*Record) error) (err error) {
	defer failed("removing", name, &err)
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := s.attach(name, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, v.Close()) }()
	r := v.Record()
	if err := allow(&r); err != nil {
		return err
	}
	tmp := filepath.Join(s.dir, tempPrefix+newID())
	if err := s.fs.Rename(filepath.Join(s.dir, name), tmp); err != nil {
		return err
	}
	if err := s.fs.SyncDir(s.dir); err != nil {
		return err
	}
	return s.removeAll(tmp)
}
