package api_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/guest/agent"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

var heldMiB = flag.Int64("held-mib", 6, "how much a process prints through a sleep and a wake")

// envPrint makes this program one that prints so many bytes.
const envPrint = "DROWSE_TEST_PRINT"

func TestMain(m *testing.M) {
	if n, err := strconv.ParseInt(os.Getenv(envPrint), 10, 64); err == nil {
		if err := printTo(os.Stdout, n); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// printTo writes the first n bytes of a stream that a terminal leaves as it is.
func printTo(w io.Writer, n int64) error {
	from, buf := rand.NewChaCha8([32]byte{2}), make([]byte, 64<<10)
	for n > 0 {
		p := buf[:min(n, int64(len(buf)))]
		_, _ = from.Read(p) // it never fails
		for i := range p {
			p[i] = '0' + p[i]%64
		}
		if _, err := w.Write(p); err != nil {
			return err
		}
		n -= int64(len(p))
	}
	return nil
}

// kept is a guest with the real agent, in this process. The processes that the agent starts stand still while their VM
// sleeps.
type kept struct {
	dir  string
	done chan struct{}
}

// keptGuests implements sandboxtest.VMs.Guests for one VM.
func keptGuests(t *testing.T) func(name, from string, clone bool) (sandboxtest.Guest, error) {
	dir, err := os.MkdirTemp("", "kept")
	if err != nil {
		t.Fatal(err)
	}
	server, err := agent.New(agent.Config{Version: "test", Machine: still{}, HookDir: filepath.Join(dir, "hooks")})
	if err != nil {
		t.Fatal(err)
	}
	k := &kept{dir, make(chan struct{})}
	var all sync.WaitGroup
	serve := func(port int, do func(context.Context, net.Listener) error) net.Listener {
		l, err := net.Listen("unix", k.socket(port))
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() { _ = do(context.Background(), l) })
		return l
	}
	serve(agentpb.AgentPort, server.Serve)
	forward := serve(agentpb.ForwardPort, server.ServeForward)
	t.Cleanup(func() {
		server.Close()
		forward.Close()
		all.Wait()
		os.RemoveAll(dir)
	})
	return func(_, from string, _ bool) (sandboxtest.Guest, error) {
		if from != "" {
			return k, k.signal(syscall.SIGCONT)
		}
		return k, nil
	}
}

func (k *kept) socket(port int) string                { return filepath.Join(k.dir, strconv.Itoa(port)) }
func (k *kept) Dial(port int) (net.Conn, error)       { return net.Dial("unix", k.socket(port)) }
func (k *kept) Done() <-chan struct{}                 { return k.done }
func (k *kept) Close() error                          { return nil }
func (k *kept) Capture(_ string, live bool) (_ error) { return k.signal(syscall.SIGSTOP) }

// signal signals the processes that this one has started.
func (k *kept) signal(sig syscall.Signal) error {
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range all {
		text, _ := os.ReadFile(path) // it may have ended
		_, behind, _ := strings.Cut(string(text), ") ")
		if f := strings.Fields(behind); len(f) > 1 && f[1] == strconv.Itoa(os.Getpid()) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			_ = syscall.Kill(pid, sig)
		}
	}
	return err
}

// still is a machine that cannot be changed.
type still struct{}

func (still) SetClock(int64, time.Time) error    { return nil }
func (still) AddEntropy([]byte) error            { return nil }
func (still) NewIdentity(string) (string, error) { return "", nil }
func (still) Power(bool) error                   { return nil }
func (still) Freeze() error                      { return nil }
func (still) Thaw() error                        { return nil }
func (still) Trim() error                        { return nil }

// reader reads the output of a process over one stream after another.
type reader struct {
	*stream
	sum   hash.Hash
	got   uint64 // of the output
	acked uint64 // the same, of this stream
	base  uint64 // where this stream began
}

// until reads until there are at least so many bytes, or the stream's last control has come, which it returns.
func (r *reader) until(bytes uint64) (last *wire.Control) {
	r.t.Helper()
	buf := make([]byte, 64<<10)
	for r.got < bytes {
		kind, m, err := r.Reader(r.t.Context())
		if err != nil {
			r.t.Fatal(err)
		}
		n, err := io.ReadFull(m, buf)
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			r.t.Fatal(n, err)
		}
		if kind == websocket.MessageText {
			c := &wire.Control{}
			if err := json.Unmarshal(buf[:n], c); err != nil {
				r.t.Fatal(err)
			}
			return c
		}
		r.sum.Write(buf[1:n])
		r.got += uint64(n - 1)
		if of := r.got - r.base; of-r.acked >= heldWindow/4 {
			r.acked = of
			text, _ := json.Marshal(wire.Control{Type: wire.ControlAck, Bytes: of})
			_ = r.Write(r.t.Context(), websocket.MessageText, text) // the end is read
		}
	}
	return nil
}

const heldWindow = 256 << 10

// attach goes on where the client is, on a new stream.
func (r *reader) attach(s *served) {
	r.t.Helper()
	r.stream = s.dial(r.t, fmt.Sprintf("/v1/sandboxes/a/processes/job/attach?offset=%d&window=%d", r.got, heldWindow))
	if m := r.started(); m.Offset != r.got {
		r.t.Fatalf("attached at %d, want %d: bytes are lost", m.Offset, r.got)
	}
	r.base, r.acked = r.got, 0
}

