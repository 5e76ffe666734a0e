package agent

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// ioctls of a file system (linux/fs.h): _IOWR('X', 119, int) and 120.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

const maxFrozen = time.Minute // that a request may ask for

// freeze is the state of the frozen file system.
type freeze struct {
	mu sync.Mutex
	// active says that it is frozen. It changes with mu held.
	active atomic.Bool
	// The others are guarded by mu, and mean something while it is frozen.
	since   time.Time
	timer   *time.Timer
	started []string // hooks that are due a "thaw"
	limits  hookLimits
}

// Freeze implements agentpb.AgentService.
func (s *Server) Freeze(ctx context.Context, m *agentpb.FreezeRequest) (*agentpb.FreezeResponse, error) {
	limits, err := newHookLimits(m.EachNanos, m.AllNanos, m.IgnoreFailures)
	if err != nil {
		return nil, err
	}
	limit := time.Duration(m.LimitNanos)
	if limit <= 0 || limit > maxFrozen {
		return nil, status.Errorf(codes.InvalidArgument, "frozen for at most %v: more than 0 and at most %v", limit, maxFrozen)
	}
	f := &s.freeze
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.active.Load() {
		return nil, status.Error(codes.FailedPrecondition, "the file system is frozen already")
	}
	out := &agentpb.FreezeResponse{}
	var started []string
	if !m.SkipHooks {
		started, out.Refused = s.before(ctx, limits, agentpb.HookFreeze, &out.Failures)
	}
	// From here on the guest must go on even if the host has gone away.
	if out.Refused {
		s.after(context.WithoutCancel(ctx), limits, agentpb.HookThaw, agentpb.HookFreeze, started, &out.Failures)
		return out, nil
	}
	if err := s.cfg.Machine.Freeze(); err != nil {
		s.after(context.WithoutCancel(ctx), limits, agentpb.HookThaw, agentpb.HookFreeze, started, &out.Failures)
		return nil, err
	}
	f.started, f.limits, f.since = started, limits, time.Now()
	f.active.Store(true)
	f.timer = time.AfterFunc(limit, s.thawLate)
	return out, nil
}

// Thaw implements agentpb.AgentService.
func (s *Server) Thaw(ctx context.Context, _ *agentpb.ThawRequest) (*agentpb.ThawResponse, error) {
	f := &s.freeze
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.active.Load() {
		return &agentpb.ThawResponse{Expired: true}, nil
	}
	out := &agentpb.ThawResponse{FrozenNanos: int64(time.Since(f.since))}
	err := s.thaw(context.WithoutCancel(ctx), &out.Failures)
	return out, err
}

// thawLate thaws when nobody has asked for it in time.
func (s *Server) thawLate() {
	f := &s.freeze
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.active.Load() {
		return
	}
	var failures []*agentpb.HookFailure // nobody is there to be told
	if err := s.thaw(context.Background(), &failures); err != nil {
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
	}
}

// thaw lets writers go on, first of all. Precondition: s.freeze.mu is held, and
// the file system is frozen.
func (s *Server) thaw(ctx context.Context, failures *[]*agentpb.HookFailure) error {
	f := &s.freeze
	f.timer.Stop()
	err := s.cfg.Machine.Thaw()
	f.active.Store(false)
	s.after(ctx, f.limits, agentpb.HookThaw, agentpb.HookFreeze, f.started, failures)
	f.started = nil
	return err
}

// Freeze implements Machine by FIFREEZE, which writes out what is dirty, empties
// the journal and flushes the device (ext4: ext4_freeze). The overlay above is
// not frozen: all that is written to it is written to this file system.
func (k *Kernel) Freeze() error {
	if k.Writable == "" {
		return status.Error(codes.FailedPrecondition, "this guest has no writable disk of drowse's")
	}
	d, err := os.Open(k.Writable)
	if err != nil {
		return fmt.Errorf("open the writable disk's file system: %w", err)
	}
	if err := unix.IoctlSetInt(int(d.Fd()), fiFreeze, 0); err != nil {
		d.Close()
		return fmt.Errorf("freeze the writable disk's file system: %w", err)
	}
	k.frozen = d
	return nil
}

// Thaw implements Machine by FITHAW. A file system that somebody in the guest
// has thawed is an error: then it was not frozen all the time.
func (k *Kernel) Thaw() error {
	if k.frozen == nil {
		return nil
	}
	defer func() { k.frozen.Close(); k.frozen = nil }()
	if err := unix.IoctlSetInt(int(k.frozen.Fd()), fiThaw, 0); err != nil {
		return fmt.Errorf("thaw the writable disk's file system: %w", err)
	}
	return nil
}
