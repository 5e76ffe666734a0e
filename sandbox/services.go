package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
)

// ServiceSpec is a program that the VM's agent keeps running: a service of the VM. It is
// started whenever the VM boots. A sleep leaves it in memory as it is, and forks and clones
// have it as the VM had it.
type ServiceSpec struct {
	// Name is 1 to 63 lower-case letters, digits, '.', '_' and '-'.
	Name string   `json:"name"`
	Argv []string `json:"argv"`
	// Env has KEY=VALUE over the least that a program needs. It is kept in the VM's record:
	// secrets belong into files, see Store.SetSecrets.
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
	// One of these: a port of the guest itself (127.0.0.1:8080) that accepts a connection, a URL of http at one that answers with a status
	// of 200 to 399, a Unix socket that accepts a connection, a path that is there, or a command that ends with status 0, as the
	// user and with the variables and directory of the service.
	TCP  string   `json:"tcp,omitempty"`
	HTTP string   `json:"http,omitempty"`
	Unix string   `json:"unix,omitempty"`
	File string   `json:"file,omitempty"`
	Exec []string `json:"exec,omitempty"`
	// IntervalSeconds, 1 by default, are between two checks, 10 at least once it is ready; TimeoutSeconds, 5 by default, are for one.
	// 1 to 600.
	IntervalSeconds int `json:"interval_seconds,omitempty"`
	TimeoutSeconds  int `json:"timeout_seconds,omitempty"`
	// StartSeconds is how long it may take until it is ready, at most 3600, before it is ended and started again; 0 is for ever.
	StartSeconds int `json:"start_seconds,omitempty"`
	// AliveFailures is after how many failures in a row it is ended and started again once it was ready, at most 1000. 0: then it
	// is not checked any more.
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
	if c.TCP != "" && guest.CheckLocal(c.TCP) != nil {
		return fmt.Sprintf("its check is at %q: use a port of 127.0.0.1, ::1 or localhost", c.TCP)
	}
	if u, err := url.Parse(c.HTTP); c.HTTP != "" && (err != nil || u.Scheme != "http" || u.User != nil || guest.CheckLocal(net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "80"))) != nil) {
		return fmt.Sprintf("its check asks %q: use a URL of http at 127.0.0.1, ::1 or localhost", c.HTTP)
	}
	return ""
}

