//go:build linux

package events

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// The default bounds of what is kept: at most Segments files of SegmentBytes, and none whose last event is older
// than Keep.
const (
	SegmentBytes = 1 << 20
	Segments     = 16
	Keep         = 30 * 24 * time.Hour
)

// lockPatience is how long a writer waits for other writers, each of which writes one line.
const lockPatience = 2 * time.Second

const (
	lockName   = "lock"
	segmentExt = ".jsonl"
	// bootGap is by how much cursors jump at least after a boot of the machine. The last events before it may not
	// have reached the disk although a reader got them. A segment has fewer lines than this, and is on disk before
	// the next one begins.
	bootGap = 1 << 20
)

// Options configure Open; zero means the default.
type Options struct {
	SegmentBytes int64
	Segments     int
	Keep         time.Duration

	// for tests
	boot func() string
	now  func() time.Time
}

// Journal is the journal in a directory. Any number of processes may write and read it at once. Its methods may be
// called from any goroutine. It holds no file open.
type Journal struct {
	dir string
	o   Options
}

// Open returns the journal in a directory. The first event creates the directory.
func Open(dir string, o Options) *Journal {
	if o.SegmentBytes == 0 {
		o.SegmentBytes = SegmentBytes
	}
	if o.Segments == 0 {
		o.Segments = Segments
	}
	if o.Keep == 0 {
		o.Keep = Keep
	}
	if o.boot == nil {
		o.boot = bootID
	}
	if o.now == nil {
		o.now = time.Now
	}
	return &Journal{dir: dir, o: o}
}

// Dir returns the journal's directory.
func (j *Journal) Dir() string { return j.dir }

// bootID identifies the current boot of the machine (proc_sys_kernel(5), random/boot_id).
func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// header is the first line of a segment.
type header struct {
	Header int `json:"drowse_events"` // Version
	// Boot is the boot in which the segment was begun, and Prev the cursor of the last event before it.
	Boot string `json:"boot"`
	Prev uint64 `json:"prev"`
}

// maxHeader is the most bytes of a header.
const maxHeader = 512

// ErrBusy means that an event was not written, because another process held the journal's lock too long.
var ErrBusy = errors.New("the journal of events is locked")

func (j *Journal) lock() (*os.File, error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), lockPatience, ErrBusy)
	defer cancel()
	for made := false; ; made = true {
		f, err := osfile.OpenLocked(ctx, filepath.Join(j.dir, lockName), os.O_CREATE|os.O_RDWR, 0o600, osfile.Exclusive)
		if made || !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
		if err := os.MkdirAll(j.dir, 0o700); err != nil {
			return nil, err
		}
	}
}

// segment is a file of a journal.
type segment struct {
	name  string
	first uint64 // its events have no smaller cursor
}

