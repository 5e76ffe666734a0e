package snapshot

import (
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

const maxFrameBytes = MaxFramePages * guestmem.PageSize

// slack is room behind a frame's pages. With less, package zstd bounds each copy exactly and takes a quarter longer.
const slack = 16

// compressor turns pages into frames. Only one goroutine may use it.
type compressor struct{ enc *zstd.Encoder }

func newCompressor(level zstd.EncoderLevel) (*compressor, error) {
	// No zstd checksum: the frame's own CRC-32C covers the compressed bytes and is checked before the decoder sees
	// them.
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(level),
		zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true), zstd.WithLowerEncoderMem(true),
		zstd.WithWindowSize(maxFrameBytes))
	if err != nil {
		return nil, fmt.Errorf("setting up zstd: %w", err)
	}
	return &compressor{enc: enc}, nil
}

// append appends a frame with the pages in raw to dst. The caller sets the file and the offset of the frame.
func (c *compressor) append(dst, raw []byte) ([]byte, Frame) {
	at := len(dst)
	dst = c.enc.EncodeAll(raw, dst)
	if len(dst)-at >= len(raw) {
		return appendRaw(dst[:at], raw)
	}
	return dst, frameOf(codecZstd, raw, dst[at:])
}

// appendRaw is append without compression.
func appendRaw(dst, raw []byte) ([]byte, Frame) {
	return append(dst, raw...), frameOf(codecRaw, raw, raw)
}

func frameOf(codec uint8, raw, stored []byte) Frame {
	return Frame{codec: codec, pages: uint8(len(raw) / guestmem.PageSize), stored: uint32(len(stored)), crc: checksum(stored)}
}

// A Decoder holds the buffers for reading frames, so that reading one allocates nothing. Only one goroutine at a
// time may use it. Get one with NewDecoder and give it back with Release.
type Decoder struct {
	zstd *zstd.Decoder
	in   []byte
	out  []byte
}

var decoders = sync.Pool{}

// prepared holds the decoders of PrepareDecoders until NewDecoder hands them out.
var prepared = make(chan *Decoder, MaxPrepared)

// MaxPrepared bounds the decoders that PrepareDecoders makes. Each takes 0.7 MiB.
const MaxPrepared = 4

// PrepareDecoders makes n decoders, at most MaxPrepared, with their memory resident. NewDecoder returns them
// first. It is for a process that will open one snapshot and must do so fast. Decoders left from earlier calls
// count.
func PrepareDecoders(n int) error {
	c, err := newCompressor(frameLevel)
	if err != nil {
		return err
	}
	page := make([]byte, guestmem.PageSize)
	copy(page, "a page that is not all alike")
	stored, frame := c.append(nil, page)
	for len(prepared) < min(n, MaxPrepared) {
		d, err := newDecoder()
		if err != nil {
			return err
		}
		// Writing makes the buffers resident, and decoding a frame builds the tables.
		clear(d.in)
		clear(d.out)
		if _, wrong := d.decode(&frame, stored); wrong != "" {
			return fmt.Errorf("trying a decoder: %w: %s", ErrCorrupt, wrong)
		}
		select {
		case prepared <- d:
		default:
			d.Release() // another call has filled prepared
		}
	}
	return nil
}

// NewDecoder returns a decoder, perhaps one that was released before.
func NewDecoder() (*Decoder, error) {
	select {
	case d := <-prepared:
		return d, nil
	default:
	}
	if d, ok := decoders.Get().(*Decoder); ok {
		return d, nil
	}
	return newDecoder()
}

func newDecoder() (*Decoder, error) {
	// The capacity of the output buffer bounds the output. It is little more than the size that the index states, so the
	// decoder refuses a frame that expands to more as soon as it reaches that size.
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(maxFrameBytes), zstd.WithDecoderMaxWindow(maxFrameBytes), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, fmt.Errorf("setting up zstd: %w", err)
	}
	return &Decoder{zstd: z, in: make([]byte, maxFrameBytes), out: make([]byte, maxFrameBytes+slack)}, nil
}

// Buffer returns the buffer that ReadFrame writes to. It has room for the pages of any frame, MaxFramePages.
func (d *Decoder) Buffer() []byte { return d.out[:maxFrameBytes] }

// Release gives the decoder back. Pages that ReadFrame returned are no longer valid.
func (d *Decoder) Release() { decoders.Put(d) }

// decode checks in against the frame's checksum and returns the pages in it, valid until the next call. If
// something is wrong, it returns what as a text.
func (d *Decoder) decode(f *Frame, in []byte) ([]byte, string) {
	if got := checksum(in); got != f.crc {
		return nil, fmt.Sprintf("frame checksum is %08x, the index says %08x", got, f.crc)
	}
	raw := int(f.pages) * guestmem.PageSize
	if f.codec == codecRaw {
		return in, ""
	}
	out, err := d.zstd.DecodeAll(in, d.out[:0:raw+slack])
	if err != nil {
		return nil, fmt.Sprintf("frame does not decompress to %d bytes: %v", raw, err)
	}
	if len(out) != raw {
		return nil, fmt.Sprintf("frame decompresses to %d bytes instead of %d", len(out), raw)
	}
	return out, ""
}
