package disk

import (
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// env is the part of the host that a disk uses.
type env struct {
	fs   osfile.FS
	boot [bootIDSize]byte // zero: unknown, equal to none
}

// hostBoot reads the id of this boot (random(4)). Without /proc it stays unknown, and what an earlier process did
// not flush then counts as lost.
var hostBoot = sync.OnceValue(func() (id [bootIDSize]byte) {
	text, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	p, err := hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(text)), "-", ""))
	if err == nil && len(p) == len(id) {
		id = [bootIDSize]byte(p)
	}
	return id
})

// OpenAhead reads what disks need of the host by path, for a process that can open no path later.
func OpenAhead() { hostBoot() }

func hostEnv() env { return env{fs: osfile.OS, boot: hostBoot()} }

// layer is one open file of a stack.
type layer struct {
	path  string
	f     osfile.File
	os    *os.File
	data  int64 // file offset of block 0
	hdr   header
	fresh bool // its name in the directory may not be durable yet
	// await waits for a range of the file; nil if all of it is there.
	await func(off, n int64) error
}

// flock takes or changes the lock of a layer: Exclusive for a writable top, Shared for all others.
func (l *layer) flock(mode osfile.LockMode) error {
	err := osfile.TryLock(l.os, mode)
	if errors.Is(err, osfile.ErrLocked) {
		return fmt.Errorf("lock %s: %w (another VM or command has it open)", l.path, ErrInUse)
	}
	return ioError("lock a layer", err)
}

// openLayer opens a file, locks it, and reads its header.
func (e env) openLayer(path string, flag int, lock osfile.LockMode) (l *layer, err error) {
	f, err := e.fs.OpenFile(path, flag, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("open layer: %w: %w", ErrMissingParent, err)
		}
		return nil, ioError("open layer", err)
	}
	l = &layer{path: path, f: f, os: f.OS()}
	defer func() {
		if err != nil {
			_ = f.Close() // the first error is the one to report
		}
	}()
	if err := l.flock(lock); err != nil {
		return nil, err
	}
	if err := l.readHeader(); err != nil {
		return nil, err
	}
	l.data = l.hdr.dataOffset()
	return l, nil
}

// headerBufs are reused, so that Open of a deep stack does not allocate a buffer for each layer.
var headerBufs = sync.Pool{New: func() any { return new([headerSpace]byte) }}

// readHeader reads or re-reads the header. It does not change the fields that readers of data use.
func (l *layer) readHeader() error {
	buf, _ := headerBufs.Get().(*[headerSpace]byte)
	defer headerBufs.Put(buf)
	n, err := l.f.ReadAt(buf[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return ioError("read header of "+l.path, err)
	}
	if l.hdr, err = decodeHeader(buf[:n]); err != nil {
		return fmt.Errorf("%s: %w", l.path, err)
	}
	st, err := l.f.Stat()
	if err != nil {
		return ioError("read length of "+l.path, err)
	}
	want := l.hdr.endOfData()
	if l.hdr.tableLen > 0 {
		want = l.hdr.tableOff + l.hdr.tableLen
	}
	if st.Size() < want {
		return fmt.Errorf("%s: %w: %d bytes, need %d", l.path, ErrTruncated, st.Size(), want)
	}
	return nil
}

// writeHeader writes h into the slot that does not hold the current header, and makes h the current one.
func (l *layer) writeHeader(h header) error {
	var buf [headerSize]byte
	h.gen = l.hdr.gen + 1
	h.encode(buf[:])
	if _, err := l.f.WriteAt(buf[:], int64(h.gen%2)*slotStride); err != nil {
		return ioError("write header of "+l.path, err)
	}
	l.hdr = h
	return nil
}

// create makes a layer file under a temporary name, locks it for writing, and renames it to path once it is
// complete. If durable is false, file and name become durable at the first flush.
func (e env) create(path string, h header, durable bool) (l *layer, err error) {
	if err := checkSize(h.size); err != nil {
		return nil, err
	}
	if _, err := e.fs.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = &fs.PathError{Op: "create", Path: path, Err: fs.ErrExist}
		}
		return nil, ioError("create layer", err)
	}
	dir, name := filepath.Split(path)
	tmp := filepath.Join(dir, "."+name+".tmp")
	f, err := e.fs.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, ioError("create layer", err)
	}
	l = &layer{path: path, f: f, os: f.OS(), hdr: h, data: h.dataOffset(), fresh: true}
	defer func() {
		if err != nil {
			_ = f.Close() // the first error is the one to report
			_ = e.fs.Remove(tmp)
		}
	}()
	if err := l.flock(osfile.Exclusive); err != nil {
		return nil, err
	}
	if err := f.Truncate(h.endOfData()); err != nil {
		return nil, ioError("create layer "+path, err)
	}
	var buf [headerSize]byte
	h.encode(buf[:])
	if _, err := f.WriteAt(buf[:], int64(h.gen%2)*slotStride); err != nil {
		return nil, ioError("create layer "+path, err)
	}
	if durable {
		if err := f.Sync(); err != nil {
			return nil, ioError("create layer "+path, err)
		}
	}
	if err := e.fs.Rename(tmp, path); err != nil {
		return nil, ioError("create layer "+path, err)
	}
	if durable {
		if err := e.fs.SyncDir(filepath.Dir(path)); err != nil {
			_ = e.fs.Remove(path)
			return nil, ioError("create layer "+path, err)
		}
		l.fresh = false
	}
	return l, nil
}

