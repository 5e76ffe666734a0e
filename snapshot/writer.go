package snapshot

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"sync"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// A job is one chunk whose leaf the new snapshot may have to write.
type job struct {
	chunk uint64
	// read marks the pages to read from the source. They replace those in the old leaf.
	read pageBits
	// hot marks the pages of Spec.Hot.
	hot pageBits
	// leaf is the encoded leaf that this snapshot has already made for the chunk; nil if the old leaf is the
	// base's.
	leaf []byte
}

// pageBits has a bit for each page of a chunk.
type pageBits [ChunkPages / 64]uint64

func (b *pageBits) has(i int) bool { return b[i/64]>>(i%64)&1 != 0 }
func (b *pageBits) set(i int)      { b[i/64] |= 1 << (i % 64) }

// A unit is a job on its way through the writer. Units are reused, so their number bounds the memory.
type unit struct {
	job
	done chan struct{}
	err  error

	buf  []byte // pages as they come from the source; a leaf before that
	cold batch
	warm batch  // of hot pages
	blob []byte // new frames; their offsets count from its start
	// hotBlob has those of hot pages, which numbers in leaf.frames; their offsets count from its start.
	hotBlob []byte
	hotAt   []int

	// old is the leaf before, oldFile its file and oldBytes its length. oldFile is 0 if there is none or it is not
	// written yet.
	old      Leaf
	oldFile  uint32
	oldBytes int
	// leaf is the leaf after. Its first kept frames are old frames that stay where they are.
	leaf Leaf
	kept int
	// same is true if the chunk does not change.
	same bool
}

// A batch is the pages of a frame that is being filled.
type batch struct {
	raw []byte
	at  []int // their places in the chunk
}

// readPages is the most pages that a unit reads at once.
const readPages = 64

func (w *writer) writers() int {
	n := w.spec.Writers
	if n <= 0 {
		n = runtime.GOMAXPROCS(0)
	}
	return min(n, MaxWriters)
}

// writeMemory writes the memory file and completes the manifest in info. It links the files of the base that are
// still needed into the directory dir.
func (w *writer) writeMemory(ctx context.Context, f io.Writer, dir string, info *Info) (int64, error) {
	m := info.Manifest
	id := randomID()
	out := &memoryWriter{f: f, number: w.number(), leaves: map[uint64][]byte{}, tally: newTally()}
	root := make([]byte, m.rootBytes())
	if w.base != nil {
		copy(root, w.base.memory.root)
		out.fromBase(w.base.manifest)
	}
	if err := out.write(encodeFileHeader(id)); err != nil {
		return 0, err
	}
	if w.spec.Memory != nil {
		p := pass{w: w, out: out, source: w.spec.Memory}
		if err := p.run(ctx, p.scan); err != nil {
			return 0, err
		}
	}
	if err := out.writeHot(); err != nil {
		return 0, err
	}
	var files []MemoryFile
	if w.base != nil {
		var err error
		if files, err = w.carry(ctx, out, dir); err != nil {
			return 0, err
		}
	}
	index := out.size
	for _, chunk := range slices.Sorted(maps.Keys(out.leaves)) {
		entry := root[chunk*rootEntry:][:rootEntry]
		clear(entry)
		leaf := out.leaves[chunk]
		if len(leaf) == 0 {
			continue // all zeros now
		}
		ref := rootRef{file: out.number, offset: out.size, frames: leafFrames(leaf), crc: checksum(leaf)}
		ref.put(entry)
		if err := out.write(leaf); err != nil {
			return 0, err
		}
	}
	m.Memory.RootCRC32C = checksum(root)
	if err := out.write(root); err != nil {
		return 0, err
	}
	m.Stats = Stats{Frames: out.tally.frames}
	for i := range files {
		u := out.tally.file(files[i].Number)
		files[i].Name = linkName(files[i].ID)
		files[i].Pages, files[i].FrameBytes, files[i].LeafBytes = u.pages, u.frameBytes, u.leafBytes
		info.SharedBytes += files[i].Size
	}
	own := out.tally.file(out.number)
	m.Memory.Files = append(files, MemoryFile{
		Number: out.number, ID: hex.EncodeToString(id[:]), Name: MemoryName, Size: out.size, Index: index,
		StoredPages: own.pages, Pages: own.pages, FrameBytes: own.frameBytes, LeafBytes: uint64(out.leafBytes),
	})
	for i := range m.Memory.Files {
		m.Stats.Pages += m.Memory.Files[i].Pages
		m.Stats.StoredBytes += m.Memory.Files[i].FrameBytes
	}
	info.CarriedBytes = out.carried
	return out.size, nil
}

