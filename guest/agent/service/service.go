package service

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// Defaults and limits of services.
const (
	defaultStopTime = 10 * time.Second
	maxStopTime     = 5 * time.Minute
	maxBackoff      = time.Hour
	defaultBackoff  = time.Second
	defaultMaxWait  = time.Minute
	maxLogWait      = 30 * time.Second
	maxEvents       = 64 // waiting for the host
)

// Services are the programs that the agent keeps running. Their whole state is in the agent's memory, so a sleep
// and a wake change nothing, and a fork has them too.
type Services struct {
	procs *proc.Table

	mu     sync.Mutex
	byName map[string]*daemon
	closed bool
	wg     sync.WaitGroup

	alive time.Duration // the least time between two checks of a ready service
	wakes atomic.Uint64 // how often the machine has been restored

	events *eventQueue // nil: no events are reported
}

// New keeps services running as processes of a table. alive is the least time between two checks of a ready
// service; 0 means 10 s. report, if not nil, tells the host of an event, one call at a time.
func New(procs *proc.Table, alive time.Duration, report func(line string) error) *Services {
	if alive == 0 {
		alive = aliveInterval
	}
	a := &Services{procs: procs, byName: make(map[string]*daemon), alive: alive}
	if report != nil {
		a.events = newEventQueue(report)
	}
	return a
}

// Woken records that the machine has been restored.
func (a *Services) Woken() { a.wakes.Add(1) }

// daemon is a service. Its supervisor, a goroutine, exists while the service runs or waits for a restart.
type daemon struct {
	all *Services
	log *proc.Output

	// change serialises starts and stops. It is held while a stop waits.
	change sync.Mutex

	mu       sync.Mutex // guards what follows; taken after change
	unit     *agentpb.Service
	state    string
	p        *proc.Process // while it runs
	stop     chan struct{}
	ended    chan struct{} // closed when the supervisor has ended; nil if there was none
	started  time.Time
	restarts uint64
	exit     *agentpb.ExecExit
	endedAt  time.Time
	problem  string

	ready         bool // it runs, and its check, if any, has succeeded
	readyAt       time.Time
	checkProblem  string
	checkRestarts uint64
	changed       flow.Bell // wakes waiters
}

// SetService implements agentpb.AgentService.
func (a *Services) SetService(ctx context.Context, m *agentpb.SetServiceRequest) (*agentpb.ServiceState, error) {
	unit, err := checkService(m.Service)
	if err != nil {
		return nil, err
	}
	v, err := a.enter(unit)
	if err != nil {
		return nil, err
	}
	v.change.Lock()
	defer v.change.Unlock()
	v.mu.Lock()
	anew := m.Restart || !proto.Equal(v.unit, unit) || v.state == agentpb.ServiceWaiting
	v.unit = unit
	v.log.Resize(int(unit.LogLimit))
	v.mu.Unlock()
	if anew && m.Start {
		if err := v.end(ctx); err != nil {
			return nil, err
		}
	}
	if m.Start {
		if err := v.begin(ctx); err != nil {
			return nil, err
		}
	}
	return v.describe(), nil
}

// StopService implements agentpb.AgentService.
func (a *Services) StopService(ctx context.Context, m *agentpb.StopServiceRequest) (*agentpb.ServiceState, error) {
	v, err := a.get(m.Name)
	if err != nil {
		return nil, err
	}
	v.change.Lock()
	defer v.change.Unlock()
	if err := v.end(ctx); err != nil {
		return nil, err
	}
	if m.Forget {
		a.mu.Lock()
		delete(a.byName, m.Name)
		a.mu.Unlock()
	}
	return v.describe(), nil
}

// ListServices implements agentpb.AgentService.
func (a *Services) ListServices(context.Context, *agentpb.ListServicesRequest) (*agentpb.ListServicesResponse, error) {
	out := &agentpb.ListServicesResponse{}
	for _, v := range a.list() {
		out.Services = append(out.Services, v.describe())
	}
	return out, nil
}

// ServiceLog implements agentpb.AgentService.
func (a *Services) ServiceLog(ctx context.Context, m *agentpb.ServiceLogRequest) (*agentpb.ServiceLogResponse, error) {
	v, err := a.get(m.Name)
	if err != nil {
		return nil, err
	}
	if m.Wait {
		ctx, cancel := context.WithTimeout(ctx, maxLogWait)
		defer cancel()
		v.log.WaitBehind(ctx, m.Offset)
	}
	out := &agentpb.ServiceLogResponse{Data: make([]byte, agentpb.MaxChunk)}
	n, at, end := v.log.Look(m.Offset, out.Data)
	out.Data, out.Offset, out.End = out.Data[:n], at, end
	return out, nil
}

