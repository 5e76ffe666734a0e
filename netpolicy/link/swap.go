package link

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// An endpoint has room for two tables. One is in force, and no program reads the other. A swap fills that one, and
// then puts it into force with a single write. Programs that began before count as runs of the old table
// (entry.go), so the loader knows when the last of them has ended. See docs/adr/0038.

// table is a map with the rows of a policy.
type table struct {
	m    *ebpf.Map // nil if there is no table
	id   ebpf.MapID
	rows int    // capacity
	mem  []byte // the rows: the kernel's memory, shared with the programs
}

// tableFlags are those of the template in bpf/endpoint.c: tables differ in size, and are written without system calls.
const tableFlags = unix.BPF_F_INNER_MAP | unix.BPF_F_MMAPABLE

// share maps the rows of a table. The kernel maps all pages at once, and they stay mapped until close.
func (t *table) share() (err error) {
	if t.mem, err = unix.Mmap(t.m.FD(), 0, t.rows*netpolicy.RowSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("mapping a table of %d rows: %w", t.rows, err)
	}
	return nil
}

// close frees a table. A zero table does nothing.
func (t *table) close() error {
	var err error
	if t.mem != nil {
		err = unix.Munmap(t.mem)
	}
	err = errors.Join(err, t.m.Close())
	*t = table{}
	return err
}

const (
	// maxWriters is how many tables may be replaced by larger ones at once: each has a thread that waits for the
	// kernel.
	maxWriters = 4
	// maxRoom is how many times as much room a table may have as the policy needs. Swap replaces a larger one.
	maxRoom = 4
	// minRoom is the number of rows up to which a table is never too large.
	minRoom = 64
	// quietWithin is how long to wait for runs by a table before asking the kernel to wait for them. A run takes
	// less than a microsecond, unless its processor is taken away.
	quietWithin = 2 * time.Millisecond
	// quietPause is the pause between two looks, after quietLooks without a pause.
	quietPause = 20 * time.Microsecond
	quietLooks = 16
)

// room returns the capacity of a new table for a policy of n rows, with room for a slightly larger policy.
func room(n int) int { return n + n/8 + 8 }

// fits reports whether a policy of n rows fits into a table that is not much too large for it.
func (t *table) fits(n int) bool {
	return t.m != nil && n <= t.rows && (t.rows <= minRoom || t.rows/maxRoom <= n)
}

// newTable makes a table and fills it.
func (e *engine) newTable(s *netpolicy.Spec, gen uint32) (t table, err error) {
	t.rows = room(s.Rows())
	t.m, err = ebpf.NewMap(&ebpf.MapSpec{
		Name: "table", Type: ebpf.Array, KeySize: 4, ValueSize: netpolicy.RowSize, MaxEntries: uint32(t.rows),
		Flags: tableFlags,
	})
	if err != nil {
		return table{}, fmt.Errorf("making a table of %d rows: %w", t.rows, err)
	}
	if t.id, err = mapID(t.m); err == nil {
		err = t.share()
	}
	if err != nil {
		return table{}, errors.Join(err, t.close())
	}
	e.fill(t, s, gen)
	return t, nil
}

// fill writes a policy into a table that no program reads. Rows behind it are unused. A program that finds the
// table in force sees all of it: the system call that puts it into force comes after these writes on x86.
func (e *engine) fill(t table, s *netpolicy.Spec, gen uint32) {
	s.Fill(t.mem, gen, e.place.claim)
}

// install puts a new policy into force. Each packet is judged by exactly one policy, and when install returns the
// old one judges no packet any more.
func (e *engine) install(s *netpolicy.Spec) error { return e.swap(s, func() {}) }

// swap is install with a call of filled once the new table is complete.
func (e *engine) swap(s *netpolicy.Spec, filled func()) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	old, spare := e.which, 1-e.which
	if err := e.owns(old); err != nil {
		return err
	}
	if err := e.prepareSpare(s, spare); err != nil {
		return err
	}
	filled()
	e.gen++
	e.history.AddRules(e.gen, s.RuleNames())
	if err := e.repin(s); err != nil {
		return err
	}
	// Only the lowest byte changes, so a program cannot see a partial write.
	if err := e.current.Put(uint32(0), spare); err != nil {
		return fmt.Errorf("installing a policy: %w", err)
	}
	e.which, e.spec = spare, s
	if err := e.await(old); err != nil {
		return err
	}
	return e.unpinOld()
}

