//go:build linux

package audit

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
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Errors that callers can tell apart.
var (
	// ErrTrail: an action could not be recorded, and therefore was not done.
	ErrTrail = errors.New("it cannot be recorded in the audit trail")
	// ErrNone: there is no trail.
	ErrNone = errors.New("there is no audit trail")
	// ErrDamaged: the file does not begin with the head of a trail.
	ErrDamaged = errors.New("the audit trail is damaged")
)

// errOther: the trail now belongs to another VM.
var errOther = errors.New("the audit trail is that of another VM")

// Path returns the path of a guest's trail, given the path of the Unix socket that stands for its vsock device.
// Older files have ".1" to ".3" appended.
func Path(socket string) string { return filepath.Join(filepath.Dir(socket), "audit.jsonl") }

func older(path string, n int) string { return path + "." + strconv.Itoa(n) }

// Trail writes to the trail of one VM. Its methods may be called from any goroutine.
type Trail struct {
	path string
	max  int64 // of a file

	mu sync.Mutex // held while a line is written; guards what follows
	vm string     // the VM whose trail it is, once known
}

// Open returns the trail at a path, which need not exist yet.
func Open(path string) *Trail { return &Trail{path: path, max: MaxFile} }

// Pending is an action that has begun. A nil Pending records nothing.
type Pending struct {
	trail *Trail
	id    string
	begin time.Time
	once  sync.Once
}

// Begin records that an action begins. It returns nil if there is no trail. If it fails, with ErrTrail or the
// context's error, the caller must not start the action. It writes one line and does not wait for the disk.
func (t *Trail) Begin(ctx context.Context, a Action) (*Pending, error) {
	if t == nil {
		return nil, nil
	}
	a = a.bounded()
	if a.Via == "" {
		a.Via = cut(via(ctx), maxText)
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	p := &Pending{trail: t, id: hex.EncodeToString(id[:]), begin: time.Now()}
	by := self()
	err := t.add(ctx, line{Type: typeBegin, ID: p.id, Time: p.begin.UTC(), Action: &a, By: &by})
	switch {
	case errors.Is(err, ErrNone):
		return nil, nil
	case err != nil && ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrTrail, err)
	}
	return p, nil
}

// End records how the action ended; only the first call counts. If that fails, the action stays without an end, and
// readers see so.
func (p *Pending) End(o Outcome) {
	if p == nil {
		return
	}
	p.once.Do(func() {
		o = o.bounded()
		now := time.Now()
		elapsed := float64(now.Sub(p.begin).Microseconds()) / 1000
		_ = p.trail.add(context.Background(), line{Type: typeEnd, ID: p.id, Time: now.UTC(), Outcome: &o, Elapsed: elapsed})
	})
}

// encode returns v as a line of JSON.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v) // ends with a line feed, and has no other
	return b.Bytes(), err
}

// add appends a line, to a new file if the current one is full.
func (t *Trail) add(ctx context.Context, l line) error {
	data, err := encode(l)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		f, err := openLocked(ctx, t.path, os.O_RDWR|os.O_APPEND)
		if err != nil {
			return err
		}
		full, err := t.addTo(f, data)
		f.Close()
		if err != nil || !full {
			return err
		}
	}
}

// addTo appends a line to a locked file. If the file is full, it starts a new one instead and returns true.
func (t *Trail) addTo(f *os.File, data []byte) (full bool, err error) {
	st, err := f.Stat()
	if err != nil {
		return false, err
	}
	size := st.Size()
	head, raw, err := readHead(f)
	if err == nil && t.vm != "" && head.VM != t.vm {
		err = errOther
	}
	if err != nil {
		return false, err
	}
	t.vm = head.VM
	if size > int64(len(raw)) && size+int64(len(data)) > t.max {
		return true, t.turn(head)
	}
	// An incomplete line, left by a power cut, stays on a line of its own.
	var last [1]byte
	if _, err := f.ReadAt(last[:], size-1); err != nil {
		return false, err
	}
	if last[0] != '\n' {
		data = append([]byte{'\n'}, data...)
	}
	if _, err := f.Write(data); err != nil {
		return false, errors.Join(fmt.Errorf("%w: make room, or see to the file system of the state directory", err), f.Truncate(size))
	}
	return false, nil
}