// A process prints much, to a pipe and to a terminal. Its sandbox sleeps and wakes meanwhile, and its client loses its
// connection with what was on the way.
func TestStream_held_output_goes_on_through_sleeps_and_cuts_without_loss(t *testing.T) {
	size := uint64(*heldMiB) << 20
	sum := sha256.New()
	if err := printTo(sum, int64(size)); err != nil {
		t.Fatal(err)
	}
	want := hex.EncodeToString(sum.Sum(nil))
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, tty := range map[string]*wire.TTY{"pipe": nil, "terminal": {Rows: 24, Cols: 80}} {
		t.Run(name, func(t *testing.T) {
			s := serve(t)
			s.vms.Guests = keptGuests(t)
			s.made(t, "a")
			begin := time.Now()
			r := &reader{stream: s.dial(t, "/v1/sandboxes/a/exec"), sum: sha256.New()}
			r.say(startOf(wire.ExecStart{
				Command: []string{program}, Env: []string{fmt.Sprint(envPrint, "=", size)}, TTY: tty,
				Detach: true, Process: "job", HoldOutput: true, OutputKiB: 2 * heldWindow >> 10, Window: heldWindow,
			}))
			r.started()
			for part := range uint64(4) {
				if last := r.until(size * (part + 1) / 6); last != nil {
					t.Fatalf("%+v %+v", last, last.Error)
				}
				if part%2 == 0 {
					if _, err := s.client.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
						t.Fatal(err)
					}
					if last := r.until(size + 1); last == nil || last.Type != wire.ControlError {
						t.Fatalf("after a sleep: %+v", last)
					}
				} else {
					_ = r.CloseNow()
				}
				r.attach(s)
			}
			last := r.until(size + 1)
			if last == nil || last.Type != wire.ControlExit || last.Exit.ExitCode != 0 || last.Offset != size {
				t.Errorf("it ends with %+v", last)
			}
			if got := hex.EncodeToString(r.sum.Sum(nil)); r.got != size || got != want {
				t.Errorf("%d bytes with SHA-256 %s, want %d with %s", r.got, got, size, want)
			}
			t.Logf("%d MiB through two sleeps and two cuts in %.1f s: SHA-256 %s", size>>20, time.Since(begin).Seconds(), want)
		})
	}
}

func TestStream_held_output_that_nobody_reads_does_not_keep_its_process(t *testing.T) {
	for name, real := range map[string]bool{"the agent": true, "the guest in memory": false} {
		t.Run(name, func(t *testing.T) {
			s := serve(t)
			argv, ended := []string{"run"}, make(chan struct{})
			if real {
				program, err := os.Executable()
				if err != nil {
					t.Fatal(err)
				}
				s.vms.Guests, argv = keptGuests(t), []string{program}
				close(ended)
			} else {
				s.vms.set(func() {
					s.vms.exec = func(_ context.Context, p *fakeguest.Process) int {
						defer close(ended)
						_ = printTo(p.Stdout, 1e9)
						return 1
					}
				})
			}
			s.made(t, "a")
			b := s.client.Sandbox("a")
			p, err := b.StartProcess(t.Context(), wire.ExecStart{Command: argv, Env: []string{envPrint + "=1000000000"}, HoldOutput: true, NoStdin: true})
			if err != nil {
				t.Fatal(err)
			}
			list := func(ready func([]wire.Process) bool) {
				for begun := time.Now(); ; time.Sleep(5 * time.Millisecond) {
					is, err := b.Processes(t.Context())
					if err != nil || time.Since(begun) > time.Minute {
						t.Fatalf("%+v, %v", is, err)
					}
					if ready(is) {
						return
					}
				}
			}
			last := uint64(0)
			list(func(is []wire.Process) bool { // until it waits
				was := last
				last = is[0].OutputEnd
				time.Sleep(20 * time.Millisecond)
				return last > 0 && last == was
			})
			if last > 8<<20 { // the session of its start may have read some
				t.Errorf("it has printed %d bytes, and nobody reads", last)
			}
			if err := b.RemoveProcess(t.Context(), p.Process); err != nil {
				t.Error(err)
			}
			list(func(is []wire.Process) bool { return len(is) == 0 })
			<-ended
		})
	}
}

// Without hold_output a process does not wait, and its client learns what it missed.
func TestStream_a_client_of_output_that_is_not_held_is_told_what_it_missed(t *testing.T) {
	const size = 4 << 20
	s := serve(t)
	s.vms.Guests = keptGuests(t)
	s.made(t, "a")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &reader{stream: s.dial(t, "/v1/sandboxes/a/exec"), sum: sha256.New()}
	r.say(startOf(wire.ExecStart{
		Command: []string{program}, Env: []string{fmt.Sprint(envPrint, "=", size)}, Detach: true, Process: "job", OutputKiB: 64, Window: heldWindow,
	}))
	r.started()
	r.until(1)
	_ = r.CloseNow()
	for ended := false; !ended; time.Sleep(5 * time.Millisecond) {
		is, err := s.client.Sandbox("a").Processes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ended = is[0].Exit != nil
	}
	r.stream = s.dial(t, fmt.Sprintf("/v1/sandboxes/a/processes/job/attach?offset=%d", r.got))
	if m := r.started(); m.Offset <= r.got || m.Offset >= size {
		t.Errorf("attached at %d after %d bytes", m.Offset, r.got)
	}
}
