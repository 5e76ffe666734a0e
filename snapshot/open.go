package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Snapshot is an opened snapshot. Its methods may be called from several
// goroutines at once; Close must be the last call, after every pager on it.
type Snapshot struct {
	dir      string
	manifest *Manifest
	payloads []Payload
	body     []byte // the manifest file
	memory   *Memory
	files    []*os.File // in the order of the manifest
}

func manifestDigest(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:])
}

// Open opens the snapshot in dir and checks all of it but the RAM, and of that
// the root of the index, and that all files are there, the right ones and of the
// right length; leaves and frames are checked as they are read. The time that
// takes hardly depends on the size of RAM, and not on the number of snapshots
// that went before. It fails with ErrNotFound, ErrIncomplete, ErrCorrupt,
// ErrVersion, ErrForeign, or the file system's error.
//
// The snapshot holds a descriptor of each of its memory files, at most MaxFiles,
// and needs their names no more: it stays readable when the directory is removed
// or compacted.
func Open(dir string) (*Snapshot, error) {
	s, err := openWith(dir, (*Snapshot).openIn)
	if err != nil {
		return nil, fmt.Errorf("opening snapshot %s: %w", dir, err)
	}
	return s, nil
}

// ReadManifest reads the manifest of the snapshot in dir, checks it, and looks at
// no other file: it says what a snapshot needs also when its memory is damaged or
// not there. It fails as Open does; ErrNotFound alone says that there is no
// snapshot, and ErrIncomplete that the manifest is missing or cut off.
func ReadManifest(dir string) (*Manifest, error) {
	s, err := openWith(dir, (*Snapshot).readIn)
	if err != nil {
		return nil, fmt.Errorf("reading the manifest of snapshot %s: %w", dir, err)
	}
	return s.manifest, nil
}

// openWith opens what in reads of the snapshot in dir.
func openWith(dir string, in func(*Snapshot, *os.Root) error) (*Snapshot, error) {
	var err error
	for range openTries {
		s := &Snapshot{dir: dir}
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

// openTries is how often a directory may be replaced by Compact while it is
// being opened.
const openTries = 8

// open says, when it fails, whether that may be because the directory has been
// replaced meanwhile.
func (s *Snapshot) open(in func(*Snapshot, *os.Root) error) (replaced bool, err error) {
	root, err := os.OpenRoot(s.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, fmt.Errorf("%w: %w", ErrNotFound, err)
	case errors.Is(err, unix.ENOTDIR):
		return false, fmt.Errorf("it is not a directory: %w: %w", ErrForeign, err)
	case err != nil:
		return false, err
	}
	defer root.Close()
	if err = in(s, root); err == nil {
		return false, nil
	}
	held, herr := root.Stat(".")
	there, terr := os.Stat(s.dir)
	return herr == nil && terr == nil && !os.SameFile(held, there), err
}

func (s *Snapshot) openIn(root *os.Root) error {
	if err := s.readIn(root); err != nil {
		return err
	}
	return s.openMemory(root)
}

func (s *Snapshot) readIn(root *os.Root) error {
	body, err := readManifest(root)
	if err != nil {
		return err
	}
	s.body = body
	s.manifest, s.payloads, err = decodeManifest(body)
	return err
}

func readManifest(root *os.Root) ([]byte, error) {
	f, err := root.Open(ManifestName)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %w", ErrIncomplete, err)
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
	if err := checkLength(f, ManifestName, size); err != nil {
		return nil, err
	}
	body := make([]byte, size)
	if n, err := f.ReadAt(body, 0); n < len(body) {
		return nil, readError(ManifestName, 0, len(body), err)
	}
	return body, nil
}

// checkLength says whether a file has the length that it must have.
func checkLength(f *os.File, name string, size int64) error {
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

func (s *Snapshot) openMemory(root *os.Root) error {
	l := &s.manifest.Memory
	files := make([]memoryFile, 0, len(l.Files))
	for _, mf := range l.Files {
		f, err := root.Open(mf.Name)
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%w: %w", ErrIncomplete, err)
			}
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
		files = append(files, memoryFile{
			r: f, name: mf.Name, number: mf.Number, index: mf.Index, root: mf.Size - s.manifest.rootBytes(),
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

// Dir is the directory of the snapshot.
func (s *Snapshot) Dir() string { return s.dir }

// Manifest describes the snapshot. It must not be changed.
func (s *Snapshot) Manifest() *Manifest { return s.manifest }

// ManifestSHA256 is over the whole manifest file, and so pins everything in the
// snapshot.
func (s *Snapshot) ManifestSHA256() string { return manifestDigest(s.body) }

// Payloads are the states of the machine's parts, in the order in which they
// were given to Create. They must not be changed.
func (s *Snapshot) Payloads() []Payload { return s.payloads }

// Memory is the RAM.
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
