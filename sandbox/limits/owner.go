package limits

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Owner limits what the sandboxes of one owner may use together. A field of 0 is no limit.
type Owner struct {
	// Sandboxes is how many there may be, in any phase.
	Sandboxes int `json:"sandboxes,omitempty"`
	// Awake is how many may be awake at once, and AwakeMiB how much RAM these may have.
	Awake    int `json:"awake,omitempty"`
	AwakeMiB int `json:"awake_mib,omitempty"`
	// DiskMiB is what their layers and snapshots may take on disk before they are refused more: see
	// state.Store.AdmitDisk. Sandboxes that are awake may write beyond it, and sleep.
	DiskMiB int `json:"disk_mib,omitempty"`
	// EgressMiBPerDay is what their guests may send to the network in a day, UTC. Beyond it, the networks of all of
	// them deny everything until the day is over. VMs count once a minute, and what they sent since is not refused.
	EgressMiBPerDay int `json:"egress_mib_per_day,omitempty"`
}

// MaxOwnerLimit bounds each field of Owner.
const MaxOwnerLimit = 1 << 30

func (o Owner) validate(whose string) error {
	for what, n := range map[string]int{"sandboxes": o.Sandboxes, "awake": o.Awake, "awake_mib": o.AwakeMiB, "disk_mib": o.DiskMiB, "egress_mib_per_day": o.EgressMiBPerDay} {
		if n < 0 || n > MaxOwnerLimit {
			return fmt.Errorf("%w: %s of %s is %d: 0 (no limit) to %d", ErrLimits, what, whose, n, MaxOwnerLimit)
		}
	}
	return nil
}

// String returns the limits in one line.
func (o Owner) String() string {
	var all []string
	for _, f := range []struct {
		n    int
		what string
	}{{o.Sandboxes, "sandboxes"}, {o.Awake, "awake"}, {o.AwakeMiB, "MiB awake"}, {o.DiskMiB, "MiB of disk"}, {o.EgressMiBPerDay, "MiB sent a day"}} {
		if f.n > 0 {
			all = append(all, fmt.Sprintf("%d %s", f.n, f.what))
		}
	}
	return cmp.Or(strings.Join(all, ", "), "no limit")
}

// OwnerUse is what the sandboxes of an owner use.
type OwnerUse struct {
	Sandboxes int `json:"sandboxes"`
	Awake     int `json:"awake"`
	AwakeMiB  int `json:"awake_mib"`
	DiskMiB   int `json:"disk_mib"`
	EgressMiB int `json:"egress_mib"` // today
}

// Of returns the limits of an owner; "" is that of sandboxes without one.
func (l Limits) Of(owner string) Owner {
	if owner == spec.TemplateOwner {
		return Owner{} // what all share counts for nobody
	}
	if o, named := l.Owners[owner]; named {
		return o
	}
	return l.DefaultOwner
}

// The ledger of an owner is the file owners/HASH.lock. Each awake VM of the owner locks as many bytes as it has MiB of
// RAM, from the beginning of a slot on. As in the ledger of the host's memory, the locks end with their process.
const (
	ownerLedgers = "owners"

	ledgerSlot = int64(1) << 24 // bytes of a slot: no VM has as many MiB

	// ledgerPatience is how long a start waits at least: others hold the ledger for moments, while they count.
	ledgerPatience = 100 * time.Millisecond

	// ledgerCreate is held while the owner's sandboxes are counted and one is made.
	ledgerCreate = ledgerMemory + 3
)

func ownerLedger(dir, owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return filepath.Join(dir, ownerLedgers, hex.EncodeToString(sum[:16])+".lock")
}

