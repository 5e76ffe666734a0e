package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/klauspost/compress/zstd"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

const (
	// aheadAtOnce pieces of aheadSize are read at once while nobody waits, and urgentAtOnce of readSize for those who do:
	// this bounds the memory of all arrivals that share a Line.
	aheadAtOnce  = 4
	aheadSize    = 1 << 20
	urgentAtOnce = 16
	// readTime is how long the store may take for a piece.
	readTime = 30 * time.Second
	// quietTime is how long nobody must have waited before more is read ahead, and maxQuiet for how long that is held up:
	// a guest that is woken often faults again and again, and each of its reads would wait behind those ahead.
	quietTime = 40 * time.Millisecond
	maxQuiet  = time.Second
	// arrivalRest is how long an arrival waits after an error of the store, and maxRest after many.
	arrivalRest = 200 * time.Millisecond
	maxRest     = 10 * time.Second
)

// Line is what arrivals of a host read by. What somebody waits for goes first.
type Line struct {
	ahead, urgent chan struct{}
	// early has places of its own: who waits for what is read early has an urgent one.
	early chan struct{}

	mu      sync.Mutex // guards what follows
	waiting int        // urgent reads
	ended   time.Time  // the last of them
}

// NewLine returns a Line.
func NewLine() *Line {
	return &Line{ahead: make(chan struct{}, aheadAtOnce), urgent: make(chan struct{}, urgentAtOnce), early: make(chan struct{}, urgentAtOnce)}
}

// take waits for the turn of a read, which done ends.
func (l *Line) take(ctx context.Context, urgent bool) (done func(), err error) {
	places := l.urgent
	if urgent {
		l.mu.Lock()
		l.waiting++
		l.mu.Unlock()
	} else {
		places = l.ahead
	}
	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.waiting--
		l.ended = time.Now()
	}
	select {
	case places <- struct{}{}:
	case <-ctx.Done():
		if urgent {
			leave()
		}
		return nil, context.Cause(ctx)
	}
	if urgent {
		return func() { <-places; leave() }, nil
	}
	for begun := time.Now(); ; {
		l.mu.Lock()
		wait := quietTime
		if l.waiting == 0 {
			wait -= time.Since(l.ended)
		}
		l.mu.Unlock()
		if wait <= 0 || time.Since(begun) > maxQuiet {
			return func() { <-places }, nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			<-places
			return nil, context.Cause(ctx)
		}
	}
}

// Arrival are memory and layers of a head on their way to a host, into files that have their sizes. A VM may run on
// them meanwhile: Ensure waits for a part. Its methods may be called from any goroutine; Close must be the last.
type Arrival struct {
	// ID is that of the snapshot, and Dir where it is meanwhile.
	ID, Dir string

	line  *Line
	head  *Entry
	store blob.Store
	fs    osfile.FS
	again bool // an earlier process may have written frames
	begun bool // it goes on when the store fails
	files map[string]*awaitedFile
	order []*awaitedFile
	left  atomic.Int64 // frames that are missing
	ctx   context.Context
	end   context.CancelFunc

	mu sync.Mutex // guards begins of wg against Close, and files and order while layers begin to come
	wg sync.WaitGroup
	// lost is closed when it is known that the rest never comes. Then err says why.
	lost     chan struct{}
	loseOnce sync.Once
	err      error
}

// awaitedFile is a memory file or layer of which frames are missing.
type awaitedFile struct {
	at   int // its place in the head
	key  string
	x    *index
	f    osfile.File
	size int64 // of f
	// begins is what a memory file has here in place of the first bytes that were sent.
	begins [snapshot.HeaderBytes]byte
	// again means that an earlier process may have written frames.
	again bool
	// layer says where the bytes of a layer are, which is sent packed. Until that is known, early has its first frames.
	layer *disk.Packed
	early [][]byte

	mu     sync.Mutex // guards frames
	frames []*flight  // nil for a frame that is missing
}

// flight is a read of frames that are on their way. It is over when done is closed.
type flight struct {
	done chan struct{}
	err  error
}

// here is the flight of frames that are there.
var here = func() *flight {
	f := &flight{done: make(chan struct{})}
	close(f.done)
	return f
}()

