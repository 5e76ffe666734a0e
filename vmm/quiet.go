package vmm

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// When the agent of a saved guest stands by, the first instructions of the restored one
// are the agent's, and what is asked of it takes a few system calls (package
// devices/handover). A guest that has slept owes much else, though: its timers have
// expired, and devices have news. The interrupts for that would come first, and each
// takes thousands of instructions of its kernel. So they are kept back until the agent
// has answered, and for quietLimit or a little more: a guest whose agent does not answer gets
// them late, and loses none. Devices begin to work only then, too: what they do at
// first is to look at their queues, and the pages of those have to be loaded. What the
// agent may wait for itself is not kept back: block devices.
var quietLimit = 50 * time.Millisecond // a constant but for tests

// When many machines are restored at once, each waits for processors for longer than it
// runs. Time in which this process has hardly run does not count, or the guests that wait
// most would be given ten times as much to do. quietMost bounds it in any case.
const (
	quietMost   = time.Second
	hardlyAtAll = time.Millisecond // of processor time in quietLimit: nothing was waiting for any
)

type quiet struct {
	on bool // of a machine that is being restored

	mu    sync.Mutex
	over  bool
	limit *time.Timer
	begun time.Time
	// The processor time of this process when it began, and at the last look.
	before, looked time.Duration
}

// mayWait says that a device has nothing to do while the machine is quiet.
func (m *Machine) mayWait(t *transport) bool { return m.quiet.on && t.Device().ID() != devices.IDBlock }

// beQuiet keeps the interrupts of devices back. Those of timers have been put off
// as the vCPUs were restored.
func (m *Machine) beQuiet() {
	for _, t := range m.virtio {
		if m.mayWait(t) {
			t.Hold()
		}
	}
}

// limitQuiet is called when the guest starts.
func (m *Machine) limitQuiet() {
	m.quiet.mu.Lock()
	defer m.quiet.mu.Unlock()
	q := &m.quiet
	if q.on && !q.over {
		q.begun, q.before = time.Now(), processorTime()
		q.looked = q.before
		q.limit = time.AfterFunc(quietLimit, m.lookAtQuiet)
	}
}

// lookAtQuiet ends the quiet time, unless the machine has lacked a processor.
func (m *Machine) lookAtQuiet() {
	if !m.quiet.more(time.Now(), processorTime()) {
		m.EndQuiet()
	}
}

// more gives the machine another quietLimit if it has not had that much of processors yet and
// goes on, so that somebody else must have them.
func (q *quiet) more(now time.Time, used time.Duration) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	since := used - q.looked
	q.looked = used
	if q.over || since < hardlyAtAll || used-q.before >= quietLimit || now.Sub(q.begun) >= quietMost {
		return false
	}
	q.limit.Reset(quietLimit)
	return true
}

// processorTime is what this process has used, guests included.
func processorTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// EndQuiet lets a machine that has been restored go on in full, if it does not yet: all
// devices are at work when it returns. It happens by itself, soon; this is for whoever is about to need
// them. It may be called at any time, on any goroutine.
func (m *Machine) EndQuiet() {
	m.quiet.mu.Lock()
	defer m.quiet.mu.Unlock()
	if !m.quiet.on || m.quiet.over {
		return
	}
	m.quiet.over = true
	if m.quiet.limit != nil {
		m.quiet.limit.Stop()
	}
	for _, t := range m.virtio {
		if !m.mayWait(t) {
			continue
		}
		if err := t.restart(); err != nil {
			m.finish(Exit{Reason: HostError, VCPU: -1, Detail: err.Error(), Err: err})
			return
		}
		t.Release()
	}
	m.gate.mu.Lock()
	defer m.gate.mu.Unlock()
	if m.gate.stopped {
		return
	}
	for _, c := range m.cpus {
		if c.putOff != (kvm.PutOff{}) {
			c.due = true
			// If this fails, the timer comes at the end of the quiet time.
			_ = c.callOut()
		}
	}
}

// dropQuiet is called when nothing will be delivered any more.
func (m *Machine) dropQuiet() {
	m.quiet.mu.Lock()
	defer m.quiet.mu.Unlock()
	m.quiet.over = true
	if m.quiet.limit != nil {
		m.quiet.limit.Stop()
	}
}

// timerDue gives a timer that was put off its deadline again. The vCPU is called out, and
// the gate's lock is held.
func (c *cpu) timerDue() {
	if !c.due {
		return
	}
	_ = c.kvm.Undo(c.putOff) // as above
	c.putOff, c.due = kvm.PutOff{}, false
}
