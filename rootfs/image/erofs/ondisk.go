package erofs

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
)

// The parts of the EROFS on-disk format that this package touches itself (Documentation/filesystems/erofs.rst and
// fs/erofs/erofs_fs.h of Linux). go-erofs has no call for hard links, the UUID and the superblock checksum.
const (
	superOffset = 1024
	superSize   = 128
	superMagic  = 0xe0f5e1e2

	sbMagic     = 0  // le32
	sbChecksum  = 4  // le32, CRC-32C of the block from the superblock on, taken with this field zero
	sbCompat    = 8  // le32
	sbBlockBits = 12 // u8
	sbRootNid   = 14 // le16
	sbInodes    = 16 // le64
	sbBlocks    = 36 // le32
	sbMetaBlock = 40 // le32
	sbUUID      = 48 // 16 bytes

	compatChecksum = 1 << 0 // EROFS_FEATURE_COMPAT_SB_CHKSUM

	nidUnit         = 32 // bytes; an inode number counts these from the metadata block
	inodeCompact    = 32 // bytes
	inodeExtended   = 64 // bytes
	xattrHeaderSize = 12
	direntSize      = 12
	direntName      = 8  // le16, offset of the name in the block
	direntType      = 10 // u8
	fileTypeDir     = 2

	layoutPlain  = 0
	layoutInline = 2

	modeTypeMask = 0o170000
	modeDir      = 0o040000
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// superChecksum computes the checksum for Linux' erofs_superblock_csum_verify: CRC-32C, started with all ones and
// not inverted at the end. block is block 0.
func superChecksum(block []byte) uint32 {
	b := append([]byte(nil), block[superOffset:]...)
	binary.LittleEndian.PutUint32(b[sbChecksum:], 0)
	return ^crc32.Checksum(b, castagnoli)
}

// onDisk reads and corrects metadata of an EROFS image just written by go-erofs: uncompressed, one device, 4096-byte
// blocks.
type onDisk struct {
	f    *os.File
	meta int64 // offset of the metadata area
}

var errLayout = errors.New("unexpected EROFS layout")

// Errors of image files.
var (
	// ErrTruncated: the file is shorter than its image.
	ErrTruncated = errors.New("image is truncated")
	// ErrCorrupt: the file is not an image that Write made.
	ErrCorrupt = errors.New("image is corrupt")
)

// nidShift is added to all inode numbers. go-erofs gives the root number 0, which user space takes for "no such
// entry": the C library's readdir omits "." and "..". So the metadata area is declared to begin a block earlier.
const nidShift = sparse.BlockSize / nidUnit

// finishEROFS points the further names of hard-linked inodes to the one inode, moves inode numbers away from 0,
// corrects the number of inodes, and sets UUID and checksum of the superblock.
func finishEROFS(ctx context.Context, f *os.File, links []fstree.HardLink, config []byte) error {
	block := make([]byte, sparse.BlockSize)
	if _, err := f.ReadAt(block, 0); err != nil {
		return err
	}
	sb := block[superOffset : superOffset+superSize]
	le := binary.LittleEndian
	if le.Uint32(sb[sbMagic:]) != superMagic || sb[sbBlockBits] != 12 {
		return fmt.Errorf("%w: magic %#x, block bits %d", errLayout, le.Uint32(sb[sbMagic:]), sb[sbBlockBits])
	}
	metaBlock, root := le.Uint32(sb[sbMetaBlock:]), uint64(le.Uint16(sb[sbRootNid:]))
	if metaBlock == 0 || root+nidShift > 1<<16-1 {
		return fmt.Errorf("%w: metadata at block %d, root inode %d", errLayout, metaBlock, root)
	}
	d := &onDisk{f: f, meta: int64(metaBlock) * sparse.BlockSize}

	nids := make(map[string]uint64, len(links))
	for _, l := range links {
		nids[path.Clean(l.Primary)] = noNid
	}
	if err := d.find(ctx, root, nids); err != nil {
		return err
	}
	alias := make(map[string]uint64, len(links))
	for _, l := range links {
		to := nids[path.Clean(l.Primary)]
		if to == noNid {
			return fmt.Errorf("find %s: %w", l.Primary, fs.ErrNotExist)
		}
		alias[l.Path] = to
	}
	if err := d.renumber(ctx, root, alias); err != nil {
		return err
	}
	le.PutUint32(sb[sbMetaBlock:], metaBlock-1)
	le.PutUint16(sb[sbRootNid:], uint16(root+nidShift))
	le.PutUint64(sb[sbInodes:], le.Uint64(sb[sbInodes:])-uint64(len(links)))

	// The UUID identifies the content as far as the metadata does; it needs no randomness.
	uuid := sha256.New()
	uuid.Write(sb)
	uuid.Write(config) // images that differ only in this get different UUIDs
	if _, err := io.Copy(uuid, io.NewSectionReader(f, d.meta, math.MaxInt64-d.meta)); err != nil {
		return err
	}
	u := uuid.Sum(nil)[:16]
	u[6], u[8] = u[6]&0x0f|0x80, u[8]&0x3f|0x80 // RFC 9562, version 8 (custom)
	copy(sb[sbUUID:], u)
	le.PutUint32(sb[sbCompat:], le.Uint32(sb[sbCompat:])|compatChecksum)
	le.PutUint32(sb[sbChecksum:], superChecksum(block))
	_, err := f.WriteAt(block, 0)
	return err
}

// renumber rewrites all directories: it shifts inode numbers by nidShift, and gives the names in alias the number
// (before the shift) found there.
func (d *onDisk) renumber(ctx context.Context, root uint64, alias map[string]uint64) error {
	return d.walk(ctx, root, func(b dirBlock, entries []dirent, in string) error {
		for _, e := range entries {
			nid := e.nid
			if e.name != "." && e.name != ".." {
				if to, ok := alias[path.Join(in, e.name)]; ok {
					nid = to
				}
			}
			binary.LittleEndian.PutUint64(b.data[e.off:], nid+nidShift)
		}
		_, err := d.f.WriteAt(b.data, b.at)
		return err
	})
}

// noNid is the number of no inode.
const noNid = math.MaxUint64

// find puts the inode numbers of the paths in nids there, which have the form of fstree.Tree.Walk. It reads each
// directory once: an image may have a large directory and as many hard links into it.
func (d *onDisk) find(ctx context.Context, root uint64, nids map[string]uint64) error {
	if len(nids) == 0 {
		return nil
	}
	return d.walk(ctx, root, func(_ dirBlock, entries []dirent, in string) error {
		for _, e := range entries {
			if p := path.Join(in, e.name); e.name != "." && e.name != ".." {
				if _, ok := nids[p]; ok {
					nids[p] = e.nid
				}
			}
		}
		return nil
	})
}

// walk calls f for each block of each directory, with the directory's path.
func (d *onDisk) walk(ctx context.Context, root uint64, f func(b dirBlock, entries []dirent, in string) error) error {
	type todo struct {
		nid  uint64
		path string
	}
	for stack := []todo{{root, "."}}; len(stack) > 0; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		cur := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		blocks, err := d.dir(cur.nid)
		if err != nil {
			return fmt.Errorf("directory %s: %w", cur.path, err)
		}
		for _, b := range blocks {
			entries, err := direntsOf(b.data)
			if err != nil {
				return fmt.Errorf("directory %s: %w", cur.path, err)
			}
			for _, e := range entries {
				if e.fileType == fileTypeDir && e.name != "." && e.name != ".." {
					stack = append(stack, todo{e.nid, path.Join(cur.path, e.name)})
				}
			}
			if err := f(b, entries, cur.path); err != nil {
				return err
			}
		}
	}
	return nil
}

