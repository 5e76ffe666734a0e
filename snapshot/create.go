package snapshot

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// FramePages is the number of pages that Create packs into a frame, and frameLevel the zstd level. Both were
// chosen by measurement, see FORMAT.md, "Choice of constants".
const (
	FramePages = 16
	frameLevel = zstd.SpeedFastest
)

// MaxHot bounds Spec.Hot. So many pages are 4 MiB; compressed, a Linux guest's would take about a third of that.
const MaxHot = 1024

// MaxWriters bounds the goroutines that compress. Each holds up to two compressed chunks and a few frames: at most
// 5 MiB.
const MaxWriters = 32

// Spec says what goes into a snapshot. Only Memory and VCPUs are required.
type Spec struct {
	// ID is the snapshot's identity, 32 hex digits. If empty, Create chooses a random one.
	ID      string
	Sandbox string
	// Created is the time of the capture. Zero means now.
	Created time.Time
	VCPUs   int
	Kernel  string
	Image   string
	Disks   []Disk
	Host    map[string]string
	Labels  map[string]string
	// Payloads are the states of vCPUs, interrupt controllers, clock, devices.
	Payloads []Payload
	// Memory is RAM at the instant of the snapshot. The guest may keep running if the source keeps what it
	// overwrites.
	Memory MemorySource
	// Base makes the snapshot a delta: Create reads only the pages in Changed from Memory and takes the others
	// from Base. Base must have the same layout and be open until Create returns. It can share files only on the
	// same file system. Neither Base nor Changed may change meanwhile.
	Base *Snapshot
	// Changed must have all pages that may differ from Base, including those that the guest has given back and
	// that are zeros again.
	Changed *guestmem.PageSet
	// Hot are the pages that the guest needs as soon as it is resumed, at most MaxHot; Create ignores further ones and
	// numbers that are out of range. It packs them into frames without other pages and does not compress these. A delta
	// packs those of the base anew that are not in such a frame yet.
	Hot []uint64
	// Writers is the number of goroutines that compress, at most MaxWriters. 0 means GOMAXPROCS.
	Writers int
	// FS, if not nil, replaces the host's file system.
	FS osfile.FS

	// maxFiles replaces deltaFiles if not 0.
	maxFiles int
}

// Info describes a snapshot that has been created.
type Info struct {
	Dir      string
	Manifest *Manifest
	// SizeBytes is the size of what was written: the manifest and the snapshot's own memory file. A full snapshot
	// has no other files.
	SizeBytes int64
	// SharedBytes is the size of the files that are links to those of the base.
	SharedBytes int64
	// CarriedBytes is the part of SizeBytes that Create wrote to carry frames over from the base's files. That
	// keeps the number of files small and lets unreferenced space be freed.
	CarriedBytes int64
	// ManifestSHA256 is the hash of the whole manifest file, and so pins everything in the snapshot.
	ManifestSHA256 string
	// WriteTime is the time to read, compress, write and sync RAM. CommitTime is the time to write the manifest
	// and rename.
	WriteTime, CommitTime time.Duration
}

const tempPrefix = ".drowse-snapshot-"

// Create writes a snapshot to the directory dir. dir must not exist, its parent must. When Create returns, the
// snapshot is durable. If Create fails, it leaves no snapshot of that name. It fails with ErrExists, ErrNoSpace,
// ErrSpec, ErrBase, the error of the source, of the base (ErrCorrupt and the like), of the file system, or of the
// context. Machine and base are unchanged in every case. Create waits for calls to the source that are under way
// before it returns.
//
// The time and memory that a delta takes grow with the number of chunks that have changed pages, apart from the 16
// bytes of the root and 64 of the bitmap for each 2 MiB of RAM. Now and then a delta also carries frames over, see
// FORMAT.md, "Deltas". Besides what the goroutines hold (see MaxWriters), Create keeps the index of what it writes
// in memory, 2 to 13 KiB for each 2 MiB.
func Create(ctx context.Context, dir string, spec Spec) (*Info, error) {
	w := &writer{spec: spec, fs: spec.FS, base: spec.Base, start: time.Now(), maxFiles: spec.maxFiles}
	if w.fs == nil {
		w.fs = osfile.OS
	}
	if w.maxFiles == 0 {
		w.maxFiles = deltaFiles
	}
	info, err := w.create(ctx, filepath.Clean(dir))
	if err != nil {
		return nil, writeError(fmt.Sprintf("writing snapshot %s", dir), err)
	}
	return info, nil
}

type writer struct {
	spec  Spec
	fs    osfile.FS
	start time.Time
	// base is the snapshot whose index the new one extends, nil for a full snapshot.
	base     *Snapshot
	maxFiles int
	// hot are the pages of Spec.Hot.
	hot *guestmem.PageSet
	// dense makes the writer repack frames that are not full, and link no files.
	dense bool
}

