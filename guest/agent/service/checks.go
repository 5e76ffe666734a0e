package service

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/internal/wait"
)

// Defaults and limits of checks of services.
const (
	defaultCheckInterval = time.Second
	defaultCheckTimeout  = 5 * time.Second
	minCheckTime         = 100 * time.Millisecond
	maxCheckTime         = 10 * time.Minute
	maxCheckStart        = time.Hour
	maxCheckAlive        = 1000
	// aliveInterval is the least time between two checks of a service that is ready. They go on as long as the
	// service runs, and must not keep the machine awake.
	aliveInterval = 10 * time.Second
	// maxHTTPLine bounds the first line of an answer, in bytes.
	maxHTTPLine = 1 << 10
	// maxServiceWait bounds one WaitService.
	maxServiceWait = 30 * time.Second
)

// checkCheck gives a check its defaults, or returns why it is not valid.
func checkCheck(c *agentpb.Check) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(codes.InvalidArgument, "check: "+format, args...)
	}
	if c == nil {
		return nil
	}
	def(&c.IntervalNanos, defaultCheckInterval)
	def(&c.TimeoutNanos, defaultCheckTimeout)
	for _, d := range []int64{c.IntervalNanos, c.TimeoutNanos} {
		if d < int64(minCheckTime) || d > int64(maxCheckTime) {
			return bad("a time of %v: it is %v to %v", time.Duration(d), minCheckTime, maxCheckTime)
		}
	}
	if c.StartNanos < 0 || c.StartNanos > int64(maxCheckStart) || c.Alive > maxCheckAlive {
		return bad("%v to start, %d failures: at most %v and %d", time.Duration(c.StartNanos), c.Alive, maxCheckStart, maxCheckAlive)
	}
	if len(c.Address) > agentpb.MaxPath || strings.ContainsAny(c.Address, "\x00\r\n") || (c.Kind == agentpb.CheckExec) != (len(c.Argv) > 0) {
		return bad("its words are not those of a check of the kind %q", c.Kind)
	}
	switch c.Kind {
	case agentpb.CheckTCP:
		if _, err := agentpb.Loopback(c.Address); err != nil {
			return bad("%v", err)
		}
	case agentpb.CheckHTTP:
		if _, _, err := localURL(c.Address); err != nil {
			return bad("%v", err)
		}
	case agentpb.CheckUnix, agentpb.CheckFile:
		if !filepath.IsAbs(c.Address) {
			return bad("%q is not an absolute path", c.Address)
		}
	case agentpb.CheckExec:
	default:
		return bad("no kind %q", c.Kind)
	}
	return nil
}

func localURL(s string) (address string, u *url.URL, err error) {
	if u, err = url.Parse(s); err != nil {
		return "", nil, err
	}
	host := u.Host
	if u.Port() == "" {
		host += ":80"
	}
	if u.Scheme != "http" || u.User != nil {
		return "", nil, fmt.Errorf("%q is not a URL of http", s)
	}
	address, err = agentpb.Loopback(host)
	return address, u, err
}

// check checks once whether a service works.
func (v *daemon) check(ctx context.Context, u *agentpb.Service) error {
	c := u.Check
	ctx, cancel := context.WithTimeout(ctx, time.Duration(c.TimeoutNanos))
	defer cancel()
	var d net.Dialer
	switch c.Kind {
	case agentpb.CheckFile:
		_, err := os.Stat(c.Address)
		return err
	case agentpb.CheckUnix:
		return closed(d.DialContext(ctx, "unix", c.Address))
	case agentpb.CheckTCP:
		address, err := agentpb.Loopback(c.Address)
		if err != nil {
			return err
		}
		return closed(d.DialContext(ctx, "tcp", address))
	case agentpb.CheckHTTP:
		return get(ctx, c.Address)
	}
	p, err := v.all.procs.Start(&agentpb.ExecStart{Argv: c.Argv, Env: u.Env, Cwd: u.Cwd, User: u.User, NoStdin: true})
	if err != nil {
		return err
	}
	p.DropOutput()
	select {
	case <-p.Done():
	case <-ctx.Done():
		_ = v.all.procs.Signal(p, syscall.SIGKILL)
		<-p.Done()
		return ctx.Err()
	}
	if p.Exit().Code != 0 {
		return errors.New("its command " + exitText(p.Exit()))
	}
	return nil
}

func closed(c net.Conn, err error) error {
	if err == nil {
		c.Close()
	}
	return err
}

