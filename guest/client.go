package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/ttrpc"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// maxIdle is how many idle connections a Client keeps for later calls.
const maxIdle = 2

// Names of calls that RemoteError.Is looks at.
const (
	opKill   = "kill"
	opAttach = "attach"
)

// Client talks to the agent of one guest.
type Client struct {
	dial Dialer

	closing context.Context // done after Close
	end     context.CancelFunc

	mu   sync.Mutex // guards idle and open; held while closing ends
	idle []*channel
	open map[*channel]struct{}

	trail atomic.Pointer[audit.Trail] // nil: nothing is recorded

	carriedMu sync.Mutex          // held before mu; guards carried
	carried   map[string]*carried // by network and address
}

// channel is one connection. It carries one call at a time.
type channel struct {
	conn   *frameConn
	rpc    *ttrpc.Client
	agent  agentpb.AgentClient
	nextID uint32 // stream id of the next call; ttrpc counts in twos
	made   time.Time
	ended  atomic.Bool // the guest's side has closed it
}

// New returns a client of the guest behind a vsock socket of the host, which connects when it is first used. For the
// rest it is one of Dial with UnixDialer.
func New(path string) *Client {
	c := newClient(UnixDialer(path))
	c.trail.Store(trailBeside(path))
	return c
}

func newClient(dial Dialer) *Client {
	c := &Client{dial: dial, open: make(map[*channel]struct{})}
	c.closing, c.end = context.WithCancel(context.Background())
	return c
}

// Dial connects to the agent. It does not wait for a guest that is starting: see WaitReady.
func Dial(ctx context.Context, dial Dialer) (*Client, error) {
	c := newClient(dial)
	ch, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	c.release(ch)
	return c, nil
}

// Close closes every connection except those that Client.Dial and Listener.Accept have returned. Calls that are
// under way fail with ErrConnectionLost. The agent kills commands that are not detached.
func (c *Client) Close() error {
	c.mu.Lock()
	c.end()
	c.idle = nil
	open := slices.Collect(maps.Keys(c.open))
	c.mu.Unlock()
	for _, ch := range open {
		c.discard(ch)
	}
	c.endCarried()
	return nil
}

// errClosed is the error of every call that starts, or waits to start, after Close.
var errClosed = fmt.Errorf("guest: the client is closed: %w", ErrConnectionLost)

// connect opens a connection.
func (c *Client) connect(ctx context.Context) (*channel, error) {
	conn, err := c.dial(ctx, agentpb.AgentPort)
	if err != nil {
		return nil, err
	}
	if v, ok := conn.(*vsockConn); ok {
		c.trail.Store(v.trail)
	}
	fc := &frameConn{Conn: conn}
	ch := &channel{conn: fc, nextID: 1, made: time.Now()}
	ch.rpc = ttrpc.NewClient(fc, ttrpc.WithOnClose(func() { ch.ended.Store(true) }))
	ch.agent = agentpb.NewAgentClient(ch.rpc)
	c.mu.Lock()
	closed := c.closing.Err() != nil
	if !closed {
		c.open[ch] = struct{}{}
	}
	c.mu.Unlock()
	if closed {
		c.discard(ch)
		return nil, errClosed
	}
	return ch, nil
}

// expect lets the guest answer the next call.
func (ch *channel) expect() {
	ch.conn.pending.Store(0)
	ch.conn.expected.Store(ch.nextID)
	ch.nextID += 2
}

// take returns a connection for one call, and whether an earlier call has used it.
func (c *Client) take(ctx context.Context) (ch *channel, used bool, err error) {
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		ch = c.idle[n-1]
		c.idle = c.idle[:n-1]
	}
	c.mu.Unlock()
	if ch != nil {
		return ch, true, nil
	}
	ch, err = c.connect(ctx)
	return ch, false, err
}

// freshFor is how long after it was made a connection counts as new.
const freshFor = 10 * time.Second

// takeNew returns a connection for a call that must not be repeated: that of Dial, if it is new and unused, or another.
// A kept one may be dead, as all are after the guest has slept. That of Dial would cost the guest as much again.
func (c *Client) takeNew(ctx context.Context) (*channel, error) {
	c.mu.Lock()
	i := slices.IndexFunc(c.idle, func(ch *channel) bool {
		return ch.nextID == 1 && !ch.ended.Load() && time.Since(ch.made) < freshFor
	})
	if i >= 0 {
		ch := c.idle[i]
		c.idle = slices.Delete(c.idle, i, i+1)
		c.mu.Unlock()
		return ch, nil
	}
	c.mu.Unlock()
	return c.connect(ctx)
}

// release keeps a connection, whose call is over, for the next call.
func (c *Client) release(ch *channel) {
	c.mu.Lock()
	keep := c.closing.Err() == nil && len(c.idle) < maxIdle
	if keep {
		c.idle = append(c.idle, ch)
	}
	c.mu.Unlock()
	if !keep {
		c.discard(ch)
	}
}

