package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Snapshot is an opened snapshot. Its methods may be called from several
// goroutines at once; Close must be the last call, after every pager on it.
type Snapshot struct {
	dir      string
	manifest *Manifest
	payloads []Payload
	digest   string
	memory   *Memory
	closers  []io.Closer
}

func manifestDigest(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:])
}

// Open opens the snapshot in dir and checks all of it but the RAM, and of that
// the root of the index and that the file is of the right length; the rest is
// checked as it is read. The time that takes does not depend on the size of RAM.
// It fails with ErrNotFound, ErrIncomplete, ErrCorrupt, ErrVersion, ErrForeign,
// or the file system's error.
func Open(dir string) (*Snapshot, error) {
	s := &Snapshot{dir: dir}
	if err := s.open(); err != nil {
		s.Close()
		return nil, fmt.Errorf("opening snapshot %s: %w", dir, err)
	}
	return s, nil
}

func (s *Snapshot) open() error {
	body, err := readManifest(s.dir)
	if err != nil {
		return err
	}
	s.digest = manifestDigest(body)
	if s.manifest, s.payloads, err = decodeManifest(body); err != nil {
		return err
	}
	return s.openMemory()
}

func readManifest(dir string) ([]byte, error) {
	f, err := os.Open(filepath.Join(dir, ManifestName))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			if _, serr := os.Stat(dir); serr == nil {
				return nil, fmt.Errorf("%w: %w", ErrIncomplete, err)
			}
			return nil, fmt.Errorf("%w: %w", ErrNotFound, err)
		}
		return nil, err
	}
	defer f.Close()
	header := make([]byte, manifestHeader)
	n, err := io.ReadFull(f, header)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, err
	}
	size, err := manifestSize(header[:n])
	if err != nil {
		return nil, err
	}
	// The length is what the header says, within its bounds; the file must have
	// that length exactly.
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() < size {
		return nil, fmt.Errorf("%s has %d bytes of %d: %w", ManifestName, st.Size(), size, ErrIncomplete)
	}
	if st.Size() > size {
		return nil, corrupt(ManifestName, size, "%d bytes too many", st.Size()-size)
	}
	body := make([]byte, size)
	if n, err := f.ReadAt(body, 0); n < len(body) {
		return nil, readError(ManifestName, 0, len(body), err)
	}
	return body, nil
}

func (s *Snapshot) openMemory() error {
	l := &s.manifest.Memory
	var files []memoryFile
	for _, mf := range l.Files {
		f, err := os.Open(filepath.Join(s.dir, mf.Name))
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%w: %w", ErrIncomplete, err)
			}
			return err
		}
		s.closers = append(s.closers, f)
		st, err := f.Stat()
		switch {
		case err != nil:
			return err
		case st.Size() < mf.Size:
			return fmt.Errorf("%s has %d bytes of %d: %w", mf.Name, st.Size(), mf.Size, ErrIncomplete)
		case st.Size() > mf.Size:
			return corrupt(mf.Name, mf.Size, "%d bytes too many", st.Size()-mf.Size)
		}
		var header [fileHeader]byte
		if n, err := f.ReadAt(header[:], 0); n < len(header) {
			return readError(mf.Name, 0, len(header), err)
		}
		if err := checkFileHeader(header[:], mf.Name, mf.ID); err != nil {
			return err
		}
		files = append(files, memoryFile{r: f, name: mf.Name, size: mf.Size})
	}
	m := newMemoryIndex(l.Slots, files)
	root := &m.files[l.Root.File-1]
	m.root = make([]byte, l.Root.Length)
	if n, err := root.r.ReadAt(m.root, l.Root.Offset); n < len(m.root) {
		return readError(root.name, l.Root.Offset, len(m.root), err)
	}
	if got := checksum(m.root); got != l.Root.CRC32C {
		return corrupt(root.name, l.Root.Offset, "index root: checksum is %08x, the manifest says %08x", got, l.Root.CRC32C)
	}
	s.memory = m
	return nil
}

// Dir is the directory of the snapshot.
func (s *Snapshot) Dir() string { return s.dir }

// Manifest describes the snapshot. It must not be changed.
func (s *Snapshot) Manifest() *Manifest { return s.manifest }

// ManifestSHA256 is over the whole manifest file, and so pins everything in the
// snapshot.
func (s *Snapshot) ManifestSHA256() string { return s.digest }

// Payloads are the states of the machine's parts, in the order in which they
// were given to Create. They must not be changed.
func (s *Snapshot) Payloads() []Payload { return s.payloads }

// Memory is the RAM.
func (s *Snapshot) Memory() *Memory { return s.memory }

// Close closes the files.
func (s *Snapshot) Close() error {
	var errs []error
	for _, c := range s.closers {
		errs = append(errs, c.Close())
	}
	s.closers = nil
	return errors.Join(errs...)
}

// Verify reads all of the RAM and checks every leaf and every frame of it,
// decompression included. It fails like Open, with the first thing that it
// finds, or with the context's error.
func (s *Snapshot) Verify(ctx context.Context) error {
	d, err := NewDecoder()
	if err != nil {
		return err
	}
	defer d.Release()
	m := s.memory
	var pages, frames, stored uint64
	for c := range m.Chunks() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		l, err := m.Leaf(c)
		if err != nil {
			return fmt.Errorf("verifying snapshot %s: %w", s.dir, err)
		}
		if l == nil {
			continue
		}
		for i := range l.frames {
			if _, err := m.ReadFrame(&l.frames[i], d); err != nil {
				return fmt.Errorf("verifying snapshot %s: %w", s.dir, err)
			}
			frames++
			stored += uint64(l.frames[i].stored)
		}
		for _, e := range l.pages {
			if e != 0 {
				pages++
			}
		}
	}
	if got := (Stats{Pages: pages, Frames: frames, StoredBytes: stored}); got != s.manifest.Stats {
		return fmt.Errorf("verifying snapshot %s: %w", s.dir, corrupt(MemoryName, 0,
			"it has %d pages in %d frames of %d bytes, the manifest says %d, %d, %d", pages, frames, stored,
			s.manifest.Stats.Pages, s.manifest.Stats.Frames, s.manifest.Stats.StoredBytes))
	}
	return nil
}
