package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
)

// blobsDir holds layers as a registry sent them, each under its digest, shared by images.
const blobsDir = "blobs"

var blobRE = lazyregexp.New(`^(sha256-[0-9a-f]{64}|sha512-[0-9a-f]{128})$`)

// blobFile returns the file name of a blob.
func blobFile(digest string) string { return strings.ReplaceAll(digest, ":", "-") }

func blobPath(s *image.Store, digest string) string {
	return filepath.Join(s.Dir(), blobsDir, blobFile(digest))
}

// shareBlobs keeps blobs from being pruned until the file is closed.
func shareBlobs(ctx context.Context, s *image.Store) (*os.File, error) {
	if err := os.MkdirAll(filepath.Join(s.Dir(), blobsDir), 0o755); err != nil {
		return nil, fmt.Errorf("open the image store: %w", err)
	}
	return s.Lock(ctx, blobsDir, osfile.Shared)
}

// hasBlob reports whether the store has a blob, with the right length.
func hasBlob(s *image.Store, digest string, size int64) bool {
	st, err := os.Lstat(blobPath(s, digest))
	return err == nil && st.Mode().IsRegular() && st.Size() == size
}

// putBlob writes a blob into the store. write writes the content to a file, which putBlob then checks. The blob is
// there whole or not at all, also after a crash.
func putBlob(s *image.Store, digest string, size int64, tmp string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(tmp, "blob-")
	if err != nil {
		return fmt.Errorf("keep a layer in the image store: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close() // a second time, if closing failed
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	v, err := layers.NewVerifier(digest)
	if err != nil {
		return err
	}
	n := &layers.HashedWriter{W: layers.SpoolWriter(f), Hash: v}
	if err := write(n); err != nil {
		return err
	}
	if n.N != size {
		return fmt.Errorf("%w: %s has %d bytes, its descriptor says %d", image.ErrDigest, digest, n.N, size)
	}
	if err := v.Check(); err != nil {
		return err
	}
	if err := errors.Join(f.Chmod(0o444), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("keep a layer in the image store: %w", err)
	}
	if err := os.Rename(f.Name(), blobPath(s, digest)); err != nil {
		return fmt.Errorf("keep a layer in the image store: %w", err)
	}
	return osfile.SyncDir(filepath.Join(s.Dir(), blobsDir))
}

// PruneBlobs removes downloaded layers that belong to no image of the store. A layer only saves its download:
// images do not need it. PruneBlobs removes nothing while a build from a registry is under way, or when the record
// of an image cannot be read (image.ErrCorrupt).
func PruneBlobs(s *image.Store) (image.Freed, error) {
	return s.PruneFolder(blobsDir, func(images []*image.Image) (func(string) bool, error) {
		needed := map[string]bool{}
		for _, i := range images {
			for _, l := range i.Layers {
				needed[blobFile(l.Digest)] = true
			}
		}
		return func(name string) bool { return needed[name] || !blobRE.MatchString(name) }, nil
	})
}