// checkService returns the unit with its defaults, or why it is not valid.
func checkService(m *agentpb.Service) (*agentpb.Service, error) {
	bad := func(format string, args ...any) (*agentpb.Service, error) {
		return nil, status.Errorf(codes.InvalidArgument, format, args...)
	}
	if m == nil || m.Name == "" || len(m.Name) > agentpb.MaxServiceName {
		return bad("the name of a service has 1 to %d bytes", agentpb.MaxServiceName)
	}
	if err := proc.CheckStart(startOf(m)); err != nil {
		return nil, err
	}
	u := proto.CloneOf(m)
	def(&u.BackoffNanos, defaultBackoff)
	def(&u.MaxBackoffNanos, max(defaultMaxWait, time.Duration(u.BackoffNanos)))
	def(&u.StopNanos, defaultStopTime)
	if u.StopSignal == 0 {
		u.StopSignal = int32(unix.SIGTERM)
	}
	if u.LogLimit == 0 {
		u.LogLimit = agentpb.DefaultServiceLog
	}
	switch {
	case u.Restart != agentpb.RestartNever && u.Restart != agentpb.RestartOnFailure && u.Restart != agentpb.RestartAlways:
		return bad("restart %q: it is %q, %q or %q", u.Restart, agentpb.RestartNever, agentpb.RestartOnFailure, agentpb.RestartAlways)
	case u.BackoffNanos < 0 || u.MaxBackoffNanos < u.BackoffNanos || u.MaxBackoffNanos > int64(maxBackoff):
		return bad("a back-off of %v to %v: it is more than 0 and at most %v", time.Duration(u.BackoffNanos), time.Duration(u.MaxBackoffNanos), maxBackoff)
	case u.StopNanos < 0 || u.StopNanos > int64(maxStopTime):
		return bad("%v to stop: it is more than 0 and at most %v", time.Duration(u.StopNanos), maxStopTime)
	case u.StopSignal < 1 || u.StopSignal > 64:
		return bad("signal %d does not exist", u.StopSignal)
	case u.LogLimit < agentpb.MinServiceLog || u.LogLimit > agentpb.MaxServiceLog:
		return bad("a log of %d bytes: it has %d to %d", u.LogLimit, agentpb.MinServiceLog, agentpb.MaxServiceLog)
	}
	return u, checkCheck(u.Check)
}

// def sets a time to its default if it is 0.
func def(v *int64, d time.Duration) {
	if *v == 0 {
		*v = int64(d)
	}
}

// startOf returns the command of a service.
func startOf(u *agentpb.Service) *agentpb.ExecStart {
	return &agentpb.ExecStart{Argv: u.Argv, Env: u.Env, Cwd: u.Cwd, User: u.User, NoStdin: true}
}

// enter returns the service with the unit's name. It makes one if there is none.
func (a *Services) enter(unit *agentpb.Service) (*daemon, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, proc.ErrStopping
	}
	if v := a.byName[unit.Name]; v != nil {
		return v, nil
	}
	if len(a.byName) >= agentpb.MaxServices {
		return nil, status.Errorf(codes.ResourceExhausted, "%d services are known, the limit", agentpb.MaxServices)
	}
	v := &daemon{all: a, unit: unit, state: agentpb.ServiceStopped, log: proc.NewLog(int(unit.LogLimit))}
	a.byName[unit.Name] = v
	return v, nil
}

func (a *Services) get(name string) (*daemon, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	v := a.byName[name]
	if v == nil {
		return nil, status.Errorf(codes.NotFound, "no service %q", name)
	}
	return v, nil
}

func (a *Services) list() []*daemon {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.byName), func(v, w *daemon) int { return strings.Compare(v.name(), w.name()) })
}

func (v *daemon) name() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.unit.Name
}

// Retire ends all supervision: a service that ends from now on is not restarted. With wait set, it waits for the
// supervisors, whose processes must have been ended.
func (a *Services) Retire(wait bool) {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	for _, v := range a.list() {
		v.mu.Lock()
		v.quit()
		v.mu.Unlock()
	}
	if wait {
		a.wg.Wait()
		a.events.close()
	}
}

