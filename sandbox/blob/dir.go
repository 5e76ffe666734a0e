package blob

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Dir is a Store in a directory of a local file system, for one host or for tests. Its processes may be many.
type Dir struct{ root string }

const (
	dirTemps = ".tmp"   // objects that are being written
	dirLocks = ".locks" // who swaps or deletes an object holds flock(2) on the file that its key hashes to
	// tempAge is the age from which on a file in dirTemps is one that a killed process has left.
	tempAge = 24 * time.Hour
	// dirTries is how often Put makes a directory that a Delete of its last object removes meanwhile.
	dirTries = 100
)

// OpenDir opens the store in the directory root, and makes it if it is missing.
func OpenDir(root string) (*Dir, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	for _, sub := range []string{"", dirTemps, dirLocks} {
		if err := makeDir(filepath.Join(root, sub)); err != nil {
			return nil, fmt.Errorf("making the store %s: %w", root, err)
		}
	}
	d := &Dir{root}
	return d, d.removeOldTemps()
}

func (d *Dir) removeOldTemps() error {
	dir := filepath.Join(d.root, dirTemps)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > tempAge {
			_ = os.Remove(filepath.Join(dir, e.Name())) // the next time, then
		}
	}
	return nil
}

// makeDir makes a directory, and those that it is in, durably.
func makeDir(dir string) error {
	if st, err := os.Stat(dir); err == nil && st.IsDir() {
		return nil
	}
	parent := filepath.Dir(dir)
	if parent == dir {
		return fs.ErrNotExist
	}
	if err := makeDir(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return osfile.SyncDir(parent)
}

func (d *Dir) path(key string) string { return filepath.Join(d.root, filepath.FromSlash(key)) }

// dirError names the object, and gives errors the names of this package.
func dirError(doing, key string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		err = ErrNotFound
	case errors.Is(err, fs.ErrExist):
		err = ErrExists
	}
	return fmt.Errorf("%s %s: %w", doing, key, err)
}

// Put implements Store.
func (d *Dir) Put(ctx context.Context, key string, body []byte) error {
	if err := CheckPut(key, body); err != nil {
		return err
	}
	return dirError("putting", key, d.put(ctx, key, body))
}

func (d *Dir) put(ctx context.Context, key string, body []byte) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	path := d.path(key)
	if _, err := os.Lstat(path); err == nil {
		return fs.ErrExist // cheaper than to write it in vain
	}
	temp, err := d.temp(body)
	if err != nil {
		return err
	}
	defer os.Remove(temp)
	for range dirTries {
		if err = makeDir(filepath.Dir(path)); err != nil {
			return err
		}
		if err = os.Link(temp, path); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return err
	}
	return osfile.SyncDir(filepath.Dir(path))
}

func (d *Dir) temp(body []byte) (string, error) {
	return osfile.WriteTemp(osfile.OS, filepath.Join(d.root, dirTemps, "object"), body, 0o600)
}

// open opens an object. A directory, in which others' objects are, is none.
func (d *Dir) open(key string) (*os.File, error) {
	f, err := os.Open(d.path(key))
	if errors.Is(err, unix.ENOTDIR) {
		return nil, fs.ErrNotExist
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// ReadAt implements Store.
func (d *Dir) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if err := CheckRead(key, off); err != nil {
		return err
	}
	return dirError("reading", key, func() error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		f, err := d.open(key)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := f.ReadAt(p, off)
		switch {
		case n == len(p):
			return nil
		case errors.Is(err, io.EOF):
			return io.ErrUnexpectedEOF
		}
		return err
	}())
}

// Load implements Store.
func (d *Dir) Load(ctx context.Context, key string, limit int64) ([]byte, Version, error) {
	if err := CheckKey(key); err != nil {
		return nil, "", err
	}
	body, err := d.load(ctx, key, limit)
	if err != nil {
		return nil, "", dirError("loading", key, err)
	}
	return body, versionOf(body), nil
}

