package e2b

import (
	"context"
	"errors"
	"io"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/process"
)

// hubKey names a process: the id of its sandbox's record, and the agent's id.
type hubKey struct{ box, id string }

// hub is this server's one session with a process, which any number of clients follow. The agent has the process and
// its output: a hub begins when somebody needs it, and ends soon after nobody does.
type hub struct {
	s       *Server
	key     hubKey
	ready   chan struct{} // closed when the session has begun, or has failed to
	err     error         // valid once ready is closed, like those below
	pid     int
	pty     bool
	session *guest.Session
	cancel  context.CancelFunc

	stdin  *io.PipeReader
	feed   *io.PipeWriter
	inputs chan struct{} // held by who writes stdin

	mu    sync.Mutex // guards what follows
	subs  map[*sub]bool
	users int // that keep it: followers, and inputs
	idle  *time.Timer
	shut  bool // stdin is closed
	ended bool
	end   *process.ProcessEvent // once it has ended, like endErr
	lost  error
}

// lingerTime is how long a hub waits for the next user: inputs that it has been given reach the agent meanwhile.
const lingerTime = 2 * time.Second

// subDepth is how many events a follower may be behind: of 32 KiB at most, so 512 KiB of a process.
const subDepth = 16

// slowTime is for how long a follower that does not read may stall others.
const slowTime = 10 * time.Second

// maxHubs bounds the processes that are followed at once.
const maxHubs = 8192

// sub is a follower.
type sub struct {
	events chan *process.ProcessEvent
	gone   chan struct{} // closed when it follows no more
	slow   chan struct{} // closed when it is left behind
}

// errSlow ends a follower that does not keep up while others follow as well.
var errSlow = connect.NewError(connect.CodeResourceExhausted, errors.New("the client does not keep up with the output that others follow: connect again"))

// hubOf returns the hub of a process, held for the caller, who calls leave. begin begins the session if there is no
// hub.
func (s *Server) hubOf(ctx context.Context, key hubKey, follow bool, begin func(ctx context.Context, h *hub) error) (h *hub, f *sub, leave func(), err error) {
	for {
		s.mu.Lock()
		h = s.hubs[key]
		fresh := h == nil
		if fresh {
			if s.closed || len(s.hubs) >= maxHubs {
				s.mu.Unlock()
				return nil, nil, nil, connect.NewError(connect.CodeResourceExhausted, errors.New("too many processes are followed"))
			}
			h = &hub{s: s, key: key, ready: make(chan struct{}), subs: map[*sub]bool{}, inputs: make(chan struct{}, 1)}
			h.stdin, h.feed = io.Pipe()
			s.hubs[key] = h
		}
		s.mu.Unlock()
		var ok bool
		if f, leave, ok = h.hold(follow); !ok {
			continue // it has just ended
		}
		if fresh {
			life, cancel := context.WithCancel(s.life)
			h.cancel = cancel
			// Until it has begun, the request governs it.
			stop := context.AfterFunc(ctx, cancel)
			h.err = begin(life, h)
			if !stop() && h.err == nil {
				h.err = ctx.Err()
			}
			if h.err != nil {
				cancel()
				h.remove()
			} else {
				s.all.Go(h.run)
			}
			close(h.ready)
		}
		select {
		case <-h.ready:
		case <-ctx.Done():
			leave()
			return nil, nil, nil, ctx.Err()
		}
		if h.err == nil {
			return h, f, leave, nil
		}
		leave()
		if fresh || !errors.Is(h.err, context.Canceled) {
			return nil, nil, nil, h.err
		}
		// Only the request that began it was canceled.
	}
}

// hold keeps the hub for a user. It returns false if the hub has been removed.
func (h *hub) hold(follow bool) (f *sub, leave func(), ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return nil, nil, false
	}
	h.users++
	if h.idle != nil {
		h.idle.Stop()
		h.idle = nil
	}
	if follow {
		f = &sub{events: make(chan *process.ProcessEvent, subDepth), gone: make(chan struct{}), slow: make(chan struct{})}
		h.subs[f] = true
	}
	return f, sync.OnceFunc(func() { h.leave(f) }), true
}

func (h *hub) leave(f *sub) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f != nil {
		delete(h.subs, f)
		close(f.gone)
	}
	if h.users--; h.users == 0 && !h.ended {
		h.idle = time.AfterFunc(lingerTime, h.close)
	}
}