func (c *ServiceCheck) unit() *guest.ServiceCheck {
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

// Defaults and bounds of services.
const (
	DefaultMaxRestarts = 10
	// MaxServices is how many a VM has, and MaxServicesBytes how long all of them are as JSON:
	// they are in each snapshot's manifest.
	MaxServices      = guest.MaxServices
	MaxServicesBytes = 16 << 10
)

var serviceRE = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

func (s *ServiceSpec) check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: service %s: %s", ErrSpec, s.Name, fmt.Sprintf(format, args...))
	}
	within := func(n, low, high int) bool { return n == 0 || n >= low && n <= high }
	switch {
	case !serviceRE.MatchString(s.Name):
		return fmt.Errorf("%w: service %q: use 1 to 63 lower-case letters, digits, '.', '_' and '-'", ErrSpec, s.Name)
	case len(s.Argv) == 0 || s.Argv[0] == "":
		return bad("it has no command")
	case s.Dir != "" && !filepath.IsAbs(s.Dir):
		return bad("its directory %q is not an absolute path", s.Dir)
	case s.Restart != "" && s.Restart != guest.RestartAlways && s.Restart != guest.RestartOnFailure && s.Restart != guest.RestartNever:
		return bad("restart %q: use %q, %q or %q", s.Restart, guest.RestartAlways, guest.RestartOnFailure, guest.RestartNever)
	case !within(s.BackoffSeconds, 1, 3600) || !within(s.MaxBackoffSeconds, max(1, s.BackoffSeconds), 3600):
		return bad("a back-off of %d to %d s: use 1 to 3600, the larger one last", s.BackoffSeconds, s.MaxBackoffSeconds)
	case s.MaxRestarts < -1 || s.MaxRestarts > 1<<20:
		return bad("%d restarts: use 1 to %d, or -1 for no limit", s.MaxRestarts, 1<<20)
	case !within(s.StopSignal, 1, 64):
		return bad("signal %d: use 1 to 64", s.StopSignal)
	case !within(s.StopSeconds, 1, 300):
		return bad("%d s to stop: use 1 to 300", s.StopSeconds)
	case !within(s.LogKiB, guest.MinServiceLog>>10, guest.MaxServiceLog>>10):
		return bad("a log of %d KiB: use %d to %d", s.LogKiB, guest.MinServiceLog>>10, guest.MaxServiceLog>>10)
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

func checkServices(list []ServiceSpec) error {
	if len(list) > MaxServices {
		return fmt.Errorf("%w: %d services: at most %d are possible", ErrSpec, len(list), MaxServices)
	}
	seen := map[string]bool{}
	for i := range list {
		if err := list[i].check(); err != nil {
			return err
		}
		if seen[list[i].Name] {
			return fmt.Errorf("%w: two services are called %s", ErrSpec, list[i].Name)
		}
		seen[list[i].Name] = true
	}
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	if len(text) > MaxServicesBytes {
		return fmt.Errorf("%w: its services have %d bytes as JSON, at most %d are possible: put long commands into scripts", ErrSpec, len(text), MaxServicesBytes)
	}
	return nil
}

// unit is what the agent is told.
func (s *ServiceSpec) unit() guest.Service {
	seconds := func(n int) time.Duration { return time.Duration(n) * time.Second }
	u := guest.Service{
		Name: s.Name, Argv: s.Argv, Env: s.Env, Dir: s.Dir, User: s.User, Restart: s.Restart,
		Backoff: seconds(s.BackoffSeconds), MaxBackoff: seconds(s.MaxBackoffSeconds),
		StopSignal: s.StopSignal, StopTime: seconds(s.StopSeconds), LogBytes: s.LogKiB << 10, Check: s.Check.unit(),
	}
	if u.Restart == "" {
		u.Restart = guest.RestartAlways
	}
	switch {
	case s.MaxRestarts == 0:
		u.MaxRestarts = DefaultMaxRestarts
	case s.MaxRestarts > 0:
		u.MaxRestarts = uint32(s.MaxRestarts)
	}
	return u
}

func findService(list []ServiceSpec, name string) int {
	return slices.IndexFunc(list, func(s ServiceSpec) bool { return s.Name == name })
}

func noService(vm, name string) error {
	return fmt.Errorf("%w: %s has no service %q: see `drowse service ls %s`", ErrNotFound, vm, name, vm)
}

// ServiceStatus is a service of a VM, and how it is.
type ServiceStatus struct {
	ServiceSpec
	// State is that of guest.ServiceState while the VM runs. "unknown" is one that the guest
	// does not know: start it. Of a VM that does not run it is "asleep", or empty.
	State    string     `json:"state,omitempty"`
	PID      int        `json:"pid,omitempty"`
	Restarts uint64     `json:"restarts"`
	Started  *time.Time `json:"started,omitempty"`
	// ExitCode, as a shell gives it, and Ended are of the last run that has ended.
	ExitCode *int       `json:"exit_code,omitempty"`
	Ended    *time.Time `json:"ended,omitempty"`
	Problem  string     `json:"problem,omitempty"`
	// Ready: it runs, and its check has passed since its start, at ReadyAt. CheckProblem is why the last check has failed,
	// CheckRestarts how often it was ended for that.
	Ready         bool       `json:"ready"`
	ReadyAt       *time.Time `json:"ready_at,omitempty"`
	CheckProblem  string     `json:"check_problem,omitempty"`
	CheckRestarts uint64     `json:"check_restarts,omitempty"`
}

// ErrServiceNotReady: a service has stopped, ended or failed, and is not going to be ready by itself.
var ErrServiceNotReady = errors.New("the service is not ready, and will not be by itself")

// WaitService waits until a service of a running VM is ready, or ctx ends. It is use of the VM, which does not go to sleep by itself
// meanwhile. The error is ErrServiceNotReady when it need not be waited for.
func (s *Store) WaitService(ctx context.Context, name, service string) (ServiceStatus, error) {
	spec, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return ServiceStatus{}, err
	}
	defer c.Close()
	out := ServiceStatus{ServiceSpec: spec}
	for {
		begun := time.Now()
		g, err := c.WaitService(ctx, service)
		if err != nil {
			return out, err
		}
		out.is(g)
		switch {
		case g.Ready:
			return out, nil
		case g.State == guest.ServiceStopped || g.State == guest.ServiceEnded || g.State == guest.ServiceFailed:
			return out, fmt.Errorf("%w: %s of %s has %s: see `drowse service logs %s %s`", ErrServiceNotReady, service, name, g.State, name, service)
		}
		// A guest that answers at once without an end must not be asked in a loop.
		if time.Since(begun) < time.Second {
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
				return out, fmt.Errorf("waiting for service %s of %s: %w", service, name, ctx.Err())
			}
		}
	}
}

