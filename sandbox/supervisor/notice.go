package supervisor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// notice notices that a file of a VM is replaced, and that a VM comes or goes. It saves repeated looks at all VMs:
// with 1,000 VMs those are thousands of system calls a second. It does not say what changed.
type notice struct {
	dir string
	f   *os.File
	// seq counts changes. last is when the last one was noticed, in nanoseconds since 1970. blind means that some
	// changes are not noticed.
	seq     atomic.Uint64
	last    atomic.Int64
	blind   atomic.Bool
	reading sync.WaitGroup
}

const (
	// Directories of VMs are made, renamed and removed. Their files are replaced by renames.
	dirEvents = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE | unix.IN_ONLYDIR
	vmEvents  = unix.IN_MOVED_TO | unix.IN_DELETE | unix.IN_ONLYDIR
	// noticeBuffer holds the events of one read. The kernel queues more, or reports an overflow.
	noticeBuffer = 64 << 10
)

// newNotice watches a directory with a directory for each VM. An error means that it cannot notice anything.
func newNotice(dir string) (*notice, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", dir, os.NewSyscallError("inotify_init1", err))
	}
	n := &notice{dir: dir, f: os.NewFile(uintptr(fd), "inotify")}
	top, err := unix.InotifyAddWatch(fd, dir, dirEvents)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watching %s: %w", dir, os.NewSyscallError("inotify_add_watch", err)), n.f.Close())
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watching %s: %w", dir, err), n.f.Close())
	}
	for _, e := range entries {
		n.add(e.Name())
	}
	n.changed()
	n.reading.Go(func() { n.read(int32(top)) })
	return n, nil
}

func (n *notice) close() {
	_ = n.f.Close()
	n.reading.Wait()
}

// add watches the directory of a VM. A directory that is already watched, under any name, stays so.
func (n *notice) add(name string) {
	rc, err := n.f.SyscallConn()
	if err == nil {
		cerr := rc.Control(func(fd uintptr) { _, err = unix.InotifyAddWatch(int(fd), filepath.Join(n.dir, name), vmEvents) })
		err = errors.Join(err, cerr)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
		n.blind.Store(true) // too many watches: every look reads all VMs again
	}
}

func (n *notice) changed() {
	n.last.Store(time.Now().UnixNano())
	n.seq.Add(1)
}

// read takes events from the kernel (inotify(7)) until the notice is closed.
func (n *notice) read(top int32) {
	buf := make([]byte, noticeBuffer)
	for {
		size, err := n.f.Read(buf)
		if err != nil {
			n.blind.Store(true)
			return
		}
		for b := buf[:size]; len(b) >= unix.SizeofInotifyEvent; {
			wd := int32(binary.NativeEndian.Uint32(b))
			mask, length := binary.NativeEndian.Uint32(b[4:]), int(binary.NativeEndian.Uint32(b[12:]))
			b = b[unix.SizeofInotifyEvent:]
			name, _, _ := bytes.Cut(b[:min(length, len(b))], []byte{0})
			b = b[min(length, len(b)):]
			if mask&unix.IN_Q_OVERFLOW != 0 {
				n.blind.Store(true) // the event of a new directory may be lost
			}
			if wd == top && mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0 {
				n.add(string(name))
			}
		}
		// After all is watched: a look from now on sees what came before.
		n.changed()
	}
}

// noticeEvery is how often all VMs are read even without a change.
const noticeEvery = 10 * time.Second

// noticed is what was read of all VMs, until something changes. It is for one goroutine.
type noticed[T any] struct {
	read func() (T, error)
	// n may be nil: then every get reads.
	n *notice

	have T
	ok   bool
	seq  uint64
	at   time.Time
}

func (c *noticed[T]) get() (T, error) {
	if c.n == nil || c.n.blind.Load() {
		return c.read()
	}
	now, seq := time.Now(), c.n.seq.Load()
	if c.ok && c.seq == seq && now.Sub(c.at) < noticeEvery {
		return c.have, nil
	}
	have, err := c.read()
	// The time of a file that was just replaced may equal that of its next version.
	settled := now.Sub(time.Unix(0, c.n.last.Load())) > 2*settleTime
	c.have, c.ok, c.seq, c.at = have, err == nil && settled, seq, now
	return have, err
}