// PullLater gets the head's snapshot without its memory and large layers, and its image if the store lacks that. The
// store has no such snapshot before state.Store.Arrived. The hosts that share sandboxes trust each other with all that
// a snapshot says.
func (h *Head) PullLater(ctx context.Context, s *state.Store, line *Line) (_ *Arrival, err error) {
	if err := h.e.a.pullImage(ctx, s, h.e.Image, nil); err != nil {
		return nil, err
	}
	if err := h.e.readIndexes(ctx); err != nil {
		return nil, err
	}
	a := h.arrival(s.FS, line)
	defer a.closeIf(&err)
	numbers, later := h.laterLayers()
	have := map[int]bool{}
	for _, l := range later {
		have[numbers[l.Sum]] = s.MayHaveLayer(l)
	}
	a.readEarly(have)
	begin := func(l *state.LaterLayer, path string) error {
		return a.addLayer(ctx, h.e, numbers[l.Sum], path, os.O_CREATE|os.O_EXCL)
	}
	in, err := s.ReceiveLater(ctx, behindDoc{a.head, a.store, s.SystemDisks()}, state.ImportOptions{Trust: true}, later, begin)
	if err != nil {
		return nil, err
	}
	a.ID, a.Dir = in.ID, s.ArrivingDir(in.ID)
	return a, a.addMemory(h.e)
}

// Resume goes on with what PullLater has begun in an earlier process.
func (h *Head) Resume(ctx context.Context, s *state.Store, line *Line, id string) (_ *Arrival, err error) {
	if err := h.e.readIndexes(ctx); err != nil {
		return nil, err
	}
	a := h.arrival(s.FS, line)
	defer a.closeIf(&err)
	a.ID, a.Dir, a.again = id, s.ArrivingDir(id), true
	numbers, later := h.laterLayers()
	entries, err := a.fs.ReadDir(a.Dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if snapshot.IsFile(e.Name()) {
			continue
		}
		// Those that the store had are not there, nor those that have arrived and have their names.
		i := slices.IndexFunc(later, func(l state.LaterLayer) bool { return l.Base() == e.Name() })
		if i < 0 {
			return nil, fmt.Errorf("%w: head %.12s has nothing like %.80q of snapshot %.12s", ErrCorrupt, h.e.ID, e.Name(), id)
		}
		if err := a.addLayer(ctx, h.e, numbers[later[i].Sum], filepath.Join(a.Dir, e.Name()), 0); err != nil {
			return nil, err
		}
	}
	return a, a.addMemory(h.e)
}

// laterBytes is how many bytes a packed layer has at most that comes with the snapshot: of two frames, one has its
// header and the other its table.
const laterBytes = 2 * frameSize

// isLater reports whether a file is a layer that comes later.
func (f *entryFile) isLater() bool {
	return f.Extra && f.Name != state.SystemFile && f.Size > laterBytes
}

// laterLayers returns the layers that come later, and by their sums their numbers among the files.
func (h *Head) laterLayers() (numbers map[string]int, later []state.LaterLayer) {
	numbers = map[string]int{}
	for i := range h.e.m.Files {
		f, x := &h.e.m.Files[i], h.e.indexes[i]
		if !f.isLater() {
			continue
		}
		sum := x.sum()
		numbers[sum] = i
		later = append(later, state.LaterLayer{
			Name: f.Name, Sum: sum, Size: f.Size, Same: func(r io.Reader) error { return x.same(r, io.Discard) },
		})
	}
	return numbers, later
}

func (h *Head) arrival(fsys osfile.FS, line *Line) *Arrival {
	a := &Arrival{line: line, head: h.e, store: h.e.a.store, fs: fsys, files: map[string]*awaitedFile{}, lost: make(chan struct{})}
	a.ctx, a.end = context.WithCancel(context.Background())
	return a
}

func (a *Arrival) closeIf(err *error) {
	if *err != nil {
		_ = a.Close()
	}
}

// addMemory begins with the memory files.
func (a *Arrival) addMemory(e *Entry) error {
	m, err := snapshot.ReadManifest(a.Dir)
	if err != nil {
		return err
	}
	// Behind the document and the manifest.
	const first = 2
	if len(e.m.Files) < first+len(m.Memory.Files) {
		return fmt.Errorf("%w: head %.12s has not the memory of snapshot %.12s", ErrCorrupt, e.ID, a.ID)
	}
	var memory []*awaitedFile
	for i, mf := range m.Memory.Files {
		sent := e.m.Files[first+i]
		if sent.Extra || sent.Size != mf.Size || sent.isPlain() {
			return fmt.Errorf("%w: head %.12s has not the memory of snapshot %.12s", ErrCorrupt, e.ID, a.ID)
		}
		w, err := a.add(e, first+i, filepath.Join(a.Dir, mf.Name), 0)
		if err != nil {
			return err
		}
		memory = append(memory, w)
		if _, err := w.f.ReadAt(w.begins[:], 0); err != nil {
			return err
		}
	}
	// Guests need more of it, and sooner, than of their disks.
	a.order = append(memory, a.order[:len(a.order)-len(memory)]...)
	a.begun = true
	return nil
}

