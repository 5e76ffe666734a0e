package instance

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/blk"
)

// A full disk of the host must not become the guest's problem: its file systems take an I/O error for a broken
// disk and stay read-only. So a write without space waits (blk.Options.OnFull), the VM is paused, and both go on
// when there is space.

// Limits of a VM's writes to the host's file system.
const (
	// Writes to a VM's disk and volumes leave 1/reservePart of the file system free, or its RAM size if less, so
	// that it can still be put to sleep. All VMs of the file system share this reserve.
	reservePart = 20
	// maxGrant is how many bytes a VM may write before it looks at the file system again. Limits are also
	// 1/spareParts of the space above the reserve and 1/reserveUsed of the reserve: others write at the same time.
	maxGrant    = 64 << 20
	spareParts  = 8
	reserveUsed = 4
	// roomToGoOn is how many bytes above the reserve must be free before a paused VM goes on.
	roomToGoOn = 16 << 20
	// roomLook is how often a paused VM looks for space.
	roomLook = time.Second
)

// space limits how much a VM may write to the file system of a directory. It is safe for concurrent use.
type space struct {
	dir    string
	statfs func() (unix.Statfs_t, error) // of dir
	ram    int64                         // of the VM, bytes
	// grant is how many bytes may be written before the next look at the file system.
	grant atomic.Int64
	// full has a value when a write waits.
	full chan struct{}
}

func newSpace(dir string, statfs func() (unix.Statfs_t, error), ram int64) *space {
	return &space{dir: dir, statfs: statfs, ram: ram, full: make(chan struct{}, 1)}
}

// spare returns how much is free above the reserve, in bytes; it may be negative.
func (s *space) spare() (spare, reserve int64, err error) {
	st, err := s.statfs()
	if err != nil {
		return 0, 0, fmt.Errorf("looking for space in %s: %w", s.dir, err)
	}
	reserve = min(s.ram, int64(st.Blocks)*st.Bsize/reservePart)
	return int64(st.Bavail)*st.Bsize - reserve, reserve, nil
}

// take implements blk.Options.Space.
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

// quota limits how much the VM's disk may take of the host. It is safe for concurrent use. A nil quota is none.
type quota struct {
	// allocated returns what the disk takes: disk.Disk.Allocated.
	allocated func() (int64, error)

	mu    sync.Mutex // guards what follows
	limit int64      // of allocated
	grant int64      // bytes that may be written before the next look
	short int64      // bytes of the last write that was refused
}

// quotaStep is how many bytes may be written at most before a look at what the disk takes. The tables of its layers
// come on top, and are counted at that look.
const quotaStep = 16 << 20

// set lets the disk take so many bytes more than now.
func (q *quota) set(more int64) error {
	now, err := q.allocated()
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.limit, q.grant = now+more, 0
	return nil
}

// take fails with EDQUOT if n bytes are more than the disk may still take. Blocks that were discarded count no more.
func (q *quota) take(n int64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.grant -= n; q.grant >= 0 {
		return nil
	}
	q.grant = 0
	now, err := q.allocated()
	if err != nil {
		return err
	}
	spare := q.limit - now
	if q.short = 0; spare < n {
		q.short = n
		return fmt.Errorf("writing %d bytes to the disk: %w", n, unix.EDQUOT)
	}
	q.grant = min(spare-n, quotaStep)
	return nil
}

// room reports whether a write that waits can be done.
func (q *quota) room() bool {
	if q == nil {
		return true
	}
	now, err := q.allocated()
	q.mu.Lock()
	defer q.mu.Unlock()
	return err == nil && q.limit-now >= max(q.short, blk.MaxRequest)
}

// takeDisk is blk.Options.Space of the VM's own disk.
func (in *Instance) takeDisk(n int64) error {
	if q := in.space.quota; q != nil {
		if err := q.take(n); err != nil {
			return err
		}
	}
	return in.space.take(n)
}

// SetDiskRoom lets the disk of a VM with a quota take so many bytes more of the host than now.
func (in *Instance) SetDiskRoom(more int64) error {
	if in.space.quota == nil {
		return nil
	}
	return in.space.quota.set(more)
}

// wait implements blk.Options.OnFull.
func (s *space) wait(error) {
	select {
	case s.full <- struct{}{}:
	default:
	}
}

// room reports whether a VM whose write waits can go on.
func (s *space) room() bool {
	spare, _, err := s.spare()
	return err == nil && spare >= roomToGoOn
}

// quotaProblem is the problem that a VM reports while its guest waits because of its disk quota.
const quotaProblem = "paused: its disk quota is used up, and it goes to sleep: remove snapshots of it, or raise the quota"

// fullProblem is the problem that a VM reports while its guest waits for space.
const fullProblem = "paused: the host's file system is full: make room below the state directory, and it goes on by itself"

// spaceWait handles the writes of an instance that wait for space.
type spaceWait struct {
	*space
	quota *quota        // nil for none
	done  chan struct{} // closed when the goroutine of awaitSpace has ended
	end   context.CancelFunc

	mu       sync.Mutex // guards what follows
	waiting  bool       // a write waits
	paused   bool       // for that reason
	starting bool       // the guest has not answered yet
	users    int        // calls of KeepRunning that are not released
}

// awaitSpace pauses the machine while a write of its guest waits for space on the host. It returns at once.
// Closing the instance ends it.
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

// waitForSpace notes that a write waits. It pauses the machine unless the guest starts or KeepRunning forbids it.
func (in *Instance) waitForSpace(ctx context.Context) {
	w := &in.space
	w.mu.Lock()
	defer w.mu.Unlock()
	over := !w.quota.room()
	if !w.waiting && !over {
		in.log.Warn("a write of the guest waits: the host's file system is full", "directory", w.dir)
	}
	if w.waiting = true; over && in.parts.QuotaReached != nil {
		in.parts.QuotaReached()
	}
	if w.users == 0 && !w.starting && !w.paused {
		w.paused = in.machine.Pause(ctx) == nil // one that has ended has nothing to pause
	}
}

// lookForSpace retries the waiting writes when there is room: a resumed device serves its queue. It reports
// whether it must look again.
func (in *Instance) lookForSpace(ctx context.Context) (again bool) {
	w := &in.space
	w.mu.Lock()
	defer w.mu.Unlock()
	room := w.room() && w.quota.room()
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

// KeepRunning keeps the machine running until release is called, also while a write of its guest waits: an
// operation on the whole VM may need the guest's help.
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

// SpaceProblem returns fullProblem while the guest waits for space on the host, else "".
func (in *Instance) SpaceProblem() string {
	in.space.mu.Lock()
	defer in.space.mu.Unlock()
	if in.space.waiting {
		if !in.space.quota.room() {
			return quotaProblem
		}
		return fullProblem
	}
	return ""
}

// started says that the guest has answered, or will not: from now on the machine may be paused.
func (w *spaceWait) started() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.starting = false
}

// endSpaceWait ends awaitSpace.
func (in *Instance) endSpaceWait() {
	if in.space.end != nil {
		in.space.end()
		<-in.space.done
	}
}
