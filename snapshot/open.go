package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Snapshot is an opened snapshot. Its methods may be called from several
// goroutines at once; Close must be the last call, after every pager on it.
type Snapshot struct {
	fs       osfile.FS
	dir      string
	manifest *Manifest
	payloads []Payload
	body     []byte // the manifest file
	memory   *Memory
	files    []osfile.File // in the order of the manifest
	ensure   Ensure        // of OpenArriving, else nil
}

func manifestDigest(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:])
}

// Open opens the snapshot in dir. It checks the manifest, the root of the index, and that every memory file is
// there, is the right one and has the right length. Leaves and frames are checked as they are read. The time that
// Open takes hardly depends on the size of RAM, and not on the length of the chain. It fails with ErrNotFound,
// ErrIncomplete, ErrCorrupt, ErrVersion, ErrForeign, or the file system's error.
//
// The snapshot holds a descriptor of each of its memory files, at most MaxFiles. So it stays readable when the
// directory is removed or compacted.
func Open(dir string) (*Snapshot, error) { return OpenIn(osfile.OS, dir) }

// OpenIn is Open in another file system than the host's.
func OpenIn(fsys osfile.FS, dir string) (*Snapshot, error) {
	s, err := openWith(fsys, dir, (*Snapshot).openFiles)
	if err != nil {
		return nil, fmt.Errorf("opening snapshot %s: %w", dir, err)
	}
	return s, nil
}

// ReadManifest reads and checks the manifest of the snapshot in dir, and no other file. So it works even if the
// memory files are damaged or missing. It fails as Open does: ErrNotFound means that there is no snapshot, and
// ErrIncomplete that the manifest is missing or truncated.
func ReadManifest(dir string) (*Manifest, error) {
	s, err := openWith(osfile.OS, dir, (*Snapshot).readIn)
	if err != nil {
		return nil, fmt.Errorf("reading the manifest of snapshot %s: %w", dir, err)
	}
	return s.manifest, nil
}

// openWith opens the snapshot in dir with in, and tries again if Compact replaces the directory meanwhile.
func openWith(fsys osfile.FS, dir string, in func(*Snapshot) error) (*Snapshot, error) {
	var err error
	for range openTries {
		s := &Snapshot{fs: fsys, dir: dir}
		var replaced bool
		if replaced, err = s.open(in); err == nil {
			return s, nil
		}
		s.Close()
		if !replaced {
			break
		}
	}
	return nil, err
}

// openTries is how often openWith tries.
const openTries = 8

// open reports, if it fails, whether the directory was replaced meanwhile, which may be the cause. Success needs no
// such check: ids and checksums in the manifest pin what belongs to it in the other files.
func (s *Snapshot) open(in func(*Snapshot) error) (replaced bool, err error) {
	before, err := s.fs.Stat(s.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, fmt.Errorf("%w: %w", ErrNotFound, err)
	case err != nil && !errors.Is(err, unix.ENOTDIR):
		return false, err
	case err != nil || !before.IsDir():
		return false, fmt.Errorf("%s is not a directory: %w: %w", s.dir, ErrForeign, unix.ENOTDIR)
	}
	if err = in(s); err == nil {
		return false, nil
	}
	// A new directory may have the inode of the one that was removed.
	after, serr := s.fs.Stat(s.dir)
	return serr == nil && (!osfile.SameFile(before, after) || !before.ModTime().Equal(after.ModTime())), err
}

func (s *Snapshot) openFiles() error {
	if err := s.readIn(); err != nil {
		return err
	}
	return s.openMemory()
}

func (s *Snapshot) readIn() error {
	body, err := s.readManifest()
	if err != nil {
		return err
	}
	s.body = body
	s.manifest, s.payloads, err = decodeManifest(body)
	return err
}