// add begins with a file of the head.
func (a *Arrival) add(e *Entry, i int, path string, flags int) (*awaitedFile, error) {
	w := &awaitedFile{at: i, key: e.m.file(i), x: e.indexes[i], size: e.m.Files[i].Size, again: a.again}
	f, err := a.fs.OpenFile(path, os.O_RDWR|flags, 0o600)
	if err != nil {
		return nil, err
	}
	w.f, w.frames = f, make([]*flight, len(w.x.frames))
	for k := range w.frames {
		if w.x.frames[k].stored == 0 {
			w.frames[k] = here // holes are zeros
		} else {
			a.left.Add(1)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.files[filepath.Base(path)], a.order = w, append(a.order, w)
	return w, nil
}

// addLayer begins with a layer. When it returns, the file has its size, and header and table durably.
func (a *Arrival) addLayer(ctx context.Context, e *Entry, i int, path string, flags int) error {
	w, err := a.add(e, i, path, flags)
	if err != nil {
		return err
	}
	if err := a.unpack(ctx, w); err != nil || a.again {
		return err
	}
	for n := 0; ; n++ { // the table when the header is there
		ranges := disk.Beginnings(w.f)
		if n == len(ranges) {
			return w.f.Sync()
		}
		if err := a.ensure(ctx, w, ranges[n][0], min(ranges[n][1], max(w.size-ranges[n][0], 0))); err != nil {
			return err
		}
	}
}

// unpack finds out where the bytes of a layer belong.
func (a *Arrival) unpack(ctx context.Context, w *awaitedFile) error {
	w.early = make([][]byte, len(w.frames))
	// Nothing of it is known to be here, and a frame of zeros is no beginning.
	var head []byte
	for n := disk.PackedHead(nil); int64(len(head)) < n; n = disk.PackedHead(head) {
		end := int((n-1)/frameSize) + 1
		if end > len(w.frames) {
			return fmt.Errorf("%w: %s is no packed layer", ErrCorrupt, w.key)
		}
		if err := a.want(ctx, w, 0, end, true); err != nil {
			return err
		}
		head = nil
		for i := range end {
			if w.early[i] == nil { // zeros
				w.early[i] = zeroFrame[:w.x.plain(i)]
			}
			head = append(head, w.early[i]...)
		}
	}
	p, err := disk.ReadPacked(bytes.NewReader(head), w.x.size)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrCorrupt, w.key, err)
	}
	if err := w.f.Truncate(p.FileSize()); err != nil {
		return fmt.Errorf("writing a layer from the archive: %w", err)
	}
	for i, b := range w.early {
		if err := p.WriteAt(w.f, b, int64(i)*frameSize); err != nil {
			return err
		}
	}
	w.size, w.layer, w.early = p.FileSize(), p, nil
	return nil
}

// Kept returns the files that have come, for the next head of their sandbox, and how they are sealed. The snapshot must
// be in the store.
func (a *Arrival) Kept(ctx context.Context, s *state.Store) (kept []Kept, by blob.Seal, err error) {
	marks, err := s.FileMarks(a.ID)
	if err != nil {
		return nil, by, err
	}
	names := map[int]string{}
	for name, w := range a.files {
		names[w.at] = name
	}
	if err := a.others(ctx, s, names); err != nil {
		return nil, by, err
	}
	for i, name := range names {
		k := Kept{entryFile: a.head.m.Files[i], Mark: marks.Of(snapshot.SentFile{Extra: a.head.m.Files[i].Extra, Name: name})}
		if k.Mark == "" {
			continue
		}
		k.In, k.At = a.head.m.place(i)
		k.Stored = a.head.indexes[i].stored()
		if k.In == a.head.m.Data {
			k.Of = a.head.Stored
		}
		kept = append(kept, k)
	}
	return kept, a.head.m.seal, nil
}

// maxSame is the most bytes of a file that others compares.
const maxSame = 64 << 20