// close detaches from the process, unless somebody needs the hub again.
func (h *hub) close() {
	<-h.ready
	h.mu.Lock()
	unused := h.users == 0 && !h.ended
	if unused {
		h.ended = true
	}
	h.mu.Unlock()
	if unused {
		h.remove()
		if h.cancel != nil {
			h.cancel()
		}
	}
}

// remove has the next user begin a new hub.
func (h *hub) remove() {
	h.s.mu.Lock()
	if h.s.hubs[h.key] == h {
		delete(h.s.hubs, h.key)
	}
	h.s.mu.Unlock()
}

// run waits for the end of the session.
func (h *hub) run() {
	st, err := h.session.Wait()
	h.cancel()
	_ = h.stdin.Close()
	h.remove()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		err = errDetached
	}
	h.ended = true
	if st != nil {
		h.end = endOf(st)
	} else {
		h.lost = err
	}
	for f := range h.subs {
		close(f.events)
	}
}

var errDetached = errors.New("nobody followed the process any more")

// endOf describes the end of a process in the words of E2B's clients, which are those of Go.
func endOf(st *guest.ExitStatus) *process.ProcessEvent {
	end := &process.ProcessEvent_EndEvent{ExitCode: int32(st.Code), Exited: st.Signal == 0}
	switch {
	case st.Signal != 0:
		end.ExitCode, end.Status = -1, "signal: "+syscall.Signal(st.Signal).String()
		if st.CoreDumped {
			end.Status += " (core dumped)"
		}
	default:
		end.Status = "exit status " + itoa(st.Code)
	}
	if st.Code != 0 {
		text := end.Status
		if st.NotStarted != "" {
			text = st.NotStarted
		}
		end.Error = &text
	}
	return &process.ProcessEvent{Event: &process.ProcessEvent_End{End: end}}
}

// output takes one of the outputs of the process.
type output struct {
	h      *hub
	stderr bool
}

// Write hands output to all followers. A slow one stalls the process, as a full pipe does. One that does not read at
// all is left behind once there are others: it may be the broken connection of a client that has come back.
func (o output) Write(p []byte) (int, error) {
	data := &process.ProcessEvent_DataEvent{}
	b := append([]byte(nil), p...)
	switch {
	case o.h.pty:
		data.Output = &process.ProcessEvent_DataEvent_Pty{Pty: b}
	case o.stderr:
		data.Output = &process.ProcessEvent_DataEvent_Stderr{Stderr: b}
	default:
		data.Output = &process.ProcessEvent_DataEvent_Stdout{Stdout: b}
	}
	o.h.tell(&process.ProcessEvent{Event: &process.ProcessEvent_Data{Data: data}})
	return len(p), nil
}

func (h *hub) tell(e *process.ProcessEvent) {
	h.mu.Lock()
	subs := make([]*sub, 0, len(h.subs))
	for f := range h.subs {
		subs = append(subs, f)
	}
	h.mu.Unlock()
	for _, f := range subs {
		select {
		case f.events <- e:
		case <-f.gone:
		default:
			h.await(f, e)
		}
	}
}

// await waits until a follower has room for an event.
func (h *hub) await(f *sub, e *process.ProcessEvent) {
	tick := time.NewTicker(h.s.slow / 10)
	defer tick.Stop()
	for left := 10; ; {
		select {
		case f.events <- e:
			return
		case <-f.gone:
			return
		case <-h.s.life.Done():
			return
		case <-tick.C:
		}
		h.mu.Lock()
		if left--; left <= 0 && len(h.subs) > 1 && h.subs[f] {
			delete(h.subs, f)
			close(f.slow)
			h.mu.Unlock()
			return
		}
		h.mu.Unlock()
	}
}

// write writes to the process's stdin or terminal.
func (h *hub) write(ctx context.Context, data []byte) error {
	select {
	case h.inputs <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	h.mu.Lock()
	shut := h.shut
	h.mu.Unlock()
	if shut {
		<-h.inputs
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("the stdin of the process is closed"))
	}
	done := make(chan error, 1)
	// A process that does not read holds the inputs up, and only itself: what is under way stays so when its request
	// has ended, and ends with the session.
	go func() {
		_, err := h.feed.Write(data)
		<-h.inputs
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return connect.NewError(connect.CodeNotFound, errors.New("the process has ended"))
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// closeStdin ends the process's stdin.
func (h *hub) closeStdin() {
	h.mu.Lock()
	h.shut = true
	h.mu.Unlock()
	_ = h.feed.Close()
}
