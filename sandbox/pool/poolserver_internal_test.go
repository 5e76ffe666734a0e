package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

// standsBy is a script whose processes stand by, and report a started VM when they are not of a pool.
const standsBy = `case "$*" in *--standby*) printf ready >&3; exec dd bs=65536 count=1 <&3 >/dev/null 2>&1;; *) echo '{"name":"a","faults":7}' >&3;; esac`

func shellLauncher(script string) Launcher {
	return Launcher{Command: []string{"/bin/sh", "-c", script, "sh"}}
}

// servePool serves a pool until the test ends.
func servePool(t *testing.T, s *state.Store, l Launcher, o Options) *Pool {
	t.Helper()
	p, err := New(s, l, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("serving: %v", err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pool is served", func() bool {
		c, err := net.Dial("unixpacket", s.PoolSocket())
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return p
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("a minute has passed, and not: %s", what)
		}
	}
}

func oneShape() []spec.Shape { return []spec.Shape{{MemoryMiB: 256, VCPUs: 1}} }

func TestServe_gives_another_user_nothing(t *testing.T) {
	s := statetest.TempStore(t)
	servePool(t, s, shellLauncher(standsBy), Options{Processes: 1, Shapes: oneShape()})
	c := statetest.DialAs(t, 65534, unix.SOCK_SEQPACKET, s.PoolSocket())
	what, err := programOf(shellLauncher(standsBy))
	if err != nil {
		t.Fatal(err)
	}
	request, err := json.Marshal(poolRequest{Version: poolVersion, Program: what, Shape: oneShape()[0]})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write(request) // the server may have closed it already
	if n, err := c.Read(make([]byte, 4096)); n != 0 {
		t.Errorf("another user is answered with %d bytes, %v", n, err)
	}
}

func TestServe_gives_a_process_to_a_launcher_of_the_same_program_alone(t *testing.T) {
	same := shellLauncher(standsBy)
	for name, tc := range map[string]struct {
		launcher Launcher
		prepare  func(t *testing.T)
		given    bool
	}{
		"same program":          {launcher: same, given: true},
		"other arguments":       {launcher: shellLauncher(standsBy + " ")},
		"other file":            {launcher: Launcher{Command: append([]string{"/bin/cat"}, same.Command[1:]...)}},
		"other range":           {launcher: same, prepare: func(t *testing.T) { t.Setenv("DROWSE_AGENT_RANGE", "10.9.0.0/16") }},
		"other GOMAXPROCS":      {launcher: same, prepare: func(t *testing.T) { t.Setenv("GOMAXPROCS", "3") }},
		"other PATH":            {launcher: same, prepare: func(t *testing.T) { t.Setenv("PATH", os.Getenv("PATH")+":/nowhere") }, given: true},
		"a variable of another": {launcher: same, prepare: func(t *testing.T) { t.Setenv("DROWSE_STATE", "/x") }, given: true},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := state.OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			p := servePool(t, s, same, Options{Processes: 1, Shapes: oneShape()})
			if tc.prepare != nil {
				tc.prepare(t)
			}
			l := tc.launcher
			l.Supervised = true
			from, done := standbys(s, l)
			defer done()
			ready := from(oneShape()[0])
			if given := ready != nil; given != tc.given {
				t.Fatalf("given %v, want %v", given, tc.given)
			}
			if ready == nil {
				return
			}
			if p.PIDs() != nil {
				t.Error("the pool has it still")
			}
			if again := from(oneShape()[0]); again != nil {
				t.Error("the only process was given twice")
			}
			// The process is ours, and ends with our end of the socket.
			if ready.Wait(time.Millisecond) {
				t.Error("it has ended")
			}
			ready.conn.Close()
			if !ready.Wait(time.Minute) {
				t.Error("it lives on")
			}
			ready.close()
		})
	}
}

