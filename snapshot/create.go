package snapshot

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// FramePages is how many pages go into a frame, and frameLevel how hard they
// are compressed. Chosen by measurement, see FORMAT.md, "Choice of constants".
const (
	FramePages = 16
	frameLevel = zstd.SpeedFastest
)

// MaxWriters bounds the goroutines that compress. Each holds up to two chunks of
// pages, raw and compressed: about 8 MiB.
const MaxWriters = 32

// Spec says what goes into a snapshot. Memory is required, the rest describes.
type Spec struct {
	// ID is the snapshot's identity, 32 hex digits; a random one if empty.
	ID      string
	Sandbox string
	// Created is the time of the capture; now if zero.
	Created time.Time
	VCPUs   int
	Kernel  string
	Image   string
	Disks   []Disk
	Host    map[string]string
	Labels  map[string]string
	// Payloads are the states of vCPUs, interrupt controllers, clock, devices.
	Payloads []Payload
	// Memory is RAM. The guest must not run, nor a device write, until Create
	// has returned.
	Memory MemorySource
	// Writers is how many goroutines compress, at most MaxWriters; as many as
	// there are processors if 0.
	Writers int
	// FS stands in for the machine's file system, if not nil.
	FS FS
}

// Info describes a snapshot that has been created.
type Info struct {
	Dir      string
	Manifest *Manifest
	// SizeBytes is what all files of the snapshot take.
	SizeBytes int64
	// ManifestSHA256 is over the whole manifest file, and so pins everything
	// in the snapshot.
	ManifestSHA256 string
	// Elapsed are the times taken: reading, compressing and writing RAM; fsync
	// and rename.
	WriteTime, CommitTime time.Duration
}

const tempPrefix = ".drowse-snapshot-"

// Create writes a snapshot to the directory dir, which must not exist, while its
// parent must. The snapshot is durable when Create returns, and there is none
// of that name if it fails: with ErrExists, ErrNoSpace, ErrSpec, the error of
// the source or of the file system, or the context's. The machine is as it was
// before in every case.
func Create(ctx context.Context, dir string, spec Spec) (*Info, error) {
	w := &writer{spec: spec, fs: spec.FS, start: time.Now()}
	if w.fs == nil {
		w.fs = osFS{}
	}
	info, err := w.create(ctx, filepath.Clean(dir))
	if err != nil {
		return nil, writeError(fmt.Sprintf("writing snapshot %s", dir), err)
	}
	return info, nil
}

type writer struct {
	spec  Spec
	fs    FS
	start time.Time
}

func (w *writer) manifest() (*Manifest, error) {
	s := &w.spec
	id := s.ID
	if id == "" {
		r := randomID()
		id = hex.EncodeToString(r[:])
	}
	created := s.Created
	if created.IsZero() {
		created = w.start
	}
	m := &Manifest{
		Version: Version, Arch: arch, ID: id, Parents: []string{}, CreatedUnixNano: created.UnixNano(),
		Sandbox: s.Sandbox, VCPUs: s.VCPUs, Kernel: s.Kernel, Image: s.Image,
		Disks: slices.Clone(s.Disks), Host: s.Host, Labels: s.Labels,
		Memory: MemoryLayout{Slots: s.Memory.Slots()},
	}
	if err := checkSlots(m.Memory.Slots); err != nil {
		return nil, err
	}
	// What can be refused is refused before RAM is written.
	probe := *m
	probe.Memory.Files = []MemoryFile{{ID: id, Name: MemoryName, Size: maxFileSize}}
	probe.Memory.Root = Extent{File: 1, Offset: fileHeader, Length: int64(chunksOf(m.RAM())) * rootEntry}
	_, err := encodeManifest(&probe, s.Payloads)
	return m, err
}

func randomID() (id [16]byte) {
	rand.Read(id[:]) // never fails
	return id
}