func (l *layer) close() error {
	return errors.Join(ioError("unlock "+l.path, osfile.Unlock(l.os)), ioError("close "+l.path, l.f.Close()))
}

// pendingCounts reports whether pending blocks of the map hold what was written. They do if this boot wrote them,
// so that their data was in its page cache, and no sync has lost it.
func (e env) pendingCounts(h *header) bool {
	return h.boot == e.boot && e.boot != [bootIDSize]byte{} && h.flags&flagSyncFailed == 0
}

// settled returns what a state means for a reader now. counts is the result of pendingCounts.
func settled(s byte, counts bool) byte {
	switch {
	case s == blockPendingAbsent && counts, s == blockPendingZero && counts:
		return blockData
	case s == blockPendingAbsent:
		return blockAbsent
	case s == blockPendingZero:
		return blockZero
	}
	return s
}

// runs calls each for the layer's runs, in order: from the table if it has one, else from the map. Runs from the
// map may have pending states.
func (l *layer) runs(each func(run)) error {
	if l.hdr.state == StateSealed || l.hdr.state == StateMerging {
		return l.tableRuns(each)
	}
	return l.mapRuns(each)
}

func (l *layer) tableRuns(each func(run)) error {
	// A layer may come from another host and be mostly a hole. So the table length that it states must not decide
	// how much memory is allocated.
	buf := make([]byte, min(l.hdr.tableLen, tablePiece))
	crc := uint32(0)
	if err := l.tablePieces(buf, func(p []byte) error {
		crc = crc32.Update(crc, crcTable, p)
		return nil
	}); err != nil {
		return err
	}
	if crc != l.hdr.tableCRC {
		return fmt.Errorf("%s: %w: table checksum is %#08x, stored %#08x", l.path, ErrCorrupt, crc, l.hdr.tableCRC)
	}
	d := tableDecoder{blocks: l.hdr.blocks()}
	if err := l.tablePieces(buf, func(p []byte) error { return d.decode(p, each) }); err != nil {
		return fmt.Errorf("%s: %w", l.path, err)
	}
	return nil
}

// tablePiece is the most bytes of a table read at once, a multiple of tableEntry.
const tablePiece = 256 << 10

// tablePieces calls f for all of the table, in order.
func (l *layer) tablePieces(buf []byte, f func(p []byte) error) error {
	for off := int64(0); off < l.hdr.tableLen; {
		p := buf[:min(l.hdr.tableLen-off, int64(len(buf)))]
		if _, err := l.f.ReadAt(p, l.hdr.tableOff+off); err != nil {
			return ioError("read table of "+l.path, err)
		}
		if err := f(p); err != nil {
			return err
		}
		off += int64(len(p))
	}
	return nil
}

// mapRuns reads the map, skipping its holes.
func (l *layer) mapRuns(each func(run)) error {
	buf := make([]byte, 64<<10)
	end := int64(mapOffset) + l.hdr.blocks()
	for off := int64(mapOffset); off < end; {
		off, _ = osfile.NextData(l.os, off, end)
		p := buf[:min(int64(len(buf)), end-off)]
		if len(p) == 0 {
			break
		}
		if _, err := l.f.ReadAt(p, off); err != nil {
			return ioError("read map of "+l.path, err)
		}
		if err := decodeMap(p, off-mapOffset, each); err != nil {
			return fmt.Errorf("%s: %w", l.path, err)
		}
		off += int64(len(p))
	}
	return nil
}

