package secretfs

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Operations, flags, and sizes in bytes, from include/uapi/linux/fuse.h.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opStatfs      = 17
	opRelease     = 18
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42

	versionMajor = 7
	versionMinor = 31
	minMinor     = 23 // since Linux 3.15; older answers are shorter

	openDirectIO = 1 << 0 // FOPEN_DIRECT_IO
	// readLockOwner (FUSE_READ_LOCKOWNER) is set in reads for programs (fuse_direct_io). It is not set in reads
	// for the kernel's page cache (fuse_do_readpage, fuse_readahead), which serve mapped files.
	readLockOwner = 1 << 1

	inHeader  = 40
	outHeader = 16
	rootNode  = 1
	maxWrite  = 4096
	// minReadBuffer is the smallest buffer that the kernel accepts for requests (FUSE_MIN_READ_BUFFER).
	minReadBuffer = 8192
)

// request is a request of the kernel.
type request struct {
	op     uint32
	unique uint64
	node   uint64
	body   []byte
}

// parse parses a message of the kernel.
func parse(b []byte) (r request, ok bool) {
	if len(b) < inHeader || int(binary.LittleEndian.Uint32(b)) != len(b) {
		return r, false
	}
	return request{
		op: binary.LittleEndian.Uint32(b[4:]), unique: binary.LittleEndian.Uint64(b[8:]),
		node: binary.LittleEndian.Uint64(b[16:]), body: b[inHeader:],
	}, true
}

func (r request) u32(off int) uint32 { return binary.LittleEndian.Uint32(r.field(off, 4)) }
func (r request) u64(off int) uint64 { return binary.LittleEndian.Uint64(r.field(off, 8)) }

// field returns n bytes of the body at off, or zeros if the body is too short.
func (r request) field(off, n int) []byte {
	if off+n > len(r.body) {
		return make([]byte, n)
	}
	return r.body[off:]
}

// putHeader writes struct fuse_out_header for a message of n bytes.
func putHeader(b []byte, n int, unique uint64, errno unix.Errno) {
	binary.LittleEndian.PutUint32(b, uint32(n))
	binary.LittleEndian.PutUint32(b[4:], uint32(-int32(errno)))
	binary.LittleEndian.PutUint64(b[8:], unique)
}

var le = binary.LittleEndian

// appendInit appends struct fuse_init_out.
func appendInit(b []byte) []byte {
	b = le.AppendUint32(b, versionMajor)
	b = le.AppendUint32(b, versionMinor)
	b = le.AppendUint32(b, 0)  // no read-ahead
	b = le.AppendUint32(b, 0)  // no flags
	b = le.AppendUint16(b, 16) // background requests, and the number that counts as congestion
	b = le.AppendUint16(b, 12)
	b = le.AppendUint32(b, maxWrite)
	b = le.AppendUint32(b, 1_000_000_000) // time stamps are in seconds
	return append(b, make([]byte, 36)...)
}

// appendAttr appends struct fuse_attr: the directory's if s is nil.
func appendAttr(b []byte, node uint64, s *agentpb.Secret) []byte {
	mode, size, links := uint32(unix.S_IFDIR|0o555), uint64(0), uint32(2)
	var uid, gid uint32
	if s != nil {
		mode, size, links = unix.S_IFREG|uint32(s.Mode&0o777), uint64(s.Size), 1
		uid, gid = s.UID, s.GID
	}
	b = le.AppendUint64(b, node)
	b = le.AppendUint64(b, size)
	b = le.AppendUint64(b, (size+511)/512)
	b = append(b, make([]byte, 3*8+3*4)...) // no times
	for _, v := range []uint32{mode, links, uid, gid, 0, 4096, 0} {
		b = le.AppendUint32(b, v)
	}
	return b
}

// appendEntry appends struct fuse_entry_out. The kernel may cache nothing: the host changes it.
func appendEntry(b []byte, node uint64, s *agentpb.Secret) []byte {
	b = le.AppendUint64(b, node)
	b = append(b, make([]byte, 8+8+8+4+4)...) // generation, and how long it is valid
	return appendAttr(b, node, s)
}

// appendAttrOut appends struct fuse_attr_out.
func appendAttrOut(b []byte, node uint64, s *agentpb.Secret) []byte {
	return appendAttr(append(b, make([]byte, 16)...), node, s)
}

// appendOpen appends struct fuse_open_out.
func appendOpen(b []byte, flags uint32) []byte {
	b = append(b, make([]byte, 8)...)
	b = le.AppendUint32(b, flags)
	return le.AppendUint32(b, 0)
}

// appendStatfs appends struct fuse_kstatfs.
func appendStatfs(b []byte, files int) []byte {
	b = append(b, make([]byte, 3*8)...)
	b = le.AppendUint64(b, uint64(files))
	b = le.AppendUint64(b, 0)
	for _, v := range []uint32{4096, 255, 4096, 0, 0, 0, 0, 0, 0, 0} {
		b = le.AppendUint32(b, v)
	}
	return b
}

// direntSize returns the size of struct fuse_dirent with its name.
func direntSize(name string) int { return (24 + len(name) + 7) &^ 7 }

// appendDirent appends struct fuse_dirent; next is the offset of the entry after it.
func appendDirent(b []byte, node, next uint64, name string, kind uint32) []byte {
	b = le.AppendUint64(b, node)
	b = le.AppendUint64(b, next)
	b = le.AppendUint32(b, uint32(len(name)))
	b = le.AppendUint32(b, kind)
	b = append(b, name...)
	return append(b, make([]byte, direntSize(name)-24-len(name))...)
}