func (w *writer) create(ctx context.Context, dir string) (info *Info, err error) {
	if w.spec.Memory == nil {
		return nil, fmt.Errorf("no source of RAM: %w", ErrSpec)
	}
	m, err := w.manifest()
	if err != nil {
		return nil, err
	}
	parent := filepath.Dir(dir)
	// The rename at the end decides, but it comes late.
	if exists, err := w.fs.Exists(dir); err != nil {
		return nil, err
	} else if exists {
		return nil, fs.ErrExist
	}
	// What is certainly too little is refused at once; how far the pages can be
	// compressed is not known before they are.
	if free, ferr := w.fs.Free(parent); ferr == nil {
		if need := uint64(payloadBytes(w.spec.Payloads)) + chunksOf(m.RAM())*rootEntry + guestmem.PageSize; free < need {
			return nil, fmt.Errorf("%s has %d bytes left and %d are needed at least: %w", parent, free, need, ErrNoSpace)
		}
	}
	temp, lock, err := w.tempDir(parent)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	done := false
	defer func() {
		if !done {
			err = errors.Join(err, w.fs.RemoveAll(temp))
		}
	}()
	memSize, err := w.writeFile(filepath.Join(temp, MemoryName), func(f File) (int64, error) {
		return w.writeMemory(ctx, f, m)
	})
	if err != nil {
		return nil, fmt.Errorf("RAM: %w", err)
	}
	wrote := time.Now()
	body, err := encodeManifest(m, w.spec.Payloads)
	if err != nil {
		return nil, err
	}
	if _, err := w.writeFile(filepath.Join(temp, ManifestName), func(f File) (int64, error) {
		n, err := f.Write(body)
		return int64(n), err
	}); err != nil {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	if err := w.fs.SyncDir(temp); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	if err := w.fs.Rename(temp, dir); err != nil {
		return nil, err
	}
	// From here on the snapshot has its name.
	temp = dir
	if err := w.fs.SyncDir(parent); err != nil {
		return nil, fmt.Errorf("making the name durable: %w", err)
	}
	done = true
	return &Info{
		Dir: dir, Manifest: m, SizeBytes: memSize + int64(len(body)),
		ManifestSHA256: manifestDigest(body),
		WriteTime:      wrote.Sub(w.start), CommitTime: time.Since(wrote),
	}, nil
}

// tempTries is how often Clean may snatch a directory away before it is locked.
const tempTries = 4

// tempDir makes a directory beside the target that no other Create uses, and
// that Clean does not remove before the lock is closed.
func (w *writer) tempDir(parent string) (name string, lock io.Closer, err error) {
	for range tempTries {
		id := randomID()
		name = filepath.Join(parent, tempPrefix+hex.EncodeToString(id[:8]))
		if err = w.fs.Mkdir(name); err != nil {
			return "", nil, err
		}
		if lock, err = w.fs.Lock(name); err == nil {
			return name, lock, nil
		}
		snatched := errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EWOULDBLOCK)
		if err = errors.Join(err, w.fs.RemoveAll(name)); !snatched {
			break
		}
	}
	return "", nil, err
}

// Clean removes what a Create that was killed has left in the directory parent.
// A Create that is at work, in any process, is not disturbed. It returns the
// number of unfinished snapshots removed.
func Clean(parent string) (int, error) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return 0, fmt.Errorf("removing unfinished snapshots: %w", err)
	}
	n := 0
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), tempPrefix) {
			continue
		}
		name := filepath.Join(parent, e.Name())
		lock, err := osFS{}.Lock(name)
		if err != nil {
			continue // in use, or somebody else has removed it
		}
		if err := os.RemoveAll(name); err != nil {
			errs = append(errs, err)
		} else {
			n++
		}
		lock.Close()
	}
	if err := errors.Join(errs...); err != nil {
		return n, fmt.Errorf("removing unfinished snapshots: %w", err)
	}
	return n, nil
}

// writeFile makes a durable file of what write writes.
func (w *writer) writeFile(name string, write func(File) (int64, error)) (n int64, err error) {
	f, err := w.fs.Create(name)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if n, err = write(f); err != nil {
		return n, err
	}
	return n, f.Sync()
}