// statePage holds a page of each block state, so that writing a run of the map allocates nothing.
var statePage = func() (p [blockStates][BlockSize]byte) {
	for s := range p {
		for i := range p[s] {
			p[s][i] = byte(s)
		}
	}
	return p
}()

// writeMap gives count blocks from b a state in the map file.
func (l *layer) writeMap(b, count int64, state byte) error {
	for count > 0 {
		n := min(count, BlockSize)
		if _, err := l.f.WriteAt(statePage[state][:n], mapOffset+b); err != nil {
			return ioError("write map of "+l.path, err)
		}
		b, count = b+n, count-n
	}
	return nil
}

// freeze marks a layer as never written again. It does not sync.
func (l *layer) freeze() error {
	h := l.hdr
	h.state = StateFrozen
	return l.writeHeader(h)
}

// taint records that a sync failed, as well as is possible on a file that cannot be synced.
func (l *layer) taint() {
	h := l.hdr
	h.flags |= flagSyncFailed
	_ = l.writeHeader(h) // the Disk itself remembers; this is for the next Open
}

// seal makes a frozen layer durable and writes its table. It can be repeated after a crash, and two processes may
// seal a layer at once, because both write the same bytes.
func (e env) seal(l *layer) error {
	if err := l.readHeader(); err != nil || l.hdr.state == StateSealed {
		return err
	}
	h := l.hdr
	var err error
	if h.tableOff, h.tableLen, h.tableCRC, err = l.writeTable(e.sealedRuns(l), h.endOfData()); err != nil {
		return err
	}
	if err := l.f.Datasync(); err != nil { // data and table at once: neither counts until the header says so
		l.taint()
		return ioError("sync "+l.path, fmt.Errorf("%w: %w", ErrSyncFailed, err))
	}
	h.state, h.boot, h.flags = StateSealed, [bootIDSize]byte{}, h.flags&^flagSyncFailed
	return e.commitHeader(l, h)
}

// commitHeader durably writes a header that changes what the layer means, and then writes it into the other slot
// too, so that damage to one slot can never bring the old meaning back.
func (e env) commitHeader(l *layer, h header) error {
	for range 2 {
		if err := l.writeHeader(h); err != nil {
			return err
		}
		if err := l.f.Sync(); err != nil {
			return ioError("sync header of "+l.path, fmt.Errorf("%w: %w", ErrSyncFailed, err))
		}
	}
	if l.fresh {
		if err := e.fs.SyncDir(filepath.Dir(l.path)); err != nil {
			return ioError("sync directory of "+l.path, err)
		}
		l.fresh = false
	}
	return nil
}

// sealedRuns returns the runs of a frozen layer as its table will have them: pending states settled, neighbours
// joined.
func (e env) sealedRuns(l *layer) func(each func(run)) error {
	counts := e.pendingCounts(&l.hdr)
	return func(each func(run)) error {
		var j joiner
		err := l.mapRuns(func(r run) {
			if r.state = settled(r.state, counts); r.state != blockAbsent {
				j.add(r, each)
			}
		})
		j.flush(each)
		return err
	}
}

// joiner merges neighbouring runs of one state.
type joiner struct{ last run }

func (j *joiner) add(r run, each func(run)) {
	if j.last.count > 0 && j.last.state == r.state && j.last.start+j.last.count == r.start {
		j.last.count += r.count
		return
	}
	j.flush(each)
	j.last = r
}

func (j *joiner) flush(each func(run)) {
	if j.last.count > 0 {
		each(j.last)
	}
	j.last = run{}
}

// writeTable writes runs as a table at off and returns its offset, length and checksum.
func (l *layer) writeTable(runs func(func(run)) error, off int64) (start, length int64, crc uint32, err error) {
	const flushAt = 64 << 10
	buf := make([]byte, 0, flushAt+4096)
	var werr error
	put := func() {
		if werr == nil && len(buf) > 0 {
			_, werr = l.f.WriteAt(buf, off+length)
			crc = crc32.Update(crc, crcTable, buf)
			length += int64(len(buf))
		}
		buf = buf[:0]
	}
	err = runs(func(r run) {
		if buf = appendEntry(buf, r); len(buf) >= flushAt {
			put()
		}
	})
	put()
	if err == nil && werr != nil {
		err = ioError("write table of "+l.path, werr)
	}
	return off, length, crc, err
}
