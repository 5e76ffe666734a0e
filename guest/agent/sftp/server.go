package sftp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Limits, the same as those of OpenSSH's server. Sizes are in bytes.
const (
	maxPacket = 256 << 10
	maxData   = maxPacket - 1024
	// maxHandles bounds the files and directories that are open at the same time.
	maxHandles = 256
	// maxEntries bounds the entries of one answer to a readdir.
	maxEntries = 100
	// version is the protocol's version.
	version = 3
)

// ErrPacket means that the client's packet is not valid, and that no answer is possible.
var ErrPacket = errors.New("sftp: a packet that is none")

// server is one session.
type server struct {
	home    string
	in      *bufio.Reader
	out     *bufio.Writer
	handles map[string]*handle
	last    uint64 // latest handle
	request []byte
	reply   []byte
}

type handle struct {
	f   *os.File
	dir bool
	app bool // append
}

// Serve answers requests until r ends, one at a time. Relative paths begin at the working directory, and "~" is
// home.
func Serve(r io.Reader, w io.Writer, home string) error {
	s := &server{
		home: home, in: bufio.NewReaderSize(r, 32<<10), out: bufio.NewWriterSize(w, 32<<10),
		handles: make(map[string]*handle), reply: make([]byte, 0, 4<<10),
	}
	defer func() {
		for _, h := range s.handles {
			h.f.Close()
		}
	}()
	for {
		typ, body, err := s.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		s.reply = append(s.reply[:0], 0, 0, 0, 0)
		s.answer(typ, body)
		binary.BigEndian.PutUint32(s.reply, uint32(len(s.reply)-4))
		if _, err := s.out.Write(s.reply); err != nil {
			return err
		}
		// Send the answers to requests that came together, together.
		if s.in.Buffered() < 4 {
			if err := s.out.Flush(); err != nil {
				return err
			}
		}
	}
}

// next reads a packet. It returns its type and its body.
func (s *server) next() (typ byte, body []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(s.in, head[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return 0, nil, fmt.Errorf("%w: it ends in its head", ErrPacket)
		}
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[:4])
	if n < 5 || n > maxPacket {
		return 0, nil, fmt.Errorf("%w: %d bytes, at most %d", ErrPacket, n, maxPacket)
	}
	s.request = slices.Grow(s.request[:0], int(n)-1)[:n-1]
	if _, err := io.ReadFull(s.in, s.request); err != nil {
		return 0, nil, fmt.Errorf("%w: it ends early", ErrPacket)
	}
	return head[4], s.request, nil
}

// answer appends the answer to a request to s.reply.
func (s *server) answer(typ byte, body []byte) {
	r := &reader{p: body}
	if typ == typeInit {
		s.reply = append(s.reply, typeVersion)
		s.reply = binary.BigEndian.AppendUint32(s.reply, version)
		for _, e := range extensions {
			s.reply = appendString(appendString(s.reply, e.name), e.version)
		}
		return
	}
	id := r.uint32()
	before := len(s.reply)
	err := s.handle(typ, id, r)
	if err == nil && len(s.reply) > before {
		return
	}
	s.reply = s.reply[:before]
	code, text := statusOf(err)
	if errors.Is(err, io.EOF) {
		code, text = statusEOF, "end of file"
	}
	s.begin(typeStatus, id)
	s.reply = binary.BigEndian.AppendUint32(s.reply, code)
	s.reply = appendString(appendString(s.reply, text), "")
}

func (s *server) begin(typ byte, id uint32) {
	s.reply = binary.BigEndian.AppendUint32(append(s.reply, typ), id)
}

