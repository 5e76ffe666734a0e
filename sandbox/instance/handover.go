package instance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/guest"
)

// How long the host waits for an agent that does not do what it is asked. Everything works without the agent, but
// a wake then takes a conversation over vsock.
const (
	standByLimit = 15 * time.Second // to stand by for a capture
	answerLimit  = 30 * time.Second // to bring a restored guest up to date
)

// How long a conversation that sets the guest's clock may take, and how often it is repeated if it took longer.
const (
	clockLate  = 500 * time.Millisecond
	clockAgain = 3
)

// standBy has the agent stand by for a capture. release lets it go on, and must be called.
func (in *Instance) standBy(ctx context.Context) (release func()) {
	if in.machine.Health().Hung {
		return func() {}
	}
	h := in.machine.Handover()
	ready := h.Expect()
	ctx, cancel := context.WithCancel(ctx)
	failed := make(chan error, 1)
	go func() { failed <- in.askToStandBy(ctx) }()
	limit := time.NewTimer(standByLimit)
	defer limit.Stop()
	var err error
	ended := false
	select {
	case <-ready:
	case err = <-failed:
		ended = true
	case <-limit.C:
		err = errors.New("it did not come in time")
	case <-ctx.Done():
		err = ctx.Err()
	case <-in.machine.Done():
		err = errors.New("the guest has ended")
	}
	if err != nil {
		h.Release()
		in.log.Warn("the capture is taken without the agent: the wake will take longer", "cause", err)
	}
	return func() {
		h.Release()
		cancel()
		if !ended {
			<-failed //nolint:errcheck // what counts is that it has ended
			ended = true
		}
	}
}

func (in *Instance) askToStandBy(ctx context.Context) error {
	// The first request after the wake finds a connection that the agent has accepted. The agent accepts it before the
	// one over which it is asked to stand by.
	if err := in.vsock.Park(guest.AgentPort); err != nil {
		return err
	}
	c, err := guest.Dial(ctx, guest.RecordedDialer(in.parts.Socket, in.vsock.DialFresh))
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Handover(ctx)
}

// entropySize is how much a restored guest gets, in bytes.
const entropySize = guest.HandoverEntropy

// whatIsNew returns the message for a restored guest.
func (in *Instance) whatIsNew(o RestoreOptions) (guest.Resume, error) {
	r := guest.Resume{Entropy: make([]byte, entropySize), NewIdentity: o.NewIdentity, Hostname: in.parts.Spec.Hostname}
	if _, err := rand.Read(r.Entropy); err != nil {
		return r, fmt.Errorf("making random numbers: %w", err)
	}
	r.Wall = time.Now()
	return r, nil
}

// offer prepares the message for the agent of a restored guest, if the agent stands by for it; otherwise the
// channel is nil.
func (in *Instance) offer(o RestoreOptions) <-chan handover.Answer {
	h := in.machine.Handover()
	if !h.StandingBy() {
		return nil
	}
	// The time of day must be that of the moment when the agent asks.
	return h.Resume(func() []byte {
		r, err := in.whatIsNew(o)
		if err == nil {
			var b []byte
			if b, err = r.Handover(); err == nil {
				return b
			}
		}
		// Without a message the agent reports a failure, and update asks it again.
		in.log.Error("a message for the restored guest could not be made", "error", err)
		return nil
	})
}

// update brings a restored guest up to date: random numbers, time of day, identity. It returns what else the agent
// reports. in.ready is when the guest was up to date.
func (in *Instance) update(ctx context.Context, offered <-chan handover.Answer, o RestoreOptions) (guest.Resumed, error) {
	what, answered := guest.Resume{}, false
	if offered != nil {
		limit := time.NewTimer(answerLimit)
		defer limit.Stop()
		select {
		case answer := <-offered:
			switch answer {
			case handover.Done:
				in.isReady()
				return guest.Resumed{}, nil
			case handover.Ask:
				in.isReady()
				answered = true
			default:
				in.log.Warn("the agent could not do all that it was told: asking again")
			}
		case <-limit.C:
			in.log.Warn("the agent did not answer where it stood by: asking again")
		case <-ctx.Done():
		}
		in.machine.Handover().Release()
	}
	// The vsock device of a machine that was restored with its agent standing by starts then.
	in.machine.EndQuiet()
	c, err := in.Agent(ctx)
	if err != nil {
		return guest.Resumed{}, in.Explain(ctx, fmt.Errorf("reaching the agent of the restored guest: %w", err))
	}
	defer c.Close()
	if !answered {
		if what, err = in.whatIsNew(o); err != nil {
			return guest.Resumed{}, err
		}
	}
	res, err := c.Resume(ctx, what)
	// A clock that is set by a conversation is late by a part of that.
	for n := 0; err == nil && !what.Wall.IsZero() && time.Since(what.Wall) > clockLate && n < clockAgain; n++ {
		what = guest.Resume{Wall: time.Now()}
		_, err = c.Resume(ctx, what)
	}
	if err != nil {
		return res, in.Explain(ctx, fmt.Errorf("bringing the restored guest up to date: %w", err))
	}
	if !answered {
		in.isReady()
	}
	return res, nil
}

// isReady notes that the agent has answered.
func (in *Instance) isReady() {
	in.ready = time.Since(in.started)
	if in.pager != nil {
		in.pager.Ready()
	}
}
