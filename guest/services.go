package guest

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// When a service that has ended is started again.
const (
	RestartNever     = agentpb.RestartNever
	RestartOnFailure = agentpb.RestartOnFailure
	RestartAlways    = agentpb.RestartAlways
)

// Bounds of services.
const (
	MaxServices    = agentpb.MaxServices
	MaxServiceName = agentpb.MaxServiceName // bytes
	MinServiceLog  = agentpb.MinServiceLog  // bytes of output that are kept
	MaxServiceLog  = agentpb.MaxServiceLog
)

// Service is a program that the agent starts, and starts again when it ends. It has no
// standard input.
type Service struct {
	Name string
	Argv []string
	Env  []string // KEY=VALUE, over the least that a program needs
	Dir  string   // "" is "/"
	User string   // as in Cmd
	// Restart is RestartNever, RestartOnFailure or RestartAlways.
	Restart string
	// Backoff is before the first restart in a row, and is doubled for each up to MaxBackoff;
	// a run of that length ends the row. 0 is 1 s, and 1 min. At most 1 h.
	Backoff, MaxBackoff time.Duration
	// MaxRestarts is how many there are in a row; 0 is no limit.
	MaxRestarts uint32
	// StopSignal is sent to the process group to stop it; 0 is SIGTERM. After StopTime, at
	// most 5 min, 0 is 10 s, it is killed.
	StopSignal int
	StopTime   time.Duration
	// LogBytes of its newest output are kept: 4 KiB to 1 MiB; 0 is 256 KiB.
	LogBytes int
	// Check says how it is seen that it is ready; nil: it is once it runs.
	Check *ServiceCheck
}

// ServiceCheck is how it is seen that a service is ready, and goes on working. It is made in the guest.
type ServiceCheck struct {
	// Kind is CheckTCP (Address is a loopback address with a port), CheckHTTP (a URL of http at one, whose answer has a
	// status of 200 to 399), CheckUnix (the path of a socket), CheckFile (a path that is there) or CheckExec (Argv ends
	// with status 0).
	Kind    string
	Address string
	Argv    []string
	// Interval is between two checks, 0 is 1 s; once ready it is 10 s at least. Timeout is of one, 0 is 5 s. 100 ms to
	// 10 min each.
	Interval, Timeout time.Duration
	// Start is how long it may take until it is ready, at most 1 h; then it is ended, and started again as after a
	// failure. 0 is for ever.
	Start time.Duration
	// Alive is after how many failures in a row one that was ready is ended and started again, at most 1000; 0: it is
	// not checked then.
	Alive uint32
}

// Kinds of checks.
const (
	CheckTCP  = agentpb.CheckTCP
	CheckUnix = agentpb.CheckUnix
	CheckHTTP = agentpb.CheckHTTP
	CheckExec = agentpb.CheckExec
	CheckFile = agentpb.CheckFile
)

// States of services, see ServiceState.
const (
	ServiceRunning = agentpb.ServiceRunning
	ServiceStopped = agentpb.ServiceStopped
	ServiceEnded   = agentpb.ServiceEnded
	ServiceFailed  = agentpb.ServiceFailed
)

func (c *ServiceCheck) message() *agentpb.Check {
	if c == nil {
		return nil
	}
	return &agentpb.Check{
		Kind: c.Kind, Address: c.Address, Argv: c.Argv, IntervalNanos: int64(c.Interval), TimeoutNanos: int64(c.Timeout),
		StartNanos: int64(c.Start), Alive: c.Alive,
	}
}

// ServiceState is what the agent says of a service.
type ServiceState struct {
	Name string
	// State is "running", "waiting" (to be started again), "stopping", "stopped", "ended" (by
	// itself, and not to be started again) or "failed".
	State    string
	PID      int
	Started  time.Time // the last time; zero if it never was
	Restarts uint64    // by the agent, since it was started or set
	Exit     *ExitStatus
	Ended    time.Time // of the run that Exit is of
	Problem  string
	// LogStart and LogEnd are the offsets of the output that is kept.
	LogStart, LogEnd uint64
	// Ready: it runs, and its check has passed since its start, at ReadyAt by the guest's clock. CheckProblem is why
	// the last check has failed, and CheckRestarts how often it was ended for that.
	Ready         bool
	ReadyAt       time.Time
	CheckProblem  string
	CheckRestarts uint64
}

// SetService makes a service known to the agent, in the place of one of that name, and with
// start starts it. One that runs is ended first if it was another, or with restart.
func (c *Client) SetService(ctx context.Context, s Service, start, restart bool) (ServiceState, error) {
	a := audit.Action{Kind: audit.KindServiceSet, Process: s.Name, Argv: s.Argv, User: s.User, Dir: s.Dir}
	req := &agentpb.SetServiceRequest{Start: start, Restart: restart, Service: &agentpb.Service{
		Name: s.Name, Argv: s.Argv, Env: s.Env, Cwd: s.Dir, User: s.User, Restart: s.Restart,
		BackoffNanos: int64(s.Backoff), MaxBackoffNanos: int64(s.MaxBackoff), MaxRestarts: s.MaxRestarts,
		StopSignal: int32(s.StopSignal), StopNanos: int64(s.StopTime), LogLimit: uint32(s.LogBytes), Check: s.Check.message(),
	}}
	return onService(ctx, c, a, "set service "+s.Name, agentpb.AgentClient.SetService, req)
}