// quit tells the supervisor not to restart the service. The caller holds v.mu.
func (v *daemon) quit() {
	if v.stop != nil {
		close(v.stop)
		v.stop = nil
	}
}

// begin starts the supervisor, if none runs. The caller holds v.change.
func (v *daemon) begin(ctx context.Context) error {
	v.mu.Lock()
	old, running := v.ended, v.stop != nil
	v.mu.Unlock()
	if running {
		return nil
	}
	if old != nil {
		// A stopped supervisor may not have ended yet.
		select {
		case <-old:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	stop, ended, first := make(chan struct{}), make(chan struct{}), make(chan struct{})
	a := v.all
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return proc.ErrStopping
	}
	v.mu.Lock()
	v.stop, v.ended = stop, ended
	v.state, v.restarts, v.problem, v.checkRestarts, v.checkProblem = agentpb.ServiceRunning, 0, "", 0, ""
	v.mu.Unlock()
	a.wg.Go(func() { v.supervise(stop, ended, first) })
	a.mu.Unlock()
	<-first // so that the caller's answer has the process
	return nil
}

// end stops the service and waits until it has ended. The caller holds v.change.
func (v *daemon) end(ctx context.Context) error {
	v.mu.Lock()
	ended := v.ended
	if v.stop != nil {
		v.state = agentpb.ServiceStopping
		v.quit()
	}
	v.mu.Unlock()
	if ended == nil {
		return nil
	}
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err() // the supervisor continues to end it
	}
}

// supervise starts the program repeatedly, as the unit says. It closes first after the first attempt to start it.
func (v *daemon) supervise(stop, ended, first chan struct{}) {
	defer close(ended)
	row := uint32(0) // restarts in a row
	for {
		wait, again := v.run(stop, first, row)
		first = nil
		if !again {
			break
		}
		row++
		if wait == 0 { // it ran for a long time
			row, wait = 1, time.Duration(v.current().BackoffNanos)
		}
		if limit := v.current().MaxRestarts; limit > 0 && row > limit {
			v.over(agentpb.ServiceFailed, fmt.Sprintf("it has ended %d times in a row", row))
			v.tell(agentpb.ServiceEvent{Event: agentpb.EventGaveUp, Problem: fmt.Sprintf("it has ended %d times in a row", row)})
			return
		}
		v.mu.Lock()
		v.state = agentpb.ServiceWaiting
		v.changed.Ring()
		v.mu.Unlock()
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-stop:
			t.Stop()
			v.over(agentpb.ServiceStopped, "")
			return
		}
		v.mu.Lock()
		v.restarts++
		v.mu.Unlock()
	}
}

// run runs the program once. It returns whether to restart it, and after what time: 0 if it ran so long that the
// row of restarts ends.
func (v *daemon) run(stop, first chan struct{}, row uint32) (wait time.Duration, again bool) {
	u := v.current()
	p, err := v.all.procs.StartWith(startOf(u), proc.StartOptions{Out: v.log})
	v.mu.Lock()
	v.started, v.problem = time.Now(), ""
	if err == nil {
		v.p = p
		if v.checkProblem = ""; u.Check == nil {
			v.ready, v.readyAt = true, v.started
		}
		if v.state != agentpb.ServiceStopping {
			v.state = agentpb.ServiceRunning
		}
	} else {
		v.problem = agentpb.Cut(proc.Problem(err), agentpb.MaxServiceText)
	}
	v.changed.Ring()
	v.mu.Unlock()
	if first != nil {
		close(first)
	}
	failed := true
	if err != nil {
		v.note("cannot be started: " + proc.Problem(err))
		v.tell(agentpb.ServiceEvent{Event: agentpb.EventFailed, Problem: agentpb.Cut(proc.Problem(err), agentpb.MaxServiceText)})
	} else {
		v.tell(agentpb.ServiceEvent{Event: agentpb.EventStarted})
		failed = v.supervised(u, p, stop)
		failed = failed || p.Exit().Code != 0
		v.mu.Lock()
		v.p, v.exit, v.endedAt = nil, p.Exit(), time.Now()
		v.ready, v.readyAt = false, time.Time{}
		v.changed.Ring()
		v.mu.Unlock()
		v.note(exitText(p.Exit()))
		v.tell(agentpb.ServiceEvent{Event: agentpb.EventEnded, Exit: p.Exit().Code, Signal: p.Exit().Signal})
	}
	select {
	case <-stop:
		v.over(agentpb.ServiceStopped, "")
		return 0, false
	default:
	}
	u = v.current()
	if u.Restart == agentpb.RestartNever || u.Restart == agentpb.RestartOnFailure && !failed {
		state := agentpb.ServiceEnded
		if failed {
			state = agentpb.ServiceFailed
		}
		v.over(state, "")
		return 0, false
	}
	longest := time.Duration(u.MaxBackoffNanos)
	v.mu.Lock()
	lasted := time.Since(v.started)
	v.mu.Unlock()
	if err == nil && lasted >= longest {
		return 0, true
	}
	wait = time.Duration(u.BackoffNanos)
	for range min(row, 32) {
		wait = min(2*wait, longest)
	}
	return wait, true
}

