package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/report"
)

// HookEvent is the event that hooks in the guest run for. It is their first argument.
type HookEvent = report.HookEvent

// The events. Those of one line belong together: a hook that was started for the first later runs for one of the
// others.
const (
	HookSleep    HookEvent = agentpb.HookSleep    // then HookWake or HookClone
	HookSnapshot HookEvent = agentpb.HookSnapshot // then HookWake in the VM, HookClone in VMs made from the snapshot
	HookWake     HookEvent = agentpb.HookWake     // the same machine continues
	HookClone    HookEvent = agentpb.HookClone    // this is a copy of it
	HookFreeze   HookEvent = agentpb.HookFreeze   // then HookThaw
	HookThaw     HookEvent = agentpb.HookThaw
)

// HookFailure is a hook that failed.
type HookFailure = report.HookFailure

// HookLimits says how long hooks may take, each of them and all together: more than 0 and at most 5 min.
type HookLimits struct {
	Each, All time.Duration
	// IgnoreFailures continues after a hook that fails.
	IgnoreFailures bool
	// Skip makes Freeze run no hooks.
	Skip bool
}

// hookSlack is how much longer than its hooks the agent may take to answer: it starts and ends processes, in a guest
// that may be slow.
const hookSlack = 15 * time.Second

// Hooked is the result of running hooks.
type Hooked struct {
	Ran int // how many were started
	// Refused reports that a hook failed before the event, which then must not happen. The hooks that had already
	// run then ran for HookWake, or after a Freeze for HookThaw.
	Refused  bool
	Failures []HookFailure // at most 128
}

// Hooks runs the guest's hooks (/etc/drowse/hooks.d) for an event, and waits for them. For HookSleep and
// HookSnapshot it runs all hooks in the order of their names; for HookWake and HookClone, in reverse, those that
// were started before. An agent too old for hooks runs none. A guest that does not answer in time is an error, but
// its hooks may still run.
func (c *Client) Hooks(ctx context.Context, event HookEvent, l HookLimits) (Hooked, error) {
	// After a refusal the agent also runs the counterparts.
	resp, err := callWithin(ctx, c, "run hooks", 2*l.All+hookSlack, agentpb.AgentClient.Hooks, &agentpb.HooksRequest{
		Event: string(event), EachNanos: int64(l.Each), AllNanos: int64(l.All), IgnoreFailures: l.IgnoreFailures,
	})
	if unknownCall(err) {
		return Hooked{}, nil
	}
	if err != nil {
		return Hooked{}, err
	}
	return Hooked{Ran: int(resp.Ran), Refused: resp.Refused, Failures: hookFailures(resp.Failures)}, nil
}

// unknownCall reports whether the agent is too old to know the call.
func unknownCall(err error) bool {
	var re *RemoteError
	return errors.As(err, &re) && re.Code == codes.Unimplemented
}

// callWithin is callOnce with a time limit for the guest's answer.
func callWithin[Req, Resp any](ctx context.Context, c *Client, op string, limit time.Duration, f method[Req, Resp], req Req) (Resp, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("guest: %s: %w: no answer within %v", op, ErrUnavailable, limit))
	defer cancel()
	resp, err := callOnce(ctx, c, op, f, req)
	if cause := context.Cause(ctx); errors.Is(err, context.DeadlineExceeded) && errors.Is(cause, ErrUnavailable) {
		err = cause
	}
	return resp, err
}

func hookFailures(in []*agentpb.HookFailure) []HookFailure {
	var out []HookFailure
	for _, f := range in[:min(len(in), agentpb.MaxHookFailures)] {
		out = append(out, HookFailure{
			Name: shortened(f.Name, agentpb.MaxHookName), Event: HookEvent(shortened(f.Event, agentpb.MaxHookName)),
			Problem: shortened(f.Problem, agentpb.MaxHookProblem), Output: shortened(f.Output, agentpb.MaxHookOutput),
		})
	}
	return out
}

// shortened returns at most n bytes of a guest's text, made printable.
func shortened(s string, n int) string { return printable(s[:min(len(s), n)]) }

// ErrFrozenTooLong says that the guest thawed its disk before Thaw.
var ErrFrozenTooLong = errors.New("the guest's disk did not stay frozen")

// Freeze makes the guest write out all data of its writable disk, and blocks all writers to it until Thaw; reading
// continues. The guest thaws by itself after limit, at most 1 min, even if the host is gone. HookFreeze hooks run
// first; if Hooked.Refused is set, the disk is not frozen.
func (c *Client) Freeze(ctx context.Context, limit time.Duration, l HookLimits) (Hooked, error) {
	resp, err := callWithin(ctx, c, "freeze the disk", 2*l.All+limit+hookSlack, agentpb.AgentClient.Freeze, &agentpb.FreezeRequest{
		LimitNanos: int64(limit), EachNanos: int64(l.Each), AllNanos: int64(l.All), IgnoreFailures: l.IgnoreFailures, SkipHooks: l.Skip,
	})
	if err != nil {
		return Hooked{}, err
	}
	return Hooked{Refused: resp.Refused, Failures: hookFailures(resp.Failures)}, nil
}

// Thawed is the result of Thaw.
type Thawed struct {
	Frozen   time.Duration // by the guest's clock
	Failures []HookFailure // of HookThaw
}

// Thaw ends a Freeze. It fails with ErrFrozenTooLong if the guest thawed before: work done in between did not see a
// frozen disk.
func (c *Client) Thaw(ctx context.Context, l HookLimits) (Thawed, error) {
	resp, err := callWithin(ctx, c, "thaw the disk", l.All+hookSlack, agentpb.AgentClient.Thaw, &agentpb.ThawRequest{})
	if err != nil {
		return Thawed{}, err
	}
	if resp.Expired {
		return Thawed{}, fmt.Errorf("guest: thaw: %w", ErrFrozenTooLong)
	}
	return Thawed{Frozen: time.Duration(max(resp.FrozenNanos, 0)), Failures: hookFailures(resp.Failures)}, nil
}

const (
	maxHooksLine = 16 // bytes
	hooksTimeout = 5 * time.Second
)

// ServeHooks calls known whenever the agent reports whether the guest has hooks, until the listener at HooksPort is
// closed. The report of a change that a command made arrives before the host learns of the command's end. ServeHooks
// serves one connection at a time, for 5 s at most, so a guest can hold up only itself.
func ServeHooks(l net.Listener, known func(present bool)) {
	serveLines(l, maxHooksLine, func(line string) (ok bool) {
		if ok = line == "hooks 0" || line == "hooks 1"; ok {
			known(line == "hooks 1")
		}
		return ok
	})
}

// serveLines calls f with the line of each connection, and answers if f accepts it.
func serveLines(l net.Listener, most int, f func(line string) (ok bool)) {
	serveEach(l, hooksTimeout, func(c net.Conn) {
		if line, err := readLine(c, most); err == nil && f(line) {
			_, _ = c.Write([]byte{'\n'})
		}
	})
}

const acceptPause = 100 * time.Millisecond

// serveEach serves connections one after the other, each for a limited time, until the listener is closed.
func serveEach(l net.Listener, limit time.Duration, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(acceptPause) // out of descriptors
			continue
		}
		if c.SetDeadline(time.Now().Add(limit)) == nil {
			serve(c)
		}
		c.Close()
	}
}
