package capture

import (
	"context"
	"os"
	"sync"

	"github.com/drowse-vm/drowse/guest/agent/machine"
	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Config says what a Standby is part of. All but Report are required.
type Config struct {
	Machine machine.Machine
	Ports   Ports
	HookDir string
	Procs   *proc.Table
	// Woken is called when the machine finds itself restored. It allocates nothing.
	Woken func()
	// Report, when set, is called when hooks have appeared or are all gone. It
	// returns when the host knows.
	Report func(present bool) error
}

// Standby has the machine ready to be captured, and brings it up to date when it has been restored.
type Standby struct {
	config Config

	mu     sync.Mutex // serialises what changes the machine
	bootID string     // the latest identity; "" is the kernel's own
	// handover is the message of a Handover, here since the wake path allocates nothing.
	handover struct {
		raw     [agentpb.HandoverSize]byte
		message agentpb.Handover
	}

	hooks     hooks
	hookWatch *hookWatch // nil: the host asks whenever it must know
	freeze    freeze
}

// New makes one, which watches for hooks if there is somebody to tell.
func New(c Config) *Standby {
	s := &Standby{config: c}
	if c.Report != nil {
		// Without it there would be hooks that nobody runs.
		var err error
		if s.hookWatch, err = watchHooks(c.HookDir, c.Report); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		}
	}
	return s
}

// BootID returns the boot id, read from the kernel once.
func (s *Standby) BootID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bootID == "" {
		s.bootID = machine.BootID()
	}
	return s.bootID
}

// Trim has the machine trim its disk, not while it is changed otherwise.
func (s *Standby) Trim() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.config.Machine.Trim()
}

// Settle tells the host whether there are hooks, if what has been done by now has changed that.
func (s *Standby) Settle() { s.hookWatch.settle() }

// Close lets the guest go on that is frozen, and ends the watch for hooks.
func (s *Standby) Close() {
	s.thawLate()
	s.hookWatch.close()
}

// Resume implements agentpb.AgentService. It is the wake path.
func (s *Standby) Resume(_ context.Context, m *agentpb.ResumeRequest) (*agentpb.ResumeResponse, error) {
	s.mu.Lock()
	err := s.update(m.WallNanos, m.Entropy, m.NewIdentity, m.Hostname)
	id := s.bootID
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	out := &agentpb.ResumeResponse{}
	if m.NewIdentity {
		out.BootId = id
	}
	// A guest without hooks spends no system call on them here. One that was
	// captured while frozen must not stay so.
	out.HooksWait, out.Hooks = s.hooksState()
	if s.freeze.active.Load() {
		s.thawLate()
	}
	return out, nil
}

// hooksState says whether hooks wait for their counterpart, and whether there may be any.
func (s *Standby) hooksState() (waiting, present bool) {
	return s.hooks.waiting.Load(), s.hookWatch == nil || s.hookWatch.present.Load()
}

// SetClock implements agentpb.AgentService.
func (s *Standby) SetClock(_ context.Context, m *agentpb.SetClockRequest) (*agentpb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &agentpb.Empty{}, s.config.Machine.SetClock(m.WallNanos)
}

// AddEntropy implements agentpb.AgentService.
func (s *Standby) AddEntropy(_ context.Context, m *agentpb.AddEntropyRequest) (*agentpb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &agentpb.Empty{}, s.config.Machine.AddEntropy(m.Entropy)
}
