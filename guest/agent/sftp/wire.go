package sftp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Types of packets: section 3 of the draft.
const (
	typeInit     = 1
	typeVersion  = 2
	typeOpen     = 3
	typeClose    = 4
	typeRead     = 5
	typeWrite    = 6
	typeLstat    = 7
	typeFstat    = 8
	typeSetstat  = 9
	typeFsetstat = 10
	typeOpendir  = 11
	typeReaddir  = 12
	typeRemove   = 13
	typeMkdir    = 14
	typeRmdir    = 15
	typeRealpath = 16
	typeStat     = 17
	typeRename   = 18
	typeReadlink = 19
	typeSymlink  = 20
	typeExtended = 200

	typeStatus        = 101
	typeHandle        = 102
	typeData          = 103
	typeName          = 104
	typeAttrs         = 105
	typeExtendedReply = 201
)

// Codes of a status: section 7.
const (
	statusOK          = 0
	statusEOF         = 1
	statusNoSuchFile  = 2
	statusDenied      = 3
	statusFailure     = 4
	statusBadMessage  = 5
	statusUnsupported = 8
)

// Flags of attributes: section 5.
const (
	attrSize        = 1
	attrOwner       = 2
	attrPermissions = 4
	attrTimes       = 8
	attrExtended    = 1 << 31
)

// Flags of an open: section 6.3.
const (
	openRead   = 1
	openWrite  = 2
	openAppend = 4
	openCreate = 8
	openTrunc  = 16
	openExcl   = 32
)

var errMessage = errors.New("the packet is malformed")

// reader parses a packet. After the first missing field it returns zero values, and bad is set.
type reader struct {
	p   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if n < 0 || n > len(r.p) {
		r.p, r.bad = nil, true
		return nil
	}
	b := r.p[:n]
	r.p = r.p[n:]
	return b
}

func (r *reader) uint32() uint32 {
	if b := r.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (r *reader) bytes() []byte { return r.take(int(r.uint32())) }

func (r *reader) string() string { return string(r.bytes()) }

// attrs are attributes to set.
type attrs struct {
	flags        uint32
	size         uint64
	uid, gid     uint32
	permissions  uint32
	atime, mtime uint32
}

func (r *reader) attrs() (a attrs) {
	a.flags = r.uint32()
	if a.flags&attrSize != 0 {
		a.size = r.uint64()
	}
	if a.flags&attrOwner != 0 {
		a.uid, a.gid = r.uint32(), r.uint32()
	}
	if a.flags&attrPermissions != 0 {
		a.permissions = r.uint32()
	}
	if a.flags&attrTimes != 0 {
		a.atime, a.mtime = r.uint32(), r.uint32()
	}
	if a.flags&attrExtended != 0 {
		for n := r.uint32(); n > 0 && !r.bad; n-- {
			r.bytes()
			r.bytes()
		}
	}
	return a
}

// mode returns the mode of a new file: otherwise if a has none.
func (a attrs) mode(otherwise uint32) uint32 {
	if a.flags&attrPermissions != 0 {
		return a.permissions & 0o7777
	}
	return otherwise
}

func appendString(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(s))), s...)
}

// appendAttrs appends all attributes that the protocol has.
func appendAttrs(b []byte, st *unix.Stat_t) []byte {
	b = binary.BigEndian.AppendUint32(b, attrSize|attrOwner|attrPermissions|attrTimes)
	b = binary.BigEndian.AppendUint64(b, uint64(st.Size))
	b = binary.BigEndian.AppendUint32(b, st.Uid)
	b = binary.BigEndian.AppendUint32(b, st.Gid)
	b = binary.BigEndian.AppendUint32(b, st.Mode)
	b = binary.BigEndian.AppendUint32(b, uint32(st.Atim.Sec))
	return binary.BigEndian.AppendUint32(b, uint32(st.Mtim.Sec))
}

// statusOf returns the status code and the message of an error.
func statusOf(err error) (uint32, string) {
	switch {
	case err == nil:
		return statusOK, "done"
	case errors.Is(err, errMessage):
		return statusBadMessage, err.Error()
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return statusNoSuchFile, words(err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return statusDenied, words(err)
	case errors.Is(err, errUnsupported):
		return statusUnsupported, err.Error()
	}
	return statusFailure, words(err)
}

var errUnsupported = errors.New("not supported")

// words returns an error's message without the path, which the client knows.
func words(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// longName returns the line of "ls -l" for a file, as clients print it.
func longName(name string, st *unix.Stat_t) string {
	t := time.Unix(st.Mtim.Unix())
	when := t.Format("Jan _2 15:04")
	if age := time.Since(t); age < 0 || age > 180*24*time.Hour {
		when = t.Format("Jan _2  2006")
	}
	return fmt.Sprintf("%s %4d %8d %8d %8d %s %s", lsMode(st.Mode), st.Nlink, st.Uid, st.Gid, st.Size, when, name)
}

func lsMode(mode uint32) string {
	b := []byte("?rwxrwxrwx")
	const kinds = "?pc?d?b?-?l?s???" // by the four bits of S_IFMT: inode(7)
	b[0] = kinds[mode&unix.S_IFMT>>12]
	for i := range 9 {
		if mode&(1<<(8-i)) == 0 {
			b[1+i] = '-'
		}
	}
	for _, s := range []struct {
		bit  uint32
		at   int
		char byte
	}{{unix.S_ISUID, 3, 's'}, {unix.S_ISGID, 6, 's'}, {unix.S_ISVTX, 9, 't'}} {
		if mode&s.bit != 0 {
			if b[s.at] == '-' {
				s.char -= 'a' - 'A'
			}
			b[s.at] = s.char
		}
	}
	return string(b)
}

// openFlags converts the flags of an open to those of open(2).
func openFlags(pflags uint32) (int, error) {
	var flags int
	switch pflags & (openRead | openWrite) {
	case openRead:
		flags = os.O_RDONLY
	case openWrite:
		flags = os.O_WRONLY
	case openRead | openWrite:
		flags = os.O_RDWR
	default:
		return 0, errMessage
	}
	for _, f := range []struct {
		theirs uint32
		ours   int
	}{{openAppend, os.O_APPEND}, {openCreate, os.O_CREATE}, {openTrunc, os.O_TRUNC}, {openExcl, os.O_EXCL}} {
		if pflags&f.theirs != 0 {
			flags |= f.ours
		}
	}
	return flags, nil
}
