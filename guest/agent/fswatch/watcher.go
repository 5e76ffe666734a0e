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

// The kinds. A file that is moved in from an unwatched place is created, and one that is moved out to such a place
// is removed.
const (
	Created    Kind = "created"
	Written    Kind = "written"    // content, by write(2) or the like, or a close after that
	Attributes Kind = "attributes" // mode, owner, times, links, extended attributes
	Removed    Kind = "removed"
	Renamed    Kind = "renamed"
	// Overflow means that changes may have been missed; Problem says which.
	Overflow Kind = "overflow"
)

// Event is one change.
type Event struct {
	Kind    Kind
	Path    string // under the name that was given to New
	From    string // of Renamed: the old name
	Dir     bool
	Problem string
}

// Limits.
const (
	// MaxDirs bounds the directories of a Watcher.
	MaxDirs = 8192
	// maxFound bounds the events of one Read for the contents of new directories.
	maxFound = 4096
	// readBuffer is the size of one read of the kernel's queue, in bytes: some hundred events.
	readBuffer = 16 << 10
	// pairWait is how long to wait for the second half of a rename. The kernel queues both together.
	pairWait = 5 * time.Millisecond
)

// ErrLimit means that there are too many directories to watch.
var ErrLimit = errors.New("too many directories to watch")

// Watcher watches files and directories. One goroutine calls Read; another may call Close.
type Watcher struct {
	paths     []string
	recursive bool
	f         *os.File
	rc        syscall.RawConn
	dirs      map[int32]*dir
	buf       [readBuffer]byte

	// State of the Read under way.
	out     []Event
	moved   map[uint32]Event // first halves of renames, by cookie
	order   []uint32         // their cookies in order
	found   int
	limited bool // some directories are not watched, and an event has said so
}

// dir is a watched directory.
type dir struct {
	path string
	root bool // New named it
	// Events of everything in it are reported (all), or of these names only.
	all  bool
	only map[string]bool
}

const (
	mask = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB |
		unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
	eventSize = 16 // of struct inotify_event without its name
)

// New starts to watch files and directories, which must exist. With recursive it also watches below the
// directories on the same file system. It reports everything that happens after it has returned. Names are
// absolute. A file is watched by its name: a file that replaces it is watched as well.
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

// watch watches a file or directory that New named.
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

// add watches a directory: everything in it if only is "", otherwise that name.
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

// addTree watches a directory, and what is below it if the Watcher is recursive. With tell it reports the contents
// as created: they were, before the watch.
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
			continue // gone, or no longer a directory: the watch of its parent reports that
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

// limit reports, once, that some directories are not watched.
func (w *Watcher) limit(path string) {
	if !w.limited {
		w.limited = true
		w.out = append(w.out, Event{Kind: Overflow, Path: path, Dir: true, Problem: fmt.Sprintf("more than %d directories, or than fs.inotify.max_user_watches: this one is not watched, and others may not be", MaxDirs)})
	}
}

// find reports an entry that was created before its directory was watched.
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
				_, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) // the kernel may have removed it
			})
			delete(w.dirs, wd)
		}
	}
}

func below(path, top string) bool {
	return path == top || strings.HasPrefix(path, strings.TrimSuffix(top, "/")+"/")
}

// Read waits for changes and returns them in order. It may merge several changes of one kind to a file into one
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

// Close ends the watch.
func (w *Watcher) Close() error { return w.f.Close() }

// parse parses events of the kernel: struct inotify_event of inotify(7).
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
			return // the rest is about watches that are gone
		}
		w.event(wd, mask, cookie, string(name))
	}
}

// again starts over after the kernel's queue was full: directories may have come and gone.
func (w *Watcher) again() {
	w.tell(Event{Kind: Overflow, Problem: "the kernel's queue was full (fs.inotify.max_queued_events): changes are not known"})
	w.drop(func(*dir) bool { return true })
	// The kernel does not reuse the numbers of the old watches (inotify(7)).
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
		w.movedOut() // the halves of a rename follow each other
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
		w.arrived(in, path, true) // it came from a directory in which only its name was watched
	}
}

// movedOut reports what was moved to an unwatched place as removed.
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

// tell adds an event, unless it equals the previous one.
func (w *Watcher) tell(e Event) {
	if n := len(w.out); n > 0 && w.out[n-1] == e {
		return
	}
	w.out = append(w.out, e)
}
