package fswatch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is what has happened to a file or directory.
type Kind string

// The kinds. A file that is moved in from where nobody watches is created, and one that is moved out
// is removed.
const (
	Created    Kind = "created"
	Written    Kind = "written"    // content, by write(2) or the like, or a close after that
	Attributes Kind = "attributes" // mode, owner, times, links, extended attributes
	Removed    Kind = "removed"
	Renamed    Kind = "renamed"
	// Overflow says that something is not known: Problem says what.
	Overflow Kind = "overflow"
)

// Event is one change.
type Event struct {
	Kind    Kind
	Path    string // under the name that was given to New
	From    string // of Renamed: the name before
	Dir     bool
	Problem string
}

// Limits.
const (
	// MaxDirs bounds the directories that a Watcher watches.
	MaxDirs = 8192
	// maxFound bounds the events that one Read makes of what lies in new directories.
	maxFound = 4096
	// readBuffer is for one read of the kernel's queue, in bytes: some hundred events.
	readBuffer = 16 << 10
	// pairWait is how long the second half of a rename is waited for. The kernel queues both in one go.
	pairWait = 5 * time.Millisecond
)

// ErrLimit says that there are more directories than can be watched.
var ErrLimit = errors.New("too many directories to watch")

// Watcher watches. Read is for one goroutine; Close may be called by another.
type Watcher struct {
	paths     []string
	recursive bool
	f         *os.File
	rc        syscall.RawConn
	dirs      map[int32]*dir
	buf       [readBuffer]byte

	// Of the Read that is under way.
	out     []Event
	moved   map[uint32]Event // first halves of renames, by cookie
	order   []uint32         // of these
	found   int
	limited bool // some directories are not watched, and that has been told
}

// dir is a watched directory.
type dir struct {
	path string
	root bool // one that was named
	// all that is in it is told, or these names only.
	all  bool
	only map[string]bool
}

const (
	mask = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB |
		unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
	eventSize = 16 // of struct inotify_event without its name
)

// New begins to watch files and directories, which must exist, and with recursive what is below the
// directories on the same file system. All that happens after it has returned is told. Names are
// absolute. A file is watched by its name: one that takes its place is watched as well.
func New(paths []string, recursive bool) (*Watcher, error) {
	w := &Watcher{recursive: recursive}
	for _, p := range paths {
		w.paths = append(w.paths, filepath.Clean(p))
	}
	if err := w.open(); err != nil {
		return nil, err
	}
	var err error
	for _, p := range w.paths {
		if err == nil {
			err = w.watch(p)
		}
	}
	if err == nil && w.limited {
		err = fmt.Errorf("%w: more than %d below what was named, or than fs.inotify.max_user_watches: name those that matter", ErrLimit, MaxDirs)
	}
	if err != nil {
		w.f.Close()
		return nil, err
	}
	w.out = nil
	return w, nil
}

func (w *Watcher) open() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watch: %w", os.NewSyscallError("inotify_init1", err))
	}
	w.f = os.NewFile(uintptr(fd), "inotify")
	if w.rc, err = w.f.SyscallConn(); err != nil {
		w.f.Close()
		return fmt.Errorf("watch: %w", err)
	}
	w.dirs, w.moved, w.order = make(map[int32]*dir), make(map[uint32]Event), nil
	return nil
}

// watch watches a file or directory that was named.
func (w *Watcher) watch(path string) error {
	fi, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	if fi.IsDir() {
		return w.addTree(path, true, false)
	}
	_, err = w.add(filepath.Dir(path), false, filepath.Base(path))
	return err
}

// add watches a directory, for all that is in it if only is "".
func (w *Watcher) add(path string, root bool, only string) (*dir, error) {
	flags := uint32(mask)
	if !root && only == "" {
		flags |= unix.IN_DONT_FOLLOW
	}
	if len(w.dirs) >= MaxDirs {
		return nil, ErrLimit
	}
	var wd int
	var err error
	if cerr := w.rc.Control(func(fd uintptr) { wd, err = unix.InotifyAddWatch(int(fd), path, flags) }); cerr != nil {
		return nil, fmt.Errorf("watch %s: %w", path, cerr)
	}
	if errors.Is(err, unix.ENOSPC) {
		return nil, ErrLimit
	}
	if err != nil {
		return nil, &fs.PathError{Op: "watch", Path: path, Err: err}
	}
	d := w.dirs[int32(wd)]
	if d == nil {
		d = &dir{path: path}
		w.dirs[int32(wd)] = d
	}
	d.root = d.root || root
	if only == "" {
		d.all = true
	} else {
		if d.only == nil {
			d.only = make(map[string]bool)
		}
		d.only[only] = true
	}
	return d, nil
}

