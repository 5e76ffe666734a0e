package agentpb

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unicode/utf8"
)

// ServicesPort is the vsock port of the host that the agent dials when a service has started
// or ended. It sends one line, see ServiceEvent, and waits for one byte.
const ServicesPort = 1021

// Bounds of services.
const (
	MaxServices       = 64
	MaxServiceName    = 64      // bytes
	MaxServiceLog     = 1 << 20 // bytes of output kept
	MinServiceLog     = 4 << 10
	MaxServiceText    = 256     // bytes of a problem
	MaxServiceEvent   = 4 << 10 // bytes of a line, with its escapes
	DefaultServiceLog = 256 << 10
)

// When a service that has ended is started again.
const (
	RestartNever     = "never"
	RestartOnFailure = "on-failure"
	RestartAlways    = "always"
)

// States of a service.
const (
	ServiceRunning  = "running"
	ServiceWaiting  = "waiting"  // to be started again
	ServiceStopping = "stopping" // it has been told to end
	ServiceStopped  = "stopped"  // it was told to end, or has not been started
	ServiceEnded    = "ended"    // by itself, and is not started again
	ServiceFailed   = "failed"   // it cannot be started, or has ended too often
)

// What a ServiceEvent says.
const (
	EventStarted = "started"
	EventEnded   = "ended"
	EventFailed  = "failed"  // it could not be started
	EventGaveUp  = "gave-up" // too many restarts in a row

	EventReady     = "ready"     // its check has passed for the first time since its start
	EventUnhealthy = "unhealthy" // it is ended since its check has failed
)

// Kinds of checks.
const (
	CheckTCP  = "tcp"
	CheckUnix = "unix"
	CheckHTTP = "http"
	CheckExec = "exec"
	CheckFile = "file"
)

// ServiceEvent is what the agent tells of a service: a line of JSON.
type ServiceEvent struct {
	Name  string `json:"name"`
	Event string `json:"event"`
	// Exit is the exit code as a shell gives it, and Signal the signal that ended it, for
	// EventEnded.
	Exit   int32 `json:"exit,omitempty"`
	Signal int32 `json:"signal,omitempty"`
	// Restarts is how often the agent has started it again, since it was set.
	Restarts uint64 `json:"restarts,omitempty"`
	// Lost is how many events before this one could not be told.
	Lost    uint64 `json:"lost,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// ErrServiceEvent says that a line is not an event.
var ErrServiceEvent = errors.New("not an event of a service")

// Line is the event as it is sent, with a newline.
func (e ServiceEvent) Line() string {
	b, _ := json.Marshal(e) // of strings and numbers, which cannot fail
	return string(b) + "\n"
}

// ParseServiceEvent reads a line, without its newline.
func ParseServiceEvent(line string) (e ServiceEvent, err error) {
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		return e, fmt.Errorf("%w: %w", ErrServiceEvent, err)
	}
	switch e.Event {
	case EventStarted, EventEnded, EventFailed, EventGaveUp, EventReady, EventUnhealthy:
	default:
		return e, fmt.Errorf("%w: event %q", ErrServiceEvent, e.Event)
	}
	if e.Name == "" || len(e.Name) > MaxServiceName || len(e.Problem) > MaxServiceText || !utf8.ValidString(e.Name+e.Problem) {
		return e, fmt.Errorf("%w: its texts are not possible", ErrServiceEvent)
	}
	return e, nil
}

// Loopback takes HOST:PORT of the machine itself: packets of a check are no use of its network.
func Loopback(s string) (string, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return "", err
	}
	if host == "" || host == "localhost" {
		host = "127.0.0.1"
	}
	a, err := netip.ParseAddrPort(net.JoinHostPort(host, port))
	if err != nil || !a.Addr().IsLoopback() || a.Port() == 0 {
		return "", fmt.Errorf("%q is not a port of 127.0.0.1, ::1 or localhost", s)
	}
	return a.String(), nil
}