// get sends a GET request to a local server. It accepts a status of 200 to 399 (RFC 9110, section 15).
func get(ctx context.Context, s string) error {
	address, u, err := localURL(s)
	if err != nil {
		return err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if _, err := io.WriteString(c, "GET "+u.RequestURI()+" HTTP/1.1\r\nHost: "+u.Host+"\r\nUser-Agent: drowse-agent\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	line, err := bufio.NewReaderSize(c, maxHTTPLine).ReadSlice('\n')
	if err != nil {
		return fmt.Errorf("its answer: %w", errors.Join(ctx.Err(), err))
	}
	version, rest, _ := strings.Cut(strings.TrimSpace(string(line)), " ")
	if !strings.HasPrefix(version, "HTTP/1.") || len(rest) < 3 || rest[0] != '2' && rest[0] != '3' {
		return fmt.Errorf("its answer is %q", agentpb.Cut(strings.TrimSpace(string(line)), agentpb.MaxServiceText/2))
	}
	return nil
}

// watchOver checks a started service until it is ready. After that, if the check has Alive set, it checks until
// ctx ends. It returns why the service must be ended, or "".
//
// Time asleep says nothing about a service: a failure of the first check that ends after a wake does not count. A
// sleep takes no more than one check and one interval from the time that the service has to become ready.
func (v *daemon) watchOver(ctx context.Context, u *agentpb.Service) (why string) {
	c := u.Check
	interval, longest := time.Duration(c.IntervalNanos), time.Duration(c.IntervalNanos+c.TimeoutNanos)
	var spent time.Duration
	ready, fails, wakes := false, uint32(0), v.all.wakes.Load()
	for {
		begun := time.Now()
		err := v.check(ctx, u)
		if ctx.Err() != nil {
			return ""
		}
		now := v.all.wakes.Load()
		woken := now != wakes
		wakes = now
		v.checked(err)
		switch {
		case err == nil:
			fails = 0
			if !ready {
				ready, interval = true, max(interval, v.all.alive)
				v.tell(agentpb.ServiceEvent{Event: agentpb.EventReady})
			}
			if c.Alive == 0 {
				return ""
			}
		case woken:
			fails = 0
		default:
			fails++
		}
		if ready && fails >= c.Alive {
			return fmt.Sprintf("%d checks in a row have failed: %s", fails, proc.Problem(err))
		}
		if wait.For(ctx, interval) != nil {
			return ""
		}
		spent += min(time.Since(begun), longest)
		if !ready && c.StartNanos > 0 && spent >= time.Duration(c.StartNanos) {
			return fmt.Sprintf("it was not ready within %v: %s", time.Duration(c.StartNanos), proc.Problem(err))
		}
	}
}

// checked records the result of a check.
func (v *daemon) checked(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.p == nil {
		return // it has ended
	}
	if err != nil {
		v.checkProblem = agentpb.Cut(proc.Problem(err), agentpb.MaxServiceText)
	} else {
		v.checkProblem = ""
		if !v.ready {
			v.ready, v.readyAt = true, time.Now()
		}
	}
	v.changed.Ring()
}

// supervised waits for the end of a service's process. If a check fails, it ends the process and returns true.
func (v *daemon) supervised(u *agentpb.Service, p *proc.Process, stop chan struct{}) (failed bool) {
	ctx, cancel := context.WithCancel(context.Background())
	var checks sync.WaitGroup
	defer checks.Wait()
	defer cancel()
	verdict := make(chan string, 1)
	if u.Check != nil {
		checks.Go(func() {
			if why := v.watchOver(ctx, u); why != "" {
				verdict <- why
			}
		})
	}
	select {
	case <-stop:
		cancel()
		v.terminate(p)
		return false
	case <-p.Done():
		return false
	case why := <-verdict:
		why = agentpb.Cut(why, agentpb.MaxServiceText)
		v.mu.Lock()
		v.checkRestarts++
		v.problem = why
		v.mu.Unlock()
		v.note("is ended: " + why)
		v.tell(agentpb.ServiceEvent{Event: agentpb.EventUnhealthy, Problem: why})
		v.signalEnd(p, u)
		return true
	}
}

// signalEnd signals a process to end, kills it when its time is up, and waits for its end.
func (v *daemon) signalEnd(p *proc.Process, u *agentpb.Service) {
	_ = v.all.procs.Signal(p, syscall.Signal(u.StopSignal))
	t := time.AfterFunc(time.Duration(u.StopNanos), func() { _ = v.all.procs.Signal(p, syscall.SIGKILL) })
	defer t.Stop()
	<-p.Done()
}

// WaitService implements agentpb.AgentService.
func (a *Services) WaitService(ctx context.Context, m *agentpb.WaitServiceRequest) (*agentpb.ServiceState, error) {
	v, err := a.get(m.Name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, maxServiceWait)
	defer cancel()
	for {
		v.mu.Lock()
		next := v.changed.Wait()
		over := v.ready || v.state == agentpb.ServiceStopped || v.state == agentpb.ServiceEnded || v.state == agentpb.ServiceFailed
		v.mu.Unlock()
		if over {
			return v.describe(), nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return v.describe(), nil
		}
	}
}
