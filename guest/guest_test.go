package guest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agent"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// os/signal keeps one goroutine until the process ends.
		goleak.IgnoreTopFunction("os/signal.signal_recv"),
		goleak.IgnoreTopFunction("os/signal.loop"))
}

// fakeMachine records what the agent would do to a machine.
type fakeMachine struct {
	mu      sync.Mutex
	wall    int64
	asOf    time.Time
	entropy []byte
	host    string
	power   chan bool
	// frozen counts Freeze without Thaw. Freeze returns freezeErr.
	frozen    int
	freezeErr error
	// trims counts calls of Trim, which returns trimErr.
	trims   int
	trimErr error
}

func (m *fakeMachine) Freeze() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freezeErr != nil {
		return m.freezeErr
	}
	m.frozen++
	return nil
}

func (m *fakeMachine) Thaw() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen--
	return nil
}

func (m *fakeMachine) Trim() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.trims++
	return m.trimErr
}

func (m *fakeMachine) refuseFreeze(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.freezeErr = err
}

func (m *fakeMachine) isFrozen() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.frozen > 0
}

func (m *fakeMachine) SetClock(ns int64, asOf time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wall, m.asOf = ns, asOf
	return nil
}

func (m *fakeMachine) AddEntropy(p []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(p) < 32 {
		return syscall.EINVAL
	}
	m.entropy = bytes.Clone(p)
	return nil
}

func (m *fakeMachine) NewIdentity(hostname string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.host = hostname
	return "11111111-2222-4333-8444-555555555555", nil
}

func (m *fakeMachine) Power(reboot bool) error {
	m.power <- reboot
	return nil
}

// A vm is an agent served on this host, behind a Unix socket that behaves as the vsock device of a VM does.
type vm struct {
	path    string
	machine *fakeMachine
	ports   *ports
	server  *agent.Server
	hooks   string      // the directory of hooks, which does not exist yet
	events  chan string // lines about services
	conns   sync.Map    // of net.Conn, the device's ends
}

// chanListener hands connections to the agent.
type chanListener struct {
	ch   chan net.Conn
	done chan struct{}
	once sync.Once
}

func (l *chanListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ch:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *chanListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *chanListener) Addr() net.Addr { return &net.UnixAddr{Name: "agent"} }