// A unit is one chunk on its way through the writer. Units are reused, so memory
// is bounded by their number.
type unit struct {
	chunk uint64
	// data marks the pages that may hold something.
	data [ChunkPages / 64]uint64
	done chan struct{}
	err  error

	read  []byte // pages as they come from the source
	raw   []byte // pages of the frame being filled
	slots []int  // and their places in the chunk
	blob  []byte // frames; their offsets count from its start
	leaf  Leaf
	pages uint64
}

// readPages is how many pages a unit asks for at once.
const readPages = 64

func (w *writer) writers() int {
	n := w.spec.Writers
	if n <= 0 {
		n = runtime.GOMAXPROCS(0)
	}
	return min(n, MaxWriters)
}

// writeMemory writes the memory file and completes m.
func (w *writer) writeMemory(ctx context.Context, f File, m *Manifest) (int64, error) {
	id := randomID()
	root := make([]byte, chunksOf(m.RAM())*rootEntry)
	out := &memoryWriter{f: f, root: root}
	if err := out.write(encodeFileHeader(id)); err != nil {
		return 0, err
	}
	if err := w.pump(ctx, m.RAM()/guestmem.PageSize, out); err != nil {
		return 0, err
	}
	for i := range out.leaves {
		l := &out.leaves[i]
		ref := rootRef{file: 1, offset: out.size, frames: l.frames, crc: checksum(l.data)}
		ref.put(root[l.chunk*rootEntry:])
		if err := out.write(l.data); err != nil {
			return 0, err
		}
	}
	m.Memory.Root = Extent{File: 1, Offset: out.size, Length: int64(len(root)), CRC32C: checksum(root)}
	if err := out.write(root); err != nil {
		return 0, err
	}
	m.Memory.Files = []MemoryFile{{ID: hex.EncodeToString(id[:]), Name: MemoryName, Size: out.size}}
	m.Stats = out.stats
	return out.size, nil
}

