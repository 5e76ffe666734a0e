package agentpb

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unicode/utf8"
)

// ServicesPort is the vsock port of the host that the agent dials when a service has an event. It sends one line
// (ServiceEvent) and waits for one byte.
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

// When the agent restarts a service that has ended.
const (
	RestartNever     = "never"
	RestartOnFailure = "on-failure"
	RestartAlways    = "always"
)

// States of a service.
const (
	ServiceRunning  = "running"
	ServiceWaiting  = "waiting"  // for a restart
	ServiceStopping = "stopping" // told to end
	ServiceStopped  = "stopped"  // was told to end, or has not been started
	ServiceEnded    = "ended"    // ended by itself, without a restart
	ServiceFailed   = "failed"   // cannot be started, or has ended too often
)

// Values of ServiceEvent.Event.
const (
	EventStarted = "started"
	EventEnded   = "ended"
	EventFailed  = "failed"  // it could not be started
	EventGaveUp  = "gave-up" // too many restarts in a row

	EventReady     = "ready"     // its check has passed for the first time since its start
	EventUnhealthy = "unhealthy" // the agent ends it because its check failed
)

// Kinds of checks.
const (
	CheckTCP  = "tcp"
	CheckUnix = "unix"
	CheckHTTP = "http"
	CheckExec = "exec"
	CheckFile = "file"
)

// ServiceEvent is the agent's report about a service: a line of JSON.
type ServiceEvent struct {
	Name  string `json:"name"`
	Event string `json:"event"`
	// Exit is the exit code in a shell's terms, and Signal the signal that ended the service, for EventEnded.
	Exit   int32 `json:"exit,omitempty"`
	Signal int32 `json:"signal,omitempty"`
	// Restarts is how often the agent has restarted the service since it was set.
	Restarts uint64 `json:"restarts,omitempty"`
	// Lost is how many events before this one were not delivered.
	Lost    uint64 `json:"lost,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// ErrServiceEvent says that a line is not an event.
var ErrServiceEvent = errors.New("not an event of a service")

// Line returns the event in its wire form, with a newline.
func (e ServiceEvent) Line() string {
	b, _ := json.Marshal(e) // cannot fail for strings and numbers
	return string(b) + "\n"
}

// ParseServiceEvent parses a line without its newline.
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

// Loopback checks a HOST:PORT, which must be on the guest itself: a check must not count as use of the VM's network.
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
