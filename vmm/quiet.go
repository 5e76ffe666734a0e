package vmm

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// When the agent of a saved guest stands by, the first instructions of the restored guest are the agent's, and the
// agent's task takes a few system calls (package devices/handover). But a guest that has slept has other work
// waiting: its timers have expired, and devices have news. Those interrupts would come first, and each takes
// thousands of instructions of the guest's kernel. So the machine keeps them back until the agent has answered, or
// for quietLimit or a little more: a guest whose agent does not answer gets them late and loses none. Devices start
// only then, too, because they look at their queues first, and a pager must load those pages. Block devices are not
// kept back: the agent may wait for them.
var quietLimit = 50 * time.Millisecond // a constant but for tests

// When many machines are restored at once, each waits for processors for longer than it runs. So the limit counts
// the processor time of this process; otherwise the guests that wait most would have ten times as much to do. A
// process that uses hardly any has nothing to run: its quiet time ends. quietMost is the limit in any case.
const (
	quietMost   = time.Second
	hardlyAtAll = time.Millisecond // processor time in quietLimit of a process with nothing to run
)

type quiet struct {
	on bool // the machine was restored and its agent stands by

	mu    sync.Mutex
	over  bool
	limit *time.Timer
	begun time.Time
	// Processor time of this process when the quiet time began, and at the last look.
	before, looked time.Duration
}

// mayWait reports whether a device must not work while the machine is quiet.
func (m *Machine) mayWait(t *transport) bool { return m.quiet.on && t.Device().ID() != devices.IDBlock }

// beQuiet keeps the interrupts of devices back. Import has already put off those of timers.
func (m *Machine) beQuiet() {
	for _, t := range m.virtio {
		if m.mayWait(t) {
			t.Hold()
		}
	}
}

// limitQuiet starts the limit of the quiet time, when the guest starts.
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

// lookAtQuiet ends the quiet time, unless other processes have kept the machine from running.
func (m *Machine) lookAtQuiet() {
	if !m.quiet.more(time.Now(), processorTime()) {
		m.EndQuiet()
	}
}

// more gives the machine another quietLimit if its process has used some processor time since the last look but
// less than quietLimit in all: it is running, and something else has the processors.
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

// processorTime returns the processor time that this process has used, guests included.
func processorTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// EndQuiet ends the quiet time of a restored machine: all devices are at work when it returns. This soon happens
// without EndQuiet; a caller that is about to need the devices calls it. Any goroutine may call it at any time.
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
	if err := m.serial.Resume(); err != nil {
		m.finish(Exit{Reason: HostError, VCPU: -1, Detail: err.Error(), Err: err})
		return
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

// dropQuiet ends the quiet time of a machine that will deliver nothing any more.
func (m *Machine) dropQuiet() {
	m.quiet.mu.Lock()
	defer m.quiet.mu.Unlock()
	m.quiet.over = true
	if m.quiet.limit != nil {
		m.quiet.limit.Stop()
	}
}

// timerDue gives a timer that was put off its own deadline again. The vCPU thread calls it outside the guest,
// holding the gate's lock.
func (c *cpu) timerDue() {
	if !c.due {
		return
	}
	_ = c.kvm.Undo(c.putOff) // as above
	c.putOff, c.due = kvm.PutOff{}, false
}
