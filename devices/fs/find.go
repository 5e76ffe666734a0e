package fs

import (
	"errors"
	"strconv"

	"golang.org/x/sys/unix"
)

// resolve keeps a path below the shared directory, even while files move in it: no "..", no symbolic link, no
// mount point (openat2(2)).
const resolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// maxRetries bounds how often a call that returns EINTR or EAGAIN is tried again.
const maxRetries = 100

func retry(f func() error) error {
	var err error
	for range maxRetries {
		if err = f(); !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
	}
	return err
}

// file is the file of a request, open while the request lasts.
type file struct {
	fd int // O_PATH, or that of a handle
	unix.Statx_t
}

func (f *file) close() { _ = unix.Close(f.fd) }

func (f *file) kind() uint32 { return uint32(f.Mode) & unix.S_IFMT }

func (f *file) identity() identity {
	return identity{ino: f.Ino, birth: f.Btime.Sec*1e9 + int64(f.Btime.Nsec)}
}

// stat reads the file's attributes again.
func (f *file) stat() error {
	return retry(func() error {
		return unix.Statx(f.fd, "", unix.AT_EMPTY_PATH|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &f.Statx_t)
	})
}

const procFDs = "/proc/self/fd"

// proc returns a path that names this very file to calls that take no O_PATH descriptor (proc(5)).
func (f *file) proc() string { return procFDs + "/" + strconv.Itoa(f.fd) }

func (f *file) chmod(mode uint32) error { return unix.Fchmodat(unix.AT_FDCWD, f.proc(), mode, 0) }

// reopen opens the file for reading or writing. The caller has checked that it is a regular file or a directory,
// so opening it cannot block and has no other effect.
func (f *file) reopen(flags int) (fd int, err error) {
	err = retry(func() (err error) {
		fd, err = unix.Openat(unix.AT_FDCWD, f.proc(), flags|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
		return err
	})
	return fd, err
}

// lookFrom finds a file by a path below a directory. If the last part is a symbolic link, it finds the link
// itself.
func lookFrom(dir int, path string) (*file, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: resolve}
	f := &file{}
	err := retry(func() (err error) {
		f.fd, err = unix.Openat2(dir, path, &how)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := f.stat(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// named finds the file of a node by its name. It fails with ESTALE if the name is gone or is another file's.
func (d *Device) named(n *node) (*file, error) {
	path, err := d.path(n)
	if err != nil {
		return nil, err
	}
	f, err := lookFrom(d.dir.fd, path)
	for _, gone := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV} {
		if errors.Is(err, gone) {
			return nil, unix.ESTALE
		}
	}
	if err != nil {
		return nil, err
	}
	if n != d.root && f.identity() != n.identity {
		f.close()
		return nil, unix.ESTALE
	}
	return f, nil
}

// find is named for a node id. It also finds open files that no longer have a name.
func (d *Device) find(id uint64) (*node, *file, error) {
	n := d.nodes[id]
	if n == nil {
		return nil, nil, unix.ESTALE
	}
	f, err := d.named(n)
	if errors.Is(err, unix.ESTALE) {
		for _, h := range n.handles {
			if h.fd < 0 {
				continue
			}
			f, err = dup(h.fd)
			break
		}
	}
	return n, f, err
}

func dup(fd int) (*file, error) {
	other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := &file{fd: other}
	if err := f.stat(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// findDir finds a directory by its name.
func (d *Device) findDir(id uint64) (*node, *file, error) {
	n := d.nodes[id]
	if n == nil {
		return nil, nil, unix.ESTALE
	}
	f, err := d.named(n)
	if err == nil && f.kind() != unix.S_IFDIR {
		f.close()
		err = unix.ENOTDIR
	}
	return n, f, err
}

// handleFD returns a handle with an open descriptor. After a restore it opens the descriptor on first use.
func (d *Device) handleFD(id uint64, dir bool) (*handle, error) {
	h := d.handles[id]
	if h == nil || h.dir != dir {
		return nil, unix.EBADF
	}
	if h.fd >= 0 {
		return h, nil
	}
	f, err := d.named(h.node)
	if err != nil {
		return nil, err
	}
	defer f.close()
	flags := int(h.flags)
	switch {
	case dir && f.kind() == unix.S_IFDIR:
		flags |= unix.O_DIRECTORY
	case dir || f.kind() != unix.S_IFREG:
		return nil, unix.ESTALE
	}
	if h.fd, err = f.reopen(flags); err != nil {
		h.fd = -1
		return nil, err
	}
	return h, nil
}

// Fd implements [guestmem.File].
func (h *handle) Fd() uintptr { return uintptr(h.fd) }

// specialBits make a program run with its owner's rights.
const specialBits = unix.S_ISUID | unix.S_ISGID

// strip clears these bits of a file before the guest changes its content. The kernel does not, since this process
// has the right to set them.
func strip(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&specialBits == 0 || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	return unix.Fchmod(fd, st.Mode&0o1777)
}

// own gives a file that was just made to the owner of the share, if it still is of that type, and makes a node of
// it.
func (d *Device) own(parent *node, f *file, name string, kind, mode uint32) (*node, error) {
	if f.kind() != kind {
		return nil, unix.ESTALE // another process was faster
	}
	err := unix.Fchownat(f.fd, "", int(d.dir.uid), int(d.dir.gid), unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.EPERM) && f.Uid == d.dir.uid && f.Gid == d.dir.gid {
		err = nil
	}
	if err == nil && kind != unix.S_IFLNK {
		err = f.chmod(mode)
	}
	if err == nil {
		err = f.stat()
	}
	if err != nil {
		return nil, err
	}
	return d.know(f.identity(), parent, name)
}
