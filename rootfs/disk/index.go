package disk

import "sync/atomic"

const (
	chunkBlocks = 4096 // blocks in a chunk of the index: 16 MiB of disk, 8 KiB of memory when mixed
	perWord     = 4    // 16-bit sources in an atomic word
	chunkWords  = chunkBlocks / perWord
	spread      = 0x0001_0001_0001_0001 // times a source: a word full of it
)

// source is where a block is read from: 0 is zeros, n is layers[n-1] of the disk.
type source = uint16

// index maps every block to its source. A chunk whose blocks all have one source needs no array, so an empty or
// one-layer 64 GiB disk takes 64 KiB. At most an index takes 1/2048 of the disk's size (4 MiB for 8 GiB) and 16
// bytes for each 16 MiB.
//
// Reading needs no lock. Two goroutines must not change the same chunk at once.
type index struct {
	blocks int64
	chunks []indexChunk
}

type indexChunk struct {
	words   atomic.Pointer[[chunkWords]atomic.Uint64] // nil: all blocks have the source uniform
	uniform atomic.Uint32
}

func newIndex(blocks int64) *index {
	return &index{blocks: blocks, chunks: make([]indexChunk, (blocks+chunkBlocks-1)/chunkBlocks)}
}

// get returns the source of one block.
func (x *index) get(b int64) source {
	c := &x.chunks[b/chunkBlocks]
	w := c.words.Load()
	if w == nil {
		return source(c.uniform.Load())
	}
	i := b % chunkBlocks
	return source(w[i/perWord].Load() >> (16 * (i % perWord)))
}

// runLen returns how many blocks from b, up to end, have the source s.
func (x *index) runLen(b, end int64, s source) int64 {
	start := b
	for b < end {
		c := &x.chunks[b/chunkBlocks]
		stop := min(end, (b/chunkBlocks+1)*chunkBlocks)
		w := c.words.Load()
		if w == nil {
			if source(c.uniform.Load()) != s {
				break
			}
			b = stop
			continue
		}
		full := uint64(s) * spread
		for b < stop {
			i := b % chunkBlocks
			v := w[i/perWord].Load()
			if v == full {
				b = min(stop, b-i%perWord+perWord)
				continue
			}
			if source(v>>(16*(i%perWord))) != s {
				return b - start
			}
			b++
		}
	}
	return b - start
}

// set gives count blocks from b the source s.
func (x *index) set(b, count int64, s source) {
	for end := b + count; b < end; {
		c := &x.chunks[b/chunkBlocks]
		base := b / chunkBlocks * chunkBlocks
		stop := min(end, base+chunkBlocks)
		w := c.words.Load()
		switch {
		case w == nil && source(c.uniform.Load()) == s:
		case w == nil && b == base && (stop == base+chunkBlocks || stop == x.blocks):
			c.uniform.Store(uint32(s))
		default:
			if w == nil {
				w = new([chunkWords]atomic.Uint64)
				v := uint64(c.uniform.Load()) * spread
				for i := range w {
					w[i].Store(v)
				}
				setWords(w, b-base, stop-base, s)
				c.words.Store(w)
			} else {
				setWords(w, b-base, stop-base, s)
			}
		}
		b = stop
	}
}

func setWords(w *[chunkWords]atomic.Uint64, i, end int64, s source) {
	for i < end {
		if i%perWord == 0 && end-i >= perWord {
			w[i/perWord].Store(uint64(s) * spread)
			i += perWord
			continue
		}
		shift := 16 * (i % perWord)
		v := w[i/perWord].Load()
		w[i/perWord].Store(v&^(0xffff<<shift) | uint64(s)<<shift)
		i++
	}
}