func (d *Dir) load(ctx context.Context, key string, limit int64) ([]byte, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	f, err := d.open(key)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	body, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(body)) > limit {
		err = fmt.Errorf("%w: it has more than %d bytes", ErrKey, limit)
	}
	return body, err
}

func versionOf(body []byte) Version {
	sum := sha256.Sum256(body)
	return Version(hex.EncodeToString(sum[:]))
}

// Swap implements Store.
func (d *Dir) Swap(ctx context.Context, key string, old Version, body []byte) (Version, error) {
	if err := CheckPut(key, body); err != nil {
		return "", err
	}
	unlock, err := d.lock(ctx, key)
	if err != nil {
		return "", dirError("swapping", key, err)
	}
	defer unlock()
	switch err = d.swap(ctx, key, old, body); {
	case errors.Is(err, fs.ErrExist):
		err = ErrChanged // made by Put
	case errors.Is(err, ErrNotFound):
		err = ErrChanged
	}
	if err != nil {
		return "", dirError("swapping", key, err)
	}
	return versionOf(body), nil
}

func (d *Dir) swap(ctx context.Context, key string, old Version, body []byte) error {
	if old == "" {
		return d.put(ctx, key, body)
	}
	was, err := d.load(ctx, key, MaxObject)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrChanged
	}
	if err != nil {
		return err
	}
	if versionOf(was) != old {
		return ErrChanged
	}
	temp, err := d.temp(body)
	if err != nil {
		return err
	}
	return osfile.Put(osfile.OS, temp, d.path(key))
}

// lock keeps other swaps and deletions of an object away.
func (d *Dir) lock(ctx context.Context, key string) (unlock func(), err error) {
	const locks = 1 // bytes of the hash in a lock's name: 256 locks
	sum := sha256.Sum256([]byte(key))
	f, err := osfile.OpenLocked(ctx, filepath.Join(d.root, dirLocks, hex.EncodeToString(sum[:locks])), os.O_CREATE|os.O_RDWR, 0o600, osfile.Exclusive)
	if err != nil {
		return nil, err
	}
	return func() {
		_ = osfile.Unlock(f)
		f.Close()
	}, nil
}

// Delete implements Store.
func (d *Dir) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	unlock, err := d.lock(ctx, key)
	if err != nil {
		return dirError("deleting", key, err)
	}
	defer unlock()
	path := d.path(key)
	switch err := unix.Unlink(path); {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR):
		return nil
	case err != nil:
		return dirError("deleting", key, err)
	}
	if err := osfile.SyncDir(filepath.Dir(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return dirError("deleting", key, err)
	}
	for dir := filepath.Dir(path); dir != d.root && os.Remove(dir) == nil; dir = filepath.Dir(dir) {
		// no directory stays empty
	}
	return nil
}

// List implements Store.
func (d *Dir) List(ctx context.Context, prefix string, each func(Info) error) error {
	// Only the directory that all such keys are in.
	begin := d.root
	if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
		if err := CheckKey(prefix[:i]); err != nil {
			return err
		}
		begin = d.path(prefix[:i])
	}
	err := filepath.WalkDir(begin, func(path string, e fs.DirEntry, err error) error {
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case e.IsDir():
			if path != d.root && strings.HasPrefix(e.Name(), ".") {
				return fs.SkipDir
			}
			return nil
		}
		key, err := filepath.Rel(d.root, path)
		if err != nil {
			return err
		}
		info, err := e.Info()
		if key = filepath.ToSlash(key); err != nil || !e.Type().IsRegular() || !strings.HasPrefix(key, prefix) || CheckKey(key) != nil {
			return nil // gone, or no object
		}
		return each(Info{Key: key, Size: info.Size(), Changed: info.ModTime()})
	})
	if err != nil {
		return fmt.Errorf("listing objects: %w", err)
	}
	return nil
}
