package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

const (
	frameSize = 512 << 10 // plain bytes of each frame but the last
	packSize  = 16 << 20  // a pack is put when it has this many bytes
	// packsAtOnce is how many packs are put at once, and readsAtOnce how many pieces of readSize are read at once: this
	// bounds the memory for a file.
	packsAtOnce = 3
	readsAtOnce = 4
	readSize    = 4 << 20

	indexMagic   = "DROWSEAI"
	indexVersion = 1
	indexHeader  = 32
	packEntry    = 4
	frameEntry   = 4 + 4 + 4 + sha256.Size
	// maxFile bounds the index of a file to less than an object may have.
	maxFile   = 512 << 30
	maxFrames = maxFile / frameSize
	maxPacks  = 1 << 16
)

// ErrCorrupt means that an archive is not what drowse has written.
var ErrCorrupt = blob.ErrCorrupt

// fileRef names a file in an archive.
type fileRef struct {
	Key   string `json:"key"`   // its index is KEY/index, its packs KEY/0, KEY/1, ...
	Size  int64  `json:"size"`  // plain bytes
	Index string `json:"index"` // SHA-256 of the index, 64 hex digits
}

// frame says where a frame is. stored 0 means zeros.
type frame struct {
	pack   uint32
	off    uint32
	stored uint32 // as many as it has plain bytes: not compressed
	sum    [sha256.Size]byte
}

// index of a file.
type index struct {
	size   int64
	packs  []uint32 // bytes of each
	frames []frame
}

// plain returns the size of frame i.
func (x *index) plain(i int) int { return int(min(frameSize, x.size-int64(i)*frameSize)) }

func framesOf(size int64) int { return int((size + frameSize - 1) / frameSize) }

func (x *index) encode() []byte {
	b := append([]byte(indexMagic), make([]byte, indexHeader-len(indexMagic))...)
	binary.LittleEndian.PutUint32(b[8:], indexVersion)
	binary.LittleEndian.PutUint32(b[12:], frameSize)
	binary.LittleEndian.PutUint64(b[16:], uint64(x.size))
	binary.LittleEndian.PutUint32(b[24:], uint32(len(x.packs)))
	for _, n := range x.packs {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	for i := range x.frames {
		f := &x.frames[i]
		b = binary.LittleEndian.AppendUint32(b, f.pack)
		b = binary.LittleEndian.AppendUint32(b, f.off)
		b = binary.LittleEndian.AppendUint32(b, f.stored)
		b = append(b, f.sum[:]...)
	}
	return b
}

// decodeIndex accepts only what encode writes for a file of that size.
func decodeIndex(b []byte, size int64) (*index, error) {
	bad := func(what string) (*index, error) { return nil, fmt.Errorf("%w: an index %s", ErrCorrupt, what) }
	if len(b) < indexHeader || string(b[:8]) != indexMagic {
		return bad("does not begin like one")
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != indexVersion {
		return bad(fmt.Sprintf("has version %d, this program reads %d: use the one that wrote it", v, indexVersion))
	}
	packs := int64(binary.LittleEndian.Uint32(b[24:]))
	if size < 0 || size > maxFile || binary.LittleEndian.Uint64(b[16:]) != uint64(size) || packs > maxPacks ||
		binary.LittleEndian.Uint32(b[12:]) != frameSize || binary.LittleEndian.Uint32(b[28:]) != 0 {
		return bad("has another size than its file")
	}
	x := &index{size: size, packs: make([]uint32, packs), frames: make([]frame, framesOf(size))}
	if int64(len(b)) != indexHeader+packEntry*packs+frameEntry*int64(len(x.frames)) {
		return bad("has an impossible length")
	}
	for b, i := b[indexHeader:], 0; i < len(x.packs); i++ {
		x.packs[i] = binary.LittleEndian.Uint32(b[packEntry*i:])
		if x.packs[i] == 0 || x.packs[i] > blob.MaxObject {
			return bad("has an impossible pack")
		}
	}
	b = b[indexHeader+packEntry*int(packs):]
	// Frames fill the packs, in order.
	pack, off := uint32(0), uint32(0)
	for i := range x.frames {
		f := &x.frames[i]
		f.pack, f.off, f.stored = binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
		copy(f.sum[:], b[12:])
		b = b[frameEntry:]
		if f.stored == 0 {
			if f.pack != 0 || f.off != 0 || f.sum != [sha256.Size]byte{} {
				return bad("has a frame of zeros somewhere")
			}
			continue
		}
		if pack < uint32(packs) && off == x.packs[pack] {
			pack, off = pack+1, 0
		}
		if f.pack != pack || f.off != off || pack >= uint32(packs) || f.stored > uint32(x.plain(i)) || f.stored > x.packs[pack]-off {
			return bad("has a frame in an impossible place")
		}
		off += f.stored
	}
	if pack != uint32(max(packs-1, 0)) || packs > 0 && off != x.packs[pack] {
		return bad("has packs without frames")
	}
	return x, nil
}

// sum is a hash that only the content of the file has, however it is compressed.
func (x *index) sum() string {
	h := sha256.New()
	fmt.Fprintf(h, "%s %d %d\n", indexMagic, frameSize, x.size)
	for i := range x.frames {
		h.Write(x.frames[i].sum[:])
	}
	return hex.EncodeToString(h.Sum(nil))
}

var encoders = sync.Pool{New: func() any {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false),
		zstd.WithSingleSegment(true), zstd.WithLowerEncoderMem(true), zstd.WithWindowSize(frameSize))
	if err != nil {
		panic(err) // the options above are wrong
	}
	return e
}}

