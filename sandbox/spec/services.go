package spec

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/internal/lazyregexp"
)

// Service is a program that the VM's agent keeps running. The agent starts it whenever the VM boots. A sleep
// leaves it in memory unchanged, and forks and clones have it in the state of their parent.
type Service struct {
	// Name is 1 to 63 lower-case letters, digits, '.', '_' and '-'.
	Name string   `json:"name"`
	Argv []string `json:"argv"`
	// Env has KEY=VALUE pairs, added to the minimum that a program needs. The VM's record keeps it. Secrets belong
	// in files, see Sandbox.SetSecrets.
	Env  []string `json:"env,omitempty"`
	Dir  string   `json:"dir,omitempty"`
	User string   `json:"user,omitempty"`
	// Restart is "always" (the default), "on-failure" or "never".
	Restart string `json:"restart,omitempty"`
	// BackoffSeconds, 1 by default, is the wait before the first restart in a row. It doubles for each restart, up
	// to MaxBackoffSeconds, 60 by default, at most 3600. A run of that length ends the row.
	BackoffSeconds    int `json:"backoff_seconds,omitempty"`
	MaxBackoffSeconds int `json:"max_backoff_seconds,omitempty"`
	// MaxRestarts is the most restarts in a row: 10 by default; -1 is no limit.
	MaxRestarts int `json:"max_restarts,omitempty"`
	// StopSignal is the signal that stops it, 15 (SIGTERM) by default. After StopSeconds, 10 by default and at
	// most 300, it is killed.
	StopSignal  int `json:"stop_signal,omitempty"`
	StopSeconds int `json:"stop_seconds,omitempty"`
	// LogKiB is how much of its newest output the guest keeps: 4 to 1024 KiB; 256 by default.
	LogKiB int `json:"log_kib,omitempty"`
	// Check tests whether it is ready. Without a check it is ready once it runs.
	Check *ServiceCheck `json:"check,omitempty"`
}

// ServiceCheck says how the agent tests, in the guest, that a service is ready and continues to work.
type ServiceCheck struct {
	// One of these: a port of the guest itself (127.0.0.1:8080) that accepts a connection, an http URL at such a
	// port that answers with a status of 200 to 399, a Unix socket that accepts a connection, a path that exists,
	// or a command that ends with status 0, with the user, variables and directory of the service.
	TCP  string   `json:"tcp,omitempty"`
	HTTP string   `json:"http,omitempty"`
	Unix string   `json:"unix,omitempty"`
	File string   `json:"file,omitempty"`
	Exec []string `json:"exec,omitempty"`
	// IntervalSeconds, 1 by default, is the time between two checks, at least 10 once the service is ready.
	// TimeoutSeconds, 5 by default, is the time for one check. Both are 1 to 600.
	IntervalSeconds int `json:"interval_seconds,omitempty"`
	TimeoutSeconds  int `json:"timeout_seconds,omitempty"`
	// StartSeconds is how long the service may take to be ready, at most 3600. After that it is ended and started
	// again. 0 is no limit.
	StartSeconds int `json:"start_seconds,omitempty"`
	// AliveFailures is how many failed checks in a row, at most 1000, cause a restart of a service that was ready.
	// 0 means that a ready service is not checked.
	AliveFailures int `json:"alive_failures,omitempty"`
}

// check returns what is wrong with it, beyond the agent's own checks; empty if nothing is.
func (c *ServiceCheck) check() string {
	n := 0
	for _, is := range []bool{c.TCP != "", c.HTTP != "", c.Unix != "", c.File != "", len(c.Exec) > 0} {
		if is {
			n++
		}
	}
	switch {
	case n != 1:
		return "its check is not one of tcp, http, unix, file and exec"
	case c.IntervalSeconds < 0 || c.IntervalSeconds > 600 || c.TimeoutSeconds < 0 || c.TimeoutSeconds > 600:
		return fmt.Sprintf("its check has times of %d and %d s: use 1 to 600", c.IntervalSeconds, c.TimeoutSeconds)
	case c.StartSeconds < 0 || c.StartSeconds > 3600:
		return fmt.Sprintf("%d s until it is ready: use 1 to 3600", c.StartSeconds)
	case c.AliveFailures < 0 || c.AliveFailures > 1000:
		return fmt.Sprintf("%d failures of its check: use 1 to 1000", c.AliveFailures)
	case (c.Unix != "" && !filepath.IsAbs(c.Unix)) || (c.File != "" && !filepath.IsAbs(c.File)):
		return "the path of its check is not absolute"
	case len(c.Exec) > 0 && c.Exec[0] == "":
		return "its check has no command"
	}
	for _, w := range slices.Concat(c.Exec, []string{c.TCP, c.HTTP, c.Unix, c.File}) {
		if strings.IndexByte(w, 0) >= 0 {
			return "a word of its check has a zero byte"
		}
	}
	if c.TCP != "" && !local(c.TCP) {
		return fmt.Sprintf("its check is at %q: use a port of 127.0.0.1, ::1 or localhost", c.TCP)
	}
	if u, err := url.Parse(c.HTTP); c.HTTP != "" && (err != nil || u.Scheme != "http" || u.User != nil || !local(net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "80")))) {
		return fmt.Sprintf("its check asks %q: use a URL of http at 127.0.0.1, ::1 or localhost", c.HTTP)
	}
	return ""
}

