package guest

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// When the agent restarts a service that has ended.
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

// Service is a program that the agent starts, and restarts when it ends. It has no standard input.
type Service struct {
	Name string
	Argv []string
	Env  []string // KEY=VALUE, added to a minimal environment
	Dir  string   // "" is "/"
	User string   // as in Cmd
	// Restart is RestartNever, RestartOnFailure or RestartAlways.
	Restart string
	// Backoff is the delay before the first restart in a row. It doubles for each further one, up to MaxBackoff; a
	// run of MaxBackoff's length ends the row. The defaults for 0 are 1 s and 1 min. At most 1 h.
	Backoff, MaxBackoff time.Duration
	// MaxRestarts bounds the restarts in a row; 0 is no limit.
	MaxRestarts uint32
	// StopSignal is sent to the process group to stop it; 0 is SIGTERM. After StopTime the group is killed: at most
	// 5 min; 0 is 10 s.
	StopSignal int
	StopTime   time.Duration
	// LogBytes is how much of the newest output the agent keeps: 4 KiB to 1 MiB; 0 is 256 KiB.
	LogBytes int
	// Check says how to find out that the service is ready. If nil, it is ready once it runs.
	Check *ServiceCheck
}

// ServiceCheck says how the agent checks, in the guest, that a service is ready and keeps working.
type ServiceCheck struct {
	// Kind is CheckTCP (Address is a loopback address with a port), CheckHTTP (an http URL at such an address that
	// must answer with a status of 200 to 399), CheckUnix (the path of a socket), CheckFile (a path that must exist)
	// or CheckExec (Argv must end with status 0).
	Kind    string
	Address string
	Argv    []string
	// Interval is the time between two checks; 0 is 1 s; once the service is ready, at least 10 s. Timeout is for
	// one check; 0 is 5 s. Both are 100 ms to 10 min.
	Interval, Timeout time.Duration
	// Start is how long the service may take to become ready, at most 1 h. After that the agent ends it and restarts
	// it as after a failure. 0 is no limit.
	Start time.Duration
	// Alive is after how many failures in a row the agent ends and restarts a service that was ready, at most 1000.
	// With 0 it does not check a service that is ready.
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

// States of services: see ServiceState.
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

// ServiceState is what the agent says about a service.
type ServiceState struct {
	Name string
	// State is "running", "waiting" (for a restart), "stopping", "stopped", "ended" (by itself, without a restart)
	// or "failed".
	State    string
	PID      int
	Started  time.Time // most recently; zero if it never was
	Restarts uint64    // by the agent, since the service was started or set
	Exit     *ExitStatus
	Ended    time.Time // end of the run that Exit describes
	Problem  string
	// LogStart and LogEnd are the offsets of the kept output.
	LogStart, LogEnd uint64
	// Ready reports that the service runs and its check has passed since its start, at ReadyAt by the guest's clock.
	// CheckProblem says why the last check failed, and CheckRestarts how often the agent ended the service for that.
	Ready         bool
	ReadyAt       time.Time
	CheckProblem  string
	CheckRestarts uint64
}

// SetService defines a service in the agent, replacing one with the same name, and with start starts it. The agent
// first ends a running service if its definition differs, or with restart.
func (c *Client) SetService(ctx context.Context, s Service, start, restart bool) (ServiceState, error) {
	a := audit.Action{Kind: audit.KindServiceSet, Process: s.Name, Argv: s.Argv, User: s.User, Dir: s.Dir}
	req := &agentpb.SetServiceRequest{Start: start, Restart: restart, Service: &agentpb.Service{
		Name: s.Name, Argv: s.Argv, Env: s.Env, Cwd: s.Dir, User: s.User, Restart: s.Restart,
		BackoffNanos: int64(s.Backoff), MaxBackoffNanos: int64(s.MaxBackoff), MaxRestarts: s.MaxRestarts,
		StopSignal: int32(s.StopSignal), StopNanos: int64(s.StopTime), LogLimit: uint32(s.LogBytes), Check: s.Check.message(),
	}}
	return onService(ctx, c, a, "set service "+s.Name, agentpb.AgentClient.SetService, req)
}

// StopService ends a service without a restart, and waits for its end. With forget the agent also forgets it. The
// error is ErrNotFound if there is no such service.
func (c *Client) StopService(ctx context.Context, name string, forget bool) (ServiceState, error) {
	a := audit.Action{Kind: audit.KindServiceStop, Process: name}
	return onService(ctx, c, a, "stop service "+name, agentpb.AgentClient.StopService, &agentpb.StopServiceRequest{Name: name, Forget: forget})
}

// WaitService waits until a service is ready, or cannot become ready by itself because it has stopped, ended or
// failed, or until about 30 s are over.
func (c *Client) WaitService(ctx context.Context, name string) (ServiceState, error) {
	resp, err := call(ctx, c, "wait for service "+name, agentpb.AgentClient.WaitService, &agentpb.WaitServiceRequest{Name: name})
	if err != nil {
		return ServiceState{}, olderAgent(err)
	}
	return serviceState(resp), nil
}

// onService makes a call about a service, and records it.
func onService[Req any](ctx context.Context, c *Client, a audit.Action, op string, f method[Req, *agentpb.ServiceState], req Req) (ServiceState, error) {
	resp, err := recorded(ctx, c, a, op, f, req)
	if err != nil {
		return ServiceState{}, olderAgent(err)
	}
	return serviceState(resp), nil
}

// Services returns the agent's services in the order of their names; none if the agent is too old for services.
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

// ServiceLog returns output of a service from an offset on, at most 32 KiB. at is where data begins: later than
// offset if the agent has dropped older output. end is the end of all output. With wait it waits for a time if
// offset is the end.
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

// ServiceEvent is an event of a service that the agent reports. Texts are cut and printable.
type ServiceEvent struct {
	Name  string
	Event string // EventStarted, EventEnded, EventFailed, EventGaveUp, EventReady or EventUnhealthy
	// Exit and Signal are for EventEnded.
	Exit, Signal int
	Restarts     uint64
	Lost         uint64 // events before this one that were not delivered
	Problem      string
}

// Events of services.
const (
	EventStarted = agentpb.EventStarted
	EventEnded   = agentpb.EventEnded
	EventFailed  = agentpb.EventFailed // it could not be started
	EventGaveUp  = agentpb.EventGaveUp // too many restarts in a row

	EventReady     = agentpb.EventReady     // its check has passed for the first time since its start
	EventUnhealthy = agentpb.EventUnhealthy // the agent ends it because its check failed
)

// ServeServices calls f for each event that the agent reports, until the listener at ServicesPort is closed. It serves
// one connection at a time, for 5 s at most, so a guest can hold up only itself. It ignores lines that are not events.
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