// others adds to names the files of the head that are not in a.files: small layers, the disk with the agent, and layers
// that this host had. Their names here differ from those in the head, so it compares their contents.
func (a *Arrival) others(ctx context.Context, s *state.Store, names map[int]string) error {
	m, err := s.Manifest(a.ID)
	if err != nil {
		return err
	}
	paths, err := s.ExtraPaths(m)
	if err != nil {
		return err
	}
	for _, w := range a.files {
		delete(paths, names[w.at])
	}
	for i := range a.head.m.Files {
		f, x := &a.head.m.Files[i], a.head.indexes[i]
		if names[i] != "" || !f.Extra || x == nil || f.Size > maxSame {
			continue
		}
		for name, path := range paths {
			if (name == state.SystemFile) == (f.Name == state.SystemFile) && x.isIn(ctx, name, path) {
				names[i] = name
				delete(paths, name)
				break
			}
		}
	}
	return nil
}

// isIn reports whether a file is what the index describes, as it is sent.
func (x *index) isIn(ctx context.Context, name, path string) bool {
	if name == state.SystemFile {
		return x.sameFile(path, io.Discard) == nil
	}
	if n, err := disk.PackedSize(path); err != nil || n != x.size {
		return false
	}
	r, w := io.Pipe()
	defer r.Close()
	go func() { w.CloseWithError(disk.Pack(ctx, w, path)) }()
	return x.same(r, io.Discard) == nil
}

// Close ends all reads.
func (a *Arrival) Close() error {
	a.mu.Lock()
	a.end()
	a.mu.Unlock()
	a.wg.Wait()
	var errs []error
	for _, w := range a.order {
		errs = append(errs, w.f.Close())
	}
	a.order = nil
	return errors.Join(errs...)
}

// Lost is closed when it is certain that the rest never comes, and Err says why.
func (a *Arrival) Lost() <-chan struct{} { return a.lost }

// Err returns why the rest never comes, once Lost is closed.
func (a *Arrival) Err() error {
	select {
	case <-a.lost:
		return a.err
	default:
		return nil
	}
}

func (a *Arrival) lose(err error) {
	a.loseOnce.Do(func() {
		a.err = err
		close(a.lost)
	})
}

// Missing returns how many frames are missing.
func (a *Arrival) Missing() int64 { return a.left.Load() }

// Ensure waits until bytes of a memory file or layer are there. It tries again while the store fails.
func (a *Arrival) Ensure(ctx context.Context, name string, off, n int64) error {
	w := a.files[name]
	if w == nil || off < 0 || n < 0 || off > w.size || n > w.size-off {
		return fmt.Errorf("%w: %d bytes at %d of %.80q", fs.ErrInvalid, n, off, name)
	}
	return a.ensure(ctx, w, off, n)
}

func (a *Arrival) ensure(ctx context.Context, w *awaitedFile, off, n int64) error {
	if w.layer != nil {
		first, end := w.layer.Range(off, n)
		off, n = first, end-first
	}
	if n == 0 {
		return nil
	}
	return a.want(ctx, w, int(off/frameSize), int((off+n-1)/frameSize)+1, true)
}

// want waits until the frames [first, end) are there.
func (a *Arrival) want(ctx context.Context, w *awaitedFile, first, end int, urgent bool) error {
	rest := arrivalRest
	for {
		var mine []int
		var waits []*flight
		fl := &flight{done: make(chan struct{})}
		w.mu.Lock()
		for i := first; i < end; i++ {
			switch at := w.frames[i]; {
			case at == here:
			case at == nil:
				w.frames[i], mine = fl, append(mine, i)
			case len(waits) == 0 || waits[len(waits)-1] != at:
				waits = append(waits, at)
			}
		}
		w.mu.Unlock()
		if len(mine) > 0 {
			waits = append(waits, fl)
			a.begin(func() { a.fly(w, fl, mine, urgent) })
		}
		if len(waits) == 0 {
			return nil
		}
		var err error
		for _, f := range waits {
			select {
			case <-f.done:
				err = errors.Join(err, f.err)
			case <-ctx.Done():
				return fmt.Errorf("waiting for the store of objects: %w", context.Cause(ctx))
			case <-a.lost:
				return a.err
			}
		}
		if err == nil {
			continue // what others have read may have failed before
		}
		if a.Err() != nil {
			return a.err
		}
		if !a.begun {
			return err
		}
		select {
		case <-time.After(rest):
			rest = min(2*rest, maxRest)
		case <-ctx.Done():
			return fmt.Errorf("waiting for the store of objects, which fails (%w): %w", err, context.Cause(ctx))
		case <-a.lost:
			return a.err
		case <-a.ctx.Done():
			return fmt.Errorf("getting memory and layers from the archive: %w", context.Canceled)
		}
	}
}