// handle executes a request. It leaves the answer in s.reply. If the answer is a status, it leaves s.reply empty
// and returns the error for it.
func (s *server) handle(typ byte, id uint32, r *reader) error {
	switch typ {
	case typeOpen:
		return s.open(id, r)
	case typeClose:
		return s.close(r)
	case typeRead:
		return s.read(id, r)
	case typeWrite:
		return s.write(r)
	case typeStat:
		return onPath(r, func(path string) error {
			return s.stat(id, func(st *unix.Stat_t) error { return unix.Stat(path, st) })
		})
	case typeLstat:
		return onPath(r, func(path string) error {
			return s.stat(id, func(st *unix.Stat_t) error { return unix.Lstat(path, st) })
		})
	case typeFstat:
		return s.onHandle(r, func(h *handle) error {
			return s.stat(id, func(st *unix.Stat_t) error { return unix.Fstat(int(h.f.Fd()), st) })
		})
	case typeSetstat:
		return onPath(r, func(path string) error { return setstat(path, r, true) })
	case typeFsetstat:
		return s.onHandle(r, func(h *handle) error { return fsetstat(h.f, r) })
	case typeOpendir:
		return onPath(r, func(path string) error { return s.add(id, path, unix.O_RDONLY|unix.O_DIRECTORY, 0, &handle{dir: true}) })
	case typeReaddir:
		return s.onHandle(r, func(h *handle) error { return s.readdir(id, h) })
	case typeMkdir:
		return onPath(r, func(path string) error { return mkdir(path, r) })
	case typeRemove:
		return onPath(r, unix.Unlink)
	case typeRmdir:
		return onPath(r, unix.Rmdir)
	case typeRealpath:
		return onPath(r, func(path string) error { return s.realpath(id, path) })
	case typeReadlink:
		return onPath(r, func(path string) error {
			target, err := os.Readlink(path)
			if err == nil {
				s.name(id, target)
			}
			return err
		})
	case typeRename:
		return onPaths(r, renameNew)
	case typeSymlink:
		// OpenSSH and its clients have the two in this order, unlike the draft.
		target := r.string()
		return onPath(r, func(path string) error { return os.Symlink(target, path) })
	case typeExtended:
		return s.extended(id, r)
	}
	return errUnsupported
}

// path reads a path. An empty path is the working directory.
func (r *reader) path() string {
	p := r.string()
	if p == "" {
		p = "."
	}
	if strings.IndexByte(p, 0) >= 0 {
		r.bad = true
	}
	return p
}

// onPath reads a path and calls f with it.
func onPath(r *reader, f func(path string) error) error {
	path := r.path()
	if r.bad {
		return errMessage
	}
	return f(path)
}

// onPaths reads two paths and calls f with them.
func onPaths(r *reader, f func(from, to string) error) error {
	from := r.path()
	return onPath(r, func(to string) error { return f(from, to) })
}

// stat answers with the attributes that f reads.
func (s *server) stat(id uint32, f func(*unix.Stat_t) error) error {
	var st unix.Stat_t
	if err := f(&st); err != nil {
		return err
	}
	s.begin(typeAttrs, id)
	s.reply = appendAttrs(s.reply, &st)
	return nil
}

// mkdir reads attributes and makes a directory with them.
func mkdir(path string, r *reader) error {
	a := r.attrs()
	if r.bad {
		return errMessage
	}
	return unix.Mkdir(path, a.mode(0o777))
}

// get reads a handle and returns it.
func (s *server) get(r *reader) (*handle, error) {
	h := s.handles[r.string()]
	if h == nil || r.bad {
		return nil, fmt.Errorf("%w: no such handle", errMessage)
	}
	return h, nil
}

// onHandle reads a handle and calls f with it.
func (s *server) onHandle(r *reader, f func(*handle) error) error {
	h, err := s.get(r)
	if err != nil {
		return err
	}
	return f(h)
}

// add opens a file with open(2) and answers with a handle of it.
func (s *server) add(id uint32, path string, flags int, mode uint32, h *handle) error {
	if len(s.handles) >= maxHandles {
		return errHandles
	}
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, mode)
	if err != nil {
		return err
	}
	h.f = os.NewFile(uintptr(fd), path)
	s.last++
	name := strconv.FormatUint(s.last, 10)
	s.handles[name] = h
	s.begin(typeHandle, id)
	s.reply = appendString(s.reply, name)
	return nil
}

var errHandles = fmt.Errorf("%d files are open, the limit", maxHandles)

func (s *server) open(id uint32, r *reader) error {
	path, pflags, a := r.path(), r.uint32(), r.attrs()
	flags, err := openFlags(pflags)
	if r.bad || err != nil {
		return errMessage
	}
	return s.add(id, path, flags|unix.O_NOCTTY, a.mode(0o666), &handle{app: pflags&openAppend != 0})
}

