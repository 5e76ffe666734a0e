package process

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The limits of package spec must equal those of the packages that make machines: others do not compile.
var (
	_ = [1]int{}[spec.MaxVCPUs-boot.MaxVCPUs]
	_ = [1]int{}[spec.MinMemoryMiB<<20-guestmem.MinSize]
	_ = [1]int{}[spec.MaxMemoryMiB<<20-guestmem.MaxSize]
	_ = [1]int{}[spec.MaxMounts-(vmm.MaxDevices-7)]
	_ = [1]int{}[spec.MaxSecrets-secrets.MaxSecrets]
	_ = [1]int{}[spec.MaxSecretName-secrets.MaxName]
	_ = [1]int{}[spec.MaxSecret-secrets.MaxValue]
)

// allowance limits how often a guest can make this process act: a burst in a row, and then once per interval. The
// zero value has a whole burst left.
type allowance struct {
	left  int
	since time.Time // when left last grew; zero before the first take
}

// take reports whether the action is allowed now, and counts it if so.
func (a *allowance) take(now time.Time, burst int, every time.Duration) bool {
	if a.since.IsZero() {
		a.left, a.since = burst, now
	}
	if n := int(min(now.Sub(a.since)/every, time.Duration(burst))); n > 0 {
		a.left, a.since = min(a.left+n, burst), now
	}
	if a.left == 0 {
		return false
	}
	a.left--
	return true
}

// A disk quota must never reach the guest as an I/O error, and never keep its VM from sleeping. So
//   - what a guest can write is bounded by the size of its disk, which is less than the quota: its own file system is
//     full first, and programs get ENOSPC;
//   - snapshots and forks, which make the guest's later writes cost more, are refused if they could use up the room
//     for the next sleep, which is always reserved;
//   - if the quota is used up all the same, since snapshots have most of it or it was lowered, the VM goes to sleep,
//     and does not wake before there is room;
//   - layers hold what others above them have replaced. A VM that lacks room wakes if joining them gives some: the
//     room for that is reserved too. Its next sleep frees them.

// quotaRoom is the least that the disk of a VM may take when it starts or a snapshot was taken, in bytes.
const quotaRoom = spec.QuotaRoomMiB << 20

// quota is the disk quota of a VM. The zero value is none. p.op guards all but reached.
type quota struct {
	limit int64 // bytes; 0 is none
	sleep int64 // reserved for the next sleep
	join  int64 // reserved for joining layers
	pages int64 // reserved for decompressed pages that are being written
	// joining reports that there is no room but what joining layers will free, and joined that this was tried.
	joining, joined bool
	// used is the most that the VM can have on disk without the layers that it has written to since it started, and
	// counted has those layers that are in it. The real use is less if others have removed something.
	used    int64
	counted map[string]bool
	reached atomic.Bool // somebody sees to it
}

// admitDisk finds the quota of a VM that starts, and refuses one that has no room.
func (p *process) admitDisk(ctx context.Context) (err error) {
	var use state.DiskUse
	q := &p.quota
	if err := p.readQuota(); err != nil || q.limit == 0 {
		return err
	}
	q.sleep, q.join = int64(p.r.Spec.SleepReserve())<<20, int64(p.r.Spec.DiskMiB)<<20+quotaRoom
	q.used = p.r.DiskUsed
	if q.used == 0 || p.room() < quotaRoom {
		if err := p.measure(ctx, 0, quotaRoom); err != nil {
			return err
		}
	}
	if p.room() >= quotaRoom {
		return nil
	}
	if use, err = p.store.DiskUse(ctx, p.r); err != nil {
		return err
	}
	// In what is reserved for it, joining layers must fit beside the least that the guest writes, and be worth it.
	_, sum, err := p.looseRun(use.Loose)
	if err != nil {
		return err
	}
	joined := min(sum, int64(p.r.Spec.DiskMiB)<<20)
	if sum-joined < quotaRoom || p.room()+q.join < joined+quotaRoom {
		return fmt.Errorf("starting %s: %w", p.r.Spec.Name, p.overQuota())
	}
	q.joining = true
	return nil
}

// readQuota reads the limits.
func (p *process) readQuota() error {
	all, err := limits.Read(p.store.Dir())
	m, _ := p.store.Metadata(p.r.Spec.Name) // if it cannot be read, the VM counts for the usual class
	p.quota.limit = all.DiskQuota(p.r.Spec, m.EffectiveClass())
	return err
}

