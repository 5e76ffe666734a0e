package guest_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/drowse-vm/drowse/guest"
)

const checkEvery = 100 * time.Millisecond

// waitReady waits until service s is ready or can no longer become ready.
func waitReady(t *testing.T, c *guest.Client) guest.ServiceState {
	t.Helper()
	for {
		st, err := c.WaitService(t.Context(), "s")
		if err != nil {
			t.Fatal(err)
		}
		if st.Ready || st.State == guest.ServiceStopped || st.State == guest.ServiceFailed || st.State == guest.ServiceEnded {
			return st
		}
	}
}

// A check of each kind fails until its target exists.
func TestServiceCheck_of_each_kind_passes_when_it_is_there_and_not_before(t *testing.T) {
	for _, kind := range []string{guest.CheckFile, guest.CheckUnix, guest.CheckTCP, guest.CheckHTTP, guest.CheckExec} {
		t.Run(kind, func(t *testing.T) {
			v := startVM(t)
			c := v.dial(t)
			dir := t.TempDir()
			check := &guest.ServiceCheck{Kind: kind, Interval: checkEvery}
			appear := func() {}
			listen := func(network, address string) net.Listener {
				l, err := net.Listen(network, address)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { l.Close() })
				return l
			}
			switch kind {
			case guest.CheckFile:
				check.Address = dir + "/f"
				appear = func() { write(t, dir+"/f", "", 0o644) }
			case guest.CheckExec:
				check.Argv = []string{"/bin/sh", "-c", "test -e " + dir + "/f"}
				appear = func() { write(t, dir+"/f", "", 0o644) }
			case guest.CheckUnix:
				check.Address = dir + "/s"
				appear = func() { listen("unix", dir+"/s") }
			case guest.CheckTCP:
				l := listen("tcp", "127.0.0.1:0")
				check.Address = l.Addr().String()
				l.Close()
				appear = func() { listen("tcp", check.Address) }
			case guest.CheckHTTP:
				// The server accepts from the beginning, and first answers that it is not ready.
				l := listen("tcp", "127.0.0.1:0")
				check.Address = "http://" + l.Addr().String() + "/health?x=1"
				appeared := make(chan struct{})
				appear = func() { close(appeared) }
				go func() {
					for {
						conn, err := l.Accept()
						if err != nil {
							return
						}
						buf := make([]byte, 512)
						n, _ := conn.Read(buf)
						answer := "HTTP/1.1 503 Later\r\n\r\n"
						select {
						case <-appeared:
							answer = "HTTP/1.1 204 No Content\r\n\r\n"
						default:
						}
						if !strings.HasPrefix(string(buf[:n]), "GET /health?x=1 HTTP/1.1\r\n") {
							answer = "HTTP/1.1 400 Bad\r\n\r\n"
						}
						_, _ = io.WriteString(conn, answer)
						conn.Close()
					}
				}()
			}
			s := shService("exec sleep 1000", guest.RestartAlways)
			s.Check = check
			mustSetService(t, c, s, false)
			for {
				list, err := c.Services(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if list[0].Ready {
					t.Fatalf("it is ready before: %+v", list[0])
				}
				if list[0].CheckProblem != "" {
					break
				}
				time.Sleep(time.Millisecond)
			}
			appear()
			st := waitReady(t, c)
			if !st.Ready || st.ReadyAt.IsZero() || st.CheckProblem != "" || st.CheckRestarts != 0 || st.State != "running" {
				t.Errorf("it is %+v", st)
			}
			for line := range v.events {
				if strings.Contains(line, `"ready"`) {
					break
				}
			}
			if st, err := c.StopService(t.Context(), "s", false); err != nil || st.Ready {
				t.Errorf("stopped it is %+v, %v", st, err)
			}
		})
	}
}

func TestServiceCheck_without_one_it_is_ready_once_it_runs_and_a_wait_ends_for_one_that_fails(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	if st := mustSetService(t, c, shService("exec sleep 1000", guest.RestartNever), false); !st.Ready {
		t.Errorf("it is %+v", st)
	}
	s := shService("exit 3", guest.RestartNever)
	s.Check = &guest.ServiceCheck{Kind: guest.CheckFile, Address: "/no/such/file", Interval: checkEvery}
	mustSetService(t, c, s, false)
	if st := waitReady(t, c); st.Ready || st.State != guest.ServiceFailed {
		t.Errorf("it is %+v", st)
	}
	if _, err := c.WaitService(t.Context(), "other"); !errors.Is(err, guest.ErrNotFound) {
		t.Errorf("one that is not there: %v", err)
	}
}