func startVM(t *testing.T) *vm {
	t.Helper()
	v := &vm{path: filepath.Join(t.TempDir(), "vsock"), machine: &fakeMachine{power: make(chan bool, 1)}, ports: &ports{device: handover.New(nil)}, hooks: filepath.Join(t.TempDir(), "hooks"), events: make(chan string, 100)}
	event := func(line string) error { v.events <- line; return nil }
	server, err := agent.New(agent.Config{Version: "test", Machine: v.machine, Ports: v.ports, HookDir: v.hooks, ReportService: event, AliveInterval: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	v.server = server
	outer, err := net.Listen("unix", v.path)
	if err != nil {
		t.Fatal(err)
	}
	inner := &chanListener{ch: make(chan net.Conn), done: make(chan struct{})}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := server.Serve(context.Background(), inner); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	wg.Go(func() {
		for {
			c, err := outer.Accept()
			if err != nil {
				return
			}
			var port int
			if _, err := fmt.Fscanf(oneByte{c}, "CONNECT %d\n", &port); err != nil || port != 1024 {
				c.Close()
				continue
			}
			fmt.Fprintf(c, "OK 5000\n")
			v.conns.Store(c, true)
			select {
			case inner.ch <- c:
			case <-inner.done:
				c.Close()
			}
		}
	})
	t.Cleanup(func() {
		outer.Close()
		server.Close()
		wg.Wait()
	})
	return v
}

// oneByte keeps Fscanf from reading ahead.
type oneByte struct{ io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.Reader.Read(p[:1]) }

// reset cuts every connection, as the wake of a VM does.
func (v *vm) reset() {
	v.conns.Range(func(k, _ any) bool {
		k.(net.Conn).Close()
		v.conns.Delete(k)
		return true
	})
}

func (v *vm) dial(t *testing.T) *guest.Client {
	t.Helper()
	c, err := guest.Dial(t.Context(), guest.UnixDialer(v.path))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func sh(script string) guest.Cmd { return guest.Cmd{Argv: []string{"/bin/sh", "-c", script}} }

func TestPing_says_who_answers(t *testing.T) {
	c := startVM(t).dial(t)
	info, err := c.Ping(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.Version != "test" || info.PID != os.Getpid() || len(info.BootID) != 36 || info.Uptime <= 0 {
		t.Errorf("got %+v", info)
	}
}

func TestResume_sets_clock_entropy_and_identity_in_one_call(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	wall := time.Unix(1700000000, 123456789)
	entropy := bytes.Repeat([]byte{7}, 32)
	got, err := c.Resume(t.Context(), guest.Resume{Wall: wall, Entropy: entropy, NewIdentity: true, Hostname: "clone"})
	if err != nil {
		t.Fatal(err)
	}
	if got.BootID != "11111111-2222-4333-8444-555555555555" {
		t.Errorf("boot id %q", got.BootID)
	}
	if v.machine.wall != wall.UnixNano() || !bytes.Equal(v.machine.entropy, entropy) || v.machine.host != "clone" {
		t.Errorf("the machine got %+v", v.machine)
	}
	if _, err := c.Resume(t.Context(), guest.Resume{Entropy: []byte("short")}); err == nil {
		t.Error("5 bytes of entropy were taken")
	}
}

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func TestShutdown_stops_the_machine(t *testing.T) {
	v := startVM(t)
	if err := v.dial(t).Shutdown(t.Context(), guest.Shutdown{Reboot: true}); err != nil {
		t.Fatal(err)
	}
	select {
	case reboot := <-v.machine.power:
		if !reboot {
			t.Error("powered off, want a reboot")
		}
	case <-time.After(5 * time.Second):
		t.Error("the machine was not stopped")
	}
}

func TestExec_separates_streams_and_gives_the_exit_code(t *testing.T) {
	c := startVM(t).dial(t)
	var stdout, stderr bytes.Buffer
	cmd := sh(`read line; echo "out $line"; echo err >&2; exit 3`)
	cmd.IO = guest.IO{Stdin: strings.NewReader("hello\n"), Stdout: &stdout, Stderr: &stderr}
	st, err := c.Exec(t.Context(), cmd)
	var ee *guest.ExitError
	if !errors.As(err, &ee) || ee.Code != 3 || st.Code != 3 {
		t.Errorf("status %v, error %v; want exit code 3", st, err)
	}
	if stdout.String() != "out hello\n" || stderr.String() != "err\n" {
		t.Errorf("stdout %q, stderr %q", &stdout, &stderr)
	}
}

func TestExec_exit_codes_are_those_of_a_shell(t *testing.T) {
	c := startVM(t).dial(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, "plain"), "x", 0o644)
	write(t, filepath.Join(dir, "noformat"), "\x00\x01", 0o755)
	for _, tt := range []struct {
		name   string
		cmd    guest.Cmd
		code   int
		signal int
	}{
		{"success", sh("exit 0"), 0, 0},
		{"failure", sh("exit 77"), 77, 0},
		{"killed by itself", sh("kill -KILL $$"), 137, 9},
		{"ended by SIGTERM", sh("kill -TERM $$"), 143, 15},
		{"no such command in PATH", guest.Cmd{Argv: []string{"no-such-command-here"}}, 127, 0},
		{"no such file", guest.Cmd{Argv: []string{"/no/such/file"}}, 127, 0},
		{"not executable", guest.Cmd{Argv: []string{dir + "/plain"}}, 126, 0},
		{"not a program", guest.Cmd{Argv: []string{dir + "/noformat"}}, 126, 0},
		{"a directory", guest.Cmd{Argv: []string{dir}}, 126, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			st, err := c.Exec(t.Context(), tt.cmd)
			if st == nil {
				t.Fatalf("no status: %v", err)
			}
			if st.Code != tt.code || st.Signal != tt.signal {
				t.Errorf("got %+v, want code %d, signal %d", st, tt.code, tt.signal)
			}
			if (err == nil) != (tt.code == 0) {
				t.Errorf("error %v", err)
			}
			if started := st.NotStarted == ""; started != (tt.code < 126 || tt.code > 128) {
				t.Errorf("not started: %q", st.NotStarted)
			}
		})
	}
}

func TestExec_refuses_what_cannot_be_run(t *testing.T) {
	c := startVM(t).dial(t)
	for _, tt := range []struct {
		name string
		cmd  guest.Cmd
		want string
	}{
		{"no argv", guest.Cmd{}, "argv is empty"},
		{"zero byte", guest.Cmd{Argv: []string{"a\x00b"}}, "zero byte"},
		{"relative directory", guest.Cmd{Argv: []string{"true"}, Dir: "tmp"}, "not an absolute path"},
		{"missing directory", guest.Cmd{Argv: []string{"true"}, Dir: "/no/such/dir"}, "working directory /no/such/dir"},
		{"unknown user", guest.Cmd{Argv: []string{"true"}, User: "nobody-of-that-name"}, "not in /etc/passwd"},
		{"unknown group", guest.Cmd{Argv: []string{"true"}, User: "root:no-such-group"}, "not in /etc/group"},
		{"long id", guest.Cmd{Argv: []string{"true"}, ID: strings.Repeat("x", 65)}, "id of 65 bytes"},
		{"negative timeout", guest.Cmd{Argv: []string{"true"}, Timeout: -1}, "out of range"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := c.Exec(t.Context(), tt.cmd)
			var re *guest.RemoteError
			if !errors.As(err, &re) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want a remote error with %q", err, tt.want)
			}
		})
	}
}

