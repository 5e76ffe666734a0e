package osfile

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ListenUnix binds a Unix socket that only its owner may use, in the place of what is at path.
func ListenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// A socket's file has its mode (net/unix/af_unix.c, unix_bind_bsd), so there is no moment at which others may use
	// it, and the umask is that of the whole process.
	private := func(_, _ string, c syscall.RawConn) error {
		var changed error
		err := c.Control(func(fd uintptr) { changed = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, changed)
	}
	return (&net.ListenConfig{Control: private}).Listen(context.Background(), "unix", path)
}
