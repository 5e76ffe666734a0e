package files

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agent/fswatch"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/flow"
)

const (
	// maxWatches bounds the watches of files. When there are more, the one whose connection was lost first is
	// ended.
	maxWatches = 16
	// watchStays is how long a watch lasts without a connection, by the guest's clock, which stops while it
	// sleeps.
	watchStays = 10 * time.Minute
	// maxWatchQueue and maxWatchBytes bound the queued events, in events and in bytes. Further events are counted,
	// and reported as an overflow.
	maxWatchQueue = 4096
	maxWatchBytes = 512 << 10
	// watchEventSize is about how many bytes an event takes besides its names.
	watchEventSize = 128
	// watchGather is how long events are gathered before the next read: each read costs a wake-up.
	watchGather = 20 * time.Millisecond
)

// watches are the watches of files, by their names. The zero value is ready.
type watches struct {
	mu     sync.Mutex
	closed bool
	byID   map[string]*watch
	wg     sync.WaitGroup
}

// watch is a watch of files. It survives the loss of its connection for some time, since every connection is lost
// when the machine sleeps, and keeps the events meanwhile.
type watch struct {
	all       *watches
	id        string
	paths     []string
	recursive bool
	w         *fswatch.Watcher

	mu      sync.Mutex
	queue   []*agentpb.WatchEvent // not acknowledged
	bytes   int
	last    uint64 // number of the newest event
	sent    uint64 // number of the last event sent to the connection
	acked   uint64 // number of the last event acknowledged, and its time
	ackedAt int64
	lost    uint64    // later events, for which there was no room
	changed flow.Bell // there may be something to send
	over    bool      // no more events come
	// takeOver ends the attached connection; it is nil for none. detached is when the last one ended. turn counts
	// connections.
	takeOver context.CancelCauseFunc
	turn     uint64
	detached time.Time
	expire   *time.Timer
}

var (
	errWatchOver = status.Error(codes.Unavailable, "the watch has ended")
	errTakenOver = status.Error(codes.Aborted, "another connection attached to the watch")
)

// Watch implements agentpb.AgentService.
func (f *Files) Watch(ctx context.Context, stream agentpb.Agent_WatchServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	m, ok := first.Msg.(*agentpb.WatchRequest_Start)
	if !ok {
		return status.Error(codes.InvalidArgument, "the first message must say what to watch")
	}
	if err := checkWatch(m.Start); err != nil {
		return err
	}
	w, resumed, err := f.watches.get(m.Start)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	after := uint64(0)
	if resumed {
		after = m.Start.After
	}
	turn, ok := w.attach(cancel, after)
	if !ok {
		return errWatchOver
	}
	defer w.detach(turn)
	go func() { cancel(w.receive(stream, turn)) }()
	if err := stream.Send(&agentpb.WatchResponse{Ready: true, Resumed: resumed}); err != nil {
		return err
	}
	return w.serve(ctx, stream, turn)
}

func checkWatch(m *agentpb.WatchStart) error {
	if len(m.Paths) == 0 || len(m.Paths) > agentpb.MaxWatchPaths {
		return status.Errorf(codes.InvalidArgument, "%d paths to watch, 1 to %d are possible", len(m.Paths), agentpb.MaxWatchPaths)
	}
	if m.Id == "" || len(m.Id) > agentpb.MaxID {
		return status.Errorf(codes.InvalidArgument, "a watch needs a name of 1 to %d bytes", agentpb.MaxID)
	}
	for _, p := range m.Paths {
		if err := checkPath(p); err != nil {
			return err
		}
	}
	return nil
}

// receive handles the host's acknowledgements. It always returns an error.
func (w *watch) receive(stream agentpb.Agent_WatchServer, turn uint64) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return errEnded
		}
		ack, ok := m.Msg.(*agentpb.WatchRequest_Ack)
		if !ok {
			return status.Errorf(codes.InvalidArgument, "unexpected message %T in a watch", m.Msg)
		}
		if err := w.ack(turn, ack.Ack); err != nil {
			return err
		}
	}
}

// get returns the watch with that id, or a new one.
func (a *watches) get(m *agentpb.WatchStart) (w *watch, resumed bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, false, errWatchOver
	}
	if w := a.byID[m.Id]; w != nil {
		if !slices.Equal(w.paths, m.Paths) || w.recursive != m.Recursive {
			return nil, false, status.Errorf(codes.AlreadyExists, "watch %q is one of other paths", m.Id)
		}
		if w.knows(m.After, m.AfterNanos) {
			return w, true, nil
		}
		delete(a.byID, m.Id)
		w.w.Close()
	}
	if len(a.byID) >= maxWatches && !a.dropOldest() {
		return nil, false, status.Errorf(codes.ResourceExhausted, "%d watches are open, the limit", maxWatches)
	}
	fw, err := fswatch.New(m.Paths, m.Recursive)
	if err != nil {
		if errors.Is(err, fswatch.ErrLimit) {
			return nil, false, status.Error(codes.ResourceExhausted, err.Error())
		}
		return nil, false, err
	}
	w = &watch{all: a, id: m.Id, paths: m.Paths, recursive: m.Recursive, w: fw, detached: time.Now()}
	if a.byID == nil {
		a.byID = make(map[string]*watch)
	}
	a.byID[w.id] = w
	a.wg.Go(w.run)
	return w, false, nil
}

