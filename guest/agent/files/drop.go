package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/treetar"
	"github.com/drowse-vm/drowse/internal/wait"
)

const (
	// maxDropDepth is how many directories deep a Drop goes. It keeps each of them open.
	maxDropDepth = 256
	// maxDropPasses bounds how often a Drop reads a directory again after it removed something: a file system may
	// leave out names meanwhile. A program that makes files at the same time may outrun it.
	maxDropPasses = 8
	// dropNames is how many names of a directory are read in one call.
	dropNames = 256
	// coarseWait bounds the wait for the clock of file times, which ticks every 1 to 40 ms.
	coarseWait = time.Second
)

// noLinks is the openat2 resolution of a path that must contain no links.
const noLinks = unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// Drop implements agentpb.AgentService.
func (f *Files) Drop(ctx context.Context, m *agentpb.DropRequest) (*agentpb.DropResponse, error) {
	limit := time.Duration(m.LimitNanos)
	switch {
	case len(m.Paths) > agentpb.MaxDropPaths:
		return nil, status.Errorf(codes.InvalidArgument, "%d paths, at most %d", len(m.Paths), agentpb.MaxDropPaths)
	case limit <= 0 || limit > agentpb.MaxDropTime:
		return nil, status.Errorf(codes.InvalidArgument, "%v to drop in: more than 0 and at most %v", limit, agentpb.MaxDropTime)
	}
	for _, p := range m.Paths {
		if err := checkPath(p.Path); err != nil {
			return nil, err
		}
		if path.Clean(p.Path) != p.Path || p.Path == "/" {
			return nil, status.Errorf(codes.InvalidArgument, "path %q: it has to be clean, and not the root", p.Path)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %v", limit))
	defer cancel()
	out := &agentpb.DropResponse{}
	if m.Look {
		now, err := nextTick(ctx)
		if err != nil {
			return nil, err
		}
		out.NowNanos = now
	} else {
		defer f.settle()
	}
	for _, p := range m.Paths {
		d := dropper{ctx: ctx, path: p, out: &agentpb.DroppedPath{}}
		if err := d.run(m.Look); err != nil {
			d.out.Problem = agentpb.Cut(err.Error(), agentpb.MaxDropProblem)
		}
		out.Paths = append(out.Paths, d.out)
	}
	if m.Trim {
		if err := f.trim(); err != nil {
			out.TrimProblem = agentpb.Cut(err.Error(), agentpb.MaxDropProblem)
		}
	}
	return out, nil
}

// nextTick waits until the coarse clock, which lags by a tick or more, is later than now, and returns its time.
// Every change before the call has an earlier time: files take their times from that clock or, since Linux 6.13,
// from the one that does not lag (multigrain timestamps). Every later change has that time or a later one.
func nextTick(ctx context.Context) (int64, error) {
	var first, now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &first); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	for end := time.Now().Add(coarseWait); time.Now().Before(end); {
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
			return 0, fmt.Errorf("read the clock: %w", err)
		}
		if now.Nano() > first.Nano() {
			return now.Nano(), nil
		}
		if wait.For(ctx, time.Millisecond) != nil {
			return 0, context.Cause(ctx)
		}
	}
	return 0, fmt.Errorf("the clock stands still: %w", unix.ETIME)
}

// dropper empties one directory.
type dropper struct {
	ctx  context.Context
	path *agentpb.DropPath
	out  *agentpb.DroppedPath
	// failed is the first error of an entry that could not be removed.
	failed error
}

// run finds out what the path is. Unless look is set, it also removes what is in it.
func (d *dropper) run(look bool) error {
	p := d.path
	at, err := openat2(unix.AT_FDCWD, p.Path, unix.O_PATH|unix.O_NOFOLLOW, noLinks)
	if err != nil {
		switch {
		case errors.Is(err, unix.ENOENT):
			d.out.State = agentpb.DropAbsent
		case errors.Is(err, unix.ELOOP):
			d.out.State = agentpb.DropLink
		case errors.Is(err, unix.ENOTDIR):
			d.out.State = agentpb.DropOther
		default:
			return fmt.Errorf("open %s: %w", p.Path, err)
		}
		return nil
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return fmt.Errorf("stat %s: %w", p.Path, err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		d.out.State, d.out.Device, d.out.Inode = agentpb.DropDirectory, st.Dev, st.Ino
		if p.Inode != 0 && (st.Ino != p.Inode || st.Dev != p.Device) {
			d.out.State = agentpb.DropReplaced
		}
	case unix.S_IFREG:
		d.out.State = agentpb.DropFile
	case unix.S_IFLNK:
		d.out.State = agentpb.DropLink
	default:
		d.out.State = agentpb.DropOther
	}
	if d.out.State != agentpb.DropDirectory {
		return nil
	}
	dir, err := openDir(at, ".", noLinks)
	if err != nil {
		return fmt.Errorf("open %s: %w", p.Path, err)
	}
	defer dir.Close()
	if look {
		if _, err := dir.Readdirnames(1); errors.Is(err, io.EOF) {
			d.out.State = agentpb.DropEmpty
		} else if err != nil {
			return fmt.Errorf("read %s: %w", p.Path, err)
		}
		return nil
	}
	if err := d.empty(dir, p.Path, 1); err != nil {
		return err
	}
	return d.failed
}

// empty removes the contents of a directory. It fails if it cannot continue. d.failed has the first entry that it
// could not remove.
func (d *dropper) empty(dir *os.File, name string, depth int) error {
	kept, mounts := d.out.Kept, d.out.Mounts
	for range maxDropPasses {
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		removed := false
		// Each pass counts anew what stays.
		d.out.Kept, d.out.Mounts = kept, mounts
		for {
			names, err := dir.Readdirnames(dropNames)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return fmt.Errorf("read %s: %w", name, err)
			}
			for _, n := range names {
				if d.ctx.Err() != nil {
					return context.Cause(d.ctx)
				}
				gone, err := d.remove(dir, n, path.Join(name, n), depth)
				if err != nil {
					return err
				}
				removed = removed || gone
			}
		}
		if !removed {
			return nil
		}
	}
	return nil
}

