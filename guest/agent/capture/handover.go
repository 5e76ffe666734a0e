package capture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Ports are the handover ports of the machine. They are used from one thread, with
// Open before and Close after.
type Ports interface {
	// Open gives the calling thread the ports, and keeps everything else from running
	// on its CPU as far as that is possible.
	Open() error
	// Close undoes Open.
	Close()
	// Command writes the command register.
	Command(v byte)
	// Wait reads the status register until that is not StatusWait.
	Wait() byte
	// Message reads the data register.
	Message(p *[agentpb.HandoverSize]byte)
}

// errNoHandover says that nobody waits at the ports.
var errNoHandover = errors.New("the host does not wait at the handover ports")

// Handover implements agentpb.AgentService. The machine is captured while it waits. When
// it finds itself in a restored machine it has the wake path before it, on which nothing
// is allocated, nobody is woken, and every system call counts.
func (s *Standby) Handover(context.Context, *agentpb.HandoverRequest) (*agentpb.HandoverResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Ports that a restored machine does not let us have make a general protection fault:
	// an error of this call, not the end of the machine's init.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	p := s.config.Ports
	if err := p.Open(); err != nil {
		return nil, fmt.Errorf("open the handover ports: %w", err)
	}
	defer p.Close()
	// The one instruction that reads the message must not meet a page that is not there: it
	// would begin again where the device has gone on.
	clear(s.handover.raw[:])
	p.Command(agentpb.CommandStandBy)
	switch status := p.Wait(); status {
	case agentpb.StatusGoOn:
		return &agentpb.HandoverResponse{}, nil
	case agentpb.StatusResumed:
		p.Message(&s.handover.raw)
		m := &s.handover.message
		err := m.Decode(&s.handover.raw)
		if err == nil {
			err = s.update(m.WallNanos, m.Entropy[:], m.NewIdentity, m.Hostname)
		}
		clear(s.handover.raw[:])
		clear(m.Entropy[:])
		if err != nil {
			// The host falls back to Resume, and gets the error there if it is still one.
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

// update brings the machine up to date. No time leaves the clock alone, no entropy adds none. The caller holds s.mu.
func (s *Standby) update(wallNanos int64, entropy []byte, newIdentity bool, hostname string) error {
	s.config.Woken()
	// First, since the time that the host says was that of a moment ago.
	if wallNanos != 0 {
		if err := s.config.Machine.SetClock(wallNanos); err != nil {
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