func (j *Journal) segments() ([]segment, error) {
	entries, err := os.ReadDir(j.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []segment
	for _, e := range entries {
		digits, ok := strings.CutSuffix(e.Name(), segmentExt)
		if !ok || len(digits) != 20 {
			continue
		}
		if n, err := strconv.ParseUint(digits, 10, 64); err == nil {
			out = append(out, segment{e.Name(), n})
		}
	}
	slices.SortFunc(out, func(a, b segment) int { return strings.Compare(a.name, b.name) })
	return out, nil
}

// Append writes an event. It sets version, cursor and id, and the time if the event has none. When Append returns,
// readers see the event and it outlives this process. It is not on disk yet: a power loss within the kernel's
// write-back time (30 s by default) may lose it. The error is ErrBusy, or one of files.
func (j *Journal) Append(e Event) (Event, error) {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	e.Version, e.ID = Version, hex.EncodeToString(id[:])
	if e.Time.IsZero() {
		e.Time = j.o.now()
	}
	e.Time = e.Time.UTC()
	e.bound()
	lock, err := j.lock()
	if err != nil {
		return e, fmt.Errorf("writing an event: %w", err)
	}
	defer lock.Close()
	if err := j.append(&e); err != nil {
		return e, fmt.Errorf("writing an event: %w", err)
	}
	return e, nil
}

// append writes an event. The lock is held.
func (j *Journal) append(e *Event) error {
	segs, err := j.segments()
	if err != nil {
		return err
	}
	boot := j.o.boot()
	if len(segs) == 0 {
		return j.begin(e, 0, boot, nil)
	}
	f, err := os.OpenFile(filepath.Join(j.dir, segs[len(segs)-1].name), os.O_RDWR|os.O_APPEND|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	h, size, last, err := repair(f, segs[len(segs)-1].first)
	if err != nil {
		return err
	}
	e.Cursor = last + 1
	line, err := e.line()
	if err != nil {
		return err
	}
	if h.Boot != boot || size+int64(len(line)) > j.o.SegmentBytes {
		// Readers may rely on this: only the newest segment can lose data.
		if err := f.Sync(); err != nil {
			return err
		}
		return j.begin(e, last, boot, &h)
	}
	return write(f, line, size)
}

// write appends a line completely or not at all.
func write(f *os.File, line []byte, size int64) error {
	n, err := f.Write(line)
	if err != nil && n > 0 {
		err = errors.Join(err, f.Truncate(size))
	}
	return err
}

// line returns an event as a line of a file.
func (e *Event) line() ([]byte, error) {
	line, err := json.Marshal(e)
	if err == nil && len(line) >= MaxLine {
		small := *e
		small.Tags, small.Details.Children, small.Details.Problem = nil, nil, "" // \u escapes make six bytes of one
		line, err = json.Marshal(small)
	}
	if err == nil && len(line) >= MaxLine {
		err = fmt.Errorf("%w: it has %d bytes", ErrInvalid, len(line))
	}
	return append(line, '\n'), err
}

// begin begins a segment with an event, and deletes old segments. last is the cursor before, and before the header
// of the previous segment.
func (j *Journal) begin(e *Event, last uint64, boot string, before *header) error {
	e.Cursor = last + 1
	if before == nil || before.Boot != boot {
		// Larger than any cursor that a reader can have, even of a deleted journal: see bootGap.
		e.Cursor = last + bootGap
		if at := uint64(max(j.o.now().Unix(), 0)) << 20; at > e.Cursor {
			e.Cursor = at
		}
	}
	line, err := e.line()
	if err != nil {
		return err
	}
	head, err := json.Marshal(header{Version, boot, last})
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(j.dir, ".new-*")
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(append(append(head, '\n'), line...))
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(j.dir, fmt.Sprintf("%020d%s", e.Cursor, segmentExt)))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return j.trim()
}

// Trim deletes segments beyond the bounds of age and number. Writers do so too when they begin a segment.
func (j *Journal) Trim() error {
	if _, err := os.Stat(j.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	lock, err := j.lock()
	if err == nil {
		defer lock.Close()
		err = j.trim()
	}
	if err != nil {
		return fmt.Errorf("deleting old events: %w", err)
	}
	return nil
}

// trim is Trim with the lock held. The newest segment stays: the next cursor depends on it.
func (j *Journal) trim() error {
	segs, err := j.segments()
	if err != nil || len(segs) == 0 {
		return err
	}
	old := j.o.now().Add(-j.o.Keep)
	var errs []error
	for i, s := range segs[:len(segs)-1] {
		path := filepath.Join(j.dir, s.name)
		st, err := os.Stat(path)
		if i >= len(segs)-j.o.Segments && err == nil && st.ModTime().After(old) {
			break // the ones after it are newer
		}
		errs = append(errs, os.Remove(path))
	}
	// A killed writer leaves such files.
	entries, err := os.ReadDir(j.dir)
	errs = append(errs, err)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".new-") {
			errs = append(errs, os.Remove(filepath.Join(j.dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// repair cuts off the unfinished line of a killed writer. It returns the header, the end of the segment and the
// last cursor.
func repair(f *os.File, first uint64) (h header, size int64, last uint64, err error) {
	st, err := f.Stat()
	if err != nil {
		return h, 0, 0, err
	}
	size = st.Size()
	h, _ = readHeader(f) // a damaged header belongs to no boot
	tail, at := make([]byte, min(size, 2*MaxLine)), size-min(size, 2*MaxLine)
	if _, err := f.ReadAt(tail, at); err != nil && !errors.Is(err, io.EOF) {
		return h, 0, 0, err
	}
	if end := bytes.LastIndexByte(tail, '\n') + 1; end < len(tail) && (end > 0 || at == 0) {
		size = at + int64(end)
		if err := f.Truncate(size); err != nil {
			return h, 0, 0, err
		}
		tail = tail[:end]
	}
	if len(tail) > 1 && tail[len(tail)-1] == '\n' {
		begin := bytes.LastIndexByte(tail[:len(tail)-1], '\n') + 1
		var e Event
		if json.Unmarshal(tail[begin:], &e) == nil && e.Cursor >= first {
			return h, size, e.Cursor, nil
		}
	}
	// A power loss may leave data that are not lines. The largest cursor counts. A line end terminates the damage.
	last = max(first, 1) - 1
	whole := make([]byte, size)
	if n, err := f.ReadAt(whole, 0); err != nil && !errors.Is(err, io.EOF) {
		return h, 0, 0, err
	} else if whole = whole[:n]; n > 0 && whole[n-1] != '\n' {
		if err := write(f, []byte("\n"), size); err != nil {
			return h, 0, 0, err
		}
		size++
	}
	for line := range bytes.SplitSeq(whole, []byte("\n")) {
		var e Event
		if json.Unmarshal(line, &e) == nil && e.Cursor > last {
			last = e.Cursor
		}
	}
	return h, size, last, nil
}

func readHeader(f *os.File) (h header, err error) {
	p := make([]byte, maxHeader)
	n, err := f.ReadAt(p, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return h, err
	}
	line, _, whole := bytes.Cut(p[:n], []byte("\n"))
	if err := json.Unmarshal(line, &h); err != nil || !whole || h.Header == 0 {
		return header{}, errors.New("a segment of the journal has no header")
	}
	return h, nil
}