// local reports whether HOST:PORT is a port of the guest itself. A check may connect to nothing else.
func local(address string) bool {
	_, err := agentpb.Loopback(address)
	return err == nil
}

// Defaults and bounds of services.
const (
	DefaultMaxRestarts = 10
	// MaxServices is the most services of a VM, and MaxServicesBytes the most bytes of all of them as JSON: each
	// snapshot's manifest contains them.
	MaxServices      = agentpb.MaxServices
	MaxServicesBytes = 16 << 10
)

var serviceRE = lazyregexp.New(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// Validate returns an ErrInvalid that says what is wrong with the service.
func (s *Service) Validate() error {
	bad := func(field, format string, args ...any) error {
		err := fmt.Errorf("%w: service %s: %s", ErrInvalid, s.Name, fmt.Sprintf(format, args...))
		if field == "" {
			return err
		}
		return InField(field, err)
	}
	within := func(n, low, high int) bool { return n == 0 || n >= low && n <= high }
	switch {
	case !serviceRE.MatchString(s.Name):
		return InField("name", fmt.Errorf("%w: service %q: use 1 to 63 lower-case letters, digits, '.', '_' and '-'", ErrInvalid, s.Name))
	case len(s.Argv) == 0 || s.Argv[0] == "":
		return bad("argv", "it has no command")
	case s.Dir != "" && !filepath.IsAbs(s.Dir):
		return bad("dir", "its directory %q is not an absolute path", s.Dir)
	case s.Restart != "" && s.Restart != agentpb.RestartAlways && s.Restart != agentpb.RestartOnFailure && s.Restart != agentpb.RestartNever:
		return bad("restart", "restart %q: use %q, %q or %q", s.Restart, agentpb.RestartAlways, agentpb.RestartOnFailure, agentpb.RestartNever)
	case !within(s.BackoffSeconds, 1, 3600) || !within(s.MaxBackoffSeconds, max(1, s.BackoffSeconds), 3600):
		return bad("", "a back-off of %d to %d s: use 1 to 3600, the larger one last", s.BackoffSeconds, s.MaxBackoffSeconds)
	case s.MaxRestarts < -1 || s.MaxRestarts > 1<<20:
		return bad("max_restarts", "%d restarts: use 1 to %d, or -1 for no limit", s.MaxRestarts, 1<<20)
	case !within(s.StopSignal, 1, 64):
		return bad("stop_signal", "signal %d: use 1 to 64", s.StopSignal)
	case !within(s.StopSeconds, 1, 300):
		return bad("stop_seconds", "%d s to stop: use 1 to 300", s.StopSeconds)
	case !within(s.LogKiB, agentpb.MinServiceLog>>10, agentpb.MaxServiceLog>>10):
		return bad("log_kib", "a log of %d KiB: use %d to %d", s.LogKiB, agentpb.MinServiceLog>>10, agentpb.MaxServiceLog>>10)
	}
	if s.Check != nil {
		if wrong := s.Check.check(); wrong != "" {
			return bad("check", "%s", wrong)
		}
	}
	for _, w := range slices.Concat(s.Argv, s.Env, []string{s.User, s.Dir}) {
		if strings.IndexByte(w, 0) >= 0 {
			return bad("", "a word of it has a zero byte")
		}
	}
	return nil
}

// ValidateServices checks the services of a VM, each by itself and all together.
func ValidateServices(list []Service) error {
	if len(list) > MaxServices {
		return fmt.Errorf("%w: %d services: at most %d are possible", ErrInvalid, len(list), MaxServices)
	}
	seen := map[string]bool{}
	for i := range list {
		if err := list[i].Validate(); err != nil {
			return err
		}
		if seen[list[i].Name] {
			return fmt.Errorf("%w: two services are called %s", ErrInvalid, list[i].Name)
		}
		seen[list[i].Name] = true
	}
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	if len(text) > MaxServicesBytes {
		return fmt.Errorf("%w: its services have %d bytes as JSON, at most %d are possible: put long commands into scripts", ErrInvalid, len(text), MaxServicesBytes)
	}
	return nil
}
