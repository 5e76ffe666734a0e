package treetar

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"
)

// openNoFollow keeps an open from following a link, or waiting for a pipe, that has replaced a file.
const openNoFollow = unix.O_NOFOLLOW | unix.O_NONBLOCK

// beneath is a directory of which only the inside changes. Every change is one call with a directory's descriptor
// and a name of one element, and follows no link. The descriptor was reached from this directory without a link, a
// "..", or a magic link (openat2(2)). So a name means what it says, whatever links are in the tree, who made them,
// and when.
type beneath struct {
	top *os.File
	// made, if not nil, is called before a directory is made that no entry names.
	made func() error
}

func openBeneath(root *os.Root) (*beneath, error) {
	top, err := root.Open(".")
	return &beneath{top: top}, err
}

func (b *beneath) close() {
	if b.top != nil {
		b.top.Close()
	}
}

// spot is a name in an open directory, where a file exists or may be created.
type spot struct {
	dir  *os.File // O_PATH
	base string   // one element
}

func (s *spot) close() { s.dir.Close() }

// beside returns another name in the same directory. It stays open for as long as this spot.
func (s *spot) beside(base string) *spot { return &spot{dir: s.dir, base: base} }

// find opens the directory of a clean name. The error is fs.ErrNotExist if there is none.
func (b *beneath) find(name string) (*spot, error) { return b.spot(name, false) }

// reach is find, but makes missing directories.
func (b *beneath) reach(name string) (*spot, error) { return b.spot(name, true) }

func (b *beneath) spot(name string, create bool) (*spot, error) {
	dir, err := b.dir(path.Dir(name), create)
	if err != nil {
		return nil, err
	}
	return &spot{dir: dir, base: path.Base(name)}, nil
}

// dir opens a directory by a clean name. It recurses at most MaxDepth deep.
func (b *beneath) dir(name string, create bool) (*os.File, error) {
	d, err := openDir(b.top, name, unix.O_PATH)
	if !create || !errors.Is(err, fs.ErrNotExist) || name == "." {
		return d, err
	}
	parent, err := b.dir(path.Dir(name), true)
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	if b.made != nil {
		if err := b.made(); err != nil {
			return nil, err
		}
	}
	if err := (&spot{parent, path.Base(name)}).mkdir(0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return openDir(parent, path.Base(name), unix.O_PATH)
}

// openDir opens the directory name beneath at.
func openDir(at *os.File, name string, flags uint64) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   flags | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	for {
		fd, err := unix.Openat2(int(at.Fd()), name, &how)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), name), nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ELOOP):
			return nil, fmt.Errorf("%w: a symbolic link is on the way to directory %q", ErrUnsafe, clip(name))
		default:
			return nil, &fs.PathError{Op: "openat2", Path: clip(name), Err: err}
		}
	}
}

func (s *spot) fd() int { return int(s.dir.Fd()) }

func (s *spot) fail(op string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: clip(s.base), Err: err}
}

// stat describes the file at the spot, without following a link.
func (s *spot) stat() (st unix.Stat_t, err error) {
	err = unix.Fstatat(s.fd(), s.base, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, s.fail("fstatat", err)
}

// lstat is stat with an fs.FileInfo as its result.
func (s *spot) lstat() (fs.FileInfo, error) {
	f, err := s.open(unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Stat()
}

// readlink returns the target of a symbolic link.
func (s *spot) readlink() (string, error) {
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(s.fd(), s.base, b)
	if err != nil {
		return "", s.fail("readlinkat", err)
	}
	return string(b[:n]), nil
}

// open opens a file. It refuses a link, and does not wait for a pipe.
func (s *spot) open(flags int, perm uint32) (*os.File, error) {
	for {
		fd, err := unix.Openat(s.fd(), s.base, flags|openNoFollow|unix.O_CLOEXEC, perm)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, s.fail("openat", err)
		}
		return os.NewFile(uintptr(fd), s.base), nil
	}
}

// openDir opens the directory at the spot for reading.
func (s *spot) openDir() (*os.File, error) { return openDir(s.dir, s.base, unix.O_RDONLY) }

func (s *spot) mkdir(perm uint32) error { return s.fail("mkdirat", unix.Mkdirat(s.fd(), s.base, perm)) }

// remove removes a file that is not a directory.
func (s *spot) remove() error { return s.fail("unlinkat", unix.Unlinkat(s.fd(), s.base, 0)) }

func (s *spot) symlink(target string) error {
	return s.fail("symlinkat", unix.Symlinkat(target, s.fd(), s.base))
}

// link makes the spot another name of the file at from.
func (s *spot) link(from *spot) error {
	return s.fail("linkat", unix.Linkat(from.fd(), from.base, s.fd(), s.base, 0))
}

// rename moves the file at the spot to another spot.
func (s *spot) rename(to *spot) error {
	return s.fail("renameat", unix.Renameat(s.fd(), s.base, to.fd(), to.base))
}

func (s *spot) chown(uid, gid int) error {
	return s.fail("fchownat", unix.Fchownat(s.fd(), s.base, uid, gid, unix.AT_SYMLINK_NOFOLLOW))
}

// setTime sets the modification time, and leaves the access time alone.
func (s *spot) setTime(t time.Time) error {
	ts := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	if !t.IsZero() {
		ts[1] = unix.NsecToTimespec(t.UnixNano())
	}
	return s.fail("utimensat", unix.UtimesNanoAt(s.fd(), s.base, ts, unix.AT_SYMLINK_NOFOLLOW))
}

func isDir(st *unix.Stat_t) bool  { return st.Mode&unix.S_IFMT == unix.S_IFDIR }
func isFile(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFREG }
func sameFile(a, b *unix.Stat_t) bool {
	return a.Dev == b.Dev && a.Ino == b.Ino
}
