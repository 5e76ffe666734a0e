package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Errors that a caller may want to distinguish.
var (
	ErrNotFound = errors.New("no such volume")
	ErrExists   = errors.New("a volume of that name exists")
	ErrName     = errors.New("invalid name of a volume")
	// ErrInUse: it is attached for writing, or is attached for reading and was requested for writing.
	ErrInUse = errors.New("the volume is in use")
	// ErrStale: a snapshot's memory does not belong to the content.
	ErrStale = errors.New("the volume has changed since the snapshot")
	// ErrDirty: its file system was not unmounted. Attach it for writing once, so that its journal is replayed.
	ErrDirty = errors.New("the volume's file system was not unmounted")
	// ErrRecord: the record is damaged or of another version.
	ErrRecord = errors.New("unreadable volume record")
	// ErrReadOnly: it is attached for reading.
	ErrReadOnly = errors.New("the volume is read-only")
	// ErrSyncFailed: a flush has failed, so no flush can be trusted any more.
	ErrSyncFailed = errors.New("an earlier flush failed")
)

// Version of a Record.
const Version = 1

// Record is the persistent record of a volume.
type Record struct {
	Version int       `json:"version"`
	ID      string    `json:"id"` // 32 hex digits
	Name    string    `json:"name"`
	Size    int64     `json:"size"` // bytes
	Created time.Time `json:"created"`
	// Generation counts first writes by a VM after a boot, a wake or a capture: equal generations of a volume that
	// is not being written to mean equal content.
	Generation uint64 `json:"generation"`
	// Settled is the snapshot whose memory belongs to the content; nil if none.
	Settled *Settled `json:"settled,omitempty"`
}

// Settled names a snapshot and the VM that sleeps in it.
type Settled struct {
	Snapshot string `json:"snapshot"`
	VM       string `json:"vm"`
}

// Names of the files of a volume.
const (
	recordName = "volume.json"
	dataName   = "data"
	maxRecord  = 64 << 10 // bytes
)

// Volume is an attached volume: a disk for a block device. Its methods may be called concurrently; Close must be
// the last.
type Volume struct {
	// begun, if not nil, notes in place of the record that the volume is written to: see Of.
	begun    func() error
	fs       osfile.FS
	dir      string
	data     osfile.File
	readOnly bool
	size     int64

	// written is set once the record says that the volume is being written to.
	written atomic.Bool
	dirty   atomic.Bool // something was written since the last flush began

	mu     sync.Mutex // guards what follows
	rec    Record
	failed error // why flushes fail
}

// Attach opens a volume, for reading or also for writing. It holds the lock until Close. It calls allow, if not
// nil, once it has the lock; allow's error ends the attach. A volume that cannot be read without a write is
// ErrDirty.
func (s *Store) Attach(name string, readOnly bool, allow func(*Record) error) (_ *Volume, err error) {
	defer failed("attaching", name, &err)
	v, err := s.attach(name, readOnly)
	if err != nil {
		return nil, err
	}
	if r := v.Record(); allow != nil {
		err = allow(&r)
	}
	if err == nil && readOnly {
		err = checkClean(v.data)
	}
	if err != nil {
		return nil, errors.Join(err, v.Close())
	}
	return v, nil
}

func (s *Store) attach(name string, readOnly bool) (v *Volume, err error) {
	for range attachTries {
		if v, err = s.attachOnce(name, readOnly); !errors.Is(err, errReplaced) {
			break
		}
	}
	return v, err
}