// pump moves all pages from the source through the compressing goroutines into
// out, in the order of their numbers: a unit is taken from free, given to a
// goroutine by work, and to the one that writes, this one, by order.
func (w *writer) pump(ctx context.Context, pages uint64, out *memoryWriter) error {
	ctx, cancel := context.WithCancel(ctx)
	n := w.writers()
	units := 2 * n
	free, work, order := make(chan *unit, units), make(chan *unit, units), make(chan *unit, units)
	for range units {
		free <- &unit{done: make(chan struct{}, 1)}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var scanErr error
	wg.Go(func() {
		defer close(order)
		defer close(work)
		scanErr = w.scan(ctx, pages, free, work, order)
	})
	for range n {
		wg.Go(func() {
			c, err := newCompressor(frameLevel)
			if err == nil {
				defer c.enc.Close()
			}
			for u := range work {
				if u.err = err; err == nil && ctx.Err() == nil {
					u.err = u.fill(w.spec.Memory, c)
				}
				u.done <- struct{}{}
			}
		})
	}
	for u := range order {
		<-u.done
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if u.err != nil {
			return u.err
		}
		if err := out.add(u); err != nil {
			return err
		}
		free <- u
	}
	// order is closed, so scan has returned.
	return scanErr
}

// scan cuts what the source has into units, one for each chunk with data.
func (w *writer) scan(ctx context.Context, pages uint64, free <-chan *unit, work, order chan<- *unit) error {
	for page := uint64(0); page < pages; {
		first, end, err := w.spec.Memory.NextData(page)
		if err != nil {
			return err
		}
		if first < page || end < first || end > pages {
			return fmt.Errorf("source of RAM has data at pages %d to %d after page %d of %d: %w", first, end, page, pages, ErrSpec)
		}
		if first == end {
			return nil
		}
		chunk := first / ChunkPages
		limit := min((chunk+1)*ChunkPages, pages)
		last := min(end, limit)
		// Further runs in the same chunk belong to the same unit.
		var data [ChunkPages / 64]uint64
		mark(&data, first, last)
		for last < limit {
			f, e, err := w.spec.Memory.NextData(last)
			if err != nil {
				return err
			}
			if f < last || e < f || e > pages {
				return fmt.Errorf("source of RAM has data at pages %d to %d after page %d of %d: %w", f, e, last, pages, ErrSpec)
			}
			if f == e || f >= limit {
				break
			}
			last = min(e, limit)
			mark(&data, f, last)
		}
		var u *unit
		select {
		case u = <-free:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		u.chunk, u.data = chunk, data
		// Both have room for every unit there is.
		work <- u
		order <- u
		page = limit
	}
	return nil
}

// mark sets the bits of pages [first, end) of a chunk.
func mark(data *[ChunkPages / 64]uint64, first, end uint64) {
	for p := first; p < end; p++ {
		i := p % ChunkPages
		data[i/64] |= 1 << (i % 64)
	}
}

var zeroPage [guestmem.PageSize]byte

// fill reads the unit's pages and packs what is not zeros into frames.
func (u *unit) fill(src MemorySource, c *compressor) error {
	if u.read == nil {
		u.read = make([]byte, readPages*guestmem.PageSize)
		u.raw = make([]byte, 0, FramePages*guestmem.PageSize)
		u.slots = make([]int, 0, FramePages)
	}
	u.blob, u.raw, u.slots, u.pages = u.blob[:0], u.raw[:0], u.slots[:0], 0
	u.leaf.frames = u.leaf.frames[:0]
	clear(u.leaf.pages[:])
	for i := 0; i < ChunkPages; {
		n := 0
		for n < readPages && i+n < ChunkPages && u.data[(i+n)/64]>>((i+n)%64)&1 != 0 {
			n++
		}
		if n == 0 {
			i++
			continue
		}
		b := u.read[:n*guestmem.PageSize]
		if err := src.ReadPages(u.chunk*ChunkPages+uint64(i), b); err != nil {
			return err
		}
		for ; len(b) > 0; b, i = b[guestmem.PageSize:], i+1 {
			page := b[:guestmem.PageSize]
			if bytes.Equal(page, zeroPage[:]) {
				continue
			}
			u.raw = append(u.raw, page...)
			u.slots = append(u.slots, i)
			if len(u.slots) == FramePages {
				u.flush(c)
			}
		}
	}
	if len(u.slots) > 0 {
		u.flush(c)
	}
	return nil
}

// flush makes a frame of the collected pages.
func (u *unit) flush(c *compressor) {
	at := int64(len(u.blob))
	var f Frame
	u.blob, f = c.append(u.blob, u.raw)
	f.offset, f.file = at, 1
	for slot, page := range u.slots {
		u.leaf.setPage(page, len(u.leaf.frames), slot)
	}
	u.leaf.frames = append(u.leaf.frames, f)
	u.pages += uint64(len(u.slots))
	u.raw, u.slots = u.raw[:0], u.slots[:0]
}

// memoryWriter puts units one after the other into the file.
type memoryWriter struct {
	f      File
	size   int64
	root   []byte
	leaves []encodedLeaf
	stats  Stats
}

type encodedLeaf struct {
	chunk  uint64
	frames int
	data   []byte
}

func (o *memoryWriter) write(p []byte) error {
	n, err := o.f.Write(p)
	o.size += int64(n)
	return err
}

func (o *memoryWriter) add(u *unit) error {
	if u.pages == 0 {
		return nil
	}
	for i := range u.leaf.frames {
		u.leaf.frames[i].offset += o.size
	}
	o.leaves = append(o.leaves, encodedLeaf{chunk: u.chunk, frames: len(u.leaf.frames), data: encodeLeaf(nil, u.chunk, &u.leaf)})
	o.stats.Pages += u.pages
	o.stats.Frames += uint64(len(u.leaf.frames))
	o.stats.StoredBytes += uint64(len(u.blob))
	return o.write(u.blob)
}

// IsTemp reports whether a name in the parent directory is that of a snapshot that
// is being made, or was when its process died.
func IsTemp(name string) bool { return strings.HasPrefix(name, tempPrefix) }
