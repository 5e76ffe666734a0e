package vmm

import (
	"sync"
	"sync/atomic"
	"time"
)

// Stage is a timed step in the life of a machine.
type Stage int

// The timed steps, in the order in which they occur.
const (
	// Of a prebuilt VM, which is made in the background.
	StageCreateVM Stage = iota
	StageMemory
	StageIRQChip
	StageVCPUs
	// Of a saved machine, while the caller makes its devices.
	StageKVMState

	StagePrebuilt // how long New waited for the prebuilt VM
	StageDevices
	StageLoad   // kernel loaded
	StageImport // saved state loaded
	StageEntry  // from the end of the last step to the first KVM_RUN
	StagePause
	// From the first KVM_RUN until the agent of a restored guest asks what to do, and from there until it has done
	// that (package devices/handover).
	StageAgentReached
	StageAgentAnswer
	stageCount
)

var stageNames = [stageCount]string{
	"create_vm", "memory", "irqchip", "vcpus", "kvm_state", "prebuilt", "devices", "load", "import", "entry", "pause",
	"agent_reached", "agent_answer",
}

// Background reports whether the step ran in the background, beside other work.
func (s Stage) Background() bool { return s <= StageKVMState }

// InGuest reports whether the step is the guest's own, after its first instruction.
func (s Stage) InGuest() bool { return s == StageAgentReached || s == StageAgentAnswer }

func (s Stage) String() string { return stageNames[s] }

// Stages are the durations of the steps that a machine has gone through, from monotonic timestamps at their ends.
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

// mark ends a step that began when the last step ended.
func (s *Stages) mark(stage Stage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.d[stage] = now.Sub(s.last)
	s.last = now
}

// since ends a step of the guest's own, which runs while the host does other work.
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

// entered must be called before every KVM_RUN; only the first call counts.
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

// Entry returns when the first vCPU entered the guest for the first time; zero before that.
func (s *Stages) Entry() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entry
}

// Durations returns the durations of the steps that the machine has gone through.
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

// ByName returns Durations by the names of the steps.
func (s *Stages) ByName() map[string]time.Duration {
	out := make(map[string]time.Duration, stageCount)
	for stage, d := range s.Durations() {
		out[stage.String()] = d
	}
	return out
}