func TestExec_sets_environment_directory_and_user(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can start a process as another user")
	}
	c := startVM(t).dial(t)
	for _, tt := range []struct {
		name string
		cmd  guest.Cmd
		want string
	}{
		{"default directory and home", sh("pwd; echo $HOME; id -un"), "/\n/root\nroot\n"},
		{"directory", guest.Cmd{Argv: []string{"pwd"}, Dir: "/usr/bin"}, "/usr/bin\n"},
		{"added variable", guest.Cmd{Argv: []string{"sh", "-c", "echo $A $HOME"}, Env: []string{"A=b c", "HOME=/h"}}, "b c /h\n"},
		{"replaced environment", guest.Cmd{Argv: []string{"/usr/bin/env"}, Env: []string{"ONLY=1"}, ReplaceEnv: true}, "ONLY=1\n"},
		{"user by name", guest.Cmd{Argv: []string{"sh", "-c", "id -u; id -g; echo $USER"}, User: "daemon"}, "1\n1\ndaemon\n"},
		{"user by number with group", guest.Cmd{Argv: []string{"sh", "-c", "id -u; id -g"}, User: "12345:daemon"}, "12345\n1\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			tt.cmd.Stdout, tt.cmd.Stderr = &out, &out
			if _, err := c.Exec(t.Context(), tt.cmd); err != nil {
				t.Fatal(err)
			}
			if out.String() != tt.want {
				t.Errorf("got %q, want %q", &out, tt.want)
			}
		})
	}
}

func TestExec_moves_10_MiB_through_a_process_unchanged(t *testing.T) {
	c := startVM(t).dial(t)
	in := make([]byte, 10<<20)
	rand.Read(in)
	h := sha256.New()
	if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"cat"}, IO: guest.IO{Stdin: bytes.NewReader(in), Stdout: h}}); err != nil {
		t.Fatal(err)
	}
	if want := sha256.Sum256(in); !bytes.Equal(h.Sum(nil), want[:]) {
		t.Error("what came out is not what went in")
	}
}

