package instance

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A full disk of the host is not the guest's business: its file systems take an I/O error for a broken disk and stay
// read-only. So a write for which there is no space waits (blk.Options.OnFull), the VM is paused, and both go on when
// there is space.

// Limits of a VM's writes to the host's file system.
const (
	// reservePart of the file system, or as much as the VM has RAM if that is less, stays free of what the VM writes to
	// its disk and volumes, so that it can still be put to sleep. All VMs of the file system share it.
	reservePart = 20
	// maxGrant is how many bytes a VM writes at most between two looks at the file system, and at most a part of what
	// is free above the reserve, and of the reserve: others write at the same time.
	maxGrant    = 64 << 20
	spareParts  = 8
	reserveUsed = 4
	// roomToGoOn is how much more than the reserve has to be free before a VM that was paused goes on.
	roomToGoOn = 16 << 20
	// roomLook is how often a paused VM looks for space.
	roomLook = time.Second
)

// space says how much a VM may write to the file system of a directory. It is safe for concurrent use.
type space struct {
	dir string
	ram int64 // of the VM, bytes
	// grant is how many bytes may be written before the file system is looked at again.
	grant atomic.Int64
	// full has a value when a write waits.
	full chan struct{}
}

func newSpace(dir string, ram int64) *space {
	return &space{dir: dir, ram: ram, full: make(chan struct{}, 1)}
}

// spare is how much is free above the reserve, in bytes; it may be negative.
func (s *space) spare() (spare, reserve int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return 0, 0, fmt.Errorf("looking for space in %s: %w", s.dir, err)
	}
	reserve = min(s.ram, int64(st.Blocks)*st.Bsize/reservePart)
	return int64(st.Bavail)*st.Bsize - reserve, reserve, nil
}

// take is for blk.Options.Space.
func (s *space) take(n int64) error {
	if s.grant.Add(-n) >= 0 {
		return nil
	}
	spare, reserve, err := s.spare()
	if err == nil && spare < n {
		err = fmt.Errorf("writing %d bytes to %s, which keeps a reserve for sleeps: %w", n, s.dir, unix.ENOSPC)
	}
	if err != nil {
		s.grant.Store(0)
		return err
	}
	s.grant.Store(min(spare/spareParts, reserve/reserveUsed, maxGrant))
	return nil
}

// wait is for blk.Options.OnFull.
func (s *space) wait(error) {
	select {
	case s.full <- struct{}{}:
	default:
	}
}

// room says whether a VM whose write waits can go on.
func (s *space) room() bool {
	spare, _, err := s.spare()
	return err == nil && spare >= roomToGoOn
}

// fullProblem is what a VM says of itself while its guest waits for space.
const fullProblem = "paused: the host's file system is full: make room below the state directory, and it goes on by itself"

// spaceWait is what an instance does about writes that wait for space.
type spaceWait struct {
	*space
	done chan struct{} // closed when nothing is done about it any more
	end  context.CancelFunc

	mu       sync.Mutex // guards what follows
	waiting  bool       // a write waits
	paused   bool       // for that reason
	starting bool       // the guest has not answered yet
	users    int        // of keepRunning
}

// awaitSpace pauses the machine while a write of its guest waits for space on the host, until there is some. It returns
// at once; closing the instance ends it.
func (in *Instance) awaitSpace() {
	ctx, end := context.WithCancel(context.Background())
	in.space.done, in.space.end, in.space.starting = make(chan struct{}), end, true
	go func() {
		defer close(in.space.done)
		var look <-chan time.Time // nil while nothing waits: an idle VM wakes nobody
		for {
			select {
			case <-ctx.Done():
				return
			case <-in.space.full:
				in.waitForSpace(ctx)
				look = time.After(roomLook)
			case <-look:
				if look = nil; in.lookForSpace(ctx) {
					look = time.After(roomLook)
				}
			}
		}
	}()
}

// waitForSpace notes that a write waits, and pauses the machine unless somebody needs it.
func (in *Instance) waitForSpace(ctx context.Context) {
	w := &in.space
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.waiting {
		in.log.Warn("a write of the guest waits: the host's file system is full", "directory", w.dir)
	}
	w.waiting = true
	if w.users == 0 && !w.starting && !w.paused {
		w.paused = in.machine.Pause(ctx) == nil // one that has ended has nothing to pause
	}
}

// lookForSpace has the writes that wait tried again when there is room: resuming a device has it serve its queue. It
// says whether there is something to wait for.
func (in *Instance) lookForSpace(ctx context.Context) (again bool) {
	w := &in.space
	w.mu.Lock()
	defer w.mu.Unlock()
	room := w.room()
	if w.users > 0 || w.starting && !room {
		return true
	}
	if !w.paused {
		w.paused = in.machine.Pause(ctx) == nil
	}
	if !w.paused || !room {
		return true
	}
	w.waiting, w.paused = false, false
	if err := in.machine.Resume(); err != nil {
		in.log.Error("resuming the VM, which has space again", "error", err)
	}
	return false
}

// KeepRunning has the machine run until release is called, also while a write of its guest waits: what is done with the
// VM as a whole may need the guest's help.
func (in *Instance) KeepRunning() (release func()) {
	w := &in.space
	w.mu.Lock()
	defer w.mu.Unlock()
	w.users++
	if w.paused {
		w.paused = false
		if err := in.machine.Resume(); err != nil {
			in.log.Error("resuming the VM", "error", err)
		}
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.users--
	}
}

// SpaceProblem says whether the guest waits for space on the host.
func (in *Instance) SpaceProblem() string {
	in.space.mu.Lock()
	defer in.space.mu.Unlock()
	if in.space.waiting {
		return fullProblem
	}
	return ""
}

// started says that the guest has answered, or will not: from now on it may be paused.
func (w *spaceWait) started() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.starting = false
}

// endSpaceWait undoes awaitSpace.
func (in *Instance) endSpaceWait() {
	if in.space.end != nil {
		in.space.end()
		<-in.space.done
	}
}
