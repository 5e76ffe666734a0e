package hosthooks

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// DirName is the directory of a store with its hooks.
const DirName = "hooks.d"

const (
	// MaxHooks is the most executables that run. With more, none runs.
	MaxHooks = 64
	// maxNames is the most entries of the directory that are read.
	maxNames = 1024
)

// ErrUnsafe means that a user other than root and this process's could have written a hook.
var ErrUnsafe = errors.New("it is not run")

// Found is the content of a directory of hooks.
type Found struct {
	// Hooks are the names of the hooks to run, in order.
	Hooks []string
	// LeftOut are regular files that are not executable. Names that begin with a dot or end with ~ are ignored.
	LeftOut []string
}

// Dir is the directory of hooks of a store.
type Dir struct {
	path, store string
	// users may own hooks.
	users []uint32
}

// In returns the directory of hooks of a store. It need not exist.
func In(store string) Dir {
	return Dir{path: filepath.Join(store, DirName), store: store, users: []uint32{0, uint32(os.Geteuid())}}
}

// Look finds the hooks. A missing directory has none, which costs one system call. If anything in the directory
// may not run, the error is ErrUnsafe, with a remedy: the hook that is left out could be the one that would refuse
// something.
func (d Dir) Look() (Found, error) {
	var st unix.Stat_t
	err := unix.Lstat(d.path, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return Found{}, nil
	}
	if err != nil {
		return Found{}, fmt.Errorf("looking for hooks of the host: %s: %w", d.path, err)
	}
	if err := d.checkDirs(st); err != nil {
		return Found{}, err
	}
	names, err := d.names()
	if err != nil {
		return Found{}, err
	}
	var out Found
	for _, name := range names {
		st, err := d.check(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			// It was removed just now.
		case err != nil:
			return Found{}, err
		case st.Mode&0o111 == 0:
			out.LeftOut = append(out.LeftOut, name)
		default:
			out.Hooks = append(out.Hooks, name)
		}
	}
	if len(out.Hooks) > MaxHooks {
		return Found{}, fmt.Errorf("%s has %d hooks, and at most %d are run: none is", d.path, len(out.Hooks), MaxHooks)
	}
	return out, nil
}

// checkDirs refuses a directory, whose entry has the attributes st, that other users could write to.
func (d Dir) checkDirs(st unix.Stat_t) error {
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("%s: %w: it is no directory: put one in its place", d.path, ErrUnsafe)
	}
	if err := d.owned(d.path, st); err != nil {
		return err
	}
	// A user who can write to the store can put another directory there. The store may be behind a link.
	if err := unix.Stat(d.store, &st); err != nil {
		return fmt.Errorf("looking for hooks of the host: %s: %w", d.store, err)
	}
	return d.owned(d.store, st)
}

// owned refuses a file that other users may write to.
func (d Dir) owned(path string, st unix.Stat_t) error {
	if !slices.Contains(d.users, st.Uid) {
		return fmt.Errorf("%s: %w: it belongs to user %d: use `chown root`", path, ErrUnsafe, st.Uid)
	}
	// An access control list that lets other users write sets the group bit (acl(5)).
	if perm := st.Mode & 0o7777; perm&0o022 != 0 {
		return fmt.Errorf("%s: %w: others may write to it (mode %04o): use `chmod go-w`", path, ErrUnsafe, perm)
	}
	return nil
}

// check refuses a file that must not run.
func (d Dir) check(name string) (st unix.Stat_t, err error) {
	path := filepath.Join(d.path, name)
	if err := unix.Lstat(path, &st); err != nil {
		return st, fmt.Errorf("%s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return st, fmt.Errorf("%s: %w: it is no regular file: copy the program there, or move it away", path, ErrUnsafe)
	}
	return st, d.owned(path, st)
}

// names returns the names to look at, in order.
func (d Dir) names() ([]string, error) {
	f, err := os.Open(d.path)
	if err != nil {
		return nil, fmt.Errorf("looking for hooks of the host: %w", err)
	}
	defer f.Close()
	all, err := f.Readdirnames(maxNames + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("looking for hooks of the host: %w", err)
	}
	if len(all) > maxNames {
		return nil, fmt.Errorf("%s has more than %d files: no hook is run", d.path, maxNames)
	}
	slices.Sort(all)
	return slices.DeleteFunc(all, func(name string) bool { return strings.HasPrefix(name, ".") || strings.HasSuffix(name, "~") }), nil
}