func TestExec_pty_has_the_size_it_was_given_and_follows_resizes(t *testing.T) {
	c := startVM(t).dial(t)
	out := newWatched()
	resize := make(chan guest.Size)
	s, err := c.Start(t.Context(), guest.Cmd{
		Argv: []string{"sh", "-c", `tty >/dev/null && echo terminal $TERM; stty size; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done`},
		Pty:  &guest.Pty{Size: guest.Size{Rows: 30, Cols: 100}, Term: "vt100"},
		IO:   guest.IO{Stdout: out, Resize: resize},
	})
	if err != nil {
		t.Fatal(err)
	}
	out.wait(t, "terminal vt100\r\n30 100\r\nready\r\n")
	resize <- guest.Size{Rows: 50, Cols: 132}
	out.wait(t, "50 132\r\n")
	if st, _ := s.Wait(); st == nil || st.Code != 5 {
		t.Errorf("status %v, want 5", st)
	}
}

func TestExec_pty_takes_input_and_interrupts(t *testing.T) {
	c := startVM(t).dial(t)
	out := newWatched()
	in, w := io.Pipe()
	defer w.Close()
	s, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"cat"}, Pty: &guest.Pty{}, IO: guest.IO{Stdin: in, Stdout: out}})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, "hello\n")
	out.wait(t, "hello\r\nhello\r\n") // the echo, then cat
	fmt.Fprint(w, "\x03")
	if st, _ := s.Wait(); st == nil || st.Signal != int(syscall.SIGINT) {
		t.Errorf("status %v, want SIGINT", st)
	}
}

// watched is a writer whose content a test can wait for.
type watched struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
}

func newWatched() *watched { return &watched{more: make(chan struct{}, 1)} }

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf.Write(p)
	select {
	case w.more <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

func (w *watched) wait(t *testing.T, text string) {
	t.Helper()
	timeout := time.After(60 * time.Second)
	for !strings.Contains(w.String(), text) {
		select {
		case <-w.more:
		case <-timeout:
			t.Fatalf("waited for %q, have %q", text, w)
		}
	}
}

func TestExec_signal_reaches_the_whole_group(t *testing.T) {
	c := startVM(t).dial(t)
	out := newWatched()
	cmd := sh(`trap 'echo parent; wait; exit 9' USR1; (trap 'echo child; exit' USR1; echo up; while :; do sleep 0.05; done) & wait; wait`)
	cmd.Stdout = out
	s, err := c.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	out.wait(t, "up")
	if err := s.Signal(int(syscall.SIGUSR1)); err != nil {
		t.Fatal(err)
	}
	st, _ := s.Wait()
	if st == nil || !strings.Contains(out.String(), "parent") || !strings.Contains(out.String(), "child") {
		t.Errorf("status %v, output %q", st, out)
	}
}

func TestExec_timeout_kills_and_says_so(t *testing.T) {
	c := startVM(t).dial(t)
	cmd := sh("sleep 100 & sleep 100; wait")
	cmd.Timeout = 100 * time.Millisecond
	begin := time.Now()
	st, err := c.Exec(t.Context(), cmd)
	if st == nil || !st.TimedOut || st.Signal != 9 || err == nil {
		t.Errorf("status %+v, error %v", st, err)
	}
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("took %v", d)
	}
}

func TestExec_a_background_child_neither_holds_up_the_exit_nor_is_killed(t *testing.T) {
	c := startVM(t).dial(t)
	dir := t.TempDir()
	cmd := sh(`(sleep 0.5; echo late; echo still here >` + dir + `/late) & echo early`)
	var out bytes.Buffer
	cmd.Stdout = &out
	if _, err := c.Exec(t.Context(), cmd); err != nil {
		t.Fatal(err)
	}
	if out.String() != "early\n" {
		t.Errorf("output %q", &out)
	}
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if b, _ := os.ReadFile(dir + "/late"); string(b) == "still here\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the child did not live to write its file")
		}
	}
}

