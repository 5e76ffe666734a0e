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

// ErrServiceNotReady means that a service has stopped, ended or failed, and will not become ready by itself.
var ErrServiceNotReady = errors.New("the service is not ready, and will not be by itself")