func TestServiceCheck_that_fails_ends_the_service_which_is_started_again(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	dir := t.TempDir()
	// The service exits with 0 when it is told to end. The failed check still counts as a failure.
	s := shService("trap 'exit 0' TERM; : > "+dir+"/f; while :; do sleep 0.05; done", guest.RestartOnFailure)
	s.Check = &guest.ServiceCheck{Kind: guest.CheckFile, Address: dir + "/f", Interval: checkEvery, Alive: 2}
	mustSetService(t, c, s, false)
	first := waitReady(t, c)
	if err := os.Remove(dir + "/f"); err != nil {
		t.Fatal(err)
	}
	for {
		st := waitReady(t, c)
		if st.PID != first.PID && st.Ready {
			if st.CheckRestarts != 1 || st.Restarts != 1 {
				t.Errorf("it is %+v", st)
			}
			break
		}
		time.Sleep(time.Millisecond)
	}
	if log := logUntil(t, c, "is ended:"); !strings.Contains(log, "2 checks in a row have failed") {
		t.Errorf("its log says %q", log)
	}
}

func TestServiceCheck_that_never_passes_ends_the_service_when_its_time_is_up(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	s := shService("exec sleep 1000", guest.RestartAlways)
	s.MaxRestarts = 1
	s.Check = &guest.ServiceCheck{Kind: guest.CheckFile, Address: "/no/such/file", Interval: checkEvery, Start: 2 * checkEvery}
	mustSetService(t, c, s, false)
	if st := waitReady(t, c); st.Ready || st.State != guest.ServiceFailed || st.CheckRestarts != 2 {
		t.Errorf("it is %+v", st)
	}
}

func TestServiceCheck_failures_of_which_each_is_the_first_after_a_wake_do_not_count(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	dir := t.TempDir()
	s := shService(": > "+dir+"/f; exec sleep 1000", guest.RestartAlways)
	// As far as the agent knows, the machine wakes during each check, which fails once the file is gone.
	resume := func() {
		if _, err := c.Resume(t.Context(), guest.Resume{}); err != nil {
			t.Error(err)
		}
	}
	fifo := filepath.Join(dir, "asked")
	s.Check = &guest.ServiceCheck{Kind: guest.CheckExec, Argv: []string{"/bin/sh", "-c", "echo >> " + fifo + "; test -e " + dir + "/f || { while ! rm " + dir + "/go 2>/dev/null; do sleep 0.01; done; exit 1; }"}, Interval: checkEvery, Alive: 1, Timeout: time.Minute}
	mustSetService(t, c, s, false)
	first := waitReady(t, c)
	if err := os.Remove(dir + "/f"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		resume() // between checks or during one
		write(t, dir+"/go", "", 0o644)
		for {
			if _, err := os.Stat(dir + "/go"); err != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		// The next check may begin before or after the next resume. Both count from the wake on.
		for n := lines(t, fifo); lines(t, fifo) == n; {
			time.Sleep(time.Millisecond)
		}
	}
	list, err := c.Services(t.Context())
	if err != nil || list[0].PID != first.PID || list[0].CheckRestarts != 0 || list[0].CheckProblem == "" {
		t.Errorf("after two failures behind wakes it is %+v, %v", list, err)
	}
	// A failure that does not follow a wake counts.
	write(t, dir+"/go", "", 0o644)
	for {
		list, err := c.Services(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if list[0].CheckRestarts == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
}

func lines(t *testing.T, path string) int {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "\n")
}

func TestServiceCheck_that_cannot_be_is_refused(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	for name, check := range map[string]guest.ServiceCheck{
		"no kind":              {},
		"another kind":         {Kind: "icmp", Address: "127.0.0.1"},
		"another machine":      {Kind: guest.CheckTCP, Address: "10.0.0.1:80"},
		"a name":               {Kind: guest.CheckTCP, Address: "example.com:80"},
		"no port":              {Kind: guest.CheckTCP, Address: "127.0.0.1"},
		"port 0":               {Kind: guest.CheckTCP, Address: "127.0.0.1:0"},
		"https":                {Kind: guest.CheckHTTP, Address: "https://127.0.0.1/"},
		"a URL elsewhere":      {Kind: guest.CheckHTTP, Address: "http://127.0.0.1.example.com/"},
		"a URL of two lines":   {Kind: guest.CheckHTTP, Address: "http://127.0.0.1/\r\nX: y"},
		"a relative path":      {Kind: guest.CheckFile, Address: "x"},
		"a command, not asked": {Kind: guest.CheckFile, Address: "/x", Argv: []string{"true"}},
		"no command":           {Kind: guest.CheckExec},
		"too often":            {Kind: guest.CheckFile, Address: "/x", Interval: time.Millisecond},
		"too seldom":           {Kind: guest.CheckFile, Address: "/x", Interval: time.Hour},
		"too patient":          {Kind: guest.CheckFile, Address: "/x", Start: 2 * time.Hour},
		"too many failures":    {Kind: guest.CheckFile, Address: "/x", Alive: 1001},
	} {
		s := shService("exec sleep 1000", guest.RestartAlways)
		s.Check = &check
		var re *guest.RemoteError
		if _, err := c.SetService(t.Context(), s, true, false); !errors.As(err, &re) || re.Code != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if list, err := c.Services(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("there are %+v, %v", list, err)
	}
}