func TestExec_100_at_once_each_get_their_own(t *testing.T) {
	c := startVM(t).dial(t)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			var out bytes.Buffer
			cmd := sh(fmt.Sprintf("cat; echo %d; exit %d", i, i%50))
			cmd.Stdin, cmd.Stdout = strings.NewReader(fmt.Sprintf("in %d\n", i)), &out
			st, err := c.Exec(t.Context(), cmd)
			if st == nil {
				t.Errorf("%d: %v", i, err)
			} else if want := fmt.Sprintf("in %d\n%d\n", i, i); st.Code != i%50 || out.String() != want {
				t.Errorf("%d: code %d, output %q", i, st.Code, &out)
			}
		})
	}
	wg.Wait()
}

// blocked is a writer that blocks until it is released.
type blocked struct {
	n    atomic.Int64
	gate chan struct{}
}

func (b *blocked) Write(p []byte) (int, error) {
	b.n.Add(int64(len(p)))
	<-b.gate
	return len(p), nil
}

func TestExec_a_reader_that_stalls_stalls_its_process_and_nothing_else(t *testing.T) {
	c := startVM(t).dial(t)
	count := filepath.Join(t.TempDir(), "count")
	w := &blocked{gate: make(chan struct{})}
	// dd prints to stderr how much it could write before it was killed.
	s, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"sh", "-c", `exec dd if=/dev/zero bs=64k count=1024 2>` + count}, IO: guest.IO{Stdout: w}})
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	time.Sleep(1500 * time.Millisecond) // longer than ttrpc waits for a reader
	runtime.GC()
	runtime.ReadMemStats(&after)
	const bound = 16 << 20
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > bound {
		t.Errorf("both ends grew by %d bytes while the reader stalled", grown)
	}
	if _, err := c.Exec(t.Context(), sh("exit 0")); err != nil {
		t.Errorf("another command, meanwhile: %v", err)
	}
	if err := s.Signal(int(syscall.SIGUSR1)); err != nil { // dd prints its count
		t.Fatal(err)
	}
	close(w.gate)
	if st, err := s.Wait(); err != nil {
		t.Fatalf("after the stall: %v, %v", st, err)
	}
	if w.n.Load() != 64<<20 {
		t.Errorf("%d bytes arrived, want 64 MiB", w.n.Load())
	}
}

func TestExec_a_process_that_does_not_read_stalls_its_writer_for_as_long_as_it_takes(t *testing.T) {
	c := startVM(t).dial(t)
	in := make([]byte, 4<<20)
	var out bytes.Buffer
	cmd := sh("sleep 1.5; wc -c")
	cmd.Stdin, cmd.Stdout = bytes.NewReader(in), &out
	if _, err := c.Exec(t.Context(), cmd); err != nil {
		t.Fatal(err)
	}
	if strings.TrimSpace(out.String()) != "4194304" {
		t.Errorf("the process read %s bytes", &out)
	}
}

// alive reports whether a process exists.
func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 30 s: " + what)
		}
	}
}

func TestExec_cancelled_context_kills_the_process(t *testing.T) {
	c := startVM(t).dial(t)
	ctx, cancel := context.WithCancel(t.Context())
	s, err := c.Start(ctx, sh("sleep 1000"))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := s.Wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	eventually(t, "the process is gone", func() bool { return !alive(s.PID()) })
}

func TestExec_lost_connection_kills_the_process(t *testing.T) {
	v := startVM(t)
	s, err := v.dial(t).Start(t.Context(), sh("sleep 1000"))
	if err != nil {
		t.Fatal(err)
	}
	v.reset()
	if _, err := s.Wait(); !errors.Is(err, guest.ErrConnectionLost) {
		t.Errorf("error %v, want ErrConnectionLost", err)
	}
	eventually(t, "the process is gone", func() bool { return !alive(s.PID()) })
}

func TestClient_calls_go_on_after_every_connection_was_cut(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	for range 3 {
		if _, err := c.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		v.reset()
	}
	if err := c.Mkdir(t.Context(), filepath.Join(t.TempDir(), "d"), 0, false); err != nil {
		t.Fatal(err)
	}
}

