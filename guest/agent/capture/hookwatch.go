package capture

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agent/poll"
)

// hookWatch knows whether there is something in the directory of hooks, and
// tells the host when that changes. So the host need not ask before each sleep,
// which would cost a guest without hooks more than the sleep itself where its
// kernel is slow, and the wake path need not look.
//
// The kernel queues an event before the call returns that has changed the
// directory (inotify(7)). settle takes what is queued, so a change that was made
// by a command whose end the host knows of is known to the host as well.
type hookWatch struct {
	dir string
	// report tells the host. It is called with mu held, and waits for the answer.
	report func(present bool) error
	f      *poll.File // of inotify
	done   chan struct{}

	present atomic.Bool

	mu   sync.Mutex // guards what follows
	wd   int        // the one watch: dir, or the nearest directory above that is there
	said bool       // what the host knows
	buf  [4096]byte
}

// watchMask is what can make a hook appear or go, in the directory itself and
// above.
const watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// watchHooks begins to watch.
func watchHooks(dir string, report func(present bool) error) (*hookWatch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	f, err := poll.New(fd, "inotify")
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	w := &hookWatch{dir: dir, report: report, f: f, wd: -1, done: make(chan struct{})}
	w.mu.Lock()
	err = w.refresh(fd)
	w.mu.Unlock()
	if err != nil {
		f.Close()
		return nil, err
	}
	go w.run()
	return w, nil
}

// run takes events as they come, until the watch is closed.
func (w *hookWatch) run() {
	defer close(w.done)
	for {
		err := w.f.Raw().Read(func(fd uintptr) bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.drain(fd)
		})
		if err != nil {
			return
		}
	}
}

// settle takes the events that have been queued by now. It costs one system call
// if there are none.
func (w *hookWatch) settle() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.f.Raw().Control(func(fd uintptr) { w.drain(fd) })
}

func (w *hookWatch) close() {
	if w != nil {
		w.f.Close()
		<-w.done
	}
}

// maxDrainReads bounds the reads of one drain: a directory that never stops
// changing must not hold up whoever waits.
const maxDrainReads = 64

// drain takes queued events, and says whether there were any. What they are does
// not matter: the directory is looked at anew. Precondition: w.mu is held.
func (w *hookWatch) drain(fd uintptr) bool {
	some := false
	for range maxDrainReads {
		if _, errno := poll.ReadAgain(fd, w.buf[:]); errno != 0 {
			break
		}
		some = true
	}
	// A report that failed is made again.
	if some || w.said != w.present.Load() {
		if err := w.refresh(int(fd)); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		}
	}
	return some
}

// maxRefresh bounds how often a directory may appear or vanish while it is being
// looked at.
const maxRefresh = 16

// refresh watches the directory, or what is there of the path to it, and tells
// the host what has changed. Precondition: w.mu is held.
func (w *hookWatch) refresh(fd int) error {
	present := false
	for range maxRefresh {
		at, wd, err := nearest(fd, w.dir)
		if err != nil {
			return err
		}
		was := w.wd
		if w.wd = wd; was >= 0 && was != wd {
			_, _ = unix.InotifyRmWatch(fd, uint32(was)) // it may be gone by itself
		}
		if at == w.dir {
			present = notEmpty(w.dir)
			break
		}
		// What is nearer may have appeared before the watch did, but not before one that was there already.
		if was == wd {
			break
		}
	}
	w.present.Store(present)
	if present == w.said {
		return nil
	}
	if err := w.report(present); err != nil {
		return err
	}
	w.said = present
	return nil
}

// nearest watches a directory, or the nearest one above it that is there.
func nearest(fd int, dir string) (at string, wd int, err error) {
	for at = dir; ; at = filepath.Dir(at) {
		wd, err = unix.InotifyAddWatch(fd, at, watchMask)
		if err == nil {
			return at, wd, nil
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) || at == "/" {
			return at, -1, fmt.Errorf("watch %s: %w", at, err)
		}
	}
}

func notEmpty(dir string) bool {
	d, err := os.Open(dir)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	defer d.Close()
	names, _ := d.Readdirnames(1)
	return len(names) > 0
}