// addTree watches a directory, and what is below it if that is wanted. With tell what is found there is
// told as created: it was, before the watch.
func (w *Watcher) addTree(top string, root, tell bool) error {
	todo := []string{top}
	dev, known := uint64(0), false
	for len(todo) > 0 {
		path := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		first := path == top
		d, err := w.add(path, root && first, "")
		switch {
		case errors.Is(err, ErrLimit):
			w.limit(path)
			return nil
		case err != nil && root && first:
			return err
		case err != nil:
			continue // gone, or no directory any more: its directory tells
		}
		if !w.recursive {
			return nil
		}
		var st unix.Stat_t
		if unix.Stat(path, &st) != nil {
			continue
		}
		if !known {
			dev, known = st.Dev, true
		}
		if st.Dev != dev {
			w.drop(func(e *dir) bool { return e == d })
			continue // another file system
		}
		entries, err := os.ReadDir(path)
		if err != nil && len(entries) == 0 {
			continue
		}
		for _, e := range entries {
			at := filepath.Join(path, e.Name())
			if tell {
				w.find(at, e.IsDir())
			}
			if e.IsDir() {
				todo = append(todo, at)
			}
		}
	}
	return nil
}

// limit tells once that not all is watched.
func (w *Watcher) limit(path string) {
	if !w.limited {
		w.limited = true
		w.out = append(w.out, Event{Kind: Overflow, Path: path, Dir: true, Problem: fmt.Sprintf("more than %d directories, or than fs.inotify.max_user_watches: this one is not watched, and others may not be", MaxDirs)})
	}
}

// find tells of what was there before its directory was watched.
func (w *Watcher) find(path string, isDir bool) {
	switch w.found++; {
	case w.found < maxFound:
		w.tell(Event{Kind: Created, Path: path, Dir: isDir})
	case w.found == maxFound:
		w.tell(Event{Kind: Overflow, Path: filepath.Dir(path), Dir: true, Problem: fmt.Sprintf("more than %d files in new directories at once", maxFound)})
	}
}

// drop ends the watches of some directories.
func (w *Watcher) drop(which func(*dir) bool) {
	for wd, d := range w.dirs {
		if which(d) {
			_ = w.rc.Control(func(fd uintptr) {
				_, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) // it may be gone by itself
			})
			delete(w.dirs, wd)
		}
	}
}

func below(path, top string) bool {
	return path == top || strings.HasPrefix(path, strings.TrimSuffix(top, "/")+"/")
}

// Read waits for changes and returns them in their order. Several changes of one kind to a file may be one
// event. It fails when the Watcher is closed.
func (w *Watcher) Read() ([]Event, error) {
	w.out, w.found = nil, 0
	for len(w.out) == 0 {
		n, err := w.f.Read(w.buf[:])
		if err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		w.parse(w.buf[:n])
		if len(w.moved) > 0 {
			if err := w.f.SetReadDeadline(time.Now().Add(pairWait)); err != nil {
				return nil, fmt.Errorf("watch: %w", err)
			}
			if n, err := w.f.Read(w.buf[:]); err == nil {
				w.parse(w.buf[:n])
			}
			if err := w.f.SetReadDeadline(time.Time{}); err != nil {
				return nil, fmt.Errorf("watch: %w", err)
			}
			w.movedOut()
		}
	}
	return w.out, nil
}

// Close ends watching.
func (w *Watcher) Close() error { return w.f.Close() }

// parse takes events of the kernel's: struct inotify_event of inotify(7).
func (w *Watcher) parse(b []byte) {
	for len(b) >= eventSize {
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		cookie := binary.NativeEndian.Uint32(b[8:])
		size := int(binary.NativeEndian.Uint32(b[12:]))
		if size > len(b)-eventSize {
			return
		}
		name, _, _ := bytes.Cut(b[eventSize:eventSize+size], []byte{0})
		b = b[eventSize+size:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			w.again()
			return // what follows is of watches that are gone
		}
		w.event(wd, mask, cookie, string(name))
	}
}

