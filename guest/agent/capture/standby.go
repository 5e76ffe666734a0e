package capture

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest/agent/machine"
	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Config describes a Standby's surroundings. All fields but Report are required.
type Config struct {
	Machine machine.Machine
	Ports   Ports
	HookDir string
	Procs   *proc.Table
	// Woken is called when the machine finds itself restored. It must not allocate.
	Woken func()
	// Report, when set, is called when hooks have appeared or the last one has gone. It returns when the host
	// knows.
	Report func(present bool) error
}

// Standby prepares the machine for a capture, and brings it up to date after a restore.
type Standby struct {
	config Config

	mu     sync.Mutex // serialises changes to the machine
	bootID string     // the latest identity; "" means the kernel's own
	// handover is the message of a Handover, kept here because the wake path allocates nothing.
	handover struct {
		raw     [agentpb.HandoverSize]byte
		message agentpb.Handover
	}

	hooks     hooks
	hookWatch *hookWatch // nil: the host has to ask each time
	freeze    freeze
}

// New makes a Standby. It watches for hooks if c.Report is set.
func New(c Config) *Standby {
	s := &Standby{config: c}
	if c.Report != nil {
		// Without the watch the host would miss hooks.
		var err error
		if s.hookWatch, err = watchHooks(c.HookDir, c.Report); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
		}
	}
	return s
}

// BootID returns the boot id. It reads it from the kernel once.
func (s *Standby) BootID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bootID == "" {
		s.bootID = machine.BootID()
	}
	return s.bootID
}

// Trim makes the machine trim its disk. It excludes other changes to the machine.
func (s *Standby) Trim() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.config.Machine.Trim()
}

// Settle tells the host whether there are hooks, if anything up to now has changed that.
func (s *Standby) Settle() { s.hookWatch.settle() }

// Close thaws a frozen guest, and ends the watch for hooks.
func (s *Standby) Close() {
	s.thawLate()
	s.hookWatch.close()
}

// Resume implements agentpb.AgentService. It is the wake path.
func (s *Standby) Resume(_ context.Context, m *agentpb.ResumeRequest) (*agentpb.ResumeResponse, error) {
	asOf := time.Now() // when the request came
	s.mu.Lock()
	err := s.update(m.WallNanos, asOf, m.Entropy, m.NewIdentity, m.Hostname)
	id := s.bootID
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	out := &agentpb.ResumeResponse{}
	if m.NewIdentity {
		out.BootId = id
	}
	// A guest without hooks makes no system call for them here. A guest that was captured while frozen must not
	// stay frozen.
	out.HooksWait, out.Hooks = s.hooksState()
	if s.freeze.active.Load() {
		s.thawLate()
	}
	return out, nil
}

// hooksState reports whether hooks wait for their counterpart, and whether there may be any.
func (s *Standby) hooksState() (waiting, present bool) {
	return s.hooks.waiting.Load(), s.hookWatch == nil || s.hookWatch.present.Load()
}
