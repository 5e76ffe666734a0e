package fs

import (
	"bytes"
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// The protocol is that of include/uapi/linux/fuse.h, little-endian, since the guest is x86-64.
const (
	protoMajor = 7
	protoMinor = 31
)

// Operations.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opReadlink    = 5
	opSymlink     = 6
	opMknod       = 8
	opMkdir       = 9
	opUnlink      = 10
	opRmdir       = 11
	opRename      = 12
	opLink        = 13
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatfs      = 17
	opRelease     = 18
	opFsync       = 20
	opFlush       = 25
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opFsyncdir    = 30
	opCreate      = 35
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
	opFallocate   = 43
	opRename2     = 45
	opLseek       = 46
)

// Sizes of the protocol's structs, in bytes.
const (
	inHeaderSize  = 40
	outHeaderSize = 16
	attrSize      = 88
	entrySize     = 40 + attrSize
	attrOutSize   = 16 + attrSize
	openOutSize   = 16
	writeInSize   = 40
	initOutSize   = 64
	statfsOutSize = 80
	direntSize    = 24
	forgetOneSize = 16
)

// FUSE_INIT flags: what the device takes of the guest's offers. Reads may come out of order (they do not). Writes
// may be longer than a page. The guest drops cached data when a file's size or time has changed. It may look up
// directories in parallel. Requests have up to MaxTransfer bytes.
const (
	initAsyncRead     = 1 << 0
	initBigWrites     = 1 << 5
	initAutoInvalData = 1 << 12
	initParallelDirs  = 1 << 18
	initMaxPages      = 1 << 22
	initFlags         = initAsyncRead | initBigWrites | initAutoInvalData | initParallelDirs | initMaxPages
)

// FUSE_SETATTR: the fields to set (FATTR_*).
const (
	setMode     = 1 << 0
	setUID      = 1 << 1
	setGID      = 1 << 2
	setSize     = 1 << 3
	setAtime    = 1 << 4
	setMtime    = 1 << 5
	setFH       = 1 << 6
	setAtimeNow = 1 << 7
	setMtimeNow = 1 << 8
)

const (
	getattrFH   = 1 << 0 // FUSE_GETATTR_FH
	writeCached = 1 << 0 // FUSE_WRITE_CACHE: from the page cache, through any handle
	fsyncData   = 1 << 0 // FUSE_FSYNC_FDATASYNC
)

// cacheTime is how long the guest may trust names and attributes: the host may change them.
const cacheTime = time.Second

const (
	maxBody     = MaxPath + 1 + MaxName + 1 + 88
	maxReply    = 4096
	listingSize = 32 << 10
)

// parser takes fields from the body of a request. The first missing field sets bad.
type parser struct {
	b   []byte
	bad bool
}

func (p *parser) take(n int) []byte {
	if n > len(p.b) {
		p.bad = true
		return make([]byte, 8)
	}
	b := p.b[:n]
	p.b = p.b[n:]
	return b
}

func (p *parser) u32() uint32 { return binary.LittleEndian.Uint32(p.take(4)) }
func (p *parser) u64() uint64 { return binary.LittleEndian.Uint64(p.take(8)) }

// text takes a string that ends with a zero byte.
func (p *parser) text() string {
	i := bytes.IndexByte(p.b, 0)
	if i < 0 {
		p.bad = true
		return ""
	}
	s := string(p.b[:i])
	p.b = p.b[i+1:]
	return s
}

// checkName refuses a string that cannot name one file in a directory.
func checkName(name string) error {
	switch {
	case len(name) > MaxName:
		return unix.ENAMETOOLONG
	case name == "" || name == "." || name == ".." || bytes.ContainsAny([]byte(name), "/\x00"):
		return unix.EINVAL
	}
	return nil
}

// builder lays out a reply.
type builder struct{ b []byte }

func (b *builder) u16(v uint16) { b.b = binary.LittleEndian.AppendUint16(b.b, v) }
func (b *builder) u32(v uint32) { b.b = binary.LittleEndian.AppendUint32(b.b, v) }
func (b *builder) u64(v uint64) { b.b = binary.LittleEndian.AppendUint64(b.b, v) }
func (b *builder) zeros(n int)  { b.b = append(b.b, make([]byte, n)...) }

func (b *builder) attr(st *unix.Statx_t) {
	b.u64(st.Ino)
	b.u64(st.Size)
	b.u64(st.Blocks)
	b.u64(uint64(st.Atime.Sec))
	b.u64(uint64(st.Mtime.Sec))
	b.u64(uint64(st.Ctime.Sec))
	b.u32(st.Atime.Nsec)
	b.u32(st.Mtime.Nsec)
	b.u32(st.Ctime.Nsec)
	b.u32(uint32(st.Mode))
	b.u32(st.Nlink)
	b.u32(st.Uid)
	b.u32(st.Gid)
	b.u32(st.Rdev_major<<8 | st.Rdev_minor&0xff)
	b.u32(st.Blksize)
	b.u32(0)
}

func (b *builder) entry(n *node, st *unix.Statx_t) {
	b.u64(n.id)
	b.u64(0) // the device never reuses an id, so there are no generations
	b.u64(uint64(cacheTime / time.Second))
	b.u64(uint64(cacheTime / time.Second))
	b.u32(uint32(cacheTime % time.Second))
	b.u32(uint32(cacheTime % time.Second))
	b.attr(st)
}

func (b *builder) attrOut(st *unix.Statx_t) {
	b.u64(uint64(cacheTime / time.Second))
	b.u32(uint32(cacheTime % time.Second))
	b.u32(0)
	b.attr(st)
}

func (b *builder) open(h *handle) {
	b.u64(h.id)
	b.u32(0)
	b.u32(0)
}