// States of services that only the host knows.
const (
	ServiceUnknown = "unknown"
	ServiceAsleep  = "asleep"
)

func (s *ServiceStatus) is(g guest.ServiceState) {
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

// SetService gives a VM a service, in the place of one of that name, for good. In a VM that
// runs it is started, anew if it is another than before; one that has stopped starts it when
// it boots. One that sleeps is ErrNotRunning: wake it first. It is in the VM's record before
// the guest is told.
func (s *Store) SetService(ctx context.Context, name string, spec ServiceSpec) (ServiceStatus, error) {
	if err := spec.check(); err != nil {
		return ServiceStatus{}, err
	}
	body, err := json.Marshal(spec)
	if err != nil {
		return ServiceStatus{}, err
	}
	live, err := s.changeServices(ctx, name, http.MethodPut, "/services", body, func(r *Record) error { return r.setService(spec) })
	if err != nil || !live {
		return ServiceStatus{ServiceSpec: spec}, err
	}
	return s.StartService(ctx, name, spec.Name, false)
}

// RemoveService ends a service and takes it from the VM for good.
func (s *Store) RemoveService(ctx context.Context, name, service string) error {
	r, err := s.Get(name)
	if err != nil {
		return err
	}
	if findService(r.Spec.Services, service) < 0 {
		return noService(name, service)
	}
	if r.Phase == Running {
		c, err := s.Agent(ctx, name)
		if err != nil {
			return err
		}
		_, err = c.StopService(ctx, service, true)
		c.Close()
		if err != nil && !errors.Is(err, guest.ErrNotFound) {
			return err
		}
	}
	_, err = s.changeServices(ctx, name, http.MethodDelete, "/services?name="+url.QueryEscape(service), nil, func(r *Record) error { return r.dropService(service) })
	return err
}

// StartService starts a service of a running VM if it does not run, or, with restart, in any
// case.
func (s *Store) StartService(ctx context.Context, name, service string, restart bool) (ServiceStatus, error) {
	spec, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return ServiceStatus{}, err
	}
	defer c.Close()
	out := ServiceStatus{ServiceSpec: spec}
	state, err := c.SetService(ctx, spec.unit(), true, restart)
	if err == nil {
		out.is(state)
	}
	return out, err
}

// StopService stops a service of a running VM, until it is started or the VM boots.
func (s *Store) StopService(ctx context.Context, name, service string) (ServiceStatus, error) {
	spec, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return ServiceStatus{}, err
	}
	defer c.Close()
	out := ServiceStatus{ServiceSpec: spec}
	state, err := c.StopService(ctx, service, false)
	if err == nil {
		out.is(state)
	}
	return out, err
}

// serviceOf returns a service of a running VM, and a client to close.
func (s *Store) serviceOf(ctx context.Context, name, service string) (ServiceSpec, *guest.Client, error) {
	r, err := s.Get(name)
	if err != nil {
		return ServiceSpec{}, nil, err
	}
	i := findService(r.Spec.Services, service)
	if i < 0 {
		return ServiceSpec{}, nil, noService(name, service)
	}
	c, err := s.Agent(ctx, name)
	return r.Spec.Services[i], c, err
}