func TestExec_after_Dial_needs_one_connection_and_another_if_that_was_cut(t *testing.T) {
	v := startVM(t)
	var dialed atomic.Int32
	unix := guest.UnixDialer(v.path)
	for name, cut := range map[string]bool{"at once": false, "after a cut": true} {
		dialed.Store(0)
		c, err := guest.Dial(t.Context(), func(ctx context.Context, port uint32) (net.Conn, error) {
			dialed.Add(1)
			return unix(ctx, port)
		})
		if err != nil {
			t.Fatal(err)
		}
		want := int32(1)
		if cut {
			v.reset()
			eventually(t, "the client sees the cut", func() bool { return guest.Cut(c) })
			want = 2
		}
		if _, err := c.Exec(t.Context(), sh("true")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n := dialed.Load(); n != want {
			t.Errorf("%s: %d connections, want %d", name, n, want)
		}
		if _, err := c.Exec(t.Context(), sh("true")); err != nil || dialed.Load() != want+1 {
			t.Errorf("%s: a second command has %d connections (%v), want one of its own", name, dialed.Load(), err)
		}
		c.Close()
	}
}

func TestAttach_a_shell_survives_the_loss_of_its_connection(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	out := newWatched()
	in, w := io.Pipe()
	s, err := c.Start(t.Context(), guest.Cmd{
		Argv: []string{"sh"}, Env: []string{"PS1=", "ENV="}, Detach: true, ID: "shell",
		Pty: &guest.Pty{Size: guest.Size{Rows: 24, Cols: 80}}, IO: guest.IO{Stdin: in, Stdout: out},
	})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, "X=kept; echo before $X\n")
	out.wait(t, "\nbefore kept\r\n")
	v.reset()
	if _, err := s.Wait(); !errors.Is(err, guest.ErrConnectionLost) {
		t.Fatalf("error %v, want ErrConnectionLost", err)
	}
	w.Close()

	list, err := c.List(t.Context())
	if err != nil || len(list) != 1 || list[0].ID != "shell" || list[0].Exit != nil || list[0].PID != s.PID() {
		t.Fatalf("list %+v, %v", list, err)
	}
	in2, w2 := io.Pipe()
	defer w2.Close()
	out2 := newWatched()
	s2, err := c.Attach(t.Context(), "shell", 0, guest.IO{Stdin: in2, Stdout: out2})
	if err != nil {
		t.Fatal(err)
	}
	out2.wait(t, "\nbefore kept\r\n") // the replay
	fmt.Fprint(w2, "echo after $X\nexit 4\n")
	if st, _ := s2.Wait(); st == nil || st.Code != 4 || !strings.Contains(out2.String(), "\nafter kept\r\n") {
		t.Errorf("status %v, output %q", st, out2)
	}
}

func TestAttach_replays_from_the_offset_that_the_last_session_reached(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	// The script prints 20,000 numbered lines, far more than the agent keeps, with pauses in which to cut.
	const script = `i=0; while [ $i -lt 200 ]; do j=0; while [ $j -lt 100 ]; do echo line $i $j; j=$((j+1)); done; i=$((i+1)); done`
	var want strings.Builder
	for i := range 200 {
		for j := range 100 {
			fmt.Fprintf(&want, "line %d %d\n", i, j)
		}
	}
	var got bytes.Buffer
	s, err := c.Start(t.Context(), guest.Cmd{
		Argv: []string{"sh", "-c", script}, Detach: true, ID: "lines", OutputLimit: 1 << 20, IO: guest.IO{Stdout: &got},
	})
	if err != nil {
		t.Fatal(err)
	}
	cuts := 0
	for {
		time.Sleep(15 * time.Millisecond)
		if cuts < 5 {
			cuts++
			v.reset()
		}
		st, err := s.Wait()
		if err == nil {
			if st.Code != 0 {
				t.Fatalf("status %v", st)
			}
			break
		}
		if !errors.Is(err, guest.ErrConnectionLost) {
			t.Fatal(err)
		}
		if s, err = c.Attach(t.Context(), "lines", s.Offset(), guest.IO{Stdout: &got}); err != nil {
			t.Fatal(err)
		}
	}
	if got.String() != want.String() {
		t.Errorf("%d bytes in %d sessions, want %d, or not the same ones", got.Len(), cuts+1, want.Len())
	}
}