func (s *server) close(r *reader) error {
	name := r.string()
	h := s.handles[name]
	if h == nil || r.bad {
		return fmt.Errorf("%w: no such handle", errMessage)
	}
	delete(s.handles, name)
	return h.f.Close()
}

func (s *server) read(id uint32, r *reader) error {
	h, err := s.get(r)
	offset, n := r.uint64(), min(r.uint32(), maxData)
	if err != nil || r.bad || offset > 1<<63-1 {
		return errMessage
	}
	s.begin(typeData, id)
	at := len(s.reply)
	s.reply = slices.Grow(s.reply, int(n)+4)[:at+4+int(n)]
	got, err := h.f.ReadAt(s.reply[at+4:], int64(offset))
	if errors.Is(err, unix.ESPIPE) {
		got, err = h.f.Read(s.reply[at+4:])
	}
	if got == 0 && n > 0 {
		s.reply = s.reply[:4] // the error is the answer, whatever it is
		if err == nil {
			err = io.EOF
		}
		return err
	}
	binary.BigEndian.PutUint32(s.reply[at:], uint32(got))
	s.reply = s.reply[:at+4+got]
	return nil
}

func (s *server) write(r *reader) error {
	h, err := s.get(r)
	offset, data := r.uint64(), r.bytes()
	if err != nil || r.bad || offset > 1<<63-1 {
		return errMessage
	}
	if !h.app {
		if _, err = h.f.WriteAt(data, int64(offset)); !errors.Is(err, unix.ESPIPE) {
			return err
		}
	}
	_, err = h.f.Write(data)
	return err
}

// setstat reads attributes and sets them on a file.
func setstat(path string, r *reader, follow bool) error {
	a := r.attrs()
	if r.bad {
		return errMessage
	}
	flags := 0
	if !follow {
		flags = unix.AT_SYMLINK_NOFOLLOW
		a.flags &^= attrSize
	}
	return a.set(
		func(size int64) error { return unix.Truncate(path, size) },
		func(uid, gid int) error { return unix.Fchownat(unix.AT_FDCWD, path, uid, gid, flags) },
		func(mode uint32) error { return unix.Fchmodat(unix.AT_FDCWD, path, mode, flags) },
		func(ts []unix.Timespec) error { return unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, flags) })
}

// fsetstat reads attributes and sets them on an open file, whatever its name is now.
func fsetstat(f *os.File, r *reader) error {
	a, fd := r.attrs(), int(f.Fd())
	if r.bad {
		return errMessage
	}
	return a.set(f.Truncate,
		func(uid, gid int) error { return unix.Fchown(fd, uid, gid) },
		func(mode uint32) error { return unix.Fchmod(fd, mode) },
		func(ts []unix.Timespec) error {
			return unix.Futimes(fd, []unix.Timeval{{Sec: ts[0].Sec}, {Sec: ts[1].Sec}})
		})
}

// set sets the attributes that a has.
func (a attrs) set(size func(int64) error, owner func(uid, gid int) error, mode func(uint32) error, times func([]unix.Timespec) error) error {
	var err error
	if a.flags&attrSize != 0 {
		if a.size > 1<<63-1 {
			return unix.EINVAL
		}
		err = size(int64(a.size))
	}
	if err == nil && a.flags&attrOwner != 0 {
		err = owner(int(a.uid), int(a.gid))
	}
	// After the owner: a change of owner clears the set-id bits.
	if err == nil && a.flags&attrPermissions != 0 {
		err = mode(a.permissions & 0o7777)
	}
	if err == nil && a.flags&attrTimes != 0 {
		err = times([]unix.Timespec{{Sec: int64(a.atime)}, {Sec: int64(a.mtime)}})
	}
	return err
}

