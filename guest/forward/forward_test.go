package forward_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/forward"
	"github.com/drowse-vm/drowse/guest/internal/agenttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParse_forwards_in_all_their_forms(t *testing.T) {
	for in, want := range map[string]string{
		"8080:80":                 "127.0.0.1:8080 -> 127.0.0.1:80",
		"0:80":                    "127.0.0.1:0 -> 127.0.0.1:80",
		"8080:db:5432":            "127.0.0.1:8080 -> db:5432",
		"0.0.0.0:8080:80":         "0.0.0.0:8080 -> 127.0.0.1:80",
		"localhost:8080:db:5432":  "localhost:8080 -> db:5432",
		"[::1]:8080:[::1]:80":     "[::1]:8080 -> [::1]:80",
		"[::1]:8080:80":           "[::1]:8080 -> 127.0.0.1:80",
		"unix:/run/a.sock:80":     "unix:/run/a.sock -> 127.0.0.1:80",
		"unix:/run/a.sock:db:80":  "unix:/run/a.sock -> db:80",
		"8080:unix:/run/b.sock":   "127.0.0.1:8080 -> unix:/run/b.sock",
		"::8080:80":               "",
		"10.0.0.1:1:unix:/run/b":  "10.0.0.1:1 -> unix:/run/b",
		"unix:/run/a:unix:/run/b": "unix:/run/a -> unix:/run/b",
		"udp:5353:53":             "udp:127.0.0.1:5353 -> udp:127.0.0.1:53",
		"udp:[::1]:0:dns:53":      "udp:[::1]:0 -> udp:dns:53",
		"udp:unix:/run/a:53":      "",
		"udp:":                    "",
		"":                        "",
		"8080":                    "",
		"8080:0":                  "",
		"8080:65536":              "",
		"-1:80":                   "",
		"a:b:c:d:e":               "",
		"unix:relative:80":        "",
		"unix:/run/a":             "",
		"unix:/run/a:unix":        "",
		"8080:ho st:80":           "",
		"[::1:8080:80":            "",
		"[nonsense]:8080:80":      "",
		"[::1]8080:80":            "",
		"8080::80":                "",
		"unix:/" + strings.Repeat("x", 200) + ":80": "",
		"8080:" + strings.Repeat("h", 600) + ":80":  "",
	} {
		got, err := forward.Parse(in)
		switch {
		case want == "" && !errors.Is(err, forward.ErrSpec):
			t.Errorf("%q: got %v, %v, want ErrSpec", in, got, err)
		case want != "" && (err != nil || got.String() != want):
			t.Errorf("%q: got %v, %v, want %s", in, got, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"8080:80", "[::1]:1:[::1]:2", "unix:/a:unix:/b", "1:h:2", "b:1:h:2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		spec, err := forward.Parse(s)
		if err != nil {
			if !errors.Is(err, forward.ErrSpec) {
				t.Fatalf("error %v", err)
			}
			return
		}
		again, err := forward.Parse(spec.Listen.String() + ":" + spec.Dial.String())
		if err != nil || again != spec {
			t.Fatalf("%q is %v, and that is %v, %v", s, spec, again, err)
		}
	})
}