var decoders = sync.Pool{New: func() any {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderMaxMemory(frameSize),
		zstd.WithDecoderMaxWindow(frameSize), zstd.WithDecoderLowmem(true))
	if err != nil {
		panic(err) // the options above are wrong
	}
	return d
}}

var zeroFrame [frameSize]byte

// packer puts a file.
type packer struct {
	store blob.Store
	key   string
	x     index
	pack  []byte // not put yet
	puts  *errgroup.Group
	ctx   context.Context
}

// put puts a file of exactly size bytes under a key that nothing has, and returns how it is named and how many bytes it
// has in the store.
func put(ctx context.Context, store blob.Store, key string, r io.Reader, size int64) (ref fileRef, stored int64, err error) {
	x, err := putPacks(ctx, store, key, r, size)
	if err != nil {
		return ref, 0, err
	}
	ref.Index, stored, err = putIndex(ctx, store, key, x)
	ref.Key, ref.Size = key, size
	return ref, stored, err
}

// putPacks puts a file without its index.
func putPacks(ctx context.Context, store blob.Store, key string, r io.Reader, size int64) (*index, error) {
	if size < 0 || size > maxFile {
		return nil, fmt.Errorf("a file of %d bytes: an archive has files of at most %d", size, int64(maxFile))
	}
	p := &packer{store: store, key: key, x: index{size: size, frames: make([]frame, framesOf(size))}}
	p.puts, p.ctx = errgroup.WithContext(ctx)
	p.puts.SetLimit(packsAtOnce)
	err := p.frames(r)
	if err == nil {
		p.flush()
	}
	if werr := p.puts.Wait(); werr != nil {
		err = werr // the cause of the other
	}
	return &p.x, err
}

// putIndex puts the index of a file, and returns its SHA-256 and how many bytes the file has in the store.
func putIndex(ctx context.Context, store blob.Store, key string, x *index) (sum string, stored int64, err error) {
	doc := x.encode()
	if err := putOwn(ctx, store, key+"/index", doc); err != nil {
		return "", 0, err
	}
	h := sha256.Sum256(doc)
	return hex.EncodeToString(h[:]), x.stored() + int64(len(doc)), nil
}

// stored is how many bytes the packs have.
func (x *index) stored() (n int64) {
	for _, size := range x.packs {
		n += int64(size)
	}
	return n
}