// discard closes a connection and waits until its ttrpc client has ended.
func (c *Client) discard(ch *channel) {
	c.mu.Lock()
	delete(c.open, ch)
	c.mu.Unlock()
	ch.rpc.Close()
	_ = ch.rpc.UserOnCloseWait(context.Background())
}

// maxNextID is where a connection is replaced, before its stream ids run out.
const maxNextID = 1 << 31

// call makes a call that is safe to repeat. It replaces a kept connection that turns out to be dead, as all
// are after the guest has woken from a snapshot.
func call[Req, Resp any](ctx context.Context, c *Client, op string, f method[Req, Resp], req Req) (resp Resp, err error) {
	for {
		ch, used, err := c.take(ctx)
		if err != nil {
			return resp, err
		}
		resp, err = on(ctx, c, ch, op, f, req)
		if used && ctx.Err() == nil && errors.Is(err, ErrConnectionLost) {
			continue
		}
		return resp, err
	}
}

// callOnce makes a call that must not be repeated.
func callOnce[Req, Resp any](ctx context.Context, c *Client, op string, f method[Req, Resp], req Req) (resp Resp, err error) {
	ch, err := c.takeNew(ctx)
	if err != nil {
		return resp, err
	}
	return on(ctx, c, ch, op, f, req)
}

// method is a method of the agent's client.
type method[Req, Resp any] func(agentpb.AgentClient, context.Context, Req) (Resp, error)

// on makes a call on a connection, then keeps or discards the connection.
func on[Req, Resp any](ctx context.Context, c *Client, ch *channel, op string, f method[Req, Resp], req Req) (Resp, error) {
	ch.expect()
	resp, err := f(ch.agent, ctx, req)
	answered := err == nil
	if err != nil {
		var re *RemoteError
		err = fail(op, ch.conn.err(err))
		answered = errors.As(err, &re)
	}
	if answered && ch.nextID < maxNextID {
		c.release(ch)
		return resp, err
	}
	c.discard(ch)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("guest: %s: %w", op, ctx.Err())
	}
	return resp, err
}

// stream is a call with messages both ways. It has a connection to itself.
type stream[Req, Resp any] struct {
	messages[Req, Resp]
	c      *Client
	ch     *channel
	op     string
	parent context.Context
	ctx    context.Context // done when the stream is closed
	cancel context.CancelCauseFunc
}

// messages are the two directions of a call.
type messages[Req, Resp any] interface {
	Send(*Req) error
	Recv() (*Resp, error)
}

// begin opens a stream and sends its first message.
func begin[Req, Resp any, S messages[Req, Resp]](ctx context.Context, c *Client, op string, f func(agentpb.AgentClient, context.Context) (S, error), first *Req) (*stream[Req, Resp], error) {
	ch, err := c.takeNew(ctx)
	if err != nil {
		return nil, err
	}
	s := &stream[Req, Resp]{c: c, ch: ch, op: op, parent: ctx}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	ch.expect()
	m, err := f(ch.agent, s.ctx)
	if err == nil {
		s.messages = m
		err = m.Send(first)
	}
	if err != nil {
		s.close()
		return nil, s.fail(err)
	}
	return s, nil
}

// Recv receives the next message.
func (s *stream[Req, Resp]) Recv() (*Resp, error) {
	m, err := s.messages.Recv()
	s.ch.conn.taken()
	return m, err
}

func (s *stream[Req, Resp]) close() {
	s.cancel(nil)
	s.c.discard(s.ch)
}

// fail turns an error of the stream into one of this package's.
func (s *stream[Req, Resp]) fail(err error) error {
	switch {
	case err == nil:
		return nil
	case s.parent.Err() != nil:
		return fmt.Errorf("guest: %s: %w", s.op, s.parent.Err())
	case errors.Is(err, io.EOF):
		err = ErrConnectionLost
	}
	return fail(s.op, s.ch.conn.err(err))
}

// Info is what the agent says about itself.
type Info struct {
	Version string
	BootID  string
	Uptime  time.Duration
	PID     int
	Wall    time.Time
}

// Ping asks the agent for its Info.
func (c *Client) Ping(ctx context.Context) (Info, error) {
	r, err := call(ctx, c, "ping", agentpb.AgentClient.Ping, &agentpb.PingRequest{})
	if err != nil {
		return Info{}, err
	}
	return Info{
		Version: printable(r.Version), BootID: printable(r.BootId), Uptime: time.Duration(r.UptimeNanos),
		PID: int(r.Pid), Wall: time.Unix(0, r.WallNanos),
	}, nil
}

// Resume says how to bring a guest that was just restored up to date.
type Resume struct {
	Wall    time.Time // zero leaves the clock alone
	Entropy []byte    // 32 to 512 bytes; 32 to 64 cost the guest least. None adds none.
	// NewIdentity is for a clone: it gets a new boot id and machine id, and Hostname if that is not empty.
	NewIdentity bool
	Hostname    string
}