// again begins anew after the kernel's queue was full: directories may have come and gone.
func (w *Watcher) again() {
	w.tell(Event{Kind: Overflow, Problem: "the kernel's queue was full (fs.inotify.max_queued_events): changes are not known"})
	w.drop(func(*dir) bool { return true })
	// The numbers of those that are made now are new ones (inotify(7)).
	clear(w.moved)
	w.order = nil
	for _, p := range w.paths {
		if err := w.watch(p); err != nil {
			w.tell(Event{Kind: Overflow, Path: p, Problem: "it is not watched any more: " + err.Error()})
		}
	}
}

func (w *Watcher) event(wd int32, mask, cookie uint32, name string) {
	if _, pair := w.moved[cookie]; mask&unix.IN_MOVED_TO == 0 || !pair {
		w.movedOut() // both halves of a rename follow upon each other
	}
	d := w.dirs[wd]
	if d == nil {
		return
	}
	isDir := mask&unix.IN_ISDIR != 0
	path := d.path
	if name != "" {
		if !d.all && !d.only[name] {
			return
		}
		path = filepath.Join(d.path, name)
	} else {
		isDir = true
	}
	switch {
	case mask&unix.IN_IGNORED != 0:
		delete(w.dirs, wd)
	case mask&(unix.IN_DELETE_SELF|unix.IN_UNMOUNT) != 0:
		if d.root {
			w.tell(Event{Kind: Removed, Path: path, Dir: true})
		} else if !d.all {
			w.tell(Event{Kind: Overflow, Path: path, Dir: true, Problem: "the directory is gone: files in it are not watched any more"})
		}
	case mask&unix.IN_MOVE_SELF != 0:
		if d.root || !d.all {
			w.tell(Event{Kind: Overflow, Path: path, Dir: true, Problem: "the directory was moved: it is not watched any more"})
			w.drop(func(e *dir) bool { return below(e.path, path) })
		}
	case name == "":
		if d.root && mask&unix.IN_ATTRIB != 0 {
			w.tell(Event{Kind: Attributes, Path: path, Dir: true})
		}
	case mask&unix.IN_CREATE != 0:
		w.tell(Event{Kind: Created, Path: path, Dir: isDir})
		w.arrived(d, path, isDir)
	case mask&(unix.IN_MODIFY|unix.IN_CLOSE_WRITE) != 0:
		w.tell(Event{Kind: Written, Path: path, Dir: isDir})
	case mask&unix.IN_ATTRIB != 0:
		w.tell(Event{Kind: Attributes, Path: path, Dir: isDir})
	case mask&unix.IN_DELETE != 0:
		w.tell(Event{Kind: Removed, Path: path, Dir: isDir})
	case mask&unix.IN_MOVED_FROM != 0:
		w.moved[cookie] = Event{Kind: Removed, Path: path, Dir: isDir}
		w.order = append(w.order, cookie)
	case mask&unix.IN_MOVED_TO != 0:
		w.movedIn(d, cookie, path, isDir)
	}
}

// arrived watches a directory that is new below a watched one.
func (w *Watcher) arrived(in *dir, path string, isDir bool) {
	if isDir && w.recursive && in.all {
		_ = w.addTree(path, false, true) // only roots fail
	}
}

func (w *Watcher) movedIn(in *dir, cookie uint32, path string, isDir bool) {
	from, ok := w.moved[cookie]
	if !ok {
		w.tell(Event{Kind: Created, Path: path, Dir: isDir})
		w.arrived(in, path, isDir)
		return
	}
	delete(w.moved, cookie)
	w.tell(Event{Kind: Renamed, Path: path, From: from.Path, Dir: isDir})
	if !isDir {
		return
	}
	if !in.all || !w.recursive {
		w.drop(func(d *dir) bool { return !d.root && below(d.path, from.Path) })
		return
	}
	was := false
	for _, d := range w.dirs {
		if !d.root && below(d.path, from.Path) {
			d.path = path + d.path[len(from.Path):]
			was = true
		}
	}
	if !was {
		w.arrived(in, path, true) // it came from where only its name was watched
	}
}

// movedOut tells of what was moved to where nobody watches.
func (w *Watcher) movedOut() {
	for _, cookie := range w.order {
		from, ok := w.moved[cookie]
		if !ok {
			continue
		}
		w.tell(from)
		if from.Dir {
			w.drop(func(d *dir) bool { return !d.root && below(d.path, from.Path) })
		}
	}
	clear(w.moved)
	w.order = w.order[:0]
}

// tell adds an event, unless it says what the one before has said.
func (w *Watcher) tell(e Event) {
	if n := len(w.out); n > 0 && w.out[n-1] == e {
		return
	}
	w.out = append(w.out, e)
}
