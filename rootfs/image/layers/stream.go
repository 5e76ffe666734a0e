package layers

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Source is a layer and the origin of its bytes. Open may be called several times, also concurrently.
type Source struct {
	image.Layer
	Open func(ctx context.Context) (io.ReadCloser, error)
}

// NewSpool makes an unnamed file.
func NewSpool(tmp string) (*os.File, error) {
	f, err := os.CreateTemp(tmp, "spool-")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSpool, err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Name returns the layer's name for errors.
func (l *Source) Name() string {
	if l.Digest != "" {
		return l.Digest
	}
	return l.DiffID
}

// Read reads the layer and checks its digests, compressed and not. If a digest does not match, Read reports that
// rather than other errors, which may follow from it.
func (l *Source) Read(ctx context.Context, spool *os.File, lim *Budget) (*Layer, error) {
	r, err := l.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // only read
	raw := &digester{r: artifact.NewReader(ctx, r), size: l.Size}
	if l.Digest != "" {
		if raw.v, err = NewVerifier(l.Digest); err != nil {
			return nil, err
		}
	}
	u, err := Unpack(raw, false, lim.MaxBytes+MaxTarOverhead)
	if err != nil {
		return nil, raw.blame(ctx, err)
	}
	defer func() { _ = u.Close() }() // only read
	plain := &digester{r: u, size: -1}
	if plain.v, err = NewVerifier(l.DiffID); err != nil {
		return nil, err
	}
	out, err := Read(ctx, plain, spool, lim, true)
	if err == nil {
		_, err = io.Copy(io.Discard, plain) // data behind the end of the archive counts for the digest
	}
	if err == nil {
		_, err = io.Copy(io.Discard, raw)
	}
	if err == nil {
		err = errors.Join(raw.check(), plain.check())
	}
	if err != nil {
		return nil, raw.blame(ctx, err)
	}
	return out, nil
}

// blame returns a digest error if a layer that cannot be read does not match its digest, otherwise err.
func (d *digester) blame(ctx context.Context, err error) error {
	if !errors.Is(err, image.ErrBadArchive) || context.Cause(ctx) != nil {
		return err
	}
	if _, cerr := io.Copy(io.Discard, d); cerr != nil {
		return cerr
	}
	if cerr := d.check(); cerr != nil {
		return fmt.Errorf("%w (%w)", cerr, err)
	}
	return err
}

// HashedWriter hashes and counts what is written through it.
type HashedWriter struct {
	W    io.Writer
	Hash hash.Hash
	N    int64
}

func (h *HashedWriter) Write(p []byte) (int, error) {
	n, err := h.W.Write(p)
	h.Hash.Write(p[:n])
	h.N += int64(n)
	return n, err
}

// Digest returns the digest. Hash must be SHA-256.
func (h *HashedWriter) Digest() string { return fmt.Sprintf("sha256:%x", h.Hash.Sum(nil)) }

// OpenRegular opens a regular file of the host.
func OpenRegular(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%w: %s is no regular file; use - for standard input", image.ErrUnsupportedSource, name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
