package vsock

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrInUse says that another process already listens on the socket path.
var ErrInUse = errors.New("the vsock path is in use")

// ErrPath says that there cannot be a Unix socket at a path.
var ErrPath = errors.New("unusable vsock path")

const (
	// listenBacklog is how many host clients wait while the device does not accept: during boot, while paused,
	// before the driver is ready.
	listenBacklog = 128
	// maxSunPath is the longest name that fits in sockaddr_un with its final
	// zero, in bytes.
	maxSunPath = 107
	// maxPortSuffix is the length of "_4294967295".
	maxPortSuffix = 11
	// lockTries bounds the race with an owner that removes its lock file.
	lockTries = 16
)

// endpoint is the device's place in the file system: the socket for host clients, and the prefix of the sockets
// that the guest can reach.
type endpoint struct {
	path  string   // empty if there is only a listener
	dir   *os.File // the directory that holds the socket; nil without a path
	base  string   // its name there
	fd    int      // the listening socket
	owned bool     // the socket file is ours to remove
	inode uint64
	lock  *os.File
}

// openEndpoint makes the listening socket at path, or takes listener if it is not nil. It replaces a socket file
// whose owner has died, but not one with a listener. With a listener path may be empty: the guest then reaches nothing
// by a path.
func openEndpoint(path string, listener *os.File) (_ *endpoint, err error) {
	e := &endpoint{fd: -1}
	defer func() {
		if err != nil {
			e.close()
		}
	}()
	if listener != nil {
		if err := e.adopt(listener); err != nil {
			return nil, err
		}
		if path == "" {
			return e, nil
		}
	}
	if path, err = absolute(path); err != nil {
		return nil, err
	}
	dirName, base := filepath.Split(path)
	if len(base)+maxPortSuffix > unix.NAME_MAX {
		return nil, fmt.Errorf("vsock path %q: %w: its last element is too long: use at most %d bytes", path, ErrPath, unix.NAME_MAX-maxPortSuffix)
	}
	dir, err := os.OpenFile(dirName, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the directory of vsock path %q: %w", path, err)
	}
	e.path, e.dir, e.base = path, dir, base
	if name := e.address(""); len(name)+maxPortSuffix > maxSunPath {
		return nil, fmt.Errorf("vsock path %q: %w: its last element is too long for a Unix socket: use at most %d bytes",
			path, ErrPath, maxSunPath-maxPortSuffix-(len(name)-len(base)))
	}
	if listener != nil {
		return e, nil
	}
	if err := e.acquire(); err != nil {
		return nil, err
	}
	if err := e.clearStale(); err != nil {
		return nil, err
	}
	return e, e.listen()
}

// absolute makes the path independent of later changes of the working directory. It refuses a final slash.
func absolute(path string) (string, error) {
	if path == "" || path[len(path)-1] == '/' {
		return "", fmt.Errorf("vsock path %q: %w: it must end in a file name", path, ErrPath)
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("vsock path %q: %w", path, err)
	}
	return abs, nil
}

// address returns a name for the socket with the given suffix that fits in sockaddr_un. If the path itself is too
// long, the name leads through the open directory.
func (e *endpoint) address(suffix string) string {
	if len(e.path)+maxPortSuffix <= maxSunPath {
		return e.path + suffix
	}
	return "/proc/self/fd/" + strconv.Itoa(int(e.dir.Fd())) + "/" + e.base + suffix
}