// A pass moves chunks through the compressing goroutines into out.
type pass struct {
	w      *writer
	out    *memoryWriter
	source MemorySource
	// carried is the set of files that the index may no longer refer to; nil if there are none.
	carried map[uint32]bool
}

// run processes the jobs that jobs emits, which must be in the order of chunks. It takes a unit from free, passes
// it to a compressing goroutine through work, and to the writing goroutine, this one, through order. So the file
// does not depend on which goroutine is faster.
func (p *pass) run(ctx context.Context, jobs func(ctx context.Context, emit func(job) error) error) error {
	ctx, cancel := context.WithCancel(ctx)
	n := p.w.writers()
	units := 2 * n
	free, work, order := make(chan *unit, units), make(chan *unit, units), make(chan *unit, units)
	for range units {
		free <- &unit{done: make(chan struct{}, 1)}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var jobsErr error
	wg.Go(func() {
		defer close(order)
		defer close(work)
		jobsErr = jobs(ctx, func(j job) error {
			select {
			case u := <-free:
				u.job = j
				// Both channels have room for all units.
				work <- u
				order <- u
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	})
	for range n {
		wg.Go(func() { p.work(ctx, work) })
	}
	for u := range order {
		<-u.done
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if u.err != nil {
			return u.err
		}
		if err := p.out.add(u); err != nil {
			return err
		}
		free <- u
	}
	// order is closed, so jobs has returned.
	return jobsErr
}

// tools are the compressor and decoder of one compressing goroutine.
type tools struct {
	c *compressor
	d *Decoder
}

func (p *pass) work(ctx context.Context, work <-chan *unit) {
	var t tools
	c, err := newCompressor(frameLevel)
	if err == nil {
		t.c = c
		defer c.enc.Close()
		if t.d, err = NewDecoder(); err == nil {
			defer t.d.Release()
		}
	}
	for u := range work {
		if u.err = err; err == nil && ctx.Err() == nil {
			u.err = p.fill(u, &t)
		}
		u.done <- struct{}{}
	}
}

// scan splits the pages to read from the source into jobs.
func (p *pass) scan(ctx context.Context, emit func(job) error) error {
	if p.w.base != nil {
		for c := range uint64(p.w.base.memory.Chunks()) {
			j := job{chunk: c}
			changed, hot := chunkOf(p.w.spec.Changed, c, &j.read), chunkOf(p.w.hot, c, &j.hot)
			if !changed && !hot {
				continue
			}
			if err := emit(j); err != nil {
				return err
			}
		}
		return nil
	}
	pages := pagesOf(p.source.Slots())
	for page := uint64(0); page < pages; {
		first, end, err := p.nextData(page, pages)
		if err != nil {
			return err
		}
		if first == end {
			return nil
		}
		chunk := first / ChunkPages
		limit := min((chunk+1)*ChunkPages, pages)
		last := min(end, limit)
		// Further runs in the same chunk belong to the same job.
		j := job{chunk: chunk}
		chunkOf(p.w.hot, chunk, &j.hot)
		mark(&j.read, first, last)
		for last < limit {
			f, e, err := p.nextData(last, pages)
			if err != nil {
				return err
			}
			if f == e || f >= limit {
				break
			}
			last = min(e, limit)
			mark(&j.read, f, last)
		}
		if err := emit(j); err != nil {
			return err
		}
		page = limit
	}
	return nil
}

// nextData calls the source's NextData and checks the result.
func (p *pass) nextData(page, pages uint64) (first, end uint64, err error) {
	first, end, err = p.source.NextData(page)
	if err == nil && (first < page || end < first || end > pages) {
		err = fmt.Errorf("source of RAM has data at pages %d to %d after page %d of %d: %w", first, end, page, pages, ErrSpec)
	}
	return first, end, err
}

// mark sets the bits of pages [first, end) of a chunk.
func mark(data *pageBits, first, end uint64) {
	for p := first; p < end; p++ {
		data.set(int(p % ChunkPages))
	}
}

var zeroPage [guestmem.PageSize]byte

// fill makes the unit's new leaf and frames.
func (p *pass) fill(u *unit, t *tools) error {
	if u.buf == nil {
		u.buf = make([]byte, readPages*guestmem.PageSize)
		u.cold.raw = make([]byte, 0, FramePages*guestmem.PageSize)
	}
	u.blob, u.hotBlob, u.hotAt = u.blob[:0], u.hotBlob[:0], u.hotAt[:0]
	u.leaf.frames, u.kept, u.same = u.leaf.frames[:0], 0, false
	clear(u.leaf.pages[:])
	if err := p.readOld(u); err != nil {
		return err
	}
	heat := p.heat(u)
	if p.source == nil && !p.touches(u) || p.source != nil && u.read == (pageBits{}) && heat == (pageBits{}) {
		u.same = true
		return nil
	}
	moved := u.keep(p.carried, &heat)
	if p.source != nil {
		if err := p.readSource(u, t.c); err != nil {
			return err
		}
		if err := p.packHot(u, t, &heat); err != nil {
			return err
		}
	} else if err := p.move(u, t, moved); err != nil {
		return err
	}
	u.flush(t.c, &u.cold)
	u.flush(t.c, &u.warm)
	return nil
}

// heat returns the hot pages that are compressed in a frame of the base and have not changed since.
func (p *pass) heat(u *unit) (heat pageBits) {
	if p.source == nil || u.hot == (pageBits{}) {
		return heat
	}
	for i := range u.old.pages {
		if frame, _, ok := u.old.Page(i); ok && u.hot.has(i) && !u.read.has(i) && u.old.frames[frame].codec != codecRaw {
			heat.set(i)
		}
	}
	return heat
}

// packHot packs pages of the base anew. It takes them from there and not from the source, which may have later content
// of pages that are not in Spec.Changed.
func (p *pass) packHot(u *unit, t *tools, heat *pageBits) error {
	done := -1
	var raw []byte
	for i := range u.old.pages {
		frame, slot, ok := u.old.Page(i)
		if !ok || !heat.has(i) {
			continue
		}
		if frame != done {
			var err error
			if raw, err = p.w.base.memory.ReadFrame(&u.old.frames[frame], t.d); err != nil {
				return fmt.Errorf("base: %w", err)
			}
			done = frame
		}
		u.pack(t.c, raw[slot*guestmem.PageSize:][:guestmem.PageSize], i)
	}
	return nil
}

// readOld reads the chunk's current leaf.
func (p *pass) readOld(u *unit) error {
	u.old.frames, u.oldFile, u.oldBytes = u.old.frames[:0], 0, 0
	clear(u.old.pages[:])
	base := p.w.base
	switch {
	case base == nil:
	case u.job.leaf != nil:
		if len(u.job.leaf) == 0 {
			return nil
		}
		// This snapshot made the leaf, so the files that it refers to exist.
		anywhere := func(uint32) int64 { return maxFileSize }
		if wrong := decodeLeaf(&u.old, u.job.leaf, u.chunk, ChunkPages, anywhere); wrong != "" {
			return fmt.Errorf("the new leaf of chunk %d is not readable: %s", u.chunk, wrong)
		}
	default:
		ok, err := base.memory.readLeaf(int(u.chunk), &u.old, u.buf)
		if err != nil {
			return fmt.Errorf("base: %w", err)
		}
		if !ok {
			u.old.frames = u.old.frames[:0]
			return nil
		}
		r := base.memory.ref(int(u.chunk))
		u.oldFile, u.oldBytes = r.file, r.length()
	}
	return nil
}

// touches reports whether the old leaf, or a frame of it, is in a file that the snapshot drops.
func (p *pass) touches(u *unit) bool {
	return p.carried[u.oldFile] || slices.ContainsFunc(u.old.frames, func(f Frame) bool { return p.carried[f.file] })
}

// keep adds the old frames that stay where they are to the new leaf, without the pages of heat. For each old frame that
// must move, it returns how many of its pages the chunk still needs.
func (u *unit) keep(carried map[uint32]bool, heat *pageBits) (moved [ChunkPages]uint16) {
	var place [ChunkPages]int // 1 + number of the frame in the new leaf
	for i := range u.old.pages {
		frame, slot, ok := u.old.Page(i)
		if !ok || u.read.has(i) || heat.has(i) {
			continue
		}
		if carried[u.old.frames[frame].file] {
			moved[frame]++
			continue
		}
		if place[frame] == 0 {
			u.leaf.frames = append(u.leaf.frames, u.old.frames[frame])
			place[frame] = len(u.leaf.frames)
		}
		u.leaf.setPage(i, place[frame]-1, slot)
	}
	u.kept = len(u.leaf.frames)
	return moved
}

// readSource reads the unit's pages and packs those that are not zeros into frames.
func (p *pass) readSource(u *unit, c *compressor) error {
	for i := 0; i < ChunkPages; {
		n := 0
		for n < readPages && i+n < ChunkPages && u.read.has(i+n) {
			n++
		}
		if n == 0 {
			i++
			continue
		}
		b := u.buf[:n*guestmem.PageSize]
		first := u.chunk*ChunkPages + uint64(i)
		if err := p.source.ReadPages(first, b); err != nil {
			return fmt.Errorf("reading pages %d to %d: %w", first, first+uint64(n)-1, err)
		}
		if r, ok := p.source.(PageReleaser); ok {
			r.Release(first, first+uint64(n))
		}
		for ; len(b) > 0; b, i = b[guestmem.PageSize:], i+1 {
			if page := b[:guestmem.PageSize]; !bytes.Equal(page, zeroPage[:]) {
				u.pack(c, page, i)
			}
		}
	}
	return nil
}

// pack adds page i of the chunk to the current frame, and flushes a full one.
func (u *unit) pack(c *compressor, page []byte, i int) {
	b := &u.cold
	if u.hot.has(i) {
		b = &u.warm
	}
	b.raw = append(b.raw, page...)
	b.at = append(b.at, i)
	if len(b.at) == FramePages {
		u.flush(c, b)
	}
}

// flush makes a frame of the collected pages, if there are any.
func (u *unit) flush(c *compressor, b *batch) {
	if len(b.at) == 0 {
		return
	}
	var at int
	var f Frame
	if b == &u.warm {
		at = len(u.hotBlob)
		u.hotBlob, f = appendRaw(u.hotBlob, b.raw)
		u.hotAt = append(u.hotAt, len(u.leaf.frames))
	} else {
		at = len(u.blob)
		u.blob, f = c.append(u.blob, b.raw)
	}
	f.offset = int64(at)
	for slot, page := range b.at {
		u.leaf.setPage(page, len(u.leaf.frames), slot)
	}
	u.leaf.frames = append(u.leaf.frames, f)
	b.raw, b.at = b.raw[:0], b.at[:0]
}

// memoryWriter writes units to the file in order.
type memoryWriter struct {
	f      io.Writer
	number uint32
	size   int64
	// leaves are the encoded leaves of chunks that have changed; empty for a chunk that is all zeros now. They are
	// small enough to hold in memory until the frames are written.
	leaves    map[uint64][]byte
	leafBytes int64
	// hot has the frames of hot pages, some MaxHot pages: one behind the other in the file, they are read with few
	// requests. hotLeaves says which entries of leaves are theirs.
	hot       []byte
	hotLeaves []hotEntry
	// tally counts what the new index refers to, except the new leaves themselves.
	tally   *tally
	carried int64
}

// fromBase starts the tally with what the base's index refers to.
func (o *memoryWriter) fromBase(m *Manifest) {
	o.tally.frames = m.Stats.Frames
	for _, f := range m.Memory.Files {
		o.tally.files[f.Number] = &use{f.Pages, f.FrameBytes, f.LeafBytes}
	}
}

// A hotEntry is a frame of hot pages in the leaf of a chunk, which is at a place of memoryWriter.hot.
type hotEntry struct {
	chunk uint64
	frame int
	at    int
}

// writeHot writes the frames of hot pages.
func (o *memoryWriter) writeHot() error {
	for _, h := range o.hotLeaves {
		binary.LittleEndian.PutUint64(o.leaves[h.chunk][leafHeader+h.frame*frameEntry:], uint64(o.size)+uint64(h.at))
	}
	err := o.write(o.hot)
	o.hot, o.hotLeaves = nil, nil
	return err
}

// total returns how long the file would be with the current leaves.
func (o *memoryWriter) total() int64 { return o.size + o.leafBytes }

func (o *memoryWriter) write(p []byte) error {
	n, err := o.f.Write(p)
	o.size += int64(n)
	return err
}

func (o *memoryWriter) add(u *unit) error {
	if u.same || len(u.leaf.frames) == 0 && len(u.old.frames) == 0 {
		return nil
	}
	for i := range u.leaf.frames[u.kept:] {
		f := &u.leaf.frames[u.kept+i]
		f.offset += o.size
		f.file = o.number
	}
	for _, i := range u.hotAt {
		o.hotLeaves = append(o.hotLeaves, hotEntry{u.chunk, i, len(o.hot) + int(u.leaf.frames[i].offset-o.size)})
	}
	o.hot = append(o.hot, u.hotBlob...)
	o.tally.remove(&u.old, u.oldFile, u.oldBytes)
	o.tally.add(&u.leaf, 0, 0)
	leaf := []byte{}
	if len(u.leaf.frames) > 0 {
		leaf = encodeLeaf(nil, u.chunk, &u.leaf)
	}
	o.leafBytes += int64(len(leaf) - len(o.leaves[u.chunk]))
	o.leaves[u.chunk] = leaf
	err := o.write(u.blob)
	if err == nil && len(o.hot) >= MaxHot*guestmem.PageSize { // a carried file may have more pages that are not compressed
		err = o.writeHot()
	}
	return err
}