func (p *packer) frames(r io.Reader) error {
	plain := make([]byte, frameSize)
	for i := range p.x.frames {
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
		b := plain[:p.x.plain(i)]
		if _, err := io.ReadFull(r, b); err != nil {
			return fmt.Errorf("reading a file of %d bytes at %d: %w", p.x.size, int64(i)*frameSize, noEOF(err))
		}
		p.add(&p.x.frames[i], b)
	}
	var more [1]byte
	if n, err := io.ReadFull(r, more[:]); n != 0 || !errors.Is(err, io.EOF) {
		return fmt.Errorf("a file has more than its %d bytes: it has changed (%w)", p.x.size, errors.Join(err, ErrCorrupt))
	}
	return nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// add appends a frame to the pack.
func (p *packer) add(f *frame, plain []byte) {
	if bytes.Equal(plain, zeroFrame[:len(plain)]) {
		return
	}
	if p.pack == nil {
		p.pack = make([]byte, 0, packSize+frameSize)
	}
	f.sum = sha256.Sum256(plain)
	f.pack, f.off = uint32(len(p.x.packs)), uint32(len(p.pack))
	e, _ := encoders.Get().(*zstd.Encoder)
	p.pack = e.EncodeAll(plain, p.pack)
	encoders.Put(e)
	if f.stored = uint32(len(p.pack)) - f.off; f.stored >= uint32(len(plain)) {
		p.pack = append(p.pack[:f.off], plain...)
		f.stored = uint32(len(plain))
	}
	if len(p.pack) >= packSize {
		p.flush()
	}
}

// flush puts the pack, while the next one is made.
func (p *packer) flush() {
	if len(p.pack) == 0 {
		return
	}
	body, key := p.pack, fmt.Sprintf("%s/%d", p.key, len(p.x.packs))
	p.x.packs, p.pack = append(p.x.packs, uint32(len(body))), nil
	p.puts.Go(func() error { return putOwn(p.ctx, p.store, key, body) })
}

// putOwn puts an object under a key that only this attempt to put an entry has: one that is there is its own, which a
// store has that has repeated the request.
func putOwn(ctx context.Context, store blob.Store, key string, body []byte) error {
	if err := store.Put(ctx, key, body); !errors.Is(err, blob.ErrExists) {
		return err
	}
	return nil
}

// open reads the index of a file.
func open(ctx context.Context, store blob.Store, ref fileRef) (*index, error) {
	limit := int64(indexHeader + packEntry*maxPacks + frameEntry*framesOf(ref.Size))
	doc, _, err := store.Load(ctx, ref.Key+"/index", limit)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(doc); hex.EncodeToString(sum[:]) != ref.Index {
		return nil, fmt.Errorf("%w: %s/index is not the one that the manifest names", ErrCorrupt, ref.Key)
	}
	return decodeIndex(doc, ref.Size)
}

// piece is a run of frames that is read at once: those with bytes are one behind the other in one pack.
type piece struct {
	first, end int // frames
	pack       uint32
	off, n     uint32
}

// pieces cuts the frames into pieces.
func (x *index) pieces() (out []piece) {
	var p piece
	for i := range x.frames {
		f := &x.frames[i]
		if f.stored == 0 {
			p.end = i + 1
			if p.end-p.first >= readSize/frameSize && p.n == 0 {
				out, p = append(out, p), piece{first: i + 1, end: i + 1}
			}
			continue
		}
		if p.n > 0 && (f.pack != p.pack || p.n+f.stored > readSize) {
			out, p = append(out, p), piece{first: i, end: i}
		}
		if p.n == 0 {
			p.pack, p.off = f.pack, f.off
		}
		p.n += f.stored
		p.end = i + 1
	}
	if p.end > p.first {
		out = append(out, p)
	}
	return out
}

// get writes a file to w. It reads ahead, and writes nothing that it has not checked.
func (x *index) get(ctx context.Context, store blob.Store, key string, w io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	type result struct {
		body []byte
		err  error
	}
	pieces := x.pieces()
	ahead := make(chan chan result, readsAtOnce-1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		defer close(ahead)
		for _, p := range pieces {
			c := make(chan result, 1)
			select {
			case ahead <- c:
			case <-ctx.Done():
				return
			}
			wg.Go(func() {
				if p.n == 0 {
					c <- result{}
					return
				}
				body := make([]byte, p.n)
				err := store.ReadAt(ctx, fmt.Sprintf("%s/%d", key, p.pack), body, int64(p.off))
				c <- result{body, err}
			})
		}
	})
	d, _ := decoders.Get().(*zstd.Decoder)
	defer decoders.Put(d)
	plain := make([]byte, 0, frameSize)
	for _, p := range pieces {
		c, ok := <-ahead
		if !ok {
			return context.Cause(ctx)
		}
		r := <-c
		if r.err != nil {
			return r.err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		body := r.body
		for i := p.first; i < p.end; i++ {
			f := &x.frames[i]
			b, err := f.decode(d, plain, body, x.plain(i))
			body = body[f.stored:]
			if err != nil {
				return fmt.Errorf("%w: frame %d of %s: %w", ErrCorrupt, i, key, err)
			}
			if _, err := w.Write(b); err != nil {
				return err
			}
		}
	}
	return nil
}

var errFrame = errors.New("it is not the one that the index names")

// decode returns the plain bytes of a frame, whose stored ones begin at body. It uses the memory of plain.
func (f *frame) decode(d *zstd.Decoder, plain, body []byte, size int) ([]byte, error) {
	switch {
	case f.stored == 0:
		return zeroFrame[:size], nil
	case int(f.stored) == size:
		plain = body[:size]
	default:
		var err error
		if plain, err = d.DecodeAll(body[:f.stored], plain[:0:size]); err != nil {
			return nil, err
		}
	}
	if len(plain) != size || sha256.Sum256(plain) != f.sum {
		return nil, errFrame
	}
	return plain, nil
}