// serve carries connections of l on the host to an address in the guest, until the test ends.
func serve(t *testing.T, l net.Listener, c *guest.Client, to forward.Address, limit int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &forward.Forward{
		MaxConns: limit,
		Accept:   l.Accept,
		Dial:     func(ctx context.Context) (net.Conn, error) { return c.Dial(ctx, to.Network, to.Address) },
	}
	done := make(chan error, 1)
	go func() { done <- f.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		l.Close()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
}

// echo answers every connection with what it receives, until the test ends.
func echo(t *testing.T, network, address string) net.Listener {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				io.Copy(c, struct{ io.Reader }{c})
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l
}

func listen(t *testing.T, a forward.Address) net.Listener {
	t.Helper()
	l, err := forward.Listen(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

type halfCloser interface {
	net.Conn
	CloseWrite() error
}

func dial(t *testing.T, addr net.Addr) halfCloser {
	t.Helper()
	c, err := net.Dial(addr.Network(), addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(halfCloser)
}

// say sends p, ends its direction, and returns the answer.
func say(c halfCloser, p []byte) ([]byte, error) {
	var wg sync.WaitGroup
	wg.Go(func() {
		c.Write(p)
		c.CloseWrite()
	})
	got, err := io.ReadAll(c)
	wg.Wait()
	return got, err
}

func TestForward_reaches_sockets_of_the_guest(t *testing.T) {
	c := agenttest.Start(t).Client(t)
	dir := t.TempDir()
	data := make([]byte, 3<<20+5)
	rand.NewChaCha8([32]byte{1}).Read(data)
	tcp, unix := echo(t, "tcp", "127.0.0.1:0"), echo(t, "unix", filepath.Join(dir, "guest"))
	for i, tt := range []struct{ host, guest forward.Address }{
		{forward.Address{Network: "tcp", Address: "127.0.0.1:0"}, forward.Address{Network: "tcp", Address: tcp.Addr().String()}},
		{forward.Address{Network: "unix", Address: filepath.Join(dir, "host")}, forward.Address{Network: "tcp", Address: tcp.Addr().String()}},
		{forward.Address{Network: "tcp", Address: "127.0.0.1:0"}, forward.Address{Network: "unix", Address: unix.Addr().String()}},
	} {
		l := listen(t, tt.host)
		serve(t, l, c, tt.guest, 0)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if got, err := say(dial(t, l.Addr()), data); err != nil || !bytes.Equal(got, data) {
					t.Errorf("case %d: %d bytes came back, changed or not all, %v", i, len(got), err)
				}
			})
		}
		wg.Wait()
	}
}

func TestForward_a_guest_that_refuses_resets_the_connection(t *testing.T) {
	c := agenttest.Start(t).Client(t)
	l := listen(t, forward.Address{Network: "tcp", Address: "127.0.0.1:0"})
	serve(t, l, c, forward.Address{Network: "tcp", Address: "127.0.0.1:1"}, 0)
	// The reset may come before connect(2) returns.
	conn, err := net.Dial("tcp", l.Addr().String())
	if err == nil {
		defer conn.Close()
		_, err = conn.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
}

func TestForward_sleep_resets_open_connections_and_new_ones_work(t *testing.T) {
	g := agenttest.Start(t)
	c := g.Client(t)
	l := listen(t, forward.Address{Network: "tcp", Address: "127.0.0.1:0"})
	serve(t, l, c, forward.Address{Network: "tcp", Address: echo(t, "tcp", "127.0.0.1:0").Addr().String()}, 0)
	conn := dial(t, l.Addr())
	conn.Write([]byte("x"))
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	g.Cut()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %v, want a reset", err)
	}
	if got, err := say(dial(t, l.Addr()), []byte("again")); err != nil || string(got) != "again" {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestForward_connections_beyond_the_limit_wait(t *testing.T) {
	c := agenttest.Start(t).Client(t)
	l := listen(t, forward.Address{Network: "tcp", Address: "127.0.0.1:0"})
	serve(t, l, c, forward.Address{Network: "tcp", Address: echo(t, "tcp", "127.0.0.1:0").Addr().String()}, 1)
	first := dial(t, l.Addr())
	first.Write([]byte("x"))
	if _, err := io.ReadFull(first, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	second := dial(t, l.Addr())
	second.Write([]byte("y"))
	answered := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(second, make([]byte, 1))
		answered <- err
	}()
	// The first connection still works. If the second had been let in, it would have worked too.
	first.Write([]byte("x"))
	if _, err := io.ReadFull(first, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-answered:
		t.Fatalf("the second connection was served beside the first: %v", err)
	default:
	}
	first.Close()
	if err := <-answered; err != nil {
		t.Errorf("the second connection was not served after the first: %v", err)
	}
}

func TestListen_a_unix_socket_is_its_owners_alone_and_is_removed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l := listen(t, forward.Address{Network: "unix", Address: path})
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v", fi, err)
	}
	if _, err := forward.Listen(t.Context(), forward.Address{Network: "unix", Address: path}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second listener: %v, want fs.ErrExist", err)
	}
	l.Close()
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestClientDial_says_what_is_wrong(t *testing.T) {
	c := agenttest.Start(t).Client(t)
	for _, tt := range []struct {
		network, address string
		want             error
	}{
		{"tcp", "127.0.0.1:1", syscall.ECONNREFUSED},
		{"unix", "/nowhere/at/all", fs.ErrNotExist},
		{"tcp", "no port", nil},
		{"sctp", "127.0.0.1:1", nil},
		{"tcp", strings.Repeat("x", 513), nil},
		{"tcp", "", nil},
	} {
		conn, err := c.Dial(t.Context(), tt.network, tt.address)
		if err == nil {
			conn.Close()
			t.Errorf("%s %q: a connection", tt.network, tt.address)
		} else if tt.want != nil && !errors.Is(err, tt.want) {
			t.Errorf("%s %q: got %v, want %v", tt.network, tt.address, err, tt.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Dial(ctx, "tcp", "127.0.0.1:1"); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

func TestClientListen_accepts_connections_of_the_guest(t *testing.T) {
	g := agenttest.Start(t)
	c := g.Client(t)
	sock := filepath.Join(t.TempDir(), "s")
	for _, a := range []forward.Address{{Network: "tcp", Address: "127.0.0.1:0"}, {Network: "unix", Address: sock}} {
		l, err := c.Listen(t.Context(), a.Network, a.Address)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				conn, err := l.AcceptGuest()
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						t.Errorf("accept: %v", err)
					}
					return
				}
				wg.Go(func() {
					io.Copy(conn, struct{ io.Reader }{conn})
					conn.Close()
				})
			}
		})
		var say5 sync.WaitGroup
		for i := range 5 {
			say5.Go(func() {
				msg := bytes.Repeat([]byte(fmt.Sprint(i)), 100_000)
				if got, err := say(dial(t, l.Addr()), msg); err != nil || !bytes.Equal(got, msg) {
					t.Errorf("%d bytes came back, %v", len(got), err)
				}
			})
		}
		say5.Wait()
		if _, err := c.Listen(t.Context(), a.Network, l.Addr().String()); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("a second listener at %s: %v", l.Addr(), err)
		}
		l.Close()
		wg.Wait()
	}
}