// dirBlock is a block of a directory and its offset in the image. The last one is cut to the directory's size.
type dirBlock struct {
	data []byte
	at   int64
}

// dir reads a directory.
func (d *onDisk) dir(nid uint64) ([]dirBlock, error) {
	le := binary.LittleEndian
	at := d.meta + int64(nid)*nidUnit
	ino := make([]byte, inodeExtended)
	if _, err := d.f.ReadAt(ino[:inodeCompact], at); err != nil {
		return nil, err
	}
	head, size := int64(inodeCompact), uint64(le.Uint32(ino[8:]))
	format := le.Uint16(ino)
	if format&1 != 0 {
		if _, err := d.f.ReadAt(ino, at); err != nil {
			return nil, err
		}
		head, size = inodeExtended, le.Uint64(ino[8:])
	}
	if n := le.Uint16(ino[2:]); n > 0 {
		head += xattrHeaderSize + int64(n-1)*4
	}
	if le.Uint16(ino[4:])&modeTypeMask != modeDir || size > fstree.MaxInodes*(fstree.MaxNameBytes+direntSize) {
		return nil, fmt.Errorf("%w: inode %d has mode %#o and %d bytes where a directory should be", errLayout, nid, le.Uint16(ino[4:]), size)
	}
	data := at + head
	switch format >> 1 & 7 {
	case layoutPlain:
		data = int64(le.Uint32(ino[16:])) * sparse.BlockSize
	case layoutInline:
		if size > sparse.BlockSize {
			return nil, fmt.Errorf("%w: inline directory %d of %d bytes", errLayout, nid, size)
		}
	default:
		return nil, fmt.Errorf("%w: directory %d has layout %d", errLayout, nid, format>>1&7)
	}
	var out []dirBlock
	for off := int64(0); off < int64(size); off += sparse.BlockSize {
		b := make([]byte, min(sparse.BlockSize, int64(size)-off))
		if _, err := d.f.ReadAt(b, data+off); err != nil {
			return nil, err
		}
		out = append(out, dirBlock{data: b, at: data + off})
	}
	return out, nil
}