// remove removes one entry of a directory, and reports whether it did.
func (d *dropper) remove(dir *os.File, name, whole string, depth int) (gone bool, err error) {
	fd := int(dir.Fd())
	var st unix.Stat_t
	err = unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, d.fail("stat", whole, err)
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if d.path.BeforeNanos != 0 && (st.Ctim.Nano() >= d.path.BeforeNanos || !d.copied(fd, name, st.Mode)) {
		// The files of a directory that was moved here since have older times.
		d.out.Kept++
		return false, nil
	}
	flags := 0
	if isDir {
		if goesOn, err := d.removeBelow(dir, name, whole, depth); err != nil || !goesOn {
			return false, err
		}
		flags = unix.AT_REMOVEDIR
	}
	err = unix.Unlinkat(fd, name, flags)
	switch {
	case err == nil:
		d.out.Entries++
		if !isDir && st.Nlink == 1 {
			d.out.Bytes += uint64(max(st.Blocks, 0)) * 512
		}
		return true, nil
	case errors.Is(err, unix.ENOENT):
	case errors.Is(err, unix.EBUSY):
		d.out.Mounts++
	case isDir && (errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST)):
		// Its contents stay, and are counted.
	default:
		return false, d.fail("remove", whole, err)
	}
	return false, nil
}

// removeBelow empties a directory below the dropped one, and reports whether it may be removed itself.
func (d *dropper) removeBelow(dir *os.File, name, whole string, depth int) (goesOn bool, err error) {
	if depth == maxDropDepth {
		return false, d.fail("remove", whole, fmt.Errorf("more than %d directories deep", maxDropDepth))
	}
	child, err := openDir(int(dir.Fd()), name, noLinks|unix.RESOLVE_BENEATH|unix.RESOLVE_NO_XDEV)
	switch {
	case errors.Is(err, unix.EXDEV):
		d.out.Mounts++
		return false, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		return false, nil // replaced meanwhile
	case err != nil:
		return false, d.fail("open", whole, err)
	}
	defer child.Close()
	return true, d.empty(child, whole, depth+1)
}

// copied reports whether a copy to the host has the entry. A copy has no devices, pipes, sockets, links that may lead
// out of the tree, or unfinished files of other copies.
func (d *dropper) copied(fd int, name string, mode uint32) bool {
	if treetar.Unfinished(name) {
		return false
	}
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR, unix.S_IFREG:
		return true
	case unix.S_IFLNK:
		var b [agentpb.MaxPath + 1]byte
		n, err := unix.Readlinkat(fd, name, b[:])
		if err != nil || n == len(b) {
			return false
		}
		to := string(b[:n])
		return !filepath.IsAbs(to) && !slices.Contains(strings.Split(to, "/"), "..")
	}
	return false
}

// fail records an error. Only the first is reported.
func (d *dropper) fail(doing, name string, err error) error {
	if d.failed == nil {
		d.failed = fmt.Errorf("%s %s: %w", doing, name, err)
	}
	return nil
}

// openTries bounds how often an open is repeated, after a signal or because something was moved meanwhile
// (openat2(2), EAGAIN).
const openTries = 100

func openat2(dir int, name string, flags, resolve uint64) (fd int, err error) {
	for range openTries {
		fd, err = unix.Openat2(dir, name, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: resolve})
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	return fd, err
}

// openDir opens a directory for reading.
func openDir(dir int, name string, resolve uint64) (*os.File, error) {
	fd, err := openat2(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, resolve)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}