func TestAttach_without_a_reader_the_oldest_output_goes_and_the_process_runs_on(t *testing.T) {
	v := startVM(t)
	c := v.dial(t)
	gate := filepath.Join(t.TempDir(), "gate")
	s, err := c.Start(t.Context(), guest.Cmd{
		Argv:   []string{"sh", "-c", `while [ ! -e ` + gate + ` ]; do sleep 0.02; done; head -c 3000000 /dev/zero | tr '\0' x; echo the end`},
		Detach: true, ID: "big", OutputLimit: 128 << 10,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, gate, "", 0o644)
	eventually(t, "the process has ended", func() bool {
		list, err := c.List(t.Context())
		return err == nil && len(list) == 1 && list[0].Exit != nil
	})
	var out bytes.Buffer
	s, err = c.Attach(t.Context(), "big", 0, guest.IO{Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := s.Wait(); err != nil || st.Code != 0 {
		t.Fatalf("%v, %v", st, err)
	}
	if out.Len() != 128<<10 || !strings.HasSuffix(out.String(), "xxthe end\n") || s.Offset() != 3000000+8 {
		t.Errorf("%d bytes, up to offset %d, ending in %q", out.Len(), s.Offset(), out.String()[max(0, out.Len()-20):])
	}
	if err := c.Forget(t.Context(), "big"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Attach(t.Context(), "big", 0, guest.IO{}); !errors.Is(err, guest.ErrNotFound) {
		t.Errorf("attach to a forgotten process: %v", err)
	}
}

func TestAttach_takes_the_process_from_another_session(t *testing.T) {
	c := startVM(t).dial(t)
	s1, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"cat"}, Detach: true, ID: "one"})
	if err != nil {
		t.Fatal(err)
	}
	s2, err := c.Attach(t.Context(), "one", 0, guest.IO{Stdin: strings.NewReader("x")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s1.Wait(); !errors.Is(err, guest.ErrTakenOver) {
		t.Errorf("first session: %v, want ErrTakenOver", err)
	}
	if st, err := s2.Wait(); err != nil || st.Code != 0 {
		t.Errorf("second session: %v, %v", st, err)
	}
}

func TestKill_tells_unknown_from_ended(t *testing.T) {
	c := startVM(t).dial(t)
	if err := c.Kill(t.Context(), "nothing", 15); !errors.Is(err, guest.ErrNotFound) {
		t.Errorf("unknown process: %v", err)
	}
	s, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"sleep", "1000"}, Detach: true, ID: "z"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"true"}, ID: "z"}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("the same id again: %v", err)
	}
	if err := c.Kill(t.Context(), "z", 15); err != nil {
		t.Fatal(err)
	}
	if st, _ := s.Wait(); st == nil || st.Signal != 15 {
		t.Errorf("status %v", st)
	}
	if err := c.Kill(t.Context(), "z", 15); !errors.Is(err, guest.ErrNotRunning) {
		t.Errorf("ended process: %v", err)
	}
}

func TestAgent_leaks_no_descriptors(t *testing.T) {
	c := startVM(t).dial(t)
	run := func() {
		_, _ = c.Exec(t.Context(), sh("exit 1"))
		_, _ = c.Exec(t.Context(), guest.Cmd{Argv: []string{"/no/such"}})
		_, _ = c.Exec(t.Context(), guest.Cmd{Argv: []string{"true"}, Pty: &guest.Pty{}})
		_, _ = c.ReadFile(t.Context(), "/etc/passwd", io.Discard, 0, 0)
		_, _ = c.ReadFile(t.Context(), "/no/such", io.Discard, 0, 0)
	}
	run()
	count := func() int {
		runtime.GC()
		e, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(e)
	}
	before := count()
	for range 10 {
		run()
	}
	eventually(t, fmt.Sprintf("as many descriptors as before (%d)", before), func() bool { return count() <= before })
}
