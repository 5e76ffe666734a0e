package vmm

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A guest that loops with interrupts off answers nothing and never ends. watch looks at the CPU time of each vCPU
// thread, which costs next to nothing, and looks at the flags of a vCPU only if it is busy. A look that finds
// interrupts off says little where the kernel's own handlers are slow. So watch also asks KVM whether the vCPU has
// taken any interrupt since the last look: a vCPU that has is not hung.
const (
	defaultWatchInterval = time.Second
	// A vCPU is busy if it uses busyShare of the interval. On a crowded host a looping vCPU gets less than a whole
	// CPU.
	busyShare = 0.2
	// The guest counts as hung after more than hungAfter looks in a row with interrupts off and none taken. A
	// healthy kernel keeps interrupts off for far less than one second, even where its code is interpreted.
	hungAfter = 10
)

// Health is the machine's judgement of its guest.
type Health struct {
	// Hung is set while a vCPU loops with interrupts off.
	Hung bool
	// Detail says which vCPU, where and for how long; empty unless Hung.
	Detail string
}

type health struct {
	mu  sync.Mutex
	now Health
}

// Health returns the result of the last look at the guest.
func (m *Machine) Health() Health {
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	return m.health.now
}

func (m *Machine) setHealth(h Health) {
	m.health.mu.Lock()
	changed := m.health.now.Hung != h.Hung
	m.health.now = h
	m.health.mu.Unlock()
	if changed && h.Hung {
		m.log.Warn("guest is hung", "detail", h.Detail)
	} else if changed {
		m.log.Info("guest is no longer hung")
	}
}

// watched is the result of the looks at a vCPU so far.
type watched struct {
	cpuTime time.Duration
	looks   int       // in a row with interrupts off and none taken
	since   time.Time // of the first of them
	taken   uint64    // interrupts, as of the last of them
}

// watch looks at the vCPUs about once a second until the machine ends. It varies the time between two looks: if
// that were a multiple of the guest's tick, each look would find the guest at the same place, say in the tick's
// handler.
func (m *Machine) watch() {
	next := func() time.Duration {
		return m.watchInterval*3/4 + rand.N(m.watchInterval/2)
	}
	timer := time.NewTimer(next())
	defer timer.Stop()
	cpus := make([]watched, len(m.cpus))
	last := time.Now()
	for {
		select {
		case <-m.ended:
			return
		case <-timer.C:
		}
		passed := time.Since(last)
		last = last.Add(passed)
		var h Health
		for i, c := range m.cpus {
			w := &cpus[i]
			now := threadTime(int(c.tid.Load()))
			busy := now-w.cpuTime >= time.Duration(float64(passed)*busyShare)
			w.cpuTime = now
			if !busy {
				w.looks = 0
				continue
			}
			s := m.look(c, false)
			const interruptFlag = 1 << 9
			if s == nil || s.rflags&interruptFlag != 0 {
				w.looks = 0
				continue
			}
			if w.looks == 0 || s.taken != w.taken {
				*w = watched{cpuTime: now, since: last, taken: s.taken}
			}
			w.looks++
			if w.looks > hungAfter {
				h = Health{Hung: true, Detail: fmt.Sprintf("vCPU %d has been looping with interrupts off for %v, now at %s: it will not answer; remove the VM or restore a snapshot",
					c.kvm.ID(), last.Sub(w.since).Round(time.Millisecond), m.location(s.rip))}
			}
		}
		m.setHealth(h)
		timer.Reset(next())
	}
}

// look calls a vCPU out of the guest and returns its instruction pointer and flags, or nil when it is not running. If
// deep is set it also returns words of the kernel's stack.
func (m *Machine) look(c *cpu, deep bool) *sample {
	s := &sample{deep: deep, done: make(chan struct{})}
	g := &m.gate
	g.mu.Lock()
	if !g.run || g.stopped || c.parked || c.sample != nil {
		g.mu.Unlock()
		return nil
	}
	c.sample = s
	err := c.callOut()
	g.mu.Unlock()
	if err != nil {
		return nil
	}
	select {
	case <-s.done:
		return s
	case <-m.ended:
		return nil
	}
}

// threadTime returns the CPU time of a thread of this process (clock_getres(2), the encoding of per-thread clock
// ids).
func threadTime(tid int) time.Duration {
	const perThreadCPU = 6
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^tid<<3|perThreadCPU), &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}