// Resumed is the agent's answer.
type Resumed struct {
	BootID string // with NewIdentity
	// HooksWait reports that hooks ran in the guest before its snapshot was taken: call Hooks with HookWake or
	// HookClone.
	HooksWait bool
	// Hooks reports that the guest has hooks, or may have some.
	Hooks bool
}

// Resume brings a restored guest up to date. When it returns nil, the guest has the given clock and entropy.
func (c *Client) Resume(ctx context.Context, r Resume) (Resumed, error) {
	req := &agentpb.ResumeRequest{Entropy: r.Entropy, NewIdentity: r.NewIdentity, Hostname: r.Hostname}
	if !r.Wall.IsZero() {
		req.WallNanos = r.Wall.UnixNano()
	}
	resp, err := call(ctx, c, "resume", agentpb.AgentClient.Resume, req)
	if err != nil {
		return Resumed{}, err
	}
	return Resumed{BootID: printable(resp.BootId), HooksWait: resp.HooksWait, Hooks: resp.Hooks}, nil
}

// Handover asks the agent to stand by at the handover ports while the VMM captures the guest (package
// devices/handover). It returns once the VMM has told the agent to go on. It uses the connection that Dial has made:
// call it first.
func (c *Client) Handover(ctx context.Context) error {
	ch, _, err := c.take(ctx)
	if err != nil {
		return err
	}
	_, err = on(ctx, c, ch, "hand over", agentpb.AgentClient.Handover, &agentpb.HandoverRequest{})
	return err
}

// HandoverEntropy is how many random bytes Resume.Handover needs.
const HandoverEntropy = agentpb.HandoverEntropy

// Handover encodes the message to a restored guest at the handover ports. The entropy must be 64 bytes.
func (r Resume) Handover() ([]byte, error) {
	m := agentpb.Handover{WallNanos: r.Wall.UnixNano(), NewIdentity: r.NewIdentity, Hostname: r.Hostname}
	if len(r.Entropy) != len(m.Entropy) {
		return nil, fmt.Errorf("guest: hand over %d bytes of entropy, want %d: %w", len(r.Entropy), len(m.Entropy), ErrProtocol)
	}
	copy(m.Entropy[:], r.Entropy)
	var b [agentpb.HandoverSize]byte
	if err := m.Encode(&b); err != nil {
		return nil, fmt.Errorf("guest: %w", err)
	}
	return b[:], nil
}

// Shutdown says how to stop a guest.
type Shutdown struct {
	Reboot bool
	// Grace is how long processes have to act on SIGTERM; 0 is 2 s.
	Grace time.Duration
}

// Shutdown asks the guest to stop and returns when it has begun to. The guest may not obey: watch the VM, and stop
// it by force in the end.
func (c *Client) Shutdown(ctx context.Context, s Shutdown) error {
	_, err := callOnce(ctx, c, "shut down", agentpb.AgentClient.Shutdown, &agentpb.ShutdownRequest{Reboot: s.Reboot, GraceNanos: int64(s.Grace)})
	if errors.Is(err, ErrConnectionLost) {
		return nil // the guest stopped before it could answer
	}
	return err
}

// Process is what the agent says about a process that it has started.
type Process struct {
	ID       string
	PID      int
	Argv     []string // at most 4 KiB
	Detached bool
	Attached bool // a connection is attached
	Pty      bool
	Started  time.Time
	Exit     *ExitStatus // nil while it runs
	// OutputStart and OutputEnd are the offsets of the kept output.
	OutputStart, OutputEnd uint64
}

// List returns the processes that the agent has started and has not forgotten.
func (c *Client) List(ctx context.Context) ([]Process, error) {
	resp, err := call(ctx, c, "list processes", agentpb.AgentClient.List, &agentpb.ListRequest{})
	if err != nil {
		return nil, err
	}
	out := make([]Process, 0, len(resp.Processes))
	for _, p := range resp.Processes {
		out = append(out, Process{
			ID: p.Id, PID: int(p.Pid), Argv: p.Argv, Detached: p.Detached, Attached: p.Attached, Pty: p.Pty,
			Started: time.Unix(0, p.StartedNanos), Exit: exitStatus(p.Exit), OutputStart: p.OutputStart, OutputEnd: p.OutputEnd,
		})
	}
	return out, nil
}

// Kill sends a signal to a process's group. It fails with ErrNotFound or ErrNotRunning.
func (c *Client) Kill(ctx context.Context, id string, signal int) error {
	a := audit.Action{Kind: audit.KindSignal, Process: id, Number: signal}
	return done(ctx, c, a, opKill, agentpb.AgentClient.Kill, &agentpb.KillRequest{Id: id, Signal: int32(signal)})
}

// Forget makes the agent forget a detached process. The agent kills it first if it still runs.
func (c *Client) Forget(ctx context.Context, id string) error {
	const sigkill = 9
	a := audit.Action{Kind: audit.KindSignal, Process: id, Number: sigkill}
	return done(ctx, c, a, opKill, agentpb.AgentClient.Kill, &agentpb.KillRequest{Id: id, Signal: sigkill, Forget: true})
}