// looseRun returns the neighbours in the VM's disk that take most and can be joined, and what they take, in bytes.
func (p *process) looseRun(loose map[string]bool) (run []string, sum int64, err error) {
	st, err := p.store.Absolute(p.r.Disk)
	if err != nil {
		return nil, 0, err
	}
	var now []string
	var size int64
	for i, path := range st.Layers {
		// The top of a VM that runs is written to.
		if !loose[p.r.Disk.Layers[i]] || p.in != nil && path == st.Top() {
			now, size = nil, 0
			continue
		}
		n, _ := state.DiskUsage(path)
		if now, size = append(now, path), size+n; len(now) > 1 && size > sum {
			run, sum = slices.Clone(now), size
		}
	}
	return run, sum, nil
}

// room returns how many bytes the VM may make the host store, without what is reserved.
func (p *process) room() int64 {
	return p.quota.limit - p.quota.used - p.quota.sleep - p.quota.join - p.quota.pages
}

func (p *process) overQuota() error {
	q := &p.quota
	return fmt.Errorf("%w: of a disk quota of %d MiB it has used %d, and %d are kept for its next sleep and for joining layers: remove snapshots or promoted copies of it, or raise the quota",
		spec.ErrQuota, q.limit>>20, q.used>>20, (q.sleep+q.join)>>20)
}

// startQuota notes which layers are counted when the VM has started.
func (p *process) startQuota() {
	if p.quota.limit == 0 {
		return
	}
	p.quota.counted = map[string]bool{}
	for _, l := range p.in.Disk().Stack().Layers {
		p.quota.counted[l] = true
	}
	// What it writes to its top layer is counted when that is sealed.
	delete(p.quota.counted, p.in.Disk().Stack().Top())
}

// countDisk counts layers that were sealed, and the snapshot in a directory if that is not empty.
func (p *process) countDisk(dir string) (top int64) {
	q := &p.quota
	layers := p.in.Disk().Stack()
	for _, l := range layers.Layers {
		if !q.counted[l] && l != layers.Top() {
			n, _ := state.DiskUsage(l)
			q.used, q.counted[l] = q.used+n, true
		}
	}
	if dir != "" {
		// Other files in it are links to what is counted.
		_, n := state.DiskUsage(dir)
		q.used += n
	}
	top, _ = state.DiskUsage(layers.Top())
	return top
}

// beginCapture keeps room for a snapshot of a VM that runs on. settle gives the disk what is left, and counts the
// snapshot in a directory if that exists. Both do nothing without a quota.
func (p *process) beginCapture(ctx context.Context, live bool) (settle func(dir string), err error) {
	if p.quota.limit == 0 {
		return func(string) {}, nil
	}
	top := p.countDisk("")
	if !live {
		return func(string) {}, nil
	}
	left := func() int64 { return p.room() - top - p.quota.sleep }
	if left() < quotaRoom {
		if err := p.measure(ctx, top, p.quota.sleep+quotaRoom); err != nil {
			return nil, err
		}
	}
	if left() < quotaRoom {
		return nil, p.overQuota()
	}
	if err := p.in.SetDiskRoom(left()); err != nil {
		return nil, err
	}
	return func(dir string) {
		p.countDisk(dir)
		p.giveRoom(0)
	}, nil
}

// beginPromotion returns how many bytes of the host's disk promotions may take, and leaves the guest's disk the least
// meanwhile. settle counts them, and gives the disk what is left.
func (p *process) beginPromotion(ctx context.Context, persist lifetime.Persist) (room int64, settle func(context.Context, []spec.Promoted, error), err error) {
	if p.quota.limit == 0 || len(persist.Promote) == 0 {
		return math.MaxInt64, func(context.Context, []spec.Promoted, error) {}, nil
	}
	top := p.countDisk("")
	// Look in any case: others remove copies, and how much these will take is not known.
	if err := p.measure(ctx, top, quotaRoom+1); err != nil {
		return 0, nil, err
	}
	if room = p.room() - top - quotaRoom; room <= 0 {
		return 0, nil, p.overQuota()
	}
	if err := p.in.SetDiskRoom(quotaRoom); err != nil {
		return 0, nil, err
	}
	return room, func(ctx context.Context, copies []spec.Promoted, err error) {
		if err == nil {
			seen := map[string]bool{}
			for _, c := range copies {
				if dir := strings.TrimSuffix(c.At, c.Path); !seen[dir] {
					n, _ := state.DiskUsage(dir)
					p.quota.used, seen[dir] = p.quota.used+n, true
				}
			}
		} else if p.measure(ctx, p.countDisk(""), 0) != nil { // a part of them may be there
			p.quota.used += room
		}
		p.giveRoom(0)
	}, nil
}

