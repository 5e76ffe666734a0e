package disk

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// A packed layer is the form in which Pack writes a sealed layer's file, which is mostly holes:
//
//	8   "DROWSELP"
//	4   version of this format, 1
//	4   number of extents
//	8   length of the file
//	16  for each extent, in ascending order: its offset and its length, not 0
//	    the bytes of the extents
//
// Integers are little-endian. Bytes that no extent covers are zeros.
const (
	packMagic   = "DROWSELP"
	packVersion = 1
	packHeader  = 24
	packExtent  = 16
	// maxPackExtents bounds what Unpack holds in memory: 16 MiB.
	maxPackExtents = 1 << 20
	maxLayerFile   = 16 << 40
)

type packed struct {
	size    int64
	extents []extentOf
}

type extentOf struct {
	off, length int64
	// at is where its bytes are among those of all extents.
	at int64
}

// PackedSize returns how many bytes Pack writes for the layer at path.
func PackedSize(path string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, ioError("open", err)
	}
	defer f.Close()
	p, err := findExtents(f)
	if err != nil {
		return 0, err
	}
	return p.length(), nil
}

func (p *packed) length() int64 {
	n := p.headLen()
	if len(p.extents) > 0 {
		last := p.extents[len(p.extents)-1]
		n += last.at + last.length
	}
	return n
}

// headLen is the length of what comes before the bytes of the extents.
func (p *packed) headLen() int64 { return packHeader + packExtent*int64(len(p.extents)) }

// add adds an extent behind the others.
func (p *packed) add(off, length int64) {
	e := extentOf{off: off, length: length}
	if n := len(p.extents); n > 0 {
		e.at = p.extents[n-1].at + p.extents[n-1].length
	}
	p.extents = append(p.extents, e)
}

// head is what Pack writes before the bytes of the extents.
func (p *packed) head() []byte {
	head := make([]byte, 0, p.headLen())
	head = append(head, packMagic...)
	head = binary.LittleEndian.AppendUint32(head, packVersion)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(p.extents)))
	head = binary.LittleEndian.AppendUint64(head, uint64(p.size))
	for _, e := range p.extents {
		head = binary.LittleEndian.AppendUint64(head, uint64(e.off))
		head = binary.LittleEndian.AppendUint64(head, uint64(e.length))
	}
	return head
}

// findExtents asks the host's file system where a file has data.
func findExtents(f *os.File) (*packed, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, ioError("stat", err)
	}
	p := &packed{size: fi.Size()}
	for off := int64(0); off < p.size; {
		data, hole := osfile.NextData(f, off, p.size)
		if data == hole {
			break
		}
		if len(p.extents) == maxPackExtents {
			return nil, fmt.Errorf("packing %s: it has more than %d extents: copy it", f.Name(), maxPackExtents)
		}
		p.add(data, hole-data)
		off = hole
	}
	return p, nil
}

// Pack writes the layer at path, which must be sealed, to w, so that Unpack makes the same file from it, holes
// included. As long as the file is not written to, Pack writes the same bytes each time.
func Pack(ctx context.Context, w io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return ioError("open", err)
	}
	defer f.Close()
	p, err := findExtents(f)
	if err != nil {
		return err
	}
	if _, err := w.Write(p.head()); err != nil {
		return fmt.Errorf("packing %s: %w", path, err)
	}
	for _, e := range p.extents {
		if err := ctx.Err(); err != nil {
			return err
		}
		if n, err := io.Copy(w, io.NewSectionReader(f, e.off, e.length)); err != nil || n != e.length {
			return fmt.Errorf("packing %s: %d of %d bytes at %d: %w", path, n, e.length, e.off, errors.Join(err, io.ErrUnexpectedEOF))
		}
	}
	return nil
}

// Unpack makes the file at path, which must not exist, from what Pack has written, and syncs it. It reads r to its
// end. If the input is not from Pack, it fails with ErrCorrupt, ErrTruncated or ErrVersion and leaves no file.
// Verify checks whether the file is a valid layer.
func Unpack(ctx context.Context, r io.Reader, path string) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return ioError("create", err)
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err != nil {
			err = errors.Join(fmt.Errorf("unpacking a layer: %w", err), os.Remove(path))
		}
	}()
	in := bufio.NewReaderSize(r, 1<<20)
	p, err := readPacked(in)
	if err != nil {
		return err
	}
	if err := f.Truncate(p.size); err != nil {
		return ioError("truncate", err)
	}
	for _, e := range p.extents {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := io.Copy(io.NewOffsetWriter(f, e.off), io.LimitReader(in, e.length))
		if err != nil {
			return ioError("write", err)
		}
		if n != e.length {
			return fmt.Errorf("%d of %d bytes at %d: %w", n, e.length, e.off, ErrTruncated)
		}
	}
	switch _, err := in.ReadByte(); {
	case err == nil:
		return fmt.Errorf("%w: bytes after its end", ErrCorrupt)
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("%w: after its end: %w", ErrCorrupt, err)
	}
	return ioError("sync", f.Sync())
}

// readPacked reads and checks the header.
func readPacked(r io.Reader) (*packed, error) {
	var head [packHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("its header: %w: %w", ErrTruncated, err)
	}
	if string(head[:8]) != packMagic {
		return nil, fmt.Errorf("it does not begin like a packed layer: %w", ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint32(head[8:]); v != packVersion {
		return nil, fmt.Errorf("a packed layer of version %d: %w", v, ErrVersion)
	}
	n, size := binary.LittleEndian.Uint32(head[12:]), binary.LittleEndian.Uint64(head[16:])
	if n > maxPackExtents || size > maxLayerFile {
		return nil, fmt.Errorf("%d extents in a file of %d bytes: %w", n, size, ErrCorrupt)
	}
	p := &packed{size: int64(size)}
	end := int64(0)
	for range n {
		var b [packExtent]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return nil, fmt.Errorf("its extents: %w: %w", ErrTruncated, err)
		}
		off, length := binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])
		if off < uint64(end) || length == 0 || off > size || length > size-off {
			return nil, fmt.Errorf("an extent of %d bytes at %d, after %d, in a file of %d: %w", length, off, end, size, ErrCorrupt)
		}
		end = int64(off + length)
		p.add(int64(off), int64(length))
	}
	return p, nil
}