// openFile opens a file of the directory, whose name is valid. A symbolic link is none of its files.
func (s *Snapshot) openFile(name string) (osfile.File, error) {
	f, err := s.fs.OpenFile(filepath.Join(s.dir, name), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
	return f, err
}

func (s *Snapshot) readManifest() ([]byte, error) {
	f, err := s.openFile(ManifestName)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	header := make([]byte, manifestHeader)
	n, err := f.ReadAt(header, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	size, err := manifestSize(header[:n])
	if err != nil {
		return nil, err
	}
	// The header states the length, within bounds. The file must have exactly that length.
	if err := checkLength(f, ManifestName, size); err != nil {
		return nil, err
	}
	body := make([]byte, size)
	if n, err := f.ReadAt(body, 0); n < len(body) {
		return nil, readError(ManifestName, 0, len(body), err)
	}
	return body, nil
}

// checkLength returns an error unless a file has exactly the given length.
func checkLength(f osfile.File, name string, size int64) error {
	st, err := f.Stat()
	switch {
	case err != nil:
		return err
	case st.Size() < size:
		return fmt.Errorf("%s has %d bytes of %d: %w", name, st.Size(), size, ErrIncomplete)
	case st.Size() > size:
		return corrupt(name, size, "%d bytes too many", st.Size()-size)
	}
	return nil
}

func (s *Snapshot) openMemory() error {
	l := &s.manifest.Memory
	files := make([]memoryFile, 0, len(l.Files))
	for _, mf := range l.Files {
		f, err := s.openFile(mf.Name)
		if err != nil {
			return err
		}
		s.files = append(s.files, f)
		if err := checkLength(f, mf.Name, mf.Size); err != nil {
			return err
		}
		var header [fileHeader]byte
		if n, err := f.ReadAt(header[:], 0); n < len(header) {
			return readError(mf.Name, 0, len(header), err)
		}
		if err := checkFileHeader(header[:], mf.Name, mf.ID); err != nil {
			return err
		}
		var r io.ReaderAt = f
		if s.ensure != nil {
			r = &arrivingFile{f, mf.Name, s.ensure}
		}
		files = append(files, memoryFile{
			r: r, name: mf.Name, number: mf.Number, index: mf.Index, root: mf.Size - s.manifest.rootBytes(),
		})
	}
	m := newMemoryIndex(l.Slots, files)
	own := &m.files[len(m.files)-1]
	m.root = make([]byte, s.manifest.rootBytes())
	if n, err := own.r.ReadAt(m.root, own.root); n < len(m.root) {
		return readError(own.name, own.root, len(m.root), err)
	}
	if got := checksum(m.root); got != l.RootCRC32C {
		return corrupt(own.name, own.root, "index root: checksum is %08x, the manifest says %08x", got, l.RootCRC32C)
	}
	s.memory = m
	return m.checkRoot()
}

// Dir returns the directory of the snapshot.
func (s *Snapshot) Dir() string { return s.dir }

// Files returns the memory files, in the order of the manifest. They are open until Close.
func (s *Snapshot) Files() []*os.File {
	out := make([]*os.File, len(s.files))
	for i, f := range s.files {
		out[i] = f.OS()
	}
	return out
}

// Manifest returns the description of the snapshot. The caller must not change it.
func (s *Snapshot) Manifest() *Manifest { return s.manifest }

// ManifestSHA256 returns the hash of the whole manifest file, which pins everything in the snapshot.
func (s *Snapshot) ManifestSHA256() string { return manifestDigest(s.body) }

// Payloads returns the states of the machine's parts, in the order given to Create. The caller must not change
// them.
func (s *Snapshot) Payloads() []Payload { return s.payloads }

// Memory returns the RAM in the snapshot.
func (s *Snapshot) Memory() *Memory { return s.memory }

// Close closes the files.
func (s *Snapshot) Close() error {
	var errs []error
	for _, f := range s.files {
		errs = append(errs, f.Close())
	}
	s.files = nil
	return errors.Join(errs...)
}
