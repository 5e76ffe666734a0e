package image

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
	"golang.org/x/sys/unix"
)

// LayerSource is a layer and where its bytes are. Open may be called several times, and at once.
type LayerSource struct {
	Layer
	Open func(ctx context.Context) (io.ReadCloser, error)
}

// newSpool makes a file without a name.
func newSpool(tmp string) (*os.File, error) {
	f, err := os.CreateTemp(tmp, "spool-")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errSpool, err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// name is how errors call the layer.
func (l *LayerSource) name() string {
	if l.Digest != "" {
		return l.Digest
	}
	return l.DiffID
}

// read reads the layer and checks its digests, compressed and not. That it is not what its digest says is told rather
// than what else is wrong with it then.
func (l *LayerSource) read(ctx context.Context, spool *os.File, lim *budget) (*layer, error) {
	r, err := l.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // only read
	raw := &digester{r: artifact.NewReader(ctx, r), size: l.Size}
	if l.Digest != "" {
		if raw.v, err = newVerifier(l.Digest); err != nil {
			return nil, err
		}
	}
	u, err := unpack(raw, false, lim.maxBytes+maxTarOverhead)
	if err != nil {
		return nil, raw.blame(ctx, err)
	}
	defer func() { _ = u.Close() }() // only read
	plain := &digester{r: u, size: -1}
	if plain.v, err = newVerifier(l.DiffID); err != nil {
		return nil, err
	}
	out, err := readLayer(ctx, plain, spool, lim, true)
	if err == nil {
		_, err = io.Copy(io.Discard, plain) // what lies behind the end of the archive belongs to the digest
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

// blame looks whether a layer that cannot be read is another one than its digest says.
func (d *digester) blame(ctx context.Context, err error) error {
	if !errors.Is(err, ErrBadArchive) || context.Cause(ctx) != nil {
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

// hashedWriter hashes and counts what is written through it.
type hashedWriter struct {
	w io.Writer
	h hash.Hash
	n int64
}

func (h *hashedWriter) Write(p []byte) (int, error) {
	n, err := h.w.Write(p)
	h.h.Write(p[:n])
	h.n += int64(n)
	return n, err
}

// digest is that of SHA-256, which h must be.
func (h *hashedWriter) digest() string { return fmt.Sprintf("sha256:%x", h.h.Sum(nil)) }

// progressWriter tells how much was written to it altogether.
func progressWriter(tell func(int64)) io.Writer {
	var n int64
	return writerFunc(func(p []byte) (int, error) {
		if n += int64(len(p)); tell != nil {
			tell(n)
		}
		return len(p), nil
	})
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// openRegular opens a regular file of the host.
func openRegular(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%w: %s is no regular file; use - for standard input", ErrUnsupportedSource, name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
