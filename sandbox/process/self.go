package process

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Bounds on a guest's requests.
const (
	// MaxSelfHold is how long one request keeps a VM from going to sleep when unused, in seconds.
	MaxSelfHold = 60 * 60
	// MaxSelfSnapshots is how many snapshots that a VM has asked for may exist at once.
	MaxSelfSnapshots = 8

	// selfBurst requests in a row are served, and then one per selfEvery. Requests over this limit are refused
	// without a record.
	selfBurst = 8
	selfEvery = 10 * time.Second
)

// selfNote begins the note of a snapshot that its VM has asked for.
const selfNote = "asked for by the guest"

// self serves the guest's requests about its own VM.
type self struct {
	allow spec.Self
	now   func() time.Time
	trail *audit.Trail

	// leaves is an error if the VM must leave no snapshot.
	leaves   func() error
	snapshot func(note string) (id string, err error)
	sleep    func()
	wake     func(at time.Time) error
	extend   func(seconds int) (expires time.Time, err error)
	fork     func() (child string, err error)
	holders  *wakeLocks

	mu   sync.Mutex // guards what follows
	rate allowance
	// release ends the current hold; nil if there is none. held is the number of that hold.
	release func()
	held    uint64
}

// serveSelf listens for the guest's requests, if it may make any. stop ends that and waits.
func (p *process) serveSelf(ctx context.Context) (stop func(), err error) {
	spec := p.r.Spec.Self
	if len(spec.Allow) == 0 {
		return func() {}, nil
	}
	name := p.r.Spec.Name
	path := guest.SelfPath(p.store.VsockPath(name))
	l, err := osfile.ListenUnix(path)
	if err != nil {
		return nil, fmt.Errorf("listening for what the guest asks for: %w", err)
	}
	// The end of the VM does not wait for a fork.
	asking, cancel := context.WithCancel(ctx)
	s := &self{
		allow: spec, now: time.Now, trail: audit.Open(p.store.AuditPath(name)), holders: &p.holders,
		leaves:   p.leaves,
		snapshot: func(note string) (string, error) { return p.selfSnapshot(ctx, note) },
		sleep:    func() { p.selfSleep(ctx) },
		wake:     func(at time.Time) error { return p.store.SelfWake(ctx, name, at) },
		extend:   func(seconds int) (time.Time, error) { return p.store.SelfExtend(ctx, name, spec, seconds) },
		fork:     func() (string, error) { return p.store.SelfFork(asking, name) },
	}
	var serving sync.WaitGroup
	serving.Go(func() { guest.ServeSelf(l, s.do) })
	return func() {
		cancel()
		l.Close()
		serving.Wait()
		s.end()
	}, nil
}

// do answers one request.
func (s *self) do(r guest.SelfRequest) (answer guest.SelfAnswer, then func()) {
	if !s.take() {
		return guest.SelfAnswer{Error: fmt.Sprintf("too many requests: %d in a row, then one in %v", selfBurst, selfEvery)}, nil
	}
	p, err := s.trail.Begin(context.Background(), audit.Action{Kind: audit.KindSelf, Argv: selfArgv(r)})
	if err != nil {
		return guest.SelfAnswer{Error: "it cannot be recorded in the audit trail, and is not done"}, nil
	}
	var o audit.Outcome
	defer func() { p.End(o) }()
	switch {
	case !s.allow.Allows(r.Do):
		err = fmt.Errorf("this VM may not ask for %s: its owner allows it with `drowse run --allow-self`", r.Do)
	case r.Do == guest.SelfSleep:
		if err = s.leaves(); err == nil {
			then = s.sleep
		}
	case r.Do == guest.SelfSnapshot:
		if err = s.leaves(); err == nil {
			answer.Snapshot, err = s.snapshot(r.Note)
		}
	case r.Do == guest.SelfHold:
		answer.Seconds, err = r.Seconds, s.hold(r.Seconds)
	case r.Do == guest.SelfWake:
		err = s.wake(r.At)
	case r.Do == guest.SelfExtend:
		answer.Expires, err = s.extend(r.Seconds)
	case r.Do == guest.SelfFork:
		answer.Child, err = s.fork()
	}
	if err != nil {
		o.Error = err.Error()
		return guest.SelfAnswer{Error: err.Error()}, nil
	}
	answer.OK = true
	return answer, then
}

// selfArgv returns a request as the audit trail records it.
func selfArgv(r guest.SelfRequest) []string {
	argv := []string{r.Do}
	if r.Note != "" {
		argv = append(argv, r.Note)
	}
	if r.Do == guest.SelfWake {
		argv = append(argv, r.At.UTC().Format(time.RFC3339))
	}
	if r.Do == guest.SelfHold || r.Do == guest.SelfExtend {
		argv = append(argv, (time.Duration(r.Seconds) * time.Second).String())
	}
	return argv
}

// take reports whether another request may be served.
func (s *self) take() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rate.take(s.now(), selfBurst, selfEvery)
}

// hold keeps the VM awake for some seconds from now on and replaces an earlier hold; 0 only ends it. A sleep on
// request still takes place.
func (s *self) hold(seconds int) error {
	if seconds > MaxSelfHold {
		return fmt.Errorf("%d s: a VM may hold itself awake for %d at once", seconds, MaxSelfHold)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.release != nil {
		s.release()
		s.release = nil
	}
	if seconds == 0 {
		return nil
	}
	s.held++
	which := s.held
	leave, done := s.holders.join()
	over := make(chan struct{})
	let := sync.OnceFunc(func() { close(over) })
	s.release = let
	go func() {
		t := time.NewTimer(time.Duration(seconds) * time.Second)
		defer t.Stop()
		select {
		case <-t.C:
		case <-leave:
		case <-over:
		}
		done()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held == which {
			s.release = nil
		}
	}()
	return nil
}

// end ends a hold.
func (s *self) end() { _ = s.hold(0) }

// leaves returns an error if the VM is ephemeral: nothing may be left of it.
func (p *process) leaves() error {
	l, err := p.store.Metadata(p.r.Spec.Name)
	if err == nil && l.Class == lifetime.Ephemeral {
		return errors.New("this VM is ephemeral: it never sleeps, and no snapshot is left of it")
	}
	return nil
}

// selfSleep puts the VM to sleep.
func (p *process) selfSleep(ctx context.Context) {
	res, err := p.sleep(events.WithCause(ctx, events.Guest), "", nil)
	if err != nil {
		p.log.Warn("the guest has asked to be put to sleep, and is awake", "error", err)
		return
	}
	p.log.Info("gone to sleep, since the guest has asked for it", "snapshot", res.Snapshot, "bytes", res.BytesStored)
	p.end()
}

// selfSnapshot takes a snapshot, unless the guest has reached its limit.
func (p *process) selfSnapshot(ctx context.Context, note string) (id string, err error) {
	all, err := p.store.Snapshots()
	if err != nil {
		return "", err
	}
	n := 0
	for i := range all {
		if all[i].Owner == p.r.ID && strings.HasPrefix(all[i].Note, selfNote) {
			n++
		}
	}
	if n >= MaxSelfSnapshots {
		return "", fmt.Errorf("%w: %d snapshots: its owner can remove some", control.ErrSelfLimit, n)
	}
	full := selfNote
	if note != "" {
		full += ": " + note
	}
	res, err := p.snapshot(events.WithCause(ctx, events.Guest), full, "")
	return res.Snapshot, err
}
