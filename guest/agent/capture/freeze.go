package capture

import (
	"context"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

const maxFrozen = time.Minute // the most that a request may ask for

// freeze is the state of the frozen file system.
type freeze struct {
	mu sync.Mutex
	// active reports whether it is frozen. It changes with mu held.
	active atomic.Bool
	// mu guards the others. They are valid only while it is frozen.
	since   time.Time
	timer   *time.Timer
	started []string // hooks whose "thaw" is due
	limits  hookLimits
}

// Freeze implements agentpb.AgentService.
func (s *Standby) Freeze(ctx context.Context, m *agentpb.FreezeRequest) (*agentpb.FreezeResponse, error) {
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
	// From here on the guest must be thawed even if the host has gone away.
	if !out.Refused {
		err = s.config.Machine.Freeze()
	}
	if out.Refused || err != nil {
		s.after(context.WithoutCancel(ctx), limits, agentpb.HookThaw, agentpb.HookFreeze, started, &out.Failures)
		return out, err
	}
	f.started, f.limits, f.since = started, limits, time.Now()
	f.active.Store(true)
	f.timer = time.AfterFunc(limit, s.thawLate)
	return out, nil
}

// Thaw implements agentpb.AgentService.
func (s *Standby) Thaw(ctx context.Context, _ *agentpb.ThawRequest) (*agentpb.ThawResponse, error) {
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

// thawLate thaws if no Thaw has come in time.
func (s *Standby) thawLate() {
	f := &s.freeze
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.active.Load() {
		return
	}
	var failures []*agentpb.HookFailure // no request waits for these
	if err := s.thaw(context.Background(), &failures); err != nil {
		os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
	}
}

// thaw thaws the file system first, then runs the hooks. Precondition: s.freeze.mu is held, and the file system is
// frozen.
func (s *Standby) thaw(ctx context.Context, failures *[]*agentpb.HookFailure) error {
	f := &s.freeze
	f.timer.Stop()
	err := s.config.Machine.Thaw()
	f.active.Store(false)
	s.after(ctx, f.limits, agentpb.HookThaw, agentpb.HookFreeze, f.started, failures)
	f.started = nil
	return err
}
