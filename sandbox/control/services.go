package control

import (
	"errors"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// guestCheck returns the agent's form of a check.
func guestCheck(c *spec.ServiceCheck) *guest.ServiceCheck {
	if c == nil {
		return nil
	}
	u := &guest.ServiceCheck{
		Argv: c.Exec, Interval: time.Duration(c.IntervalSeconds) * time.Second, Timeout: time.Duration(c.TimeoutSeconds) * time.Second,
		Start: time.Duration(c.StartSeconds) * time.Second, Alive: uint32(c.AliveFailures),
	}
	for kind, address := range map[string]string{guest.CheckTCP: c.TCP, guest.CheckHTTP: c.HTTP, guest.CheckUnix: c.Unix, guest.CheckFile: c.File} {
		if address != "" {
			u.Kind, u.Address = kind, address
		}
	}
	if u.Kind == "" {
		u.Kind = guest.CheckExec
	}
	return u
}

// GuestService returns the agent's form of a service.
func GuestService(s *spec.Service) guest.Service {
	seconds := func(n int) time.Duration { return time.Duration(n) * time.Second }
	u := guest.Service{
		Name: s.Name, Argv: s.Argv, Env: s.Env, Dir: s.Dir, User: s.User, Restart: s.Restart,
		Backoff: seconds(s.BackoffSeconds), MaxBackoff: seconds(s.MaxBackoffSeconds),
		StopSignal: s.StopSignal, StopTime: seconds(s.StopSeconds), LogBytes: s.LogKiB << 10, Check: guestCheck(s.Check),
	}
	if u.Restart == "" {
		u.Restart = guest.RestartAlways
	}
	switch {
	case s.MaxRestarts == 0:
		u.MaxRestarts = spec.DefaultMaxRestarts
	case s.MaxRestarts > 0:
		u.MaxRestarts = uint32(s.MaxRestarts)
	}
	return u
}

// ServiceStatus is a service of a VM with its state.
type ServiceStatus struct {
	spec.Service
	// State is a guest.ServiceState while the VM runs, or "unknown" for a service that the guest does not know:
	// start it. If the VM does not run, it is "asleep" or empty.
	State    string     `json:"state,omitempty"`
	PID      int        `json:"pid,omitempty"`
	Restarts uint64     `json:"restarts"`
	Started  *time.Time `json:"started,omitempty"`
	// ExitCode, as a shell gives it, and Ended belong to the last run that ended.
	ExitCode *int       `json:"exit_code,omitempty"`
	Ended    *time.Time `json:"ended,omitempty"`
	Problem  string     `json:"problem,omitempty"`
	// Ready reports that it runs and that its check has passed since its start, at ReadyAt. CheckProblem is why
	// the last check failed. CheckRestarts counts the restarts because of failed checks.
	Ready         bool       `json:"ready"`
	ReadyAt       *time.Time `json:"ready_at,omitempty"`
	CheckProblem  string     `json:"check_problem,omitempty"`
	CheckRestarts uint64     `json:"check_restarts,omitempty"`
}

// ErrServiceNotReady means that a service has stopped, ended or failed, and will not become ready by itself.
var ErrServiceNotReady = errors.New("the service is not ready, and will not be by itself")

// States of services that only the host knows.
const (
	ServiceUnknown = "unknown"
	ServiceAsleep  = "asleep"
)

func (s *ServiceStatus) Set(g guest.ServiceState) {
	s.State, s.PID, s.Restarts, s.Problem = g.State, g.PID, g.Restarts, g.Problem
	s.Ready, s.CheckProblem, s.CheckRestarts, s.ReadyAt = g.Ready, g.CheckProblem, g.CheckRestarts, nil
	if !g.ReadyAt.IsZero() {
		s.ReadyAt = &g.ReadyAt
	}
	if !g.Started.IsZero() {
		s.Started = &g.Started
	}
	if g.Exit != nil {
		s.ExitCode, s.Ended = &g.Exit.Code, &g.Ended
	}
}