// dirent is a record of a directory block.
type dirent struct {
	name     string
	nid      uint64
	fileType byte
	off      int // of the record in the block
}

// direntsOf returns the entries of one directory block.
func direntsOf(b []byte) ([]dirent, error) {
	le := binary.LittleEndian
	if len(b) < direntSize {
		return nil, fmt.Errorf("%w: a block of %d bytes", errLayout, len(b))
	}
	// The first name follows the last record, so its offset gives the number of records.
	names := int(le.Uint16(b[direntName:]))
	if names == 0 || names%direntSize != 0 || names > len(b) {
		return nil, fmt.Errorf("%w: names at offset %d", errLayout, names)
	}
	out := make([]dirent, names/direntSize)
	for i := range out {
		off := i * direntSize
		start, end := int(le.Uint16(b[off+direntName:])), len(b)
		if i+1 < len(out) {
			end = int(le.Uint16(b[off+direntSize+direntName:]))
		}
		if start > end || end > len(b) {
			return nil, fmt.Errorf("%w: name %d at %d to %d", errLayout, i, start, end)
		}
		name, _, _ := strings.Cut(string(b[start:end]), "\x00") // the last name of a block is padded
		out[i] = dirent{name: name, nid: le.Uint64(b[off:]), fileType: b[off+direntType], off: off}
	}
	return out, nil
}

// Superblock has what the cheap check needs.
type Superblock struct{ Blocks int64 }

// ReadSuper reads block 0 and checks magic, block size and checksum. Its errors include ErrTruncated and ErrCorrupt.
func ReadSuper(r io.ReaderAt) (Superblock, error) {
	block := make([]byte, sparse.BlockSize)
	if n, err := r.ReadAt(block, 0); err != nil {
		if err == io.EOF {
			return Superblock{}, fmt.Errorf("%w: it has %d bytes, not even a superblock", ErrTruncated, n)
		}
		return Superblock{}, fmt.Errorf("read the superblock: %w", err)
	}
	sb := block[superOffset : superOffset+superSize]
	le := binary.LittleEndian
	if m := le.Uint32(sb[sbMagic:]); m != superMagic {
		return Superblock{}, fmt.Errorf("%w: no EROFS superblock (magic %#x)", ErrCorrupt, m)
	}
	if sb[sbBlockBits] != 12 {
		return Superblock{}, fmt.Errorf("%w: the superblock tells of blocks of 2^%d bytes", ErrCorrupt, sb[sbBlockBits])
	}
	if want, got := le.Uint32(sb[sbChecksum:]), superChecksum(block); want != got {
		return Superblock{}, fmt.Errorf("%w: the superblock has checksum %#x, its record says %#x", ErrCorrupt, got, want)
	}
	return Superblock{Blocks: int64(le.Uint32(sb[sbBlocks:]))}, nil
}