// checkBase returns an error if the delta cannot be made.
func (w *writer) checkBase(dir string) error {
	s := &w.spec
	if s.Base == nil {
		if s.Changed != nil {
			return fmt.Errorf("a set of changed pages, and no base that they differ from: %w", ErrSpec)
		}
		return nil
	}
	bm := s.Base.manifest
	switch {
	case s.Changed == nil:
		return fmt.Errorf("a base, and no set of pages that have changed: %w", ErrSpec)
	case s.Base.memory == nil || s.Base.files == nil:
		return fmt.Errorf("the base %s is closed: %w", s.Base.dir, ErrBase)
	case !slices.Equal(bm.Memory.Slots, s.Memory.Slots()):
		return fmt.Errorf("RAM is laid out as %v, in the base %s as %v: %w: make a full snapshot",
			s.Memory.Slots(), s.Base.dir, bm.Memory.Slots, ErrBase)
	case s.Changed.Pages() != s.Base.memory.pages:
		return fmt.Errorf("a set of changed pages for %d pages of RAM, which has %d: %w", s.Changed.Pages(), s.Base.memory.pages, ErrSpec)
	case s.ID == bm.ID:
		return fmt.Errorf("the id %s is that of the base: %w: choose another", s.ID, ErrBase)
	case bm.Depth == math.MaxUint32 || w.number() == 0:
		return fmt.Errorf("the chain of the base is too long: %w: make a full snapshot", ErrBase)
	}
	// A snapshot may not lie inside another one.
	rel, err := filepath.Rel(absolute(s.Base.dir), absolute(dir))
	if err == nil && rel != "." && rel != ".." && !strings.HasPrefix(rel, "../") {
		return fmt.Errorf("%s is inside of its base %s: %w: choose another name", dir, s.Base.dir, ErrBase)
	}
	return nil
}

func absolute(name string) string {
	if a, err := filepath.Abs(name); err == nil {
		return a
	}
	return filepath.Clean(name)
}

// number returns the new file's number in the index, 0 if there are no more numbers.
func (w *writer) number() uint32 {
	if w.base == nil {
		return 1
	}
	files := w.base.manifest.Memory.Files
	return files[len(files)-1].Number + 1
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
		Version: Version, Arch: arch, ID: id, CreatedUnixNano: created.UnixNano(),
		Sandbox: s.Sandbox, VCPUs: s.VCPUs, Kernel: s.Kernel, Image: s.Image,
		Disks: slices.Clone(s.Disks), Host: s.Host, Labels: s.Labels,
		Memory: MemoryLayout{Slots: s.Memory.Slots()},
	}
	if b := s.Base; b != nil {
		m.Base, m.Depth = b.manifest.ID, b.manifest.Depth+1
	}
	if err := checkSlots(m.Memory.Slots); err != nil {
		return nil, err
	}
	// Encode a probe, so that a bad spec is refused before RAM is written.
	probe := *m
	probe.Memory.Files = []MemoryFile{{Number: w.number(), ID: id, Name: MemoryName, Size: fileHeader + m.rootBytes(), Index: fileHeader}}
	_, err := encodeManifest(&probe, s.Payloads)
	return m, err
}

func randomID() (id [16]byte) {
	rand.Read(id[:]) // never fails
	return id
}

func (w *writer) create(ctx context.Context, dir string) (*Info, error) {
	if w.spec.Memory == nil {
		return nil, fmt.Errorf("no source of RAM: %w", ErrSpec)
	}
	if err := w.checkBase(dir); err != nil {
		return nil, err
	}
	m, err := w.manifest()
	if err != nil {
		return nil, err
	}
	parent := filepath.Dir(dir)
	// The rename at the end makes the final check, but it comes late.
	if err := unused(w.fs, dir); err != nil {
		return nil, err
	}
	if err := w.checkFree(parent, m, w.spec.Payloads); err != nil {
		return nil, err
	}
	w.hot = guestmem.NewPageSet(pagesOf(m.Memory.Slots))
	for _, page := range w.spec.Hot[:min(len(w.spec.Hot), MaxHot)] {
		if page < w.hot.Pages() {
			w.hot.Add(page, page+1)
		}
	}
	info, err := w.build(ctx, parent, m, w.spec.Payloads, func(temp string) (string, error) {
		if err := w.fs.RenameNew(temp, dir); err != nil {
			return temp, err
		}
		return dir, nil
	})
	if err != nil {
		return nil, err
	}
	info.Dir = dir
	return info, nil
}

// unused returns fs.ErrExist if a file or directory has that name.
func unused(fsys osfile.FS, name string) error {
	_, err := fsys.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = fs.ErrExist
	}
	return err
}