// Services lists the services of a VM in the order of their names. A VM that sleeps is not
// woken.
func (s *Store) Services(ctx context.Context, name string) ([]ServiceStatus, error) {
	r, err := s.Get(name)
	if err != nil {
		return nil, err
	}
	out := make([]ServiceStatus, len(r.Spec.Services))
	for i, spec := range r.Spec.Services {
		out[i].ServiceSpec = spec
		if r.Phase == Asleep {
			out[i].State = ServiceAsleep
		}
	}
	slices.SortFunc(out, func(a, b ServiceStatus) int { return strings.Compare(a.Name, b.Name) })
	if r.Phase != Running || len(out) == 0 {
		return out, nil
	}
	c, err := s.Agent(ctx, name)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	states, err := c.Services(ctx)
	if err != nil {
		return nil, err
	}
	for i := range out {
		out[i].State = ServiceUnknown
		for _, g := range states {
			if g.Name == out[i].Name {
				out[i].is(g)
			}
		}
	}
	return out, nil
}

// ServiceLog writes the output of a service that its guest has kept to w, and with follow what
// comes until ctx ends. What was dropped before it could be written is named by a line.
func (s *Store) ServiceLog(ctx context.Context, name, service string, w io.Writer, follow bool) error {
	_, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return err
	}
	defer c.Close()
	next, known := uint64(0), false
	for {
		data, at, end, err := c.ServiceLog(ctx, service, next, follow && known)
		if err != nil {
			return err
		}
		if known && at > next {
			if _, err := fmt.Fprintf(w, "[%d bytes were dropped]\n", at-next); err != nil {
				return err
			}
		}
		if _, err := w.Write(data); err != nil {
			return err
		}
		next, known = at+uint64(len(data)), true
		if next >= end && !follow {
			return nil
		}
		if len(data) == 0 && at < end {
			return fmt.Errorf("reading the log of service %s: %w: an empty part", service, guest.ErrProtocol)
		}
	}
}