// begin runs f in the background, or at once if the arrival is closed, where it fails.
func (a *Arrival) begin(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ctx.Err() != nil {
		f()
		return
	}
	a.wg.Go(f)
}

// fly reads frames, and says so.
func (a *Arrival) fly(w *awaitedFile, fl *flight, frames []int, urgent bool) {
	fl.err = a.read(w, frames, urgent)
	after := here
	if fl.err != nil {
		after = nil
		if Lost(fl.err) {
			a.lose(fl.err)
		}
	} else {
		a.left.Add(-int64(len(frames)))
	}
	w.mu.Lock()
	for _, i := range frames {
		w.frames[i] = after
	}
	w.mu.Unlock()
	close(fl.done)
}

// LostTries is how often the store must say that something is damaged or gone, before it is lost: what may be between
// it and this host can be wrong for once, and a guest that has lost a page is lost with all that it has done.
const LostTries = 3

// Lost reports whether an error says that what the store should have is damaged or gone.
func Lost(err error) bool { return errors.Is(err, ErrCorrupt) || errors.Is(err, ErrNotFound) }

// read reads frames and writes them.
func (a *Arrival) read(w *awaitedFile, frames []int, urgent bool) error {
	g, ctx := errgroup.WithContext(a.ctx)
	for len(frames) > 0 {
		if w.again && a.isHere(w, frames[0]) {
			frames = frames[1:]
			continue
		}
		n, size := 1, w.x.frames[frames[0]].stored
		for ; n < len(frames) && frames[n] == frames[n-1]+1; n++ {
			f := &w.x.frames[frames[n]]
			if f.pack != w.x.frames[frames[0]].pack || size+f.stored > readSize {
				break
			}
			size += f.stored
		}
		run := frames[:n]
		frames = frames[n:]
		g.Go(func() error {
			for try := 1; ; try++ {
				if err := a.readRun(ctx, w, run, size, urgent); !Lost(err) || try == LostTries {
					return err
				}
				select {
				case <-time.After(arrivalRest):
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
		})
	}
	return g.Wait()
}

// readRun reads frames that are one behind the other in a pack.
func (a *Arrival) readRun(ctx context.Context, w *awaitedFile, frames []int, size uint32, urgent bool) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if urgent { // else Run has a place
		done, err := a.line.take(ctx, true)
		if err != nil {
			return err
		}
		defer done()
	}
	body := make([]byte, size)
	at := &w.x.frames[frames[0]]
	ctx, cancel := context.WithTimeoutCause(ctx, readTime, errSlowStore)
	defer cancel()
	err := a.store.ReadAt(ctx, fmt.Sprintf("%s/%d", w.key, at.pack), body, int64(at.off))
	if errors.Is(err, blob.ErrNotFound) {
		return fmt.Errorf("getting memory and layers from the archive: %w: it has been removed meanwhile, or a part of it is lost (%w)", ErrNotFound, err)
	}
	if err != nil {
		return fmt.Errorf("getting memory and layers from the archive: %w", err)
	}
	d, _ := decoders.Get().(*zstd.Decoder)
	defer decoders.Put(d)
	plain := make([]byte, 0, frameSize)
	for _, i := range frames {
		f := &w.x.frames[i]
		b, err := f.decode(d, plain, body, w.x.plain(i))
		if err != nil {
			return fmt.Errorf("%w: frame %d of %s: %w", ErrCorrupt, i, w.key, err)
		}
		body = body[f.stored:]
		if err := w.write(i, b); err != nil {
			return fmt.Errorf("writing memory and layers from the archive: %w", err)
		}
	}
	return nil
}

// write puts the plain bytes of a frame where they belong.
func (w *awaitedFile) write(i int, b []byte) error {
	switch {
	case w.layer != nil:
		return w.layer.WriteAt(w.f, b, int64(i)*frameSize)
	case w.early != nil:
		w.early[i] = bytes.Clone(b)
		return nil
	case i == 0:
		copy(b, w.begins[:])
	}
	_, err := w.f.WriteAt(b, int64(i)*frameSize)
	return err
}

var errSlowStore = fmt.Errorf("the store of objects has not answered within %v", readTime)

// isHere reports whether an earlier process has written a frame. The first one has another header here.
func (a *Arrival) isHere(w *awaitedFile, i int) bool {
	if i == 0 || w.early != nil {
		return false
	}
	b := make([]byte, w.x.plain(i))
	var err error
	if w.layer != nil {
		err = w.layer.ReadAt(w.f, b, int64(i)*frameSize)
	} else {
		_, err = w.f.ReadAt(b, int64(i)*frameSize)
	}
	if err != nil || bytes.Equal(b, zeroFrame[:len(b)]) {
		return false
	}
	return sha256.Sum256(b) == w.x.frames[i].sum
}

// Open opens the snapshot as far as it is there: it waits for the root of its index.
func (a *Arrival) Open(ctx context.Context) (*snapshot.Snapshot, error) {
	return snapshot.OpenArriving(a.fs, a.Dir, func(name string, off, n int64) error { return a.Ensure(ctx, name, off, n) })
}

// Load waits until the index of all pages is there, which is small, and then until the content of some is. Unless it is
// urgent, what somebody else waits for goes first.
func (a *Arrival) Load(ctx context.Context, m *snapshot.Memory, pages []uint64, urgent bool) error {
	var index, stored []snapshot.Place
	for c := range m.Chunks() {
		if p, ok := m.LeafPlace(c); ok {
			index = append(index, p)
		}
	}
	if err := a.ensureAll(ctx, index, urgent); err != nil {
		return err
	}
	for _, page := range pages {
		if page >= m.Pages() {
			continue
		}
		p, ok, err := m.FramePlace(page)
		if err != nil {
			return err
		}
		if ok {
			stored = append(stored, p)
		}
	}
	return a.ensureAll(ctx, stored, urgent)
}

// ensureAll ensures places, neighbours of a file together.
func (a *Arrival) ensureAll(ctx context.Context, places []snapshot.Place, urgent bool) error {
	needs := map[*awaitedFile][]bool{}
	for _, p := range places {
		w := a.files[p.File]
		if w == nil || p.Len <= 0 || p.Off < 0 || p.Off+p.Len > w.x.size {
			return fmt.Errorf("%w: %d bytes at %d of %.80q", fs.ErrInvalid, p.Len, p.Off, p.File)
		}
		if needs[w] == nil {
			needs[w] = make([]bool, len(w.frames)+1)
		}
		for i := p.Off / frameSize; i*frameSize < p.Off+p.Len; i++ {
			needs[w][i] = true
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(urgentAtOnce)
	atOnce := aheadSize / frameSize
	if urgent {
		atOnce = readSize / frameSize
	}
	for w, need := range needs {
		for i := 0; i < len(need); i++ {
			first := i
			for need[i] && i-first < atOnce { // the last is false
				i++
			}
			if end := i; first < end {
				i-- // the loop counts on
				g.Go(func() error {
					if urgent {
						return a.want(ctx, w, first, end, true)
					}
					return a.wantInTurn(ctx, w, first, end)
				})
			}
		}
	}
	return g.Wait()
}

// wantInTurn is want of what nobody waits for.
func (a *Arrival) wantInTurn(ctx context.Context, w *awaitedFile, first, end int) error {
	// Before it takes frames on: whoever waits for these must not wait for others.
	done, err := a.line.take(ctx, false)
	if err != nil {
		return err
	}
	defer done()
	return a.want(ctx, w, first, end, false)
}

// Run reads all that is missing while nobody waits for a part of it. It returns nil when everything is there and
// durable, and tries again while the store fails. Another error than the context's means that the rest never comes.
func (a *Arrival) Run(ctx context.Context) error {
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(aheadAtOnce)
	for _, w := range a.order {
		for first := 0; first < len(w.frames); {
			end, size := first, uint32(0)
			for ; end < len(w.frames) && (end == first || size+w.x.frames[end].stored <= aheadSize); end++ {
				size += w.x.frames[end].stored
			}
			from := first
			g.Go(func() error { return a.wantInTurn(run, w, from, end) })
			first = end
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, w := range a.order {
		// By these descriptors: others may not be told what went wrong before they were opened.
		if err := w.f.Sync(); err != nil {
			return fmt.Errorf("writing memory and layers from the archive: %w", err)
		}
	}
	return nil
}
