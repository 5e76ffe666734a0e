package records

import (
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Service is a service of a sandbox with its state: what `drowse service ls -o json` has of one.
type Service struct {
	spec.Service
	// State is a guest.ServiceState while the sandbox runs, or ServiceUnknown for a service that the guest does not
	// know: start it. If the sandbox does not run, it is ServiceAsleep or empty.
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

// States of services that only the host knows.
const (
	ServiceUnknown = "unknown"
	ServiceAsleep  = "asleep"
)
