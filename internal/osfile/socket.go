package osfile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ListenUnix binds a Unix socket that only its owner may use. It replaces any file at path.
func ListenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return ListenUnixNew(context.Background(), path)
}

// ListenUnixNew is ListenUnix, but fails with fs.ErrExist if something exists at path.
func ListenUnixNew(ctx context.Context, path string) (net.Listener, error) {
	// The file gets the socket's mode (net/unix/af_unix.c, unix_bind_bsd), so there is no moment at which other
	// users may use it. A umask would not do: it is that of the whole process.
	private := func(_, _ string, c syscall.RawConn) error {
		var changed error
		err := c.Control(func(fd uintptr) { changed = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, changed)
	}
	l, err := (&net.ListenConfig{Control: private}).Listen(ctx, "unix", path)
	if errors.Is(err, unix.EADDRINUSE) {
		err = fmt.Errorf("%w: %w", fs.ErrExist, err)
	}
	return l, err
}

// PeerUser returns the user of the process that has connected (SO_PEERCRED, unix(7)).
func PeerUser(c *net.UnixConn) (uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if cerr != nil {
		return 0, os.NewSyscallError("getsockopt", cerr)
	}
	return cred.Uid, nil
}
