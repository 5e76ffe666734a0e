package vmm

import (
	"sync"
	"sync/atomic"
	"time"
)

// Stage names a step in the life of a machine that is timed.
type Stage int

// The steps that are timed, in the order in which they occur.
const (
	// Of a prebuilt VM, which is made in the background.
	StageCreateVM Stage = iota
	StageMemory
	StageIRQChip
	StageVCPUs
	// Of a saved machine, while its devices are put together.
	StageKVMState

	StagePrebuilt // what New has waited for it
	StageDevices
	StageLoad   // kernel loaded
	StageImport // saved state loaded
	StageEntry  // from the end of the last step to the first KVM_RUN
	StagePause
	// From the first KVM_RUN until the agent of a restored guest asks what there is to
	// do, and from there until it has done it (package devices/handover).
	StageAgentReached
	StageAgentAnswer
	stageCount
)

var stageNames = [stageCount]string{
	"create_vm", "memory", "irqchip", "vcpus", "kvm_state", "prebuilt", "devices", "load", "import", "entry", "pause",
	"agent_reached", "agent_answer",
}

// Background says that the step took place while other things were done.
func (s Stage) Background() bool { return s <= StageKVMState }

// InGuest says that the step is the guest's own, after its first instruction.
func (s Stage) InGuest() bool { return s == StageAgentReached || s == StageAgentAnswer }

func (s Stage) String() string { return stageNames[s] }

// Stages are durations of the steps that a machine has gone through, from
// monotonic timestamps taken where they end.
type Stages struct {
	once    atomic.Bool
	mu      sync.Mutex
	started time.Time
	last    time.Time
	d       [stageCount]time.Duration
	entry   time.Time
	guest   time.Time     // the end of the guest's last step
	inside  chan struct{} // closed at the first KVM_RUN
}

func (s *Stages) begin() {
	s.started, s.inside = time.Now(), make(chan struct{})
	s.last = s.started
}

// mark ends a step that began when the last one ended.
func (s *Stages) mark(stage Stage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.d[stage] = now.Sub(s.last)
	s.last = now
}

// since ends a step of the guest's own, which goes on while the host does other things.
func (s *Stages) since(stage Stage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.guest.IsZero() {
		s.guest = s.entry
	}
	s.d[stage] = now.Sub(s.guest)
	s.guest = now
}

func (s *Stages) set(stage Stage, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.d[stage] = d
}

// entered is called before every KVM_RUN; the first counts.
func (s *Stages) entered() {
	if s.once.Load() || s.once.Swap(true) {
		return
	}
	s.mark(StageEntry)
	s.mu.Lock()
	s.entry = s.last
	s.mu.Unlock()
	close(s.inside)
}

// Entry is when the first vCPU entered the guest for the first time, zero before.
func (s *Stages) Entry() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entry
}

// Durations returns the steps that have been gone through.
func (s *Stages) Durations() map[Stage]time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[Stage]time.Duration, stageCount)
	for i, d := range s.d {
		if d != 0 {
			out[Stage(i)] = d
		}
	}
	return out
}
