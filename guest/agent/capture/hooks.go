package capture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Hooks are the executables of a directory. Before a sleep, a snapshot or a freeze each is run with the event as
// its argument, in the order of their names. Afterwards those that were started are run in reverse order, so that
// what was stopped last starts first. A hook then gets two arguments: the event, and the earlier one that it
// belongs to. This is what pm-utils did (pm-action(8)), with the words of systemd-sleep(8) and of qemu-ga's
// fsfreeze-hook.
const (
	// DefaultHookDir is the directory of a guest's hooks.
	DefaultHookDir = "/etc/drowse/hooks.d"

	maxHooks     = 64
	maxHookNames = 1024            // entries read of the directory
	maxHookTime  = 5 * time.Minute // the most that a request may give
	killTime     = 2 * time.Second // how long to wait for a killed hook
)

// hooks is the agent's record of the hooks that it has run.
type hooks struct {
	mu sync.Mutex // one event at a time
	// before is the last event, and started the hooks whose counterpart is due, in the order in which they ran.
	// Both are in the memory that a snapshot keeps, so the wake path need not read a directory. Guarded by mu.
	before  string
	started []string
	// waiting reports whether started is not empty.
	waiting atomic.Bool
}

// Hooks implements agentpb.AgentService.
func (s *Standby) Hooks(ctx context.Context, m *agentpb.HooksRequest) (*agentpb.HooksResponse, error) {
	limits, err := newHookLimits(m.EachNanos, m.AllNanos, m.IgnoreFailures)
	if err != nil {
		return nil, err
	}
	h := &s.hooks
	h.mu.Lock()
	defer h.mu.Unlock()
	out := &agentpb.HooksResponse{}
	switch m.Event {
	case agentpb.HookSleep, agentpb.HookSnapshot:
		// The counterparts that an earlier attempt left undone come first.
		s.counterpart(ctx, limits, agentpb.HookWake, out)
		h.started, out.Refused = s.before(ctx, limits, m.Event, &out.Failures)
		h.before = m.Event
		h.waiting.Store(len(h.started) > 0)
		out.Ran += uint32(len(h.started))
		if out.Refused {
			// The host may have gone away: the guest runs on all the same.
			s.counterpart(context.WithoutCancel(ctx), limits, agentpb.HookWake, out)
		}
	case agentpb.HookWake, agentpb.HookClone:
		s.counterpart(ctx, limits, m.Event, out)
	default:
		return nil, status.Errorf(codes.InvalidArgument, "hook event %q", m.Event)
	}
	return out, nil
}

// counterpart runs the counterparts that are due. Precondition: s.hooks.mu is held.
func (s *Standby) counterpart(ctx context.Context, l hookLimits, event string, out *agentpb.HooksResponse) {
	h := &s.hooks
	out.Ran += uint32(len(h.started))
	s.after(ctx, l, event, h.before, h.started, &out.Failures)
	h.started = nil
	h.waiting.Store(false)
}

// hookLimits are the time limits of hooks.
type hookLimits struct {
	each, all time.Duration
	ignore    bool // continue after a failure
}

func newHookLimits(each, all int64, ignore bool) (hookLimits, error) {
	l := hookLimits{time.Duration(each), time.Duration(all), ignore}
	if l.each <= 0 || l.all <= 0 || l.each > maxHookTime || l.all > maxHookTime {
		return l, status.Errorf(codes.InvalidArgument, "hooks have %v each and %v together: more than 0 and at most %v", l.each, l.all, maxHookTime)
	}
	return l, nil
}

// before runs the hooks before an event. It returns the hooks that it started, and whether one has refused.
func (s *Standby) before(ctx context.Context, l hookLimits, event string, failures *[]*agentpb.HookFailure) (started []string, refused bool) {
	names, err := hookNames(s.config.HookDir)
	if err != nil {
		*failures = append(*failures, &agentpb.HookFailure{Name: s.config.HookDir, Event: event, Problem: err.Error()})
		if !l.ignore {
			return nil, true
		}
	}
	if len(names) == 0 {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(ctx, l.all)
	defer cancel()
	for _, name := range names {
		f, ran := s.runHook(ctx, l.each, name, event)
		if ran {
			started = append(started, name)
		}
		if f == nil {
			continue
		}
		*failures = append(*failures, f)
		if !l.ignore {
			return started, true
		}
	}
	return started, false
}

// after runs the counterparts, all of them even if some fail.
func (s *Standby) after(ctx context.Context, l hookLimits, event, before string, started []string, failures *[]*agentpb.HookFailure) {
	if len(started) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.all)
	defer cancel()
	for _, name := range slices.Backward(started) {
		if f, _ := s.runHook(ctx, l.each, name, event, before); f != nil {
			*failures = append(*failures, f)
		}
	}
}

// hookNames lists the hooks of a directory in the order of their names. A missing directory costs one system call.
// Hidden files, editors' backups and files that are not executable are not hooks.
func hookNames(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	all, err := d.Readdirnames(maxHookNames + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(all) > maxHookNames {
		return nil, fmt.Errorf("more than %d files", maxHookNames)
	}
	slices.Sort(all)
	var names []string
	for _, name := range all {
		if strings.HasPrefix(name, ".") || strings.HasSuffix(name, "~") {
			continue
		}
		fi, err := os.Stat(filepath.Join(dir, name))
		if err != nil || !fi.Mode().IsRegular() || fi.Mode()&0o111 == 0 {
			continue
		}
		names = append(names, name)
	}
	if len(names) > maxHooks {
		return nil, fmt.Errorf("%d hooks, at most %d are run", len(names), maxHooks)
	}
	return names, nil
}

// runHook runs one hook and returns its failure, or nil, and whether it was started. It kills the hook's process
// group when the time is up.
func (s *Standby) runHook(ctx context.Context, limit time.Duration, name string, args ...string) (f *agentpb.HookFailure, ran bool) {
	fail := func(problem string) *agentpb.HookFailure {
		return &agentpb.HookFailure{Name: agentpb.Cut(name, agentpb.MaxHookName), Event: args[0], Problem: agentpb.Cut(problem, agentpb.MaxHookProblem)}
	}
	if err := ctx.Err(); err != nil {
		return fail("not run: " + hookEnd(err)), false
	}
	argv := append([]string{filepath.Join(s.config.HookDir, name)}, args...)
	p, err := s.config.Procs.Start(&agentpb.ExecStart{Argv: argv, NoStdin: true})
	if err != nil {
		return fail(err.Error()), false
	}
	p.KeepNewest() // its newest output
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %v", limit))
	defer cancel()
	killed := ""
	select {
	case <-p.Done():
	case <-ctx.Done():
		killed = hookEnd(context.Cause(ctx)) + ": killed"
		_ = s.config.Procs.Signal(p, syscall.SIGKILL)
		t := time.NewTimer(killTime)
		defer t.Stop()
		select {
		case <-p.Done():
		case <-t.C:
			// It is stuck in the kernel, as in a write to a frozen file system.
			return fail(killed + ", and has not ended yet"), true
		}
	}
	switch {
	case killed != "":
		f = fail(killed)
	case p.Exit().Signal != 0:
		f = fail(fmt.Sprintf("ended by signal %d", p.Exit().Signal))
	case p.Exit().Code != 0:
		f = fail(fmt.Sprintf("exit status %d", p.Exit().Code))
	default:
		return nil, true
	}
	f.Output = p.LastOutput(agentpb.MaxHookOutput)
	return f, true
}

func hookEnd(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "the time for all hooks is up"
	case errors.Is(err, context.Canceled):
		return "the host has gone away"
	}
	return err.Error()
}