func openOwner(dir, owner string) (*ledger, error) {
	path := ownerLedger(dir, owner)
	l, err := openLedger(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return l, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	return openLedger(path)
}

// AdmitOwner waits until an owner may have one more VM of mib MiB awake, and counts it until release is called or
// this process has ended. VMs without limits are counted too, for limits that come later. Waiters queue as in
// AdmitMemory, and only behind VMs of the same owner. AdmitOwner fails with spec.ErrQuota if no other VM of the owner
// sleeps or ends within MemoryWaitSeconds, or if the VM is larger than the limit.
func AdmitOwner(ctx context.Context, dir, owner string, mib int, wake bool) (release func() error, err error) {
	limits, err := Read(dir)
	if err != nil {
		return nil, err
	}
	may := limits.Of(owner)
	if may.AwakeMiB > 0 && mib > may.AwakeMiB {
		return nil, fmt.Errorf("%w: %s may have %d MiB of RAM awake, and this one has %d: give it less, or raise the limit with Limits.Write",
			spec.ErrQuota, ownerName(owner), may.AwakeMiB, mib)
	}
	l, err := openOwner(dir, owner)
	if err != nil {
		return nil, fmt.Errorf("counting awake sandboxes of %s: %w", ownerName(owner), err)
	}
	if err := l.admit(ctx, may, mib, wake, time.Duration(limits.MemoryWaitSeconds)*time.Second); err != nil {
		if errors.Is(err, spec.ErrQuota) {
			n, used, uerr := l.slots()
			err = errors.Join(fmt.Errorf("%w: %s has %d awake with %d MiB, this one has %d MiB, and the limit is %s, and none slept or ended within %d s: put some to sleep, or raise the limit with Limits.Write",
				spec.ErrQuota, ownerName(owner), n, used, mib, Owner{Awake: may.Awake, AwakeMiB: may.AwakeMiB}, limits.MemoryWaitSeconds), uerr)
		} else {
			err = fmt.Errorf("counting awake sandboxes of %s: %w", ownerName(owner), err)
		}
		return nil, errors.Join(err, l.f.Close())
	}
	return l.f.Close, nil
}

func ownerName(owner string) string {
	if owner == "" {
		return "sandboxes without an owner"
	}
	return fmt.Sprintf("owner %q", owner)
}

// admit takes a slot. It fails with spec.ErrQuota if there is none in time.
func (l *ledger) admit(ctx context.Context, may Owner, mib int, wake bool, patience time.Duration) error {
	if may.Awake == 0 && may.AwakeMiB == 0 {
		return l.await(ctx, func() (bool, error) { return l.takeSlot(mib) })
	}
	ctx, cancel := context.WithTimeoutCause(ctx, max(patience, ledgerPatience), spec.ErrQuota)
	defer cancel()
	queue := ledgerBoots
	if wake {
		queue = ledgerWakes
	}
	if err := l.await(ctx, func() (bool, error) { return l.lock(queue, 1) }); err != nil {
		return err
	}
	if err := l.await(ctx, func() (bool, error) { return l.takeWithin(may, mib) }); err != nil {
		return err
	}
	return l.unlock(queue, 1)
}

// takeWithin takes a slot if the limits allow one more.
func (l *ledger) takeWithin(may Owner, mib int) (ok bool, err error) {
	if ok, err := l.lock(ledgerTake, 1); err != nil || !ok {
		return false, err
	}
	defer func() { err = errors.Join(err, l.unlock(ledgerTake, 1)) }()
	n, used, err := l.slots()
	if err != nil || may.Awake > 0 && n >= may.Awake || may.AwakeMiB > 0 && used+int64(mib) > int64(may.AwakeMiB) {
		return false, err
	}
	return l.takeSlot(mib)
}

// takeSlot takes a random slot, unless another VM has it. That costs the same however many there are.
func (l *ledger) takeSlot(mib int) (bool, error) {
	return l.lock(rand.Int64N(ledgerMemory/ledgerSlot)*ledgerSlot, min(max(int64(mib), 1), ledgerSlot))
}

// slots returns how many slots others have taken, and their bytes.
func (l *ledger) slots() (n int, mib int64, err error) {
	for at := int64(0); ; n++ {
		begin, after, err := l.taken(at, ledgerMemory)
		if err != nil || begin == ledgerMemory {
			return n, mib, err
		}
		mib += after - begin
		at = after
	}
}

// OwnerAwake returns how many VMs of an owner are awake, and how many MiB of RAM they have. They count for the owner
// that they had when they started.
func OwnerAwake(dir, owner string) (n int, mib int64, err error) {
	l, err := openOwner(dir, owner)
	if err != nil {
		return 0, 0, fmt.Errorf("counting awake sandboxes of %s: %w", ownerName(owner), err)
	}
	defer l.f.Close()
	return l.slots()
}

// createPatience is how long a creation waits for others of the same owner, each of which takes milliseconds.
const createPatience = time.Minute

// AdmitSandbox admits one more sandbox of an owner, if count finds fewer than there may be; else it fails with
// spec.ErrQuota. Until the caller has made it and calls release, no other sandbox of the owner is admitted. Without a
// limit, AdmitSandbox does not count.
func AdmitSandbox(dir, owner string, count func() (int, error)) (release func() error, err error) {
	limits, err := Read(dir)
	if err != nil {
		return nil, err
	}
	may := limits.Of(owner)
	if may.Sandboxes == 0 {
		return func() error { return nil }, nil
	}
	l, err := openOwner(dir, owner)
	if err != nil {
		return nil, fmt.Errorf("counting sandboxes of %s: %w", ownerName(owner), err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), createPatience)
	defer cancel()
	n := 0
	if err = l.await(ctx, func() (bool, error) { return l.lock(ledgerCreate, 1) }); err == nil {
		n, err = count()
	}
	switch {
	case err != nil:
		err = fmt.Errorf("counting sandboxes of %s: %w", ownerName(owner), err)
	case n >= may.Sandboxes:
		err = fmt.Errorf("%w: %s has %d sandboxes, and may have %d: remove some, or raise the limit with Limits.Write",
			spec.ErrQuota, ownerName(owner), n, may.Sandboxes)
	default:
		return l.f.Close, nil
	}
	return nil, errors.Join(err, l.f.Close())
}

// CheckDisk fails with spec.ErrQuota if what an owner's sandboxes take on disk has reached the limit. used returns
// that in bytes; without a limit, CheckDisk does not call it.
func CheckDisk(dir, owner string, used func() (int64, error)) error {
	limits, err := Read(dir)
	if err != nil {
		return err
	}
	may := int64(limits.Of(owner).DiskMiB) << 20
	if may == 0 {
		return nil
	}
	n, err := used()
	if err != nil {
		return fmt.Errorf("adding up what %s has on disk: %w", ownerName(owner), err)
	}
	if n >= may {
		return fmt.Errorf("%w: %s has %d MiB on disk, and may have %d: remove snapshots or sandboxes, or raise the limit with Limits.Write",
			spec.ErrQuota, ownerName(owner), n>>20, may>>20)
	}
	return nil
}
