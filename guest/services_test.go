package guest_test

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// shService returns a service that runs a shell command and restarts at once.
func shService(script, restart string) guest.Service {
	return guest.Service{Name: "s", Argv: []string{"/bin/sh", "-c", script}, Restart: restart, Backoff: time.Millisecond, MaxBackoff: time.Hour}
}

func mustSetService(t *testing.T, c *guest.Client, s guest.Service, restart bool) guest.ServiceState {
	t.Helper()
	st, err := c.SetService(t.Context(), s, true, restart)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// logUntil waits until the log of service s contains a text.
func logUntil(t *testing.T, c *guest.Client, text string) string {
	t.Helper()
	var all string
	for next := uint64(0); !strings.Contains(all, text); {
		data, at, _, err := c.ServiceLog(t.Context(), "s", next, true)
		if err != nil {
			t.Fatal(err)
		}
		all += string(data)
		next = at + uint64(len(data))
	}
	return all
}

// stateUntil waits until service s is in the given state.
func stateUntil(t *testing.T, c *guest.Client, state string) guest.ServiceState {
	t.Helper()
	for {
		list, err := c.Services(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(list) == 1 && list[0].State == state {
			return list[0]
		}
		time.Sleep(time.Millisecond)
	}
}

func TestService_runs_until_it_is_stopped(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	s := shService("echo out; echo err >&2; exec sleep 1000", guest.RestartAlways)
	st := mustSetService(t, c, s, false)
	if st.Name != "s" || st.State != "running" || st.PID == 0 || st.Started.IsZero() || st.Exit != nil {
		t.Fatalf("it has begun as %+v", st)
	}
	logUntil(t, c, "err\n")
	if again := mustSetService(t, c, s, false); again.PID != st.PID {
		t.Errorf("set once more, it has another process: %d, before %d", again.PID, st.PID)
	}
	anew := mustSetService(t, c, s, true)
	if anew.PID == st.PID || anew.State != "running" {
		t.Errorf("restarted, it is %+v", anew)
	}
	s.Env = []string{"A=b"}
	if other := mustSetService(t, c, s, false); other.PID == anew.PID {
		t.Error("changed, it has the same process")
	}
	st, err := c.StopService(t.Context(), "s", false)
	if err != nil {
		t.Fatal(err)
	}
	if st.State != "stopped" || st.PID != 0 || st.Exit == nil || st.Exit.Signal != int(syscall.SIGTERM) || st.Ended.IsZero() {
		t.Errorf("stopped, it is %+v", st)
	}
	if _, err := c.StopService(t.Context(), "s", true); err != nil {
		t.Fatal(err)
	}
	if list, err := c.Services(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("forgotten: %v, %v", list, err)
	}
	if _, err := c.StopService(t.Context(), "s", false); !errors.Is(err, guest.ErrNotFound) {
		t.Errorf("one that is not there: %v, want ErrNotFound", err)
	}
}

func TestService_is_started_again_as_its_policy_says(t *testing.T) {
	for _, c := range []struct {
		name, script, restart string
		limit                 uint32
		state                 string
		runs                  int
	}{
		{"always, failing, gives up", "exit 3", guest.RestartAlways, 3, "failed", 4},
		{"always, ending well, gives up", "exit 0", guest.RestartAlways, 2, "failed", 3},
		{"on-failure, failing, gives up", "exit 3", guest.RestartOnFailure, 2, "failed", 3},
		{"on-failure, ending well", "exit 0", guest.RestartOnFailure, 2, "ended", 1},
		{"never, failing", "exit 3", guest.RestartNever, 2, "failed", 1},
		{"never, ending well", "exit 0", guest.RestartNever, 2, "ended", 1},
		{"a signal is a failure", "kill -9 $$", guest.RestartOnFailure, 1, "failed", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := startVM(t)
			client := v.dial(t)
			s := shService("echo run; "+c.script, c.restart)
			s.MaxRestarts = c.limit
			mustSetService(t, client, s, false)
			st := stateUntil(t, client, c.state)
			if int(st.Restarts) != c.runs-1 || st.Exit == nil || st.PID != 0 {
				t.Errorf("it is %+v, want %d runs", st, c.runs)
			}
			data, _, _, err := client.ServiceLog(t.Context(), "s", 0, false)
			if n := strings.Count(string(data), "run\n"); err != nil || n != c.runs {
				t.Errorf("it ran %d times, want %d: %q, %v", n, c.runs, data, err)
			}
			// The service can be started again.
			if st := mustSetService(t, client, s, false); st.Started.IsZero() {
				t.Errorf("started again, it is %+v", st)
			}
		})
	}
}

func TestService_that_cannot_be_started_says_why(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	s := guest.Service{Name: "s", Argv: []string{"/no/such/file"}, Restart: guest.RestartAlways, Backoff: time.Millisecond, MaxRestarts: 2}
	if st := mustSetService(t, c, s, false); !strings.Contains(st.Problem, "no such file") {
		t.Errorf("it is %+v", st)
	}
	if st := stateUntil(t, c, "failed"); !strings.Contains(st.Problem, "3 times in a row") {
		t.Errorf("in the end it is %+v", st)
	}
	s.Argv, s.User = []string{"true"}, "nobody-of-that-name"
	if st := mustSetService(t, c, s, false); !strings.Contains(st.Problem, "nobody-of-that-name") {
		t.Errorf("with an unknown user it is %+v", st)
	}
}

func TestService_waits_between_restarts_and_can_be_stopped_then(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	s := shService("exit 1", guest.RestartAlways)
	s.Backoff = time.Hour
	mustSetService(t, c, s, false)
	if st := stateUntil(t, c, "waiting"); st.Restarts != 0 || st.Exit.Code != 1 {
		t.Errorf("it is %+v", st)
	}
	// A start by the caller does not wait for the backoff.
	mustSetService(t, c, s, false)
	for log := ""; strings.Count(log, "has ended") < 2; {
		log = logUntil(t, c, "has ended")
	}
	stateUntil(t, c, "waiting")
	if st, err := c.StopService(t.Context(), "s", false); err != nil || st.State != "stopped" {
		t.Errorf("stopped: %+v, %v", st, err)
	}
}

func TestService_that_does_not_stop_is_killed(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	s := shService("trap '' TERM; echo there; while :; do sleep 1000; done", guest.RestartAlways)
	s.StopTime = time.Millisecond
	mustSetService(t, c, s, false)
	logUntil(t, c, "there\n")
	st, err := c.StopService(t.Context(), "s", false)
	if err != nil || st.State != "stopped" || st.Exit.Signal != int(syscall.SIGKILL) {
		t.Errorf("it is %+v, %v", st, err)
	}
	s = shService("trap 'echo bye; exit 0' USR1; echo ready; while :; do sleep 0.01; done", guest.RestartAlways)
	s.StopSignal = int(syscall.SIGUSR1)
	mustSetService(t, c, s, false)
	logUntil(t, c, "ready\n")
	if st, err := c.StopService(t.Context(), "s", false); err != nil || st.Exit.Code != 0 {
		t.Errorf("one with a signal of its own is %+v, %v", st, err)
	}
	if log := logUntil(t, c, "bye\n"); !strings.Contains(log, "drowse: s was ended by signal 9\n") {
		t.Errorf("the log of both is %q", log)
	}
}

func TestService_log_keeps_the_newest(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	s := shService("seq 1 20000; echo end", guest.RestartNever)
	s.LogBytes = guest.MinServiceLog
	mustSetService(t, c, s, false)
	stateUntil(t, c, "ended")
	data, at, end, err := c.ServiceLog(t.Context(), "s", 0, false)
	if err != nil || len(data) != guest.MinServiceLog || end != at+uint64(len(data)) || !strings.HasSuffix(string(data), "20000\nend\ndrowse: s has ended with status 0\n") {
		t.Errorf("%d bytes from %d, of %d, %v: ...%q", len(data), at, end, err, data[max(0, len(data)-40):])
	}
	if data, at, _, err := c.ServiceLog(t.Context(), "s", end+100, true); err != nil || len(data) != 0 || at != end {
		t.Errorf("behind the end: %d bytes from %d, %v", len(data), at, err)
	}
}

func TestService_events_are_told_in_their_order(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	s := shService("exit 3", guest.RestartOnFailure)
	s.MaxRestarts = 1
	mustSetService(t, c, s, false)
	var got []string
	for len(got) < 5 {
		e, err := agentpb.ParseServiceEvent(strings.TrimSuffix(<-v.events, "\n"))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%s %s %d %d", e.Name, e.Event, e.Exit, e.Restarts))
	}
	if want := []string{"s started 0 0", "s ended 3 0", "s started 0 1", "s ended 3 1", "s gave-up 0 1"}; !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
}

func TestService_that_is_not_possible_is_refused(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	good := shService("true", guest.RestartNever)
	for name, change := range map[string]func(*guest.Service){
		"no name":         func(s *guest.Service) { s.Name = "" },
		"a long name":     func(s *guest.Service) { s.Name = strings.Repeat("a", guest.MaxServiceName+1) },
		"no command":      func(s *guest.Service) { s.Argv = nil },
		"a policy":        func(s *guest.Service) { s.Restart = "sometimes" },
		"a back-off":      func(s *guest.Service) { s.Backoff, s.MaxBackoff = 2*time.Second, time.Second },
		"a long back-off": func(s *guest.Service) { s.MaxBackoff = 2 * time.Hour },
		"a stop time":     func(s *guest.Service) { s.StopTime = time.Hour },
		"a signal":        func(s *guest.Service) { s.StopSignal = 65 },
		"a small log":     func(s *guest.Service) { s.LogBytes = 1 },
		"a large log":     func(s *guest.Service) { s.LogBytes = guest.MaxServiceLog + 1 },
	} {
		s := good
		change(&s)
		_, err := c.SetService(t.Context(), s, true, false)
		var re *guest.RemoteError
		if !errors.As(err, &re) || re.Code != codes.InvalidArgument {
			t.Errorf("%s: got %v, want InvalidArgument", name, err)
		}
	}
	for i := range guest.MaxServices {
		s := good
		s.Name = fmt.Sprint("s", i)
		if _, err := c.SetService(t.Context(), s, false, false); err != nil {
			t.Fatal(err)
		}
	}
	var re *guest.RemoteError
	if _, err := c.SetService(t.Context(), good, false, false); !errors.As(err, &re) || re.Code != codes.ResourceExhausted {
		t.Errorf("one too many: got %v, want ResourceExhausted", err)
	}
}

func TestServeServices_hears_events_and_nothing_else(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vsock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan guest.ServiceEvent, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		guest.ServeServices(l, func(e guest.ServiceEvent) { heard <- e })
	}()
	good := agentpb.ServiceEvent{Name: "s", Event: agentpb.EventEnded, Exit: 3, Problem: "a\x1bb"}.Line()
	for _, line := range []string{"\n", "{}\n", `{"name":"s","event":"other"}` + "\n", strings.Repeat("x", 8<<10) + "\n", good} {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte(line)); err != nil && line == good {
			t.Fatal(err)
		}
		n, err := conn.Read(make([]byte, 1))
		if (n == 1) != (line == good) {
			t.Errorf("%.20q: answered with %d bytes, %v", line, n, err)
		}
		conn.Close()
	}
	if e := <-heard; e.Name != "s" || e.Exit != 3 || strings.Contains(e.Problem, "\x1b") || len(heard) > 0 {
		t.Errorf("heard %+v and %d more", e, len(heard))
	}
	l.Close()
	<-done
}
