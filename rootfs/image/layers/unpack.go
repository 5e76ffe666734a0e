package layers

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Limits of decompression.
const (
	maxWindow = 128 << 20 // bytes of history that a zstd frame or an xz block may require; zstd --long=27 needs as many
	// Any stream may expand to freeBytes, and beyond that to maxExpansion times its own size. Root filesystems
	// compress to between half and a tenth.
	freeBytes    = 1 << 30
	maxExpansion = 500
)

// Magic numbers of compressed streams: RFC 1952 (gzip), RFC 8878 (zstd, and its skippable frames), the .xz file
// format, bzip2.
var (
	magicGzip = []byte{0x1f, 0x8b}
	magicZstd = []byte{0x28, 0xb5, 0x2f, 0xfd}
	magicXz   = []byte{0xfd, '7', 'z', 'X', 'Z', 0}
	magicBz2  = []byte("BZh")
)

// Unpacked is the plain form of a stream that may be compressed, as its first bytes say. Its errors are
// ErrBadArchive and ErrTooLarge; errors of the stream below stay as they are.
type Unpacked struct {
	src     *artifact.Reader
	r       io.Reader
	close   func()
	Packed  bool  // it is compressed
	out     int64 // bytes returned so far
	max     int64 // bytes to return at most
	failure error // the first error
}

// Unpack detects the compression from the beginning of a stream. all accepts xz and bzip2 too, which layers never
// use. most bounds the output, in bytes. Close frees memory, and leaves r open.
func Unpack(r io.Reader, all bool, most int64) (*Unpacked, error) {
	src := artifact.NewReader(context.Background(), r)
	b := bufio.NewReaderSize(src, 64<<10)
	head, err := b.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	u := &Unpacked{src: src, r: b, close: func() {}, Packed: true, max: most}
	switch {
	case bytes.HasPrefix(head, magicGzip):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, u.failed("gzip", err)
		}
		u.r, u.close = z, func() { _ = z.Close() } // no error can follow
	case bytes.HasPrefix(head, magicZstd), len(head) > 3 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, u.failed("zstd", err)
		}
		u.r, u.close = z, z.Close
	case all && bytes.HasPrefix(head, magicXz):
		z, err := xz.NewReader(b, maxWindow)
		if err != nil {
			return nil, u.failed("xz", err)
		}
		u.r = z
	case all && bytes.HasPrefix(head, magicBz2):
		u.r = bzip2.NewReader(b)
	default:
		u.Packed = false
	}
	return u, nil
}

func (u *Unpacked) failed(what string, err error) error {
	if u.src.Err != nil {
		return u.src.Err
	}
	if !u.Packed {
		return err
	}
	return fmt.Errorf("%w: decompress it (%s): %w", image.ErrBadArchive, what, err)
}

// Read implements io.Reader.
func (u *Unpacked) Read(p []byte) (int, error) {
	if u.failure != nil {
		return 0, u.failure
	}
	n, err := u.r.Read(p)
	u.out += int64(n)
	switch {
	case u.out > u.max:
		err = fmt.Errorf("%w: it unpacks to more than %d bytes; raise MaxBytes (--max-size) to take it", image.ErrTooLarge, u.max)
	case u.Packed && u.out > freeBytes && u.out/maxExpansion > u.src.N:
		err = fmt.Errorf("%w: it expands to more than %d times its size; unpack it first if it is what it should be", image.ErrTooLarge, maxExpansion)
	case err != nil && !errors.Is(err, io.EOF):
		err = u.failed("damaged", err)
	case errors.Is(err, io.EOF) && u.src.Err != nil:
		err = u.src.Err
	}
	u.failure = err
	return n, err
}

// Close frees the memory of the decompression.
func (u *Unpacked) Close() error {
	u.close()
	return nil
}

// digestRE matches the digests that the OCI image specification registers.
var digestRE = lazyregexp.New(`^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$`)

// IsDigest reports whether s is a digest that can be checked.
func IsDigest(s string) bool { return digestRE.MatchString(s) }

// Verifier is a hash that is compared with a digest after everything has been written to it.
type Verifier struct {
	hash.Hash
	want string
}

func NewVerifier(digest string) (*Verifier, error) {
	switch {
	case !IsDigest(digest):
		return nil, fmt.Errorf("%w: digest %.100q", image.ErrBadManifest, digest)
	case strings.HasPrefix(digest, "sha512:"):
		return &Verifier{sha512.New(), digest}, nil
	}
	return &Verifier{sha256.New(), digest}, nil
}

// Check returns ErrDigest if the digest differs.
func (v *Verifier) Check() error {
	algorithm, want, _ := strings.Cut(v.want, ":")
	if got := fmt.Sprintf("%x", v.Sum(nil)); got != want {
		return fmt.Errorf("%w: %s has the digest %s:%s", image.ErrDigest, v.want, algorithm, got)
	}
	return nil
}

// digester hashes a stream as it is read, and knows its expected length.
type digester struct {
	r    io.Reader
	v    *Verifier // nil: no digest to compare
	n    int64
	size int64 // expected; -1 if unknown
}

func (d *digester) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	if d.v != nil {
		d.v.Write(p[:n])
	}
	if d.n += int64(n); d.size >= 0 && d.n > d.size {
		return 0, fmt.Errorf("%w: it is longer than the %d bytes that its descriptor says", image.ErrDigest, d.size)
	}
	return n, err
}

// check compares length and digest. Everything must have been read.
func (d *digester) check() error {
	if d.size >= 0 && d.n != d.size {
		return fmt.Errorf("%w: it has %d bytes, its descriptor says %d", image.ErrDigest, d.n, d.size)
	}
	if d.v == nil {
		return nil
	}
	return d.v.Check()
}
