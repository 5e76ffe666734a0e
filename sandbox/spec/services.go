package spec

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Service is a program that the VM's agent keeps running: a service of the VM. It is
// started whenever the VM boots. A sleep leaves it in memory as it is, and forks and clones
// have it as the VM had it.
type Service struct {
	// Name is 1 to 63 lower-case letters, digits, '.', '_' and '-'.
	Name string   `json:"name"`
	Argv []string `json:"argv"`
	// Env has KEY=VALUE over the least that a program needs. It is kept in the VM's record:
	// secrets belong into files, see Sandbox.SetSecrets.
	Env  []string `json:"env,omitempty"`
	Dir  string   `json:"dir,omitempty"`
	User string   `json:"user,omitempty"`
	// Restart is "always" (the default), "on-failure" or "never".
	Restart string `json:"restart,omitempty"`
	// BackoffSeconds, 1 by default, are waited before the first restart in a row, and doubled
	// for each up to MaxBackoffSeconds, 60 by default, at most 3600. A run of that length ends the row.
	BackoffSeconds    int `json:"backoff_seconds,omitempty"`
	MaxBackoffSeconds int `json:"max_backoff_seconds,omitempty"`
	// MaxRestarts is how many there are in a row: 10 by default; -1 is no limit.
	MaxRestarts int `json:"max_restarts,omitempty"`
	// StopSignal is sent to stop it, 15 (SIGTERM) by default; after StopSeconds, 10 by
	// default and at most 300, it is killed.
	StopSignal  int `json:"stop_signal,omitempty"`
	StopSeconds int `json:"stop_seconds,omitempty"`
	// LogKiB of its newest output are kept in the guest: 4 to 1024; 256 by default.
	LogKiB int `json:"log_kib,omitempty"`
	// Check says how it is seen that it is ready; without one it is once it runs.
	Check *ServiceCheck `json:"check,omitempty"`
}

// ServiceCheck is how it is seen, in the guest, that a service is ready and goes on working.
type ServiceCheck struct {
	// One of these: a port of the guest itself (127.0.0.1:8080) that accepts a connection, a URL of http at one that
	// answers with a status of 200 to 399, a Unix socket that accepts a connection, a path that is there, or a command
	// that ends with status 0, as the user and with the variables and directory of the service.
	TCP  string   `json:"tcp,omitempty"`
	HTTP string   `json:"http,omitempty"`
	Unix string   `json:"unix,omitempty"`
	File string   `json:"file,omitempty"`
	Exec []string `json:"exec,omitempty"`
	// IntervalSeconds, 1 by default, are between two checks, 10 at least once it is ready; TimeoutSeconds, 5 by
	// default, are for one. 1 to 600.
	IntervalSeconds int `json:"interval_seconds,omitempty"`
	TimeoutSeconds  int `json:"timeout_seconds,omitempty"`
	// StartSeconds is how long it may take until it is ready, at most 3600, before it is ended and started again; 0 is
	// for ever.
	StartSeconds int `json:"start_seconds,omitempty"`
	// AliveFailures is after how many failures in a row it is ended and started again once it was ready, at most 1000.
	// 0: then it is not checked any more.
	AliveFailures int `json:"alive_failures,omitempty"`
}

// check says what is wrong with it, beyond what the agent says.
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

// local says whether HOST:PORT is a port of the guest itself, which is all that a check may connect to.
func local(address string) bool {
	_, err := agentpb.Loopback(address)
	return err == nil
}

// Defaults and bounds of services.
const (
	DefaultMaxRestarts = 10
	// MaxServices is how many a VM has, and MaxServicesBytes how long all of them are as JSON:
	// they are in each snapshot's manifest.
	MaxServices      = agentpb.MaxServices
	MaxServicesBytes = 16 << 10
)

var serviceRE = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// Validate says what is wrong with it, by an ErrInvalid.
func (s *Service) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: service %s: %s", ErrInvalid, s.Name, fmt.Sprintf(format, args...))
	}
	within := func(n, low, high int) bool { return n == 0 || n >= low && n <= high }
	switch {
	case !serviceRE.MatchString(s.Name):
		return fmt.Errorf("%w: service %q: use 1 to 63 lower-case letters, digits, '.', '_' and '-'", ErrInvalid, s.Name)
	case len(s.Argv) == 0 || s.Argv[0] == "":
		return bad("it has no command")
	case s.Dir != "" && !filepath.IsAbs(s.Dir):
		return bad("its directory %q is not an absolute path", s.Dir)
	case s.Restart != "" && s.Restart != agentpb.RestartAlways && s.Restart != agentpb.RestartOnFailure && s.Restart != agentpb.RestartNever:
		return bad("restart %q: use %q, %q or %q", s.Restart, agentpb.RestartAlways, agentpb.RestartOnFailure, agentpb.RestartNever)
	case !within(s.BackoffSeconds, 1, 3600) || !within(s.MaxBackoffSeconds, max(1, s.BackoffSeconds), 3600):
		return bad("a back-off of %d to %d s: use 1 to 3600, the larger one last", s.BackoffSeconds, s.MaxBackoffSeconds)
	case s.MaxRestarts < -1 || s.MaxRestarts > 1<<20:
		return bad("%d restarts: use 1 to %d, or -1 for no limit", s.MaxRestarts, 1<<20)
	case !within(s.StopSignal, 1, 64):
		return bad("signal %d: use 1 to 64", s.StopSignal)
	case !within(s.StopSeconds, 1, 300):
		return bad("%d s to stop: use 1 to 300", s.StopSeconds)
	case !within(s.LogKiB, agentpb.MinServiceLog>>10, agentpb.MaxServiceLog>>10):
		return bad("a log of %d KiB: use %d to %d", s.LogKiB, agentpb.MinServiceLog>>10, agentpb.MaxServiceLog>>10)
	}
	if s.Check != nil {
		if wrong := s.Check.check(); wrong != "" {
			return bad("%s", wrong)
		}
	}
	for _, w := range slices.Concat(s.Argv, s.Env, []string{s.User, s.Dir}) {
		if strings.IndexByte(w, 0) >= 0 {
			return bad("a word of it has a zero byte")
		}
	}
	return nil
}

// ValidateServices says what is wrong with the services of a VM, each by itself and together.
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
