package artifact

import (
	"bytes"
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

	"github.com/drowse-vm/drowse/internal/osfile"
)

const (
	// tempPrefix starts the name of everything unfinished.
	tempPrefix = osfile.TempPrefix

	// staleAfter is the age at which a temporary file must be left from a crash: nothing here takes an hour to
	// write.
	staleAfter = time.Hour

	dirMode  = 0o755
	fileMode = 0o644

	// A user who can open a lock's file can hold the lock.
	lockDirMode  = 0o700
	lockFileMode = 0o600
)

// IsTemp reports whether name, the last element of a path, is that of an unfinished file or folder.
func IsTemp(name string) bool { return strings.HasPrefix(name, tempPrefix) }

// lockFlags are the open flags of a lock's file. It is made if necessary, and stays.
const lockFlags = os.O_RDWR | os.O_CREATE

// Lock takes the exclusive lock of the file at path, which it makes if necessary. It waits until ctx ends. The
// lock excludes other goroutines and other processes alike, and ends with the process.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), lockDirMode); err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	f, err := osfile.OpenLocked(ctx, path, lockFlags, lockFileMode, osfile.Exclusive)
	if err != nil {
		return nil, err
	}
	return func() { f.Close() }, nil
}

// RemoveRemains removes the staging folders in dir whose makers are dead. lockPath returns the lock that covers a
// folder by its key, or "" for a folder to leave alone. Correctness does not depend on it, so it ignores errors.
func RemoveRemains(dir string, lockPath func(key string) string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		key, ok := strings.CutPrefix(e.Name(), tempPrefix)
		if !ok || !e.IsDir() {
			continue
		}
		path := lockPath(key)
		if path == "" {
			continue
		}
		if os.MkdirAll(filepath.Dir(path), lockDirMode) != nil {
			continue
		}
		if f, err := osfile.TryOpenLocked(path, lockFlags, lockFileMode, osfile.Exclusive); err == nil {
			_ = os.RemoveAll(filepath.Join(dir, e.Name()))
			f.Close()
		}
	}
}

// WriteFile makes the file at path with what write puts into it: the whole file or, after an error, none. It
// replaces an existing file of that name. Two callers may write the same path at once; one of the two files stays.
func WriteFile(path string, write func(f *os.File) error) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return err
	}
	removeStale(dir)
	return osfile.Replace(path, fileMode, write)
}

// nameLength is how many hexadecimal digits of a hash the name of a Made file has.
const nameLength = 32

// Made returns the absolute path of a cached file, whose name is a hash of everything that decides its content. It
// makes a missing file with write. program is the first program that a guest starts from it: see RequireStatic.
func Made(cacheDir, folder string, hash []byte, ext, program string, write func(f *os.File) error) (string, error) {
	path, err := filepath.Abs(filepath.Join(cacheDir, folder, hex.EncodeToString(hash)[:nameLength]+ext))
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	if err := RequireStatic(program); err != nil {
		return "", err
	}
	return path, WriteFile(path, write)
}

// StagingDir makes an empty folder in dir, with a temporary name that holds key. It first removes a folder that an
// interrupted run has left under the same key, so the caller must hold a lock that covers key.
func StagingDir(dir, key string) (string, error) {
	p := filepath.Join(dir, tempPrefix+key)
	if err := os.RemoveAll(p); err != nil {
		return "", err
	}
	if err := os.MkdirAll(p, dirMode); err != nil {
		return "", err
	}
	return p, nil
}

// PublishDir writes all of staging through to disk and gives it its final name, which must not exist. Both must be
// on one file system.
func PublishDir(ctx context.Context, staging, final string) error {
	err := filepath.WalkDir(staging, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if d.Type()&^fs.ModeDir != 0 { // the folder has the links and the like
			return nil
		}
		return osfile.SyncDir(p) // fsync(2) works the same for files
	})
	if err != nil {
		return fmt.Errorf("writing %s to disk: %w", final, err)
	}
	if err := os.Rename(staging, final); err != nil {
		return err
	}
	return osfile.SyncDir(filepath.Dir(final))
}

// HashFile returns the SHA-256 of the file at path, in hexadecimal, and its size in bytes. It stops when ctx ends.
func HashFile(ctx context.Context, path string) (sum string, size int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	size, err = io.Copy(h, NewReader(ctx, f))
	if err != nil {
		return "", 0, fmt.Errorf("reading %s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), size, nil
}

// Reader fails with the context's cause once its context has ended. It counts the bytes that it returns, and keeps
// the error of the reader below.
type Reader struct {
	ctx context.Context
	r   io.Reader
	N   int64
	Err error // not io.EOF
}

// NewReader returns a reader of r that works until ctx ends.
func NewReader(ctx context.Context, r io.Reader) *Reader { return &Reader{ctx: ctx, r: r} }

// Read implements io.Reader.
func (c *Reader) Read(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		c.Err = err
		return 0, err
	}
	n, err := c.r.Read(p)
	c.N += int64(n)
	if err != nil && err != io.EOF {
		c.Err = err
	}
	return n, err
}

// CountingWriter returns a writer that calls tell with the number of bytes written to it so far.
func CountingWriter(tell func(total int64)) io.Writer { return &countingWriter{tell: tell} }

type countingWriter struct {
	n    int64
	tell func(total int64)
}

func (c *countingWriter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	c.tell(c.n)
	return len(p), nil
}

// LineWriter calls Line with each line written to it, cut to its first Max bytes. A carriage return ends a line
// too.
type LineWriter struct {
	Max  int
	Line func(line string)
	part []byte
}

// Write implements io.Writer.
func (w *LineWriter) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		n := bytes.IndexAny(rest, "\r\n")
		piece := rest
		if n >= 0 {
			piece = rest[:n]
		}
		w.part = append(w.part, piece[:min(len(piece), w.Max-len(w.part))]...)
		if n < 0 {
			break
		}
		w.Flush()
		rest = rest[n+1:]
	}
	return len(p), nil
}

// Flush ends an unfinished line.
func (w *LineWriter) Flush() {
	w.Line(string(w.part))
	w.part = w.part[:0]
}

// ReadFile reads a whole file of at most limit bytes.
func ReadFile(name string, limit int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = &fs.PathError{Op: "read", Path: name, Err: fmt.Errorf("it has more than %d bytes", limit)}
	}
	return b, err
}

// removeStale removes temporary files in dir that no living writer can own. Correctness does not depend on it, so
// it ignores errors.
func removeStale(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		if !IsTemp(e.Name()) || !e.Type().IsRegular() {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > staleAfter {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}