func TestClientListen_ends_when_the_VM_sleeps_and_frees_its_address(t *testing.T) {
	g := agenttest.Start(t)
	c := g.Client(t)
	l, err := c.Listen(t.Context(), "unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	// One connection waits in the agent, where no caller accepts it.
	waiting := dial(t, l.Addr())
	g.Cut()
	if _, err := waiting.Read(make([]byte, 1)); err == nil {
		t.Error("a connection that nobody has taken outlives its listener")
	}
	for {
		_, err := l.Accept()
		if errors.Is(err, guest.ErrConnectionLost) {
			break
		} else if err == nil || !errors.Is(err, guest.ErrConnectionLost) {
			t.Fatalf("accept: %v, want ErrConnectionLost", err)
		}
	}
	// The agent ends the old listener in its own time.
	for {
		again, err := c.Listen(t.Context(), "unix", l.Addr().String())
		if err == nil {
			again.Close()
			break
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	l.Close()
}

// forwardGoroutines counts the goroutines for forwards in the agent and its client, which share this process.
func forwardGoroutines() (n int) {
	buf := make([]byte, 1<<20)
	for g := range bytes.SplitSeq(buf[:runtime.Stack(buf, true)], []byte("\n\n")) {
		for _, f := range []string{"agent.(*Server).ServeForward(", "agent.(*forwards)", "agent.(*forwardListener)", "guest/internal/relay."} {
			if bytes.Contains(g, []byte(f)) {
				n++
				break
			}
		}
	}
	return n
}

// When a VM wakes, it runs the goroutines that wait in its agent. There should be few.
func TestAgent_at_rest_has_one_goroutine_for_forwards(t *testing.T) {
	c := agenttest.Start(t).Client(t)
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		out, err := c.Dial(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		in, err := l.AcceptGuest()
		if err != nil {
			t.Fatal(err)
		}
		out.Close()
		in.Abort()
	}
	l.Close()
	for forwardGoroutines() != 1 { // they end in their own time, or the test fails
		runtime.Gosched()
	}
}