func (s *server) readdir(id uint32, h *handle) error {
	if !h.dir {
		return fmt.Errorf("%w: not a directory", errMessage)
	}
	names, err := h.f.Readdirnames(maxEntries)
	if len(names) == 0 {
		if err == nil {
			err = io.EOF
		}
		return err
	}
	s.begin(typeName, id)
	at := len(s.reply)
	s.reply = binary.BigEndian.AppendUint32(s.reply, 0)
	count := uint32(0)
	for _, name := range names {
		var st unix.Stat_t
		if unix.Fstatat(int(h.f.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			continue // gone since
		}
		s.reply = appendAttrs(appendString(appendString(s.reply, name), longName(name, &st)), &st)
		count++
	}
	binary.BigEndian.PutUint32(s.reply[at:], count)
	return nil
}

// name answers with one name and no attributes.
func (s *server) name(id uint32, name string) {
	s.begin(typeName, id)
	s.reply = binary.BigEndian.AppendUint32(s.reply, 1)
	s.reply = appendString(appendString(s.reply, name), name)
	s.reply = binary.BigEndian.AppendUint32(s.reply, 0)
}

// realpath resolves links; the last element need not exist.
func (s *server) realpath(id uint32, path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	resolved, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		var dir string
		if dir, err = filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
			resolved = filepath.Join(dir, filepath.Base(path))
		}
	}
	if err != nil {
		return err
	}
	s.name(id, resolved)
	return nil
}

// renameNew renames a file without replacing another: section 6.5.
func renameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	// This file system cannot do it atomically.
	if _, err := os.Lstat(to); err == nil {
		return unix.EEXIST
	}
	return unix.Rename(from, to)
}

// extensions are the extensions that the server offers: PROTOCOL of OpenSSH, section 4.
var extensions = []struct{ name, version string }{
	{"posix-rename@openssh.com", "1"},
	{"statvfs@openssh.com", "2"},
	{"fstatvfs@openssh.com", "2"},
	{"hardlink@openssh.com", "1"},
	{"fsync@openssh.com", "1"},
	{"lsetstat@openssh.com", "1"},
	{"limits@openssh.com", "1"},
	{"expand-path@openssh.com", "1"},
}

func (s *server) extended(id uint32, r *reader) error {
	switch r.string() {
	case "posix-rename@openssh.com":
		return onPaths(r, unix.Rename)
	case "hardlink@openssh.com":
		return onPaths(r, unix.Link)
	case "fsync@openssh.com":
		return s.onHandle(r, func(h *handle) error { return h.f.Sync() })
	case "lsetstat@openssh.com":
		return onPath(r, func(path string) error { return setstat(path, r, false) })
	case "statvfs@openssh.com":
		return onPath(r, func(path string) error {
			return s.statvfs(id, func(st *unix.Statfs_t) error { return unix.Statfs(path, st) })
		})
	case "fstatvfs@openssh.com":
		return s.onHandle(r, func(h *handle) error {
			return s.statvfs(id, func(st *unix.Statfs_t) error { return unix.Fstatfs(int(h.f.Fd()), st) })
		})
	case "limits@openssh.com":
		s.begin(typeExtendedReply, id)
		for _, n := range []uint64{maxPacket, maxData, maxData, maxHandles} {
			s.reply = binary.BigEndian.AppendUint64(s.reply, n)
		}
		return nil
	case "expand-path@openssh.com":
		return onPath(r, func(path string) error {
			if rest, ok := strings.CutPrefix(path, "~"); ok {
				if rest != "" && rest[0] != '/' {
					return fmt.Errorf("%w: the home of another user", errUnsupported)
				}
				path = s.home + rest
			}
			return s.realpath(id, path)
		})
	}
	return errUnsupported
}

// statvfs answers with the file system's state that f reads.
func (s *server) statvfs(id uint32, f func(*unix.Statfs_t) error) error {
	var st unix.Statfs_t
	if err := f(&st); err != nil {
		return err
	}
	const readOnly, noSetID = 1, 2
	var flag uint64
	if st.Flags&unix.ST_RDONLY != 0 {
		flag |= readOnly
	}
	if st.Flags&unix.ST_NOSUID != 0 {
		flag |= noSetID
	}
	fsid := uint64(uint32(st.Fsid.Val[0])) | uint64(uint32(st.Fsid.Val[1]))<<32
	s.begin(typeExtendedReply, id)
	for _, n := range []uint64{
		uint64(st.Bsize), uint64(st.Frsize), st.Blocks, st.Bfree, st.Bavail,
		st.Files, st.Ffree, st.Ffree, fsid, flag, uint64(st.Namelen),
	} {
		s.reply = binary.BigEndian.AppendUint64(s.reply, n)
	}
	return nil
}