// checkFree returns ErrNoSpace if the space is certainly too little. The compressed size of the pages is not known
// yet.
func (w *writer) checkFree(parent string, m *Manifest, payloads []Payload) error {
	need := uint64(payloadBytes(payloads)) + uint64(m.rootBytes()) + guestmem.PageSize
	if free, err := w.fs.Free(parent); err == nil && free < need {
		return fmt.Errorf("%s has %d bytes left and %d are needed at least: %w", parent, free, need, ErrNoSpace)
	}
	return nil
}

// build writes the files of the snapshot m into a temporary directory in parent and makes it durable. Then commit
// gives it its name in one step, and returns the directory that build must remove if a later step fails.
func (w *writer) build(ctx context.Context, parent string, m *Manifest, payloads []Payload,
	commit func(temp string) (string, error)) (info *Info, err error) {
	temp, lock, err := w.tempDir(parent)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	unwanted := temp
	defer func() {
		if unwanted != "" {
			err = errors.Join(err, w.fs.RemoveAll(unwanted))
		}
	}()
	info = &Info{Manifest: m}
	memSize, err := w.writeFile(filepath.Join(temp, MemoryName), func(f io.Writer) (int64, error) {
		return w.writeMemory(ctx, f, temp, info)
	})
	if err != nil {
		return nil, fmt.Errorf("RAM: %w", err)
	}
	wrote := time.Now()
	body, err := encodeManifest(m, payloads)
	if err != nil {
		return nil, err
	}
	if _, err := w.writeFile(filepath.Join(temp, ManifestName), func(f io.Writer) (int64, error) {
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
	// If commit succeeds, the snapshot has its name from here on.
	if unwanted, err = commit(temp); err != nil {
		return nil, err
	}
	if err := w.fs.SyncDir(parent); err != nil {
		return nil, fmt.Errorf("making the name durable: %w", err)
	}
	unwanted = ""
	info.SizeBytes = memSize + int64(len(body))
	info.ManifestSHA256 = manifestDigest(body)
	info.WriteTime, info.CommitTime = wrote.Sub(w.start), time.Since(wrote)
	return info, nil
}

// tempTries is how often tempDir tries if Clean removes its directory before it is locked.
const tempTries = 4

// tempDir makes a directory beside the target that no other Create uses. Clean does not remove it until lock is
// closed.
func (w *writer) tempDir(parent string) (name string, lock io.Closer, err error) {
	for range tempTries {
		id := randomID()
		name = filepath.Join(parent, tempPrefix+hex.EncodeToString(id[:8]))
		if err = w.fs.Mkdir(name, 0o700); err != nil {
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

// Clean removes what a killed Create has left in the directory parent, and returns the number of unfinished
// snapshots removed. It does not touch the directory of a Create that is still running, in any process.
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
		lock, err := osfile.OS.Lock(name)
		if err != nil {
			continue // in use, or removed by another process
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

// writeFile creates a file, lets write fill it, and makes it durable.
func (w *writer) writeFile(name string, write func(io.Writer) (int64, error)) (n int64, err error) {
	f, err := w.fs.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if n, err = write(io.NewOffsetWriter(f, 0)); err != nil {
		return n, err
	}
	return n, f.Sync()
}

// Remove removes the snapshot in dir, or what is left of it. A crash leaves all of it or nothing of that name;
// Clean removes the rest. Files that other snapshots link to stay. A missing snapshot is not an error.
func Remove(dir string) error {
	free, err := Discard(dir)
	if err != nil {
		return err
	}
	return free()
}

// Discard is Remove in two steps. When it returns, the snapshot's name is durably gone, even after a crash. free
// removes the files, which may take long.
func Discard(dir string) (free func() error, err error) {
	wrap := func(err error) error {
		if err != nil {
			err = fmt.Errorf("removing snapshot %s: %w", dir, err)
		}
		return err
	}
	temp, err := discard(filepath.Clean(dir), osfile.OS)
	if err != nil {
		return nil, wrap(err)
	}
	return func() error {
		if temp == "" {
			return nil
		}
		return wrap(osfile.OS.RemoveAll(temp))
	}, nil
}

// discard renames a snapshot to a name that Clean recognizes, and returns it; empty if there is no snapshot.
func discard(dir string, fsys osfile.FS) (temp string, err error) {
	id := randomID()
	temp = filepath.Join(filepath.Dir(dir), tempPrefix+hex.EncodeToString(id[:8]))
	if err := fsys.RenameNew(dir, temp); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	// After a crash the old name must not come back with some of the files missing.
	return temp, fsys.SyncDir(filepath.Dir(dir))
}

// IsTemp reports whether a name in the parent directory belongs to a snapshot that is being created or removed, or
// was when its process died.
func IsTemp(name string) bool { return strings.HasPrefix(name, tempPrefix) }
