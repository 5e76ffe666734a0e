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

// hookWatch knows whether the directory of hooks has entries, and tells the host when that changes. So the host
// need not ask before each sleep, and the wake path need not look. Asking would cost a guest without hooks more
// than the sleep itself where its kernel is slow.
//
// The kernel queues an event before the call that changed the directory returns (inotify(7)). settle takes what is
// queued. So the host knows of every change made by a command whose end it knows of.
type hookWatch struct {
	dir string
	// report tells the host. It is called with mu held, and returns when the host has answered.
	report func(present bool) error
	f      *poll.File // of inotify
	done   chan struct{}

	present atomic.Bool

	mu   sync.Mutex // guards what follows
	wd   int        // the one watch: on dir, or on its nearest existing ancestor
	said bool       // what the host knows
	buf  [4096]byte
}

// watchMask has the events that can make a hook appear or vanish, in the directory itself and above it.
const watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// watchHooks starts a watch.
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

// run takes events until the watch is closed.
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

// settle takes the events that are queued now. With none it costs one system call.
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

// maxDrainReads bounds the reads of one drain: a directory that never stops changing must not hold up the caller.
const maxDrainReads = 64

// drain takes queued events, and reports whether there were any. It ignores what they say: refresh reads the
// directory again. Precondition: w.mu is held.
func (w *hookWatch) drain(fd uintptr) bool {
	some := false
	for range maxDrainReads {
		if _, errno := poll.ReadAgain(fd, w.buf[:]); errno != 0 {
			break
		}
		some = true
	}
	// A report that failed is repeated.
	if some || w.said != w.present.Load() {
		if err := w.refresh(int(fd)); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		}
	}
	return some
}

// maxRefresh bounds how often a directory may appear or vanish during a refresh.
const maxRefresh = 16

// refresh watches the directory, or its nearest existing ancestor, and tells the host of a change. Precondition:
// w.mu is held.
func (w *hookWatch) refresh(fd int) error {
	present := false
	for range maxRefresh {
		at, wd, err := nearest(fd, w.dir)
		if err != nil {
			return err
		}
		was := w.wd
		if w.wd = wd; was >= 0 && was != wd {
			_, _ = unix.InotifyRmWatch(fd, uint32(was)) // the kernel may have removed it
		}
		if at == w.dir {
			present = notEmpty(w.dir)
			break
		}
		// A nearer directory may have appeared before a new watch did, but not unnoticed if the watch is the old one.
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

// nearest watches a directory, or its nearest existing ancestor.
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