// terminate waits for a process that is not restarted. It signals a process that must stop, and kills it when its
// time is up. When the machine ends, the process ends without that.
func (v *daemon) terminate(p *proc.Process) {
	v.mu.Lock()
	stopping, u := v.state == agentpb.ServiceStopping, v.unit
	v.mu.Unlock()
	if stopping {
		v.signalEnd(p, u)
		return
	}
	<-p.Done()
}

func (v *daemon) current() *agentpb.Service {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.unit
}

// over records that the service is not restarted.
func (v *daemon) over(state, problem string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state = state
	if problem != "" {
		v.problem = problem
	}
	v.stop = nil
	v.changed.Ring()
}

// note writes a line of the agent into the service's log.
func (v *daemon) note(text string) {
	v.log.Write(true, []byte("drowse: "+v.name()+" "+text+"\n"))
}

func exitText(e *agentpb.ExecExit) string {
	if e.Signal != 0 {
		return fmt.Sprintf("was ended by signal %d", e.Signal)
	}
	return fmt.Sprintf("has ended with status %d", e.Code)
}

// tell reports an event to the host.
func (v *daemon) tell(e agentpb.ServiceEvent) {
	v.mu.Lock()
	e.Name, e.Restarts = v.unit.Name, v.restarts
	v.mu.Unlock()
	v.all.events.put(e)
}

// describe returns the service's state.
func (v *daemon) describe() *agentpb.ServiceState {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := &agentpb.ServiceState{Name: v.unit.Name, State: v.state, Restarts: v.restarts, Exit: v.exit, Problem: v.problem}
	out.LogStart, out.LogEnd = v.log.Bounds()
	out.Ready, out.Check, out.CheckRestarts = v.ready, v.checkProblem, v.checkRestarts
	if v.ready {
		out.ReadyNanos = v.readyAt.UnixNano()
	}
	if v.p != nil {
		out.Pid = int32(v.p.PID())
	}
	if !v.started.IsZero() {
		out.StartedNanos = v.started.UnixNano()
	}
	if !v.endedAt.IsZero() {
		out.EndedNanos = v.endedAt.UnixNano()
	}
	return out
}

// eventQueue reports events to the host, one after the other, without holding up the services.
type eventQueue struct {
	report  func(line string) error
	waiting chan agentpb.ServiceEvent
	lost    atomic.Uint64
	closed  atomic.Bool
	ended   chan struct{}
}

func newEventQueue(report func(line string) error) *eventQueue {
	q := &eventQueue{report: report, waiting: make(chan agentpb.ServiceEvent, maxEvents), ended: make(chan struct{})}
	go q.run()
	return q
}

func (q *eventQueue) put(e agentpb.ServiceEvent) {
	if q == nil {
		return
	}
	select {
	case q.waiting <- e:
	default:
		q.lost.Add(1)
	}
}

func (q *eventQueue) run() {
	defer close(q.ended)
	for e := range q.waiting {
		if q.closed.Load() {
			continue
		}
		e.Lost = q.lost.Swap(0)
		if err := q.report(e.Line()); err != nil {
			os.Stderr.WriteString("drowse-agent: " + err.Error() + "\n")
			q.lost.Add(e.Lost + 1)
		}
	}
}

// close closes the queue. No put may follow.
func (q *eventQueue) close() {
	if q != nil && !q.closed.Swap(true) {
		close(q.waiting)
		<-q.ended
	}
}