// prepareSpare fills the table that is not in force. It replaces a table that is too small or much too large.
func (e *engine) prepareSpare(s *netpolicy.Spec, spare uint32) error {
	if err := e.owns(spare); err != nil {
		return err
	}
	t := &e.tables[spare]
	if t.fits(s.Rows()) {
		// The last swap waited for these runs already, unless it failed.
		if err := e.await(spare); err != nil {
			return err
		}
		e.fill(*t, s, e.gen+1)
		return nil
	}
	// The kernel frees the old table when no program uses it any more, so there is no need to wait for that.
	e.writers <- struct{}{}
	ended := func() { <-e.writers }
	next, err := e.newTable(s, e.gen+1)
	if err != nil {
		ended()
		return err
	}
	wait, err := publish([]slotMap{{e.shared.policies, e.place.table(spare), next.m}})
	if err != nil {
		ended()
		return errors.Join(err, next.close())
	}
	e.wg.Go(func() {
		_ = wait()
		ended()
	})
	before := *t
	*t = next
	return before.close()
}

// clearSpare removes what a dead endpoint left in the place of the other table.
func (e *engine) clearSpare() error {
	var there ebpf.MapID
	at := e.place.table(1 - e.which)
	err := e.shared.policies.Lookup(at, &there)
	if err == nil {
		err = e.shared.policies.Delete(at)
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("clearing a slot: %w", err)
	}
	return nil
}

// owns checks that the slot still has the endpoint's table, or none if it has none. If the endpoint's pins were
// removed, its slot may belong to another endpoint, and its packets would pass by that endpoint's flows.
func (e *engine) owns(which uint32) error {
	var there ebpf.MapID
	err := e.shared.policies.Lookup(e.place.table(which), &there)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("finding the table: %w", err)
	}
	if there != e.tables[which].id {
		return fmt.Errorf("installing a policy: %w: the endpoint's pins were removed, and its slot is not its own any more", ErrGone)
	}
	return nil
}

// await returns when no packet is judged any more by a table that is not in force.
func (e *engine) await(which uint32) error {
	// Earlier writes must be visible before the counters are read. On x86 only this fence ensures it.
	var fence atomic.Uint32
	fence.Add(1)
	end := time.Now().Add(quietWithin)
	for i := 0; ; i++ {
		quiet, err := e.quiet(which)
		if err != nil || quiet {
			return err
		}
		switch {
		case time.Now().After(end):
			return e.grace()
		case i < quietLooks:
			runtime.Gosched()
		default:
			time.Sleep(quietPause)
		}
	}
}

// quiet reports whether all runs by a table have ended. It reads the ended ones first: each of them was counted as
// begun before.
func (e *engine) quiet(which uint32) (bool, error) {
	_, ended, err := e.runs(which)
	if err != nil {
		return false, err
	}
	begun, _, err := e.runs(which)
	return begun == ended, err
}

// runs returns how many runs by a table have begun and ended.
func (e *engine) runs(which uint32) (begun, ended uint64, err error) {
	var per []bpf.EndpointCounter
	if err := e.counts.Lookup(runsAt+which, &per); err != nil {
		return 0, 0, fmt.Errorf("counting runs: %w", err)
	}
	for _, c := range per {
		begun += c.Packets
		ended += c.Bytes
	}
	return begun, ended, nil
}

// settle returns when all packets that the programs of all endpoints judge at the time of the call have been judged.
func (e *engine) settle() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.owns(e.which); err != nil {
		return err
	}
	return e.grace()
}

// grace makes the kernel wait until every running program has ended, as every write into a map of maps does.
func (e *engine) grace() error {
	if err := e.shared.policies.Put(e.place.table(e.which), e.tables[e.which].m); err != nil {
		return fmt.Errorf("waiting for packets to be judged: %w", err)
	}
	return nil
}