func (s *Store) attachOnce(name string, readOnly bool) (*Volume, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	dir := filepath.Join(s.dir, name)
	flags, mode := os.O_RDWR, osfile.Exclusive
	if readOnly {
		flags, mode = os.O_RDONLY, osfile.Shared
	}
	data, err := s.fs.OpenFile(filepath.Join(dir, dataName), flags|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: see Volumes().List", ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	v := &Volume{fs: s.fs, dir: dir, data: data, readOnly: readOnly}
	if err := v.open(mode); err != nil {
		return nil, errors.Join(err, data.Close())
	}
	return v, nil
}

// errReplaced means that another file has taken the place of the one that was opened.
var errReplaced = fmt.Errorf("%w: it has just been removed", ErrNotFound)

// attachTries is how often a volume may be resized, or removed and made again, during an attach.
const attachTries = 8

func (v *Volume) open(mode osfile.LockMode) error {
	err := osfile.TryLock(v.data.OS(), mode)
	if errors.Is(err, osfile.ErrLocked) {
		return fmt.Errorf("%w: stop the VM that has it, or attach it read-only in all", ErrInUse)
	}
	if err != nil {
		return err
	}
	st, err := v.data.Stat()
	if err != nil {
		return err
	}
	// The volume may have been resized, or removed and made again, since the file was opened.
	if now, err := v.fs.Stat(filepath.Join(v.dir, dataName)); err != nil || !os.SameFile(now, st) {
		return errReplaced
	}
	rec, err := readRecord(v.fs, v.dir)
	if err != nil {
		return err
	}
	rec.adopt(st.Size())
	if st.Size() != rec.Size {
		return fmt.Errorf("%w: its file has %d bytes and should have %d", ErrRecord, st.Size(), rec.Size)
	}
	v.rec, v.size = *rec, rec.Size
	return nil
}

// adopt sets the record's size to that of the file, if a resize was killed between the two: see Resize. The record
// on disk gets it with its next write.
func (r *Record) adopt(file int64) {
	if file > r.Size && checkSize(file) == nil {
		r.Size = file
	}
}

// Where ext4 says that its journal must be replayed (Documentation/filesystems/ext4, "The Super Block"): offsets
// in the file, the magic number, and INCOMPAT_RECOVER.
const (
	superMagicAt   = 1024 + 0x38
	superIncompat  = 1024 + 0x60
	ext4Magic      = 0xef53
	incompatReplay = 0x4
)

// checkClean refuses a file system that cannot be read without a write.
func checkClean(f osfile.File) error {
	var magic [2]byte
	var incompat [4]byte
	if _, err := f.ReadAt(magic[:], superMagicAt); err != nil {
		return err
	}
	if _, err := f.ReadAt(incompat[:], superIncompat); err != nil {
		return err
	}
	if uint(magic[0])|uint(magic[1])<<8 == ext4Magic && incompat[0]&incompatReplay != 0 {
		return fmt.Errorf("%w: attach it for writing once, and shut that VM down", ErrDirty)
	}
	return nil
}

// Record returns the current record of the volume.
func (v *Volume) Record() Record {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.rec
}

// Check reports whether a snapshot's memory may continue with the content. For writing, this VM must have slept
// with it in that snapshot, without a write since. For reading, there must be no write since generation. It fails
// with ErrStale.
func (v *Volume) Check(id string, generation uint64, as Settled) error {
	r := v.Record()
	return r.Check(id, generation, v.readOnly, as)
}

// Check is Volume.Check for a volume that is not attached.
func (r *Record) Check(id string, generation uint64, readOnly bool, as Settled) error {
	switch {
	case r.ID != id:
		return fmt.Errorf("%w: volume %s is another one of that name", ErrStale, r.Name)
	case readOnly && r.Generation != generation:
		return fmt.Errorf("%w: volume %s has been written to", ErrStale, r.Name)
	case !readOnly && (r.Settled == nil || *r.Settled != as):
		return fmt.Errorf("%w: volume %s is not as this VM has left it there", ErrStale, r.Name)
	}
	return nil
}

// begin makes the record say that the volume is being written to, before the first write.
func (v *Volume) begin() error {
	if v.written.Load() {
		return nil
	}
	if v.readOnly {
		return ErrReadOnly
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.written.Load() {
		return nil
	}
	if v.begun != nil {
		if err := v.begun(); err != nil {
			return fmt.Errorf("noting that volume %s is written to: %w", v.rec.Name, err)
		}
		v.written.Store(true)
		return nil
	}
	next := v.rec
	next.Generation++
	next.Settled = nil
	if err := writeRecord(v.fs, v.dir, &next); err != nil {
		return fmt.Errorf("noting that volume %s is written to: %w", v.rec.Name, err)
	}
	v.rec = next
	v.written.Store(true)
	return nil
}

// Of returns the volume whose record and open data file another process has, which has attached it. begun has that
// process call Written. Only Record, Check, Rearm and the methods of a disk work.
func Of(r Record, data *os.File, readOnly bool, begun func() error) *Volume {
	return &Volume{data: osfile.NewFile(data), rec: r, size: r.Size, readOnly: readOnly, begun: begun}
}

// File returns the open data file, which stays the volume's.
func (v *Volume) File() *os.File { return v.data.OS() }

// Written makes the record say that the volume is being written to. Each write does so by itself.
func (v *Volume) Written() error { return v.begin() }

// Rearm has the next write call begun again: the volume may have been settled. There must be no write meanwhile.
func (v *Volume) Rearm() { v.written.Store(false) }

// Settle makes all writes durable and records, durably, that the content belongs to a snapshot. There must be no
// write meanwhile. The first later write removes that record before it takes effect.
func (v *Volume) Settle(as Settled) error {
	if v.readOnly {
		return nil
	}
	if err := v.Flush(); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	next := v.rec
	next.Settled = &as
	// If this fails the record may have been written all the same: so the next write must replace it.
	v.written.Store(false)
	if err := writeRecord(v.fs, v.dir, &next); err != nil {
		return fmt.Errorf("noting that volume %s belongs to snapshot %s: %w", v.rec.Name, as.Snapshot, err)
	}
	v.rec = next
	return nil
}

// Close detaches the volume. It does not make unflushed writes durable.
func (v *Volume) Close() error { return errors.Join(osfile.Unlock(v.data.OS()), v.data.Close()) }

// Size returns the size of the disk in bytes.
func (v *Volume) Size() int64 { return v.size }

// ReadOnly reports whether the volume is attached for reading only.
func (v *Volume) ReadOnly() bool { return v.readOnly }

// ReadExtent returns the place in the file from which to read bytes of the disk.
func (v *Volume) ReadExtent(off, n int64) (f *os.File, fileOff, length int64, err error) {
	return v.data.OS(), off, n, nil
}

// WriteExtent returns the place in the file to which to write bytes of the disk.
func (v *Volume) WriteExtent(off, n int64) (f *os.File, fileOff, length int64, err error) {
	if err := v.begin(); err != nil {
		return nil, 0, 0, err
	}
	return v.data.OS(), off, n, nil
}

// Wrote ends a write.
func (v *Volume) Wrote(_, _ int64, err error) error {
	v.dirty.Store(true)
	return err
}

// Flush makes all earlier writes durable. An error that is ErrSyncFailed is final.
func (v *Volume) Flush() error {
	if v.readOnly {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.failed != nil {
		return v.failed
	}
	if !v.dirty.Swap(false) {
		return nil
	}
	if err := v.data.Datasync(); err != nil {
		// Not %w: space on the host does not bring back what was lost.
		v.failed = fmt.Errorf("flushing volume %s: %w: %v", v.rec.Name, ErrSyncFailed, err)
		return v.failed
	}
	return nil
}

// Discard frees space. The range then reads as zeros where the file system can punch holes, and stays unchanged
// elsewhere.
func (v *Volume) Discard(off, n int64) error {
	err := v.allocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// WriteZeroes zeroes a range, and frees its space if mayUnmap is set.
func (v *Volume) WriteZeroes(off, n int64, mayUnmap bool) error {
	mode := uint32(unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE)
	if mayUnmap {
		mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	}
	err := v.allocate(mode, off, n)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	for n > 0 {
		k, err := v.data.WriteAt(zeros[:min(n, int64(len(zeros)))], off)
		if err != nil {
			return err
		}
		off, n = off+int64(k), n-int64(k)
	}
	return nil
}

var zeros [64 << 10]byte

func (v *Volume) allocate(mode uint32, off, n int64) error {
	if err := v.begin(); err != nil {
		return err
	}
	v.dirty.Store(true)
	return v.data.Fallocate(mode, off, n)
}

func readRecord(fsys osfile.FS, dir string) (*Record, error) {
	f, err := fsys.OpenFile(filepath.Join(dir, recordName), os.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d := json.NewDecoder(io.NewSectionReader(f, 0, maxRecord))
	d.DisallowUnknownFields()
	var r Record
	if err := d.Decode(&r); err != nil {
		return nil, fmt.Errorf("%w: %s: %w: it was written by another version, or is damaged", ErrRecord, dir, err)
	}
	if r.Version != Version || r.Name != filepath.Base(dir) || len(r.ID) != idBytes*2 || strings.Trim(r.ID, "0123456789abcdef") != "" || r.Size <= 0 {
		return nil, fmt.Errorf("%w: %s: version %d of volume %q, this build reads version %d", ErrRecord, dir, r.Version, r.Name, Version)
	}
	return &r, nil
}

// writeRecord replaces a record: after a crash at any instant, the old or the new one exists.
func writeRecord(fsys osfile.FS, dir string, r *Record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return osfile.WriteFileIn(fsys, filepath.Join(dir, recordName), append(data, '\n'), 0o600)
}