// changeServices changes the services in a VM's record: by its process if it runs. live says
// that it does.
func (s *Store) changeServices(ctx context.Context, name, method, path string, body []byte, change func(*Record) error) (live bool, err error) {
	for {
		r, err := s.Get(name)
		if err != nil {
			return false, err
		}
		switch r.Phase {
		case Running:
			live = true
			err = s.callWith(ctx, name, method, path, body, discard)
		case Asleep:
			return false, fmt.Errorf("%w: %s is asleep, and so are its services: wake it with `drowse wake %s`", ErrNotRunning, name, name)
		default:
			live = false
			err = s.changeRecord(name, change)
		}
		if !passing(err) {
			return live, err
		}
		select {
		case <-ctx.Done():
			return false, errors.Join(fmt.Errorf("changing the services of %s: %w", name, ctx.Err()), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// changeRecord changes the record of a VM without a process.
func (s *Store) changeRecord(name string, change func(*Record) error) error {
	l, err := s.lock(name)
	if err != nil {
		return err
	}
	defer l.release()
	r, err := s.load(name)
	if err != nil {
		return err
	}
	if err := change(r); err != nil {
		return err
	}
	return s.save(r)
}

func (r *Record) setService(spec ServiceSpec) error {
	list := slices.Clone(r.Spec.Services)
	if i := findService(list, spec.Name); i >= 0 {
		list[i] = spec
	} else {
		list = append(list, spec)
	}
	if err := checkServices(list); err != nil {
		return err
	}
	r.Spec.Services = list
	return nil
}

func (r *Record) dropService(name string) error {
	i := findService(r.Spec.Services, name)
	if i < 0 {
		return noService(r.Spec.Name, name)
	}
	r.Spec.Services = slices.Delete(slices.Clone(r.Spec.Services), i, i+1)
	return nil
}

// The rest is in the VM's process.

func (p *process) handleServices(handle func(string, func(*http.Request) (any, error), func())) {
	change := func(f func(*Record) error) (any, error) {
		p.op.Lock()
		defer p.op.Unlock()
		if err := p.alive(); err != nil {
			return nil, err
		}
		defer p.in.keepRunning()()
		if err := p.in.listenServices(); err != nil {
			return nil, err
		}
		before := p.r.Spec.Services
		err := f(p.r)
		if err == nil {
			err = p.store.save(p.r)
		}
		if err != nil {
			p.r.Spec.Services = before
		}
		return struct{}{}, err
	}
	handle("PUT /services", func(r *http.Request) (any, error) {
		var spec ServiceSpec
		d := json.NewDecoder(io.LimitReader(r.Body, 4*MaxServicesBytes))
		d.DisallowUnknownFields()
		if err := d.Decode(&spec); err != nil {
			return nil, fmt.Errorf("reading a service: %w: %w", ErrSpec, err)
		}
		return change(func(r *Record) error { return r.setService(spec) })
	}, nil)
	handle("DELETE /services", func(r *http.Request) (any, error) {
		name := r.URL.Query().Get("name")
		return change(func(r *Record) error { return r.dropService(name) })
	}, nil)
}

// startServices starts the services of a guest that has booted. What fails does not keep the
// VM from running.
func (p *process) startServices(ctx context.Context) {
	ctx, stop := p.in.whileRunning(ctx)
	defer stop()
	c, err := p.in.Agent(ctx)
	if err != nil {
		p.log.Error("services could not be started", "error", err)
		return
	}
	defer c.Close()
	for i := range p.r.Spec.Services {
		spec := &p.r.Spec.Services[i]
		if _, err := c.SetService(ctx, spec.unit(), true, false); err != nil {
			p.log.Error("a service could not be started", "service", spec.Name, "error", err)
		}
	}
}

// listenServices lets the guest say what becomes of its services. A VM without services does
// not listen.
func (in *Instance) listenServices() error {
	in.servicesMu.Lock()
	defer in.servicesMu.Unlock()
	if in.services != nil || in.parts.ServiceEvent == nil {
		return nil
	}
	l, err := listenUnix(guest.ServicesPath(in.parts.Socket))
	if err != nil {
		return fmt.Errorf("listening for services of the guest: %w", err)
	}
	in.services = l
	go guest.ServeServices(l, in.parts.ServiceEvent)
	return nil
}

// serviceTrail puts what a guest says of its services into the audit trail: of services that
// the VM has, and no more than the bounds below, so that a guest cannot push out what others
// have done.
type serviceTrail struct {
	trail *audit.Trail
	known func(name string) bool
	now   func() time.Time

	mu    sync.Mutex // guards what follows
	left  int
	since time.Time
	lost  uint64
}

// Events in a row that are recorded, and how long it takes until one more is.
const (
	serviceEvents = 64
	serviceEvery  = 10 * time.Second
)

func (t *serviceTrail) record(e guest.ServiceEvent) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.known(e.Name) {
		return
	}
	t.lost += min(e.Lost, 1<<32)
	now := t.now()
	if t.since.IsZero() {
		t.left, t.since = serviceEvents, now
	}
	if n := int(min(now.Sub(t.since)/serviceEvery, serviceEvents)); n > 0 {
		t.left, t.since = min(t.left+n, serviceEvents), now
	}
	if t.left == 0 {
		t.lost++
		return
	}
	t.left--
	a := audit.Action{Kind: audit.KindServiceExit, Process: e.Name}
	o := audit.Outcome{Error: e.Problem}
	switch e.Event {
	case guest.EventStarted, guest.EventFailed:
		a.Kind = audit.KindServiceStart
	case guest.EventReady:
		a.Kind = audit.KindServiceReady
	case guest.EventUnhealthy:
		a.Kind = audit.KindServiceUnhealthy
	case guest.EventEnded:
		o.Exit, o.ExitSignal = &e.Exit, e.Signal
	}
	if t.lost > 0 {
		o.Error = strings.TrimSpace(fmt.Sprintf("%s (%d events before this one are not recorded)", o.Error, t.lost))
		t.lost = 0
	}
	// What cannot be recorded has been done all the same.
	if p, err := t.trail.Begin(context.Background(), a); err == nil {
		p.End(o)
	}
}

// serviceEvents is what is done with what the guest says of services.
func (p *process) serviceEvents() func(guest.ServiceEvent) {
	name := p.r.Spec.Name
	// As the record is on disk: p.r may be in use by what waits for the guest.
	known := func(service string) bool {
		r, err := p.store.load(name)
		return err == nil && findService(r.Spec.Services, service) >= 0
	}
	t := &serviceTrail{trail: audit.Open(p.store.AuditPath(name)), now: time.Now, known: known}
	return t.record
}
