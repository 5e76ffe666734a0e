package image

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"
)

// Limits of decompression.
const (
	maxWindow = 128 << 20 // bytes of history that a zstd frame or an xz block may ask for; zstd --long=27 needs as many
	// A stream may expand to freeBytes however small it is, and beyond that to maxExpansion times its own size. Root
	// filesystems compress to between half and a tenth.
	freeBytes    = 1 << 30
	maxExpansion = 500
)

// Beginnings of compressed streams: RFC 1952 (gzip), RFC 8878 (zstd, and its skippable frames), the .xz file format,
// bzip2.
var (
	magicGzip = []byte{0x1f, 0x8b}
	magicZstd = []byte{0x28, 0xb5, 0x2f, 0xfd}
	magicXz   = []byte{0xfd, '7', 'z', 'X', 'Z', 0}
	magicBz2  = []byte("BZh")
)

// unpacked is what a stream gives that may be compressed, which its first bytes tell. Its errors are ErrBadArchive and
// ErrTooLarge; those of the stream below are passed on as they are.
type unpacked struct {
	src     *countedReader
	r       io.Reader
	close   func()
	packed  bool  // it is compressed
	out     int64 // bytes given so far
	max     int64 // bytes to give at most
	failure error // of before
}

// unpack looks at the beginning of a stream. all says that xz and bzip2 are wanted too: layers are never compressed by
// these. most bounds what comes out, in bytes. Close frees memory, and leaves r open.
func unpack(r io.Reader, all bool, most int64) (*unpacked, error) {
	src := &countedReader{r: r}
	b := bufio.NewReaderSize(src, 64<<10)
	head, err := b.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	u := &unpacked{src: src, r: b, close: func() {}, packed: true, max: most}
	switch {
	case bytes.HasPrefix(head, magicGzip):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, u.failed("gzip", err)
		}
		u.r, u.close = z, func() { _ = z.Close() } // nothing is left to say
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
		u.packed = false
	}
	return u, nil
}

func (u *unpacked) failed(what string, err error) error {
	if u.src.err != nil {
		return u.src.err
	}
	if !u.packed {
		return err
	}
	return fmt.Errorf("%w: decompress it (%s): %w", ErrBadArchive, what, err)
}

// Read implements io.Reader.
func (u *unpacked) Read(p []byte) (int, error) {
	if u.failure != nil {
		return 0, u.failure
	}
	n, err := u.r.Read(p)
	u.out += int64(n)
	switch {
	case u.out > u.max:
		err = fmt.Errorf("%w: it unpacks to more than %d bytes; raise MaxBytes (--max-size) to take it", ErrTooLarge, u.max)
	case u.packed && u.out > freeBytes && u.out/maxExpansion > u.src.n:
		err = fmt.Errorf("%w: it expands to more than %d times its size; unpack it first if it is what it should be", ErrTooLarge, maxExpansion)
	case err != nil && !errors.Is(err, io.EOF):
		err = u.failed("damaged", err)
	case errors.Is(err, io.EOF) && u.src.err != nil:
		err = u.src.err
	}
	u.failure = err
	return n, err
}

// Close frees what decompression needed.
func (u *unpacked) Close() error {
	u.close()
	return nil
}

// countedReader counts what it gives, and remembers the error of the reader below.
type countedReader struct {
	r   io.Reader
	n   int64
	err error // not io.EOF
}

func (c *countedReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	if err != nil && err != io.EOF {
		c.err = err
	}
	return n, err
}

// digester hashes what is read through it and knows how long that should be.
type digester struct {
	r    io.Reader
	h    hash.Hash
	n    int64
	size int64 // expected; -1 when nobody has said
}

func (d *digester) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	d.h.Write(p[:n])
	if d.n += int64(n); d.size >= 0 && d.n > d.size {
		return 0, fmt.Errorf("%w: it is longer than the %d bytes that its descriptor says", ErrDigest, d.size)
	}
	return n, err
}