func TestServe_has_the_next_process_made_when_the_VM_is_there(t *testing.T) {
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := shellLauncher(standsBy)
	p := servePool(t, s, l, Options{Processes: 1, Shapes: oneShape()})
	l.Supervised = true
	from, done := standbys(s, l)
	ready := from(oneShape()[0])
	if ready == nil {
		t.Fatal("no process")
	}
	if err := ready.Kill(); err != nil {
		t.Error(err)
	}
	if !ready.Wait(time.Minute) {
		t.Error("a process that was killed lives on")
	}
	ready.close()
	if pids := p.PIDs(); pids != nil {
		t.Errorf("processes %v were made while a VM was being started", pids)
	}
	done()
	if err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestServe_ends_processes_of_a_program_that_was_replaced(t *testing.T) {
	dir := t.TempDir()
	s, err := state.OpenStore(filepath.Join(dir, "state"))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "program")
	replace := func() {
		text := "#!/bin/sh\n" + standsBy + "\n"
		if err := os.WriteFile(file+".new", []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	replace()
	l := Launcher{Command: []string{file}}
	p := servePool(t, s, l, Options{Processes: 2, Shapes: oneShape()})
	before := p.PIDs()
	replace()
	l.Supervised = true
	eventually(t, "a process of the new program", func() bool {
		from, done := standbys(s, l)
		defer done()
		ready := from(oneShape()[0])
		if ready == nil {
			return false
		}
		defer ready.close()
		if slices.Contains(before, ready.pid) {
			t.Fatal("a process of the old program was given")
		}
		return true
	})
	for _, pid := range before {
		if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
			t.Errorf("process %d of the old program: %v", pid, err)
		}
	}
}

func TestServe_a_second_time_for_a_store_is_refused(t *testing.T) {
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := shellLauncher(standsBy)
	first := servePool(t, s, l, Options{Processes: 1, Shapes: oneShape()})
	if err := first.Serve(t.Context()); !errors.Is(err, spec.ErrServed) {
		t.Errorf("got %v, want ErrServed", err)
	}
}

func TestServe_of_one_launcher_too_many_leaves_it_to_start_a_process(t *testing.T) {
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := shellLauncher(standsBy)
	servePool(t, s, l, Options{Shapes: oneShape(), Processes: 1})
	// asks reports whether the server answers a launcher. The request is of another version, and gets no process.
	asks := func() (c net.Conn, answered bool) {
		c, err := net.Dial("unixpacket", s.PoolSocket())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_, _ = c.Write([]byte(`{"version":0}`)) // fails if the server has closed it
		n, err := c.Read(make([]byte, maxPoolMessage))
		return c, n > 0 && err == nil
	}
	var last net.Conn
	for i := range maxPoolClients {
		// A launcher that is gone may still occupy a place.
		eventually(t, fmt.Sprintf("launcher %d of %d is answered", i+1, maxPoolClients), func() (answered bool) {
			last, answered = asks()
			return answered
		})
	}
	if _, answered := asks(); answered {
		t.Errorf("launcher %d is answered, want at most %d", maxPoolClients+1, maxPoolClients)
	}
	lock, err := s.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a"}, Phase: state.Starting})
	if err != nil {
		t.Fatal(err)
	}
	lock.Release()
	l.Supervised = true
	if rep, err := Start(t.Context(), s, l, spec.VM{Name: "a"}.Shape(), control.Order{Name: "a", Snapshot: "x"}); err != nil || rep.Faults != 7 {
		t.Errorf("got %+v, %v, want the report of a process of its own", rep, err)
	}
	last.Close()
	eventually(t, "there is room when one has gone", func() bool {
		_, answered := asks()
		return answered
	})
}

func TestLaunch_without_a_pool_that_answers_starts_a_process(t *testing.T) {
	for name, serve := range map[string]func(t *testing.T, path string){
		"nobody has served": func(*testing.T, string) {},
		"whoever served was killed": func(t *testing.T, path string) {
			l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			l.Close()
		},
		"it does not answer":          fakePool(""),
		"it answers with nonsense":    fakePool("nonsense"),
		"it has none":                 fakePool(`{"version":1}`),
		"it names one and sends none": fakePool(`{"version":1,"pid":1}`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := state.OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			lock, err := s.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a"}, Phase: state.Starting})
			if err != nil {
				t.Fatal(err)
			}
			lock.Release()
			serve(t, s.PoolSocket())
			l := shellLauncher(standsBy)
			l.Supervised = true
			rep, err := Start(t.Context(), s, l, spec.VM{Name: "a"}.Shape(), control.Order{Name: "a", Snapshot: "x"})
			if err != nil || rep.Faults != 7 {
				t.Errorf("got %+v, %v, want the report of a process of its own", rep, err)
			}
		})
	}
}

// fakePool answers a request with a text, or never if it is empty.
func fakePool(text string) func(t *testing.T, path string) {
	return func(t *testing.T, path string) {
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			buf := make([]byte, maxPoolMessage)
			if _, err := c.Read(buf); err != nil {
				return
			}
			if text != "" {
				_, _ = c.Write([]byte(text))
			}
			_, _ = c.Read(buf)
		}()
		t.Cleanup(func() {
			l.Close()
			<-ended
		})
	}
}

func TestPool_that_follows_is_made_for_what_was_asked_for_last(t *testing.T) {
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	small, large := spec.Shape{MemoryMiB: 256, VCPUs: 1}, spec.Shape{MemoryMiB: 4096, VCPUs: 2}
	p, err := New(s, shellLauncher(standsBy), Options{Processes: 3, Shapes: []spec.Shape{small}, Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}()
	have := func() (small, large int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, s := range p.ready {
			if s.shape.VCPUs == 1 {
				small++
			} else {
				large++
			}
		}
		return small, large
	}
	for asked, want := range [][2]int{{3, 0}, {2, 1}, {1, 2}, {0, 3}} {
		if asked > 0 {
			p.starts()
			if ready := p.pop(large); ready == nil {
				t.Fatal("no process is ready")
			} else if fits := ready.shape == large; fits != (asked > 1) {
				t.Errorf("request %d was given a process for %+v", asked, ready.shape)
			} else {
				ready.end()
			}
			p.started()
		}
		eventually(t, "the pool has the shapes that were asked for", func() bool {
			s, l := have()
			return s == want[0] && l == want[1]
		})
	}
}