// StopService ends a service, which is not started again, and with forget makes the agent
// forget it. It waits until it has ended. It fails with ErrNotFound if there is none.
func (c *Client) StopService(ctx context.Context, name string, forget bool) (ServiceState, error) {
	a := audit.Action{Kind: audit.KindServiceStop, Process: name}
	return onService(ctx, c, a, "stop service "+name, agentpb.AgentClient.StopService, &agentpb.StopServiceRequest{Name: name, Forget: forget})
}

// WaitService waits until a service is ready, or is not going to be by itself since it has stopped, ended or failed, or
// for some 30 s.
func (c *Client) WaitService(ctx context.Context, name string) (ServiceState, error) {
	resp, err := call(ctx, c, "wait for service "+name, agentpb.AgentClient.WaitService, &agentpb.WaitServiceRequest{Name: name})
	if err != nil {
		return ServiceState{}, olderAgent(err)
	}
	return serviceState(resp), nil
}

// onService does something with a service, and records it.
func onService[Req any](ctx context.Context, c *Client, a audit.Action, op string, f method[Req, *agentpb.ServiceState], req Req) (ServiceState, error) {
	resp, err := recorded(ctx, c, a, op, f, req)
	if err != nil {
		return ServiceState{}, olderAgent(err)
	}
	return serviceState(resp), nil
}

// Services returns the services that the agent knows, in the order of their names. One that
// knows none, since it is older, has none.
func (c *Client) Services(ctx context.Context) ([]ServiceState, error) {
	resp, err := call(ctx, c, "list services", agentpb.AgentClient.ListServices, &agentpb.ListServicesRequest{})
	if unknownCall(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []ServiceState
	for _, s := range resp.Services[:min(len(resp.Services), agentpb.MaxServices)] {
		out = append(out, serviceState(s))
	}
	return out, nil
}

func serviceState(s *agentpb.ServiceState) ServiceState {
	out := ServiceState{
		Name: shortened(s.Name, agentpb.MaxServiceName), State: shortened(s.State, agentpb.MaxServiceName), PID: int(s.Pid),
		Restarts: s.Restarts, Exit: exitStatus(s.Exit), Problem: shortened(s.Problem, agentpb.MaxServiceText),
		LogStart: s.LogStart, LogEnd: s.LogEnd,
	}
	out.Ready, out.CheckProblem, out.CheckRestarts = s.Ready, shortened(s.Check, agentpb.MaxServiceText), s.CheckRestarts
	if s.Ready && s.ReadyNanos != 0 {
		out.ReadyAt = time.Unix(0, s.ReadyNanos)
	}
	if s.StartedNanos != 0 {
		out.Started = time.Unix(0, s.StartedNanos)
	}
	if s.EndedNanos != 0 {
		out.Ended = time.Unix(0, s.EndedNanos)
	}
	return out
}

// ServiceLog returns output of a service from an offset on, at most 32 KiB, with the offset
// that it begins at, which is a later one if older output has been dropped, and the end of
// all that there is. With wait it waits for some time if the offset is the end.
func (c *Client) ServiceLog(ctx context.Context, name string, offset uint64, wait bool) (data []byte, at, end uint64, err error) {
	resp, err := call(ctx, c, "log of service "+name, agentpb.AgentClient.ServiceLog, &agentpb.ServiceLogRequest{Name: name, Offset: offset, Wait: wait})
	if err != nil {
		return nil, 0, 0, err
	}
	if len(resp.Data) > agentpb.MaxChunk {
		return nil, 0, 0, fmt.Errorf("guest: log of service %s: %w: %d bytes in one answer", name, ErrProtocol, len(resp.Data))
	}
	return resp.Data, resp.Offset, resp.End, nil
}

// ServiceEvent is what the agent tells of a service by itself. Texts are cut and printable.
type ServiceEvent struct {
	Name  string
	Event string // EventStarted, EventEnded, EventFailed or EventGaveUp
	// Exit and Signal are those of EventEnded.
	Exit, Signal int
	Restarts     uint64
	Lost         uint64 // events before this one that could not be told
	Problem      string
}

// Events of services.
const (
	EventStarted = agentpb.EventStarted
	EventEnded   = agentpb.EventEnded
	EventFailed  = agentpb.EventFailed // it could not be started
	EventGaveUp  = agentpb.EventGaveUp // too many restarts in a row

	EventReady     = agentpb.EventReady     // its check has passed for the first time since its start
	EventUnhealthy = agentpb.EventUnhealthy // it is ended since its check has failed
)

// ServicesPath is where the host listens for events of services, given the path of the Unix
// socket that stands for the vsock device.
func ServicesPath(path string) string { return path + "_" + strconv.Itoa(agentpb.ServicesPort) }

// ServeServices calls f for each event that the agent tells, until the listener is closed.
// One connection is served at a time, for 5 s at most, so a guest can hold up only itself.
// What is no event is not heard.
func ServeServices(l net.Listener, f func(ServiceEvent)) {
	serveLines(l, agentpb.MaxServiceEvent, func(line string) (ok bool) {
		e, err := agentpb.ParseServiceEvent(line)
		if err != nil {
			return false
		}
		f(ServiceEvent{
			Name: shortened(e.Name, agentpb.MaxServiceName), Event: e.Event, Exit: int(e.Exit), Signal: int(e.Signal),
			Restarts: e.Restarts, Lost: e.Lost, Problem: shortened(e.Problem, agentpb.MaxServiceText),
		})
		return true
	})
}