// adopt takes a duplicate of a listening socket.
func (e *endpoint) adopt(listener *os.File) (err error) {
	if e.fd, err = unix.FcntlInt(listener.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		e.fd = -1
		return fmt.Errorf("taking over a vsock listener: %w", err)
	}
	accepting, err := unix.GetsockoptInt(e.fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil || accepting == 0 {
		return fmt.Errorf("taking over a vsock listener: %w: %s is not a listening socket", ErrPath, listener.Name())
	}
	if err := unix.SetNonblock(e.fd, true); err != nil {
		return fmt.Errorf("taking over a vsock listener: %w", err)
	}
	return nil
}

// acquire locks the path against other owners, for as long as this process lives or until close. It opens the lock
// by the directory's descriptor. Devices do not use internal/osfile.
func (e *endpoint) acquire() error {
	name := e.base + ".lock"
	for range lockTries {
		fd, err := unix.Openat(int(e.dir.Fd()), name, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return fmt.Errorf("creating the lock of vsock path %q: %w", e.path, err)
		}
		lock := os.NewFile(uintptr(fd), e.path+".lock")
		if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
			lock.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return fmt.Errorf("vsock path %q: %w by another VM: stop it or use another path", e.path, ErrInUse)
			}
			return fmt.Errorf("locking vsock path %q: %w", e.path, err)
		}
		// The previous owner may have removed the file that this process has locked.
		var mine, there unix.Stat_t
		if err := unix.Fstat(fd, &mine); err != nil {
			lock.Close()
			return fmt.Errorf("locking vsock path %q: %w", e.path, err)
		}
		err = unix.Fstatat(int(e.dir.Fd()), name, &there, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && mine.Ino == there.Ino && mine.Dev == there.Dev {
			e.lock = lock
			return nil
		}
		lock.Close()
	}
	return fmt.Errorf("vsock path %q: %w: its lock file keeps changing", e.path, ErrInUse)
}

// clearStale removes a socket without a listener. The caller holds the lock.
func (e *endpoint) clearStale() error {
	var st unix.Stat_t
	err := unix.Fstatat(int(e.dir.Fd()), e.base, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return fmt.Errorf("looking at vsock path %q: %w", e.path, err)
	case st.Mode&unix.S_IFMT != unix.S_IFSOCK:
		return fmt.Errorf("vsock path %q: %w: something that is not a socket is there: remove it or use another path", e.path, ErrPath)
	}
	fd, err := connectUnix(e.address(""))
	if err == nil {
		unix.Close(fd)
	}
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("vsock path %q: %w: a process listens there: stop it or use another path", e.path, ErrInUse)
	case !errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("finding out whether vsock path %q is stale: %w", e.path, err)
	}
	if err := unix.Unlinkat(int(e.dir.Fd()), e.base, 0); err != nil {
		return fmt.Errorf("removing the stale socket at vsock path %q: %w", e.path, err)
	}
	return nil
}

func (e *endpoint) listen() error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("creating the socket for vsock path %q: %w", e.path, err)
	}
	e.fd = fd
	// The file gets the mode of the unbound socket, so no other user can connect at any moment.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return fmt.Errorf("setting the mode of vsock path %q: %w", e.path, err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: e.address("")}); err != nil {
		return fmt.Errorf("binding vsock path %q: %w", e.path, err)
	}
	e.owned = true
	var st unix.Stat_t
	if err := unix.Fstatat(int(e.dir.Fd()), e.base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("looking at vsock path %q: %w", e.path, err)
	}
	e.inode = st.Ino
	if err := unix.Listen(fd, listenBacklog); err != nil {
		return fmt.Errorf("listening on vsock path %q: %w", e.path, err)
	}
	return nil
}

// connect connects to the service at the given port for the guest. It does not block: if the backlog of a listener
// is full it fails with unix.EAGAIN.
func (e *endpoint) connect(port uint32) (int, error) {
	if e.dir == nil {
		return -1, unix.ECONNREFUSED
	}
	return connectUnix(e.address("_" + strconv.FormatUint(uint64(port), 10)))
}

func connectUnix(name string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	for {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: name})
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// close stops listening, and removes the socket and its lock.
func (e *endpoint) close() error {
	var errs []error
	if e.fd >= 0 {
		errs = append(errs, os.NewSyscallError("close vsock listener", unix.Close(e.fd)))
		e.fd = -1
	}
	if e.owned {
		var st unix.Stat_t
		err := unix.Fstatat(int(e.dir.Fd()), e.base, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && (e.inode == 0 || st.Ino == e.inode) {
			err = unix.Unlinkat(int(e.dir.Fd()), e.base, 0)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("removing vsock path %q: %w", e.path, err))
		}
		e.owned = false
	}
	if e.lock != nil {
		// Remove the file while it is locked. A process that waits for the lock looks again.
		if err := unix.Unlinkat(int(e.dir.Fd()), e.base+".lock", 0); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("removing the lock of vsock path %q: %w", e.path, err))
		}
		errs = append(errs, e.lock.Close())
		e.lock = nil
	}
	if e.dir != nil {
		errs = append(errs, e.dir.Close())
		e.dir = nil
	}
	return errors.Join(errs...)
}