// knows reports whether an event was the last that the host acknowledged, or waits for its acknowledgement.
func (w *watch) knows(number uint64, nanos int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if number == w.acked {
		return nanos == w.ackedAt
	}
	for _, e := range w.queue {
		if e.Number == number {
			return e.WallNanos == nanos
		}
	}
	return false
}

// dropOldest ends the watch that has been without a connection longest. The caller holds the lock.
func (a *watches) dropOldest() bool {
	var oldest *watch
	var since time.Time
	for _, w := range a.byID {
		w.mu.Lock()
		if w.takeOver == nil && (oldest == nil || w.detached.Before(since)) {
			oldest, since = w, w.detached
		}
		w.mu.Unlock()
	}
	if oldest == nil {
		return false
	}
	delete(a.byID, oldest.id)
	oldest.w.Close()
	return true
}

// close ends all watches.
func (a *watches) close() {
	a.mu.Lock()
	a.closed = true
	for _, w := range a.byID {
		w.w.Close()
	}
	a.mu.Unlock()
	a.wg.Wait()
}

// run takes changes until the watch is closed.
func (w *watch) run() {
	defer func() {
		w.w.Close()
		w.mu.Lock()
		w.over = true
		if w.expire != nil {
			w.expire.Stop()
		}
		w.changed.Ring()
		w.mu.Unlock()
		w.all.mu.Lock()
		if w.all.byID[w.id] == w {
			delete(w.all.byID, w.id)
		}
		w.all.mu.Unlock()
	}()
	for {
		events, err := w.w.Read()
		if err != nil {
			return
		}
		w.add(events)
		time.Sleep(watchGather)
	}
}

// add queues events.
func (w *watch) add(events []fswatch.Event) {
	now := time.Now().UnixNano()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range events {
		m := &agentpb.WatchEvent{
			Kind: string(e.Kind), Path: e.Path, From: e.From, Dir: e.Dir, Problem: e.Problem, WallNanos: now,
		}
		size := watchSize(m)
		if w.lost > 0 || len(w.queue) >= maxWatchQueue || w.bytes+size > maxWatchBytes {
			w.lost++
			continue
		}
		w.push(m)
	}
	w.changed.Ring()
}

func watchSize(m *agentpb.WatchEvent) int {
	return watchEventSize + len(m.Path) + len(m.From) + len(m.Problem)
}

// push queues an event. The caller holds the lock.
func (w *watch) push(m *agentpb.WatchEvent) {
	w.last++
	m.Number = w.last
	w.queue = append(w.queue, m)
	w.bytes += watchSize(m)
}

// ack records the connection's acknowledgement.
func (w *watch) ack(turn, number uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if turn != w.turn {
		return errTakenOver
	}
	if number > w.sent {
		return status.Errorf(codes.InvalidArgument, "event %d is acknowledged, and %d was the last", number, w.sent)
	}
	w.forget(number)
	w.changed.Ring()
	return nil
}

// forget removes events up to a number, and queues an overflow for lost ones. The caller holds the lock.
func (w *watch) forget(number uint64) {
	n := 0
	for n < len(w.queue) && w.queue[n].Number <= number {
		w.acked, w.ackedAt = w.queue[n].Number, w.queue[n].WallNanos
		w.bytes -= watchSize(w.queue[n])
		n++
	}
	w.queue = slices.Delete(w.queue, 0, n)
	if w.lost > 0 && len(w.queue) < maxWatchQueue/2 && w.bytes < maxWatchBytes/2 {
		w.push(&agentpb.WatchEvent{
			Kind: string(fswatch.Overflow), WallNanos: time.Now().UnixNano(),
			Problem: fmt.Sprintf("%d events were lost: they came faster than they were taken, or while nobody was there to take them", w.lost),
		})
		w.lost = 0
	}
}

// attach replaces the connection with a new one, which has the events up to a number.
func (w *watch) attach(takeOver context.CancelCauseFunc, has uint64) (turn uint64, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return 0, false
	}
	if w.takeOver != nil {
		w.takeOver(errTakenOver)
	}
	if w.expire != nil {
		w.expire.Stop()
	}
	w.takeOver, w.sent = takeOver, has
	w.forget(has)
	w.turn++
	return w.turn, true
}

// detach ends a connection. The watch lives on for some time, unless another connection has taken over.
func (w *watch) detach(turn uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.turn != turn || w.over {
		return
	}
	w.takeOver, w.detached = nil, time.Now()
	w.expire = time.AfterFunc(watchStays, func() { w.w.Close() })
}

// next returns the next events for the connection, at most a message's worth, or what to wait for.
func (w *watch) next(turn uint64) (events []*agentpb.WatchEvent, wait <-chan struct{}, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case turn != w.turn:
		return nil, nil, errTakenOver
	case len(w.queue) == 0 && w.over:
		return nil, nil, errWatchOver
	case len(w.queue) == 0 || w.queue[0].Number <= w.sent:
		return nil, w.changed.Wait(), nil
	}
	size := 0
	for _, e := range w.queue {
		if size += watchSize(e); len(events) == agentpb.MaxWatchEvents || len(events) > 0 && size > agentpb.MaxMessage/4 {
			break
		}
		events = append(events, e)
		w.sent = e.Number
	}
	return events, nil, nil
}

// serve sends events until the connection ends.
func (w *watch) serve(ctx context.Context, stream agentpb.Agent_WatchServer, turn uint64) error {
	for {
		events, wait, err := w.next(turn)
		if err == nil && len(events) > 0 {
			err = stream.Send(&agentpb.WatchResponse{Events: events})
		}
		if err != nil {
			return err
		}
		if wait == nil {
			continue
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
