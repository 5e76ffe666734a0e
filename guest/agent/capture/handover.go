package capture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Ports are the handover ports of the machine. One thread uses them, between Open and Close.
type Ports interface {
	// Open gives the calling thread access to the ports, and as far as possible keeps everything else from running
	// on its CPU.
	Open() error
	// Close undoes Open.
	Close()
	// Command writes the command register.
	Command(v byte)
	// Wait reads the status register until it is not StatusWait.
	Wait() byte
	// Message reads the data register.
	Message(p *[agentpb.HandoverSize]byte)
}

// errNoHandover means that no host waits at the ports.
var errNoHandover = errors.New("the host does not wait at the handover ports")

// Handover implements agentpb.AgentService. The host captures the machine while Handover waits. In a restored
// machine it then runs the wake path, on which it allocates nothing and wakes no thread, and every system call
// counts.
func (s *Standby) Handover(context.Context, *agentpb.HandoverRequest) (*agentpb.HandoverResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// In a restored machine that denies access to the ports, they cause a general protection fault: an error of
	// this call, not the end of the machine's init.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	p := s.config.Ports
	if err := p.Open(); err != nil {
		return nil, fmt.Errorf("open the handover ports: %w", err)
	}
	defer p.Close()
	// Touch the buffer's page: one instruction reads the message, and a page fault would restart it after the
	// device has moved on.
	clear(s.handover.raw[:])
	p.Command(agentpb.CommandStandBy)
	switch status := p.Wait(); status {
	case agentpb.StatusGoOn:
		return &agentpb.HandoverResponse{}, nil
	case agentpb.StatusResumed:
		asOf := time.Now() // the host's time is that of the next instruction
		p.Message(&s.handover.raw)
		m := &s.handover.message
		err := m.Decode(&s.handover.raw)
		if err == nil {
			err = s.update(m.WallNanos, asOf, m.Entropy[:], m.NewIdentity, m.Hostname)
		}
		clear(s.handover.raw[:])
		clear(m.Entropy[:])
		if err != nil {
			// The host falls back to Resume, and gets the error there if it persists.
			p.Command(agentpb.CommandFailed)
			os.Stderr.WriteString("drowse-agent: handover: " + err.Error() + "\n")
			return nil, err
		}
		if waiting, present := s.hooksState(); waiting || present {
			p.Command(agentpb.CommandAsk)
		} else {
			p.Command(agentpb.CommandDone)
		}
		if s.freeze.active.Load() {
			s.thawLate()
		}
		return &agentpb.HandoverResponse{}, nil
	default:
		return nil, fmt.Errorf("status %d: %w", status, errNoHandover)
	}
}

// update brings the machine up to date. Time 0, which is that of asOf, leaves the clock; no entropy adds none. The
// caller holds s.mu.
func (s *Standby) update(wallNanos int64, asOf time.Time, entropy []byte, newIdentity bool, hostname string) error {
	s.config.Woken()
	// The clock comes first: the host's time is already a moment old.
	if wallNanos != 0 {
		if err := s.config.Machine.SetClock(wallNanos, asOf); err != nil {
			return err
		}
	}
	if len(entropy) > 0 {
		if err := s.config.Machine.AddEntropy(entropy); err != nil {
			return err
		}
	}
	if !newIdentity {
		return nil
	}
	id, err := s.config.Machine.NewIdentity(hostname)
	if err == nil {
		s.bootID = id
	}
	return err
}
