package upper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Limits of a walk. It does not look beyond them, and then Partial says so.
const (
	maxDepth = 256         // levels of directories; a walk keeps one of each level open
	maxPath  = 4095        // bytes: PATH_MAX without its zero
	maxNames = 1 << 18     // of one directory
	nameBuf  = 32 << 10    // bytes of directory entries read at once
	xattrBuf = maxPath + 1 // bytes of an overlay attribute: a path, or one letter
)

// Attributes that an overlay gives to directories of its upper layer.
const (
	attrOpaque   = "trusted.overlay.opaque"   // "y": nothing of the lower directory shows through
	attrRedirect = "trusted.overlay.redirect" // the directory of another path shows through
)

// node is an entry of the upper directory at one moment.
type node struct {
	mode         uint32 // st_mode
	uid, gid     uint32
	ino          uint64
	rdev         uint64
	size         int64
	mtime, ctime int64 // nanoseconds
	opaque       bool
	redirect     string
}

// whiteout reports whether the entry hides the image's path: it is a device 0/0, which only the overlay itself can
// make.
func (n *node) whiteout() bool { return n.mode&unix.S_IFMT == unix.S_IFCHR && n.rdev == 0 }
func (n *node) dir() bool      { return n.mode&unix.S_IFMT == unix.S_IFDIR }

// View is the result of a walk. A walk has a fixed order: a directory before its contents, siblings by the bytes
// of their names.
type View struct {
	nodes map[string]node // by path, without a leading slash
	last  string          // the last path, if not done
	done  bool
	part  string
}

// Untouched returns the view of a disk that was never written.
func Untouched() *View { return &View{done: true} }

// Last returns the last path of the walk, or "" if the walk is complete.
func (v *View) Last() string { return v.last }

// Budget bounds a walk. Zero means no bound.
type Budget struct {
	Entries int
	Time    time.Duration
	// Until is the last path of interest; "" means no bound.
	Until string
}

// Look walks the upper directory from behind a path ("" means from the beginning), as far as the budget allows,
// but at least one entry. What changes meanwhile may be in the view or not.
func (t *Tree) Look(ctx context.Context, after string, b Budget) (*View, error) {
	w := &walk{ctx: ctx, after: after, b: b, v: &View{nodes: map[string]node{}}, buf: make([]byte, nameBuf)}
	if b.Time > 0 {
		w.deadline = time.Now().Add(b.Time)
	}
	fd, err := unix.Openat(t.upper, ".", dirFlags, 0)
	if err != nil {
		return nil, fmt.Errorf("look at the upper directory: %w", err)
	}
	switch err := w.dir(fd, "", 0); {
	case err == nil:
		w.v.done, w.v.last = true, ""
	case !errors.Is(err, errBudget):
		return nil, fmt.Errorf("look at the upper directory: %w", err)
	}
	return w.v, nil
}

// errBudget ends a walk early.
var errBudget = errors.New("the budget is spent")

type walk struct {
	ctx      context.Context
	after    string
	b        Budget
	deadline time.Time
	n        int // entries behind after
	v        *View
	buf      []byte
}

// dir walks a directory and closes it.
func (w *walk) dir(fd int, rel string, depth int) error {
	defer unix.Close(fd)
	names, all, err := readNames(fd, w.buf)
	if err != nil {
		return &fs.PathError{Op: "readdir", Path: "/" + rel, Err: err}
	}
	if !all {
		w.v.part = fmt.Sprintf("a directory has more than %d names", maxNames)
	}
	for _, name := range names {
		p := join(rel, name)
		above := p == w.after || strings.HasPrefix(w.after, p) && w.after[len(p)] == '/'
		if !above && agentpb.ComparePaths(p, w.after) <= 0 {
			continue
		}
		if w.b.Until != "" && agentpb.ComparePaths(p, w.b.Until) > 0 {
			return nil
		}
		if len(p) > maxPath {
			w.v.part = fmt.Sprintf("a path has more than %d bytes", maxPath)
			continue
		}
		if err := w.one(fd, name, p, depth, above); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) one(fd int, name, p string, depth int, above bool) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	var st unix.Stat_t
	err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil // gone meanwhile
	}
	if err != nil {
		return &fs.PathError{Op: "lstat", Path: "/" + p, Err: err}
	}
	n := node{
		mode: st.Mode, uid: st.Uid, gid: st.Gid, ino: st.Ino, rdev: st.Rdev, size: st.Size,
		mtime: st.Mtim.Nano(), ctime: st.Ctim.Nano(),
	}
	var sub int
	if n.dir() {
		sub, err = unix.Openat(fd, name, dirFlags, 0)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			return nil // replaced meanwhile
		}
		if err != nil {
			return &fs.PathError{Op: "open", Path: "/" + p, Err: err}
		}
		if err := n.attributes(sub); err != nil {
			unix.Close(sub)
			return &fs.PathError{Op: "getxattr", Path: "/" + p, Err: err}
		}
	}
	w.v.nodes[p] = n
	if !above {
		w.n++
		w.v.last = p
		if w.b.Entries > 0 && w.n >= w.b.Entries || !w.deadline.IsZero() && time.Now().After(w.deadline) {
			if n.dir() {
				unix.Close(sub)
			}
			return errBudget
		}
	}
	switch {
	case !n.dir():
		return nil
	case depth >= maxDepth:
		unix.Close(sub)
		w.v.part = fmt.Sprintf("there are more than %d directories above each other", maxDepth)
		return nil
	}
	return w.dir(sub, p, depth+1)
}

// attributes reads the overlay's attributes of a directory.
func (n *node) attributes(fd int) error {
	var buf [xattrBuf]byte
	get := func(name string) (string, error) {
		k, err := unix.Fgetxattr(fd, name, buf[:])
		if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) {
			return "", nil
		}
		return string(buf[:max(k, 0)]), err
	}
	opaque, err := get(attrOpaque)
	if err != nil {
		return err
	}
	n.opaque = opaque == "y"
	n.redirect, err = get(attrRedirect)
	return err
}

// readNames returns the names of a directory, sorted, and whether they are complete.
func readNames(fd int, buf []byte) (names []string, all bool, err error) {
	for {
		n, err := unix.ReadDirent(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, false, err
		}
		if n <= 0 {
			break
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
		if len(names) >= maxNames {
			slices.Sort(names)
			return names[:maxNames], false, nil
		}
	}
	slices.Sort(names)
	return names, true, nil
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

func parent(p string) string {
	if i := strings.LastIndexByte(p, '/'); i >= 0 {
		return p[:i]
	}
	return ""
}

// Tick returns the longest time between two values of this kernel's time of change, 1/CONFIG_HZ (clock_getres(2)).
// A file that is looked at and written to within one tick may look the same. Wait for one between a walk and the
// changes that it must reveal.
var Tick = sync.OnceValue(func() time.Duration {
	const longest = 40 * time.Millisecond // in the kernels that drowse builds
	var res unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_REALTIME_COARSE, &res); err != nil {
		return longest
	}
	return time.Duration(res.Nano())
})