// beginPages keeps room for decompressed pages, which are the first that is given up. settle counts what was written.
// It is not ok while something else goes on, or if there is no room to spare.
func (p *process) beginPages() (left int64, settle func(wrote int64), ok bool) {
	if !p.op.TryLock() {
		return 0, nil, false
	}
	defer p.op.Unlock()
	if p.alive() != nil {
		return 0, nil, false
	}
	// Half of what is left: the guest's disk goes on taking the rest.
	if left = (p.room() - p.countDisk("") - quotaRoom) / 2; left <= 0 {
		return 0, nil, false
	}
	p.quota.pages = left
	p.giveRoom(0)
	return left, func(wrote int64) {
		if p.op.TryLock() { // else a sleep has counted all
			defer p.op.Unlock()
			p.quota.used, p.quota.pages = p.quota.used+wrote, 0
			if p.alive() == nil {
				p.giveRoom(0)
			}
		}
	}, true
}

// measure looks at what the VM has on disk. top is what its top layer takes, which does not count. If there is less
// room than needed, the VM gives up decompressed pages.
func (p *process) measure(ctx context.Context, top, need int64) error {
	use, err := p.store.DiskUse(ctx, p.r)
	if err != nil {
		return err
	}
	p.quota.used = use.Bytes - top
	if p.room()-top >= need || use.PageBytes == 0 {
		return nil
	}
	if err := p.store.ForgetPages(use.Pages); err != nil {
		p.log.Warn("giving up decompressed pages for room in its disk quota", "error", err)
	}
	if use, err = p.store.DiskUse(ctx, p.r); err == nil {
		p.quota.used = use.Bytes - top
	}
	return err
}

// giveRoom gives the guest's disk what is left, and least in any case.
func (p *process) giveRoom(least int64) {
	top := p.countDisk("")
	if err := p.in.SetDiskRoom(max(p.room()-top, least)); err != nil {
		p.log.Warn("telling the VM what its disk may take", "error", err)
	}
}

// maySquash reports whether layers of these sizes may be joined: snapshots keep them, so the joined one comes on top.
func (p *process) maySquash(sizes []int64) bool {
	if p.quota.limit == 0 {
		return true
	}
	left := p.room() - p.countDisk("") - quotaRoom
	for _, n := range sizes {
		left -= n
	}
	return left >= 0
}

// settleSquash counts a layer that was joined of others, which count until others have removed them.
func (p *process) settleSquash() {
	if p.quota.limit == 0 {
		return
	}
	least := int64(0)
	if p.quota.joining { // out of what is reserved for that
		least = quotaRoom
	}
	p.giveRoom(least) // the joined one is in the stack
}

// quotaRetry is how long a VM waits until it tries again to sleep because of its quota.
const quotaRetry = 30 * time.Second

// quotaReached sees to a guest whose write waits: it goes on if there is room, since snapshots were removed or the
// limit raised. Otherwise the VM goes to sleep.
func (p *process) quotaReached() {
	if !p.quota.reached.CompareAndSwap(false, true) {
		return
	}
	p.background.Go(func() {
		defer p.quota.reached.Store(false)
		for p.lasting.Err() == nil {
			again, err := p.makeRoom()
			if err != nil && p.lasting.Err() == nil {
				p.log.Warn("its disk quota is used up, and it cannot sleep", "error", err, "again_after", quotaRetry)
			}
			if !again {
				return
			}
			select {
			case <-p.lasting.Done():
			case <-p.in.Machine().Done():
				return
			case <-time.After(quotaRetry):
			}
		}
	})
}

// makeRoom gives the disk more room, or puts the VM to sleep. It reports whether that must be tried again.
func (p *process) makeRoom() (again bool, err error) {
	more, err := p.lookForRoom()
	if more || err != nil {
		return err != nil, err
	}
	res, err := p.sleep(events.WithCause(p.lasting, events.Quota), spec.HooksSkip, nil)
	switch {
	case errors.Is(err, spec.ErrNotRunning):
		return false, nil
	case err != nil:
		return true, err
	}
	p.log.Warn("gone to sleep, since its disk quota is used up", "snapshot", res.Snapshot, "bytes", res.BytesStored)
	p.end()
	return false, nil
}

func (p *process) lookForRoom() (more bool, err error) {
	p.op.Lock()
	defer p.op.Unlock()
	if p.alive() != nil {
		return false, nil
	}
	if err := p.readQuota(); err != nil {
		return false, err
	}
	if p.quota.limit == 0 { // taken away
		return true, p.in.SetDiskRoom(spec.MaxDiskMiB << 20)
	}
	top := p.countDisk("")
	if err := p.measure(p.lasting, top, quotaRoom); err != nil {
		return false, err
	}
	if left := p.room() - top; left >= quotaRoom {
		return true, p.in.SetDiskRoom(left)
	}
	return false, nil
}
