package snapshot

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// ReceiveLater is Receive without the memory. The memory files have their sizes and headers, and holes for all else,
// which the caller writes: byte for byte what src has, without the header. The directory has the name ID in parent,
// where nobody may look for snapshots. When all is there, Arrived makes it one.
func ReceiveLater(ctx context.Context, src Source, parent string, place Placer, more More) (*Imported, error) {
	return imported(parent)(receive(ctx, src, filepath.Clean(parent), place, osfile.OS, &more))
}

// More are files of the caller that ReceiveLater has beside the memory.
type More struct {
	// Bytes is what they will take of the disk.
	Bytes int64
	// Put makes them in the directory, durably, before Placer.Adopt. It may be nil. They must be gone before Arrived.
	Put func(dir string) error
}

// Arrived makes the snapshot, whose memory has arrived in a directory of ReceiveLater, durable and renames it to dir.
// It fails like Open if something is missing that Open looks at; frames and leaves are the caller's to check.
func Arrived(fsys osfile.FS, arriving, dir string) error {
	err := arrived(fsys, filepath.Clean(arriving), filepath.Clean(dir))
	if err != nil {
		return writeError(fmt.Sprintf("completing snapshot %s", dir), err)
	}
	return nil
}

func arrived(fsys osfile.FS, arriving, dir string) error {
	s, err := OpenIn(fsys, arriving)
	if err != nil {
		return err
	}
	for _, f := range s.files {
		err = errors.Join(err, f.Sync())
	}
	if err = errors.Join(err, s.Close()); err != nil {
		return err
	}
	if err := fsys.RenameNew(arriving, dir); err != nil {
		return err
	}
	return errors.Join(fsys.SyncDir(filepath.Dir(dir)), fsys.SyncDir(filepath.Dir(arriving)))
}

// HeaderBytes is how many bytes at the beginning of a memory file ReceiveLater has written.
const HeaderBytes = fileHeader

// Ensure returns when bytes of the memory file of that name are there, or why they cannot be.
type Ensure func(file string, off, n int64) error

// OpenArriving is OpenIn for a directory of ReceiveLater. It calls ensure before each read of a memory file. Its memory
// files must not be linked.
func OpenArriving(fsys osfile.FS, dir string, ensure Ensure) (*Snapshot, error) {
	s, err := openWith(fsys, dir, func(s *Snapshot) error {
		s.ensure = ensure
		return s.openFiles()
	})
	if err != nil {
		return nil, fmt.Errorf("opening snapshot %s: %w", dir, err)
	}
	return s, nil
}

// arrivingFile is a memory file of which a part may be missing.
type arrivingFile struct {
	io.ReaderAt
	name   string
	ensure Ensure
}

// ReadAt implements io.ReaderAt.
func (a *arrivingFile) ReadAt(p []byte, off int64) (int, error) {
	if err := a.ensure(a.name, off, int64(len(p))); err != nil {
		return 0, err
	}
	return a.ReaderAt.ReadAt(p, off)
}

// Place is a piece of a memory file.
type Place struct {
	File string
	Off  int64
	Len  int64 // bytes
}

// LeafPlace returns where the index of a chunk is; false for a chunk of zeros. It reads no file.
func (m *Memory) LeafPlace(chunk int) (Place, bool) {
	if binary.LittleEndian.Uint32(m.root[chunk*rootEntry:]) == 0 {
		return Place{}, false
	}
	r := m.ref(chunk)
	f := m.file(r.file) // checkRoot has found it
	return Place{f.name, r.offset, int64(r.length())}, true
}

// FramePlace returns where the frame of a page is; false for a page of zeros. It fails like Leaf.
func (m *Memory) FramePlace(page uint64) (Place, bool, error) {
	l, err := m.Leaf(int(page / ChunkPages))
	if err != nil || l == nil {
		return Place{}, false, err
	}
	i, _, ok := l.Page(int(page % ChunkPages))
	if !ok {
		return Place{}, false, nil
	}
	f := l.Frame(i)
	return Place{m.file(f.file).name, f.offset, int64(f.stored)}, true, nil
}
