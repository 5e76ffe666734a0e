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

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// FramePages is how many pages go into a frame, and frameLevel how hard they
// are compressed. Chosen by measurement, see FORMAT.md, "Choice of constants".
const (
	FramePages = 16
	frameLevel = zstd.SpeedFastest
)

// MaxWriters bounds the goroutines that compress. Each holds up to two chunks,
// compressed, and a few frames: at most 5 MiB.
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
	// Memory is RAM at the instant of the snapshot. The guest may run on if the
	// source keeps what it overwrites.
	Memory MemorySource
	// Base makes the snapshot a delta: only the pages in Changed are read from
	// Memory, and the others are what they are in Base, which must be open
	// until Create returns, on the same file system if files are to be shared,
	// and of the same layout. Neither may change meanwhile.
	Base *Snapshot
	// Changed must have all pages that may differ from Base, among them those
	// that the guest has given back and that are zeros again.
	Changed *guestmem.PageSet
	// Writers is how many goroutines compress, at most MaxWriters; as many as
	// there are processors if 0.
	Writers int
	// FS stands in for the machine's file system, if not nil.
	FS FS

	// maxFiles is in place of deltaFiles if not 0.
	maxFiles int
}

// Info describes a snapshot that has been created.
type Info struct {
	Dir      string
	Manifest *Manifest
	// SizeBytes is what has been written: the manifest and the snapshot's own
	// memory file. A full snapshot has no more.
	SizeBytes int64
	// SharedBytes is the size of the files that are links to those of the base.
	SharedBytes int64
	// CarriedBytes is how much of SizeBytes was only written because frames of
	// the base's files were carried over, so that the number of files stays
	// small and space that nothing refers to can be freed.
	CarriedBytes int64
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
// of that name if it fails: with ErrExists, ErrNoSpace, ErrSpec, ErrBase, the
// error of the source, of the base (ErrCorrupt and the like) or of the file
// system, or the context's. Machine and base are as they were in every case.
// Create waits for calls of the source that are under way, then returns.
//
// The time and the memory that a delta takes go with the number of chunks that
// have changed pages, but for the 16 bytes of the root and 64 of the bitmap for
// each 2 MiB of RAM; once in many deltas it also carries frames over, see
// FORMAT.md, "Deltas". Beside what the goroutines hold (see MaxWriters), Create
// keeps the index of what it writes in memory, 2 to 13 KiB for each 2 MiB.
func Create(ctx context.Context, dir string, spec Spec) (*Info, error) {
	w := &writer{spec: spec, fs: spec.FS, base: spec.Base, start: time.Now(), maxFiles: spec.maxFiles}
	if w.fs == nil {
		w.fs = osFS{}
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
	fs    FS
	start time.Time
	// base is what the index is based on, nil for a full snapshot.
	base     *Snapshot
	maxFiles int
	// dense makes frames that are not full be packed anew, and links nothing.
	dense bool
}

// checkBase says whether the delta can be made at all.
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
	// Nothing else belongs into a snapshot.
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

// number is what the index calls the new file; 0 if there are no more numbers.
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
	// What can be refused is refused before RAM is written.
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
	// The rename at the end decides, but it comes late.
	if exists, err := w.fs.Exists(dir); err != nil {
		return nil, err
	} else if exists {
		return nil, fs.ErrExist
	}
	if err := w.checkFree(parent, m, w.spec.Payloads); err != nil {
		return nil, err
	}
	info, err := w.build(ctx, parent, m, w.spec.Payloads, func(temp string) (string, error) {
		if err := w.fs.Rename(temp, dir); err != nil {
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

// checkFree refuses at once what is certainly too little space; how far the
// pages can be compressed is not known before they are.
func (w *writer) checkFree(parent string, m *Manifest, payloads []Payload) error {
	need := uint64(payloadBytes(payloads)) + uint64(m.rootBytes()) + guestmem.PageSize
	if free, err := w.fs.Free(parent); err == nil && free < need {
		return fmt.Errorf("%s has %d bytes left and %d are needed at least: %w", parent, free, need, ErrNoSpace)
	}
	return nil
}

// build writes the files of the snapshot m into a temporary directory in
// parent and makes it durable. Then commit gives it its name, in one step, and
// says what must be removed if anything fails from then on.
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
	memSize, err := w.writeFile(filepath.Join(temp, MemoryName), func(f File) (int64, error) {
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
	// From here on the snapshot has its name, unless this fails.
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

// Remove removes the snapshot in dir, or what is left of it, so that a crash
// leaves all of it or nothing of that name; Clean removes the rest. Files that
// other snapshots have links to stay theirs. It is no error if there is none.
func Remove(dir string) error {
	free, err := Discard(dir)
	if err != nil {
		return err
	}
	return free()
}

// Discard is Remove in two steps: when it returns, the snapshot has no name any
// more, also after a crash, and free removes its files, which may take long.
func Discard(dir string) (free func() error, err error) {
	wrap := func(err error) error {
		if err != nil {
			err = fmt.Errorf("removing snapshot %s: %w", dir, err)
		}
		return err
	}
	temp, err := discard(filepath.Clean(dir), osFS{})
	if err != nil {
		return nil, wrap(err)
	}
	return func() error {
		if temp == "" {
			return nil
		}
		return wrap(osFS{}.RemoveAll(temp))
	}, nil
}

// discard gives a snapshot a name that Clean knows; empty if there is none.
func discard(dir string, fsys FS) (temp string, err error) {
	id := randomID()
	temp = filepath.Join(filepath.Dir(dir), tempPrefix+hex.EncodeToString(id[:8]))
	if err := fsys.Rename(dir, temp); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	// It must not come back without some of its files.
	return temp, fsys.SyncDir(filepath.Dir(dir))
}

// IsTemp reports whether a name in the parent directory is that of a snapshot that
// is being made, or was when its process died.
func IsTemp(name string) bool { return strings.HasPrefix(name, tempPrefix) }
