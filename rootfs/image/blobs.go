package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// blobsDir holds layers as a registry gave them, each under its digest, for images that have them in common.
const blobsDir = "blobs"

var blobRE = regexp.MustCompile(`^(sha256-[0-9a-f]{64}|sha512-[0-9a-f]{128})$`)

func (s *Store) blobPath(h v1.Hash) string {
	return filepath.Join(s.dir, blobsDir, h.Algorithm+"-"+h.Hex)
}

// shareBlobs keeps blobs from being pruned until the file is closed.
func (s *Store) shareBlobs(ctx context.Context) (*os.File, error) {
	if err := os.MkdirAll(filepath.Join(s.dir, blobsDir), 0o755); err != nil {
		return nil, fmt.Errorf("open the image store: %w", err)
	}
	f, err := lock(ctx, filepath.Join(s.dir, locksDir, blobsDir), osfile.Shared)
	if err != nil {
		return nil, fmt.Errorf("lock the blobs of the image store %s: %w", s.dir, err)
	}
	return f, nil
}

// hasBlob says that a blob is in the store, with its right length.
func (s *Store) hasBlob(h v1.Hash, size int64) bool {
	st, err := os.Lstat(s.blobPath(h))
	return err == nil && st.Mode().IsRegular() && st.Size() == size
}

// putBlob writes a blob into the store. write gets a file to write to, which is checked afterwards; the blob is there
// whole or not at all, after a crash too.
func (s *Store) putBlob(h v1.Hash, size int64, tmp string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(tmp, "blob-")
	if err != nil {
		return fmt.Errorf("keep a layer in the image store: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeIfThere(f.Name()))
		}
	}()
	hash, err := v1.Hasher(h.Algorithm)
	if err != nil {
		return errors.Join(fmt.Errorf("%w: digest %q: %w", ErrBadManifest, h, err), f.Close())
	}
	n := &countingWriter{w: io.MultiWriter(markWriteErrors{f}, hash)}
	if err := write(n); err != nil {
		return errors.Join(err, f.Close())
	}
	if n.n != size {
		return errors.Join(fmt.Errorf("%w: %s has %d bytes, its descriptor says %d", ErrDigest, h, n.n, size), f.Close())
	}
	if got := fmt.Sprintf("%x", hash.Sum(nil)); got != h.Hex {
		return errors.Join(fmt.Errorf("%w: %s has the digest %s:%s", ErrDigest, h, h.Algorithm, got), f.Close())
	}
	if err := errors.Join(f.Chmod(0o444), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("keep a layer in the image store: %w", err)
	}
	if err := os.Rename(f.Name(), s.blobPath(h)); err != nil {
		return fmt.Errorf("keep a layer in the image store: %w", err)
	}
	return osfile.SyncDir(filepath.Join(s.dir, blobsDir))
}

type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// Freed is what PruneBlobs or PruneSteps has removed.
type Freed struct {
	Blobs int   // layers of registries
	Steps int   // results of steps
	Bytes int64 // of them
	Busy  bool  // a build that may need them is under way, so nothing was removed
}

// PruneBlobs removes downloaded layers that belong to no image of the store. A layer only saves its download: images
// need none. Nothing is removed while a build from a registry is under way, or when the record of an image cannot be
// read (ErrCorrupt).
func (s *Store) PruneBlobs(ctx context.Context) (Freed, error) {
	var out Freed
	l, err := s.lock(ctx)
	if err != nil {
		return out, err
	}
	defer l.Close()
	entries, err := os.ReadDir(filepath.Join(s.dir, blobsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return out, fmt.Errorf("prune the layers of the image store: %w", err)
	}
	mine, err := tryLock(filepath.Join(s.dir, locksDir, blobsDir))
	if errors.Is(err, osfile.ErrLocked) {
		out.Busy = true
		return out, nil
	}
	if err != nil {
		return out, fmt.Errorf("prune the layers of the image store: %w", err)
	}
	defer mine.Close()
	images, err := s.List()
	if err != nil {
		return out, fmt.Errorf("prune the layers of the image store: %w", err)
	}
	needed := map[string]bool{}
	for _, i := range images {
		for _, l := range i.Layers {
			if h, err := v1.NewHash(l.Digest); err == nil {
				needed[filepath.Base(s.blobPath(h))] = true
			}
		}
	}
	var errs []error
	for _, e := range entries {
		if !blobRE.MatchString(e.Name()) || needed[e.Name()] {
			continue
		}
		var size int64
		if st, err := e.Info(); err == nil {
			size = st.Size()
		}
		if err := os.Remove(filepath.Join(s.dir, blobsDir, e.Name())); err != nil {
			errs = append(errs, fmt.Errorf("prune the layers of the image store: %w", err))
			continue
		}
		out.Blobs++
		out.Bytes += size
	}
	return out, errors.Join(errs...)
}