// turn replaces a full, locked file by a new one. There is a file at the path at any moment, even after a crash.
func (t *Trail) turn(h Head) error {
	h.Part, h.Time = h.Part+1, time.Now().UTC()
	data, err := encode(h)
	if err != nil {
		return err
	}
	next := t.path + ".new"
	if err := os.WriteFile(next, data, 0o600); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	for n := KeptFiles; n > 1; n-- {
		if err := os.Rename(older(t.path, n-1), older(t.path, n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	// That name still exists if a crash has left one file with both names: rename(2).
	if err := os.Remove(older(t.path, 1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Link(t.path, older(t.path, 1)); err != nil {
		return err
	}
	return os.Rename(next, t.path)
}

// lockPatience is how long to wait for the lock. Others hold it only for a write.
const lockPatience = 10 * time.Second

var errHeld = fmt.Errorf("another process has held it for %v: see who has it open", lockPatience)

// openLocked opens the file at a path and locks it. Closing the file unlocks it. The file is still the one at that
// path.
func openLocked(ctx context.Context, path string, flags int) (*os.File, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lockPatience, errHeld)
	defer cancel()
	f, err := osfile.OpenLocked(ctx, path, flags|unix.O_NOFOLLOW, 0o600, osfile.Exclusive)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNone
	}
	return f, err
}

// isAt reports whether an open file is the one at a path.
func isAt(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Lstat(path)
	return err == nil && os.SameFile(a, b)
}

// maxHead bounds the first line, in bytes.
const maxHead = 4 << 10

// readHead reads the first line of a file.
func readHead(f io.ReaderAt) (h Head, raw []byte, err error) {
	buf := make([]byte, maxHead)
	n, err := f.ReadAt(buf, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return h, nil, err
	}
	end := bytes.IndexByte(buf[:n], '\n')
	if end < 0 {
		return h, nil, fmt.Errorf("%w: no first line", ErrDamaged)
	}
	raw = buf[:end+1]
	if err := json.Unmarshal(raw, &h); err != nil || h.VM == "" || h.Part < 1 {
		return h, nil, fmt.Errorf("%w: its first line is not one of a trail", ErrDamaged)
	}
	if h.Version != Version {
		return h, nil, fmt.Errorf("%w: version %d, this build reads %d", ErrDamaged, h.Version, Version)
	}
	return h, raw, nil
}

// ReadHead returns the head of the trail at a path, which names its VM. The error is ErrNone or ErrDamaged.
func ReadHead(path string) (Head, error) {
	p, err := openPart(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNone
	}
	if err != nil {
		return Head{}, err
	}
	return p.head, p.f.Close()
}

// Ensure makes the trail of a VM, unless it exists. It renames a trail that is damaged, as after a power cut, or
// another VM's, appending ".damaged".
func Ensure(ctx context.Context, path string, h Head) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("making an audit trail: %w", err)
		}
	}()
	h.Version, h.Part, h.Time = Version, 1, time.Now().UTC()
	data, err := encode(h)
	if err == nil && len(data) > maxHead {
		err = fmt.Errorf("a first line of %d bytes, at most %d", len(data), maxHead)
	}
	for done := false; err == nil && !done; {
		var f *os.File
		if f, err = openLocked(ctx, path, os.O_RDWR|os.O_APPEND|os.O_CREATE); err == nil {
			done, err = ensure(f, path, h.VM, data)
			f.Close()
		}
	}
	return err
}

// ensure is Ensure for an existing, locked file.
func ensure(f *os.File, path, vm string, head []byte) (done bool, err error) {
	st, err := f.Stat()
	if err != nil {
		return false, err
	}
	if st.Size() == 0 {
		if _, err := f.Write(head); err != nil {
			return false, errors.Join(err, f.Truncate(0))
		}
		return true, nil
	}
	is, _, err := readHead(f)
	if err == nil && is.VM == vm {
		return true, nil
	}
	if err != nil && !errors.Is(err, ErrDamaged) {
		return false, err
	}
	return false, os.Rename(path, path+".damaged")
}
