package fakeguest_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/fakeguest"
)

// serve serves a guest behind a Unix socket until the test ends.
func serve(t *testing.T, g *fakeguest.Guest) (path string, p *fakeguest.Ports) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "vsock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	p = fakeguest.Listen(l, agentpb.AgentPort)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = g.Serve(p)
	}()
	t.Cleanup(func() {
		p.Close()
		<-done
	})
	return path, p
}

func dial(t *testing.T, d guest.Dialer) *guest.Client {
	t.Helper()
	c, err := guest.Dial(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestPorts_count_connections_but_those_that_are_no_use(t *testing.T) {
	path, p := serve(t, fakeguest.New(nil))
	dial(t, guest.IdleDialer(path))
	if open, ever := p.Uses(); open != 0 || ever != 0 {
		t.Errorf("an idle one: %d open of %d", open, ever)
	}
	c := dial(t, guest.UnixDialer(path))
	if open, ever := p.Uses(); open != 1 || ever != 1 {
		t.Errorf("another one: %d open of %d", open, ever)
	}
	p.Cut()
	if _, err := c.Ping(t.Context()); err != nil {
		t.Errorf("after its connection was cut: %v", err)
	}
	if _, err := guest.UnixDialer(path)(t.Context(), agentpb.ForwardPort); !errors.Is(err, guest.ErrUnavailable) {
		t.Errorf("a port that is none: %v", err)
	}
}

func TestCommand_that_is_cut_or_sent_a_signal_is_killed(t *testing.T) {
	killed := make(chan error, 2)
	g := fakeguest.New(nil)
	g.Commands = map[string]fakeguest.Command{"wait": func(ctx context.Context, p *fakeguest.Process) int {
		_, _ = p.Stdout.Write([]byte("here"))
		<-ctx.Done()
		killed <- ctx.Err()
		return 0
	}}
	path, p := serve(t, g)
	for name, end := range map[string]func(*guest.Session) error{
		"cut":    func(*guest.Session) error { p.Cut(); return nil },
		"signal": func(s *guest.Session) error { return s.Signal(int(syscall.SIGTERM)) },
	} {
		s, err := dial(t, guest.UnixDialer(path)).Start(t.Context(), guest.Cmd{Argv: []string{"wait"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := end(s); err != nil {
			t.Fatal(err)
		}
		<-killed
		_, err = s.Wait()
		var exit *guest.ExitError
		if name == "cut" && !errors.Is(err, guest.ErrConnectionLost) || name == "signal" && (!errors.As(err, &exit) || exit.Signal != int(syscall.SIGTERM)) {
			t.Errorf("%s: it ends with %v", name, err)
		}
	}
}

func TestDetached_process_without_stdin_reads_its_end(t *testing.T) {
	path, _ := serve(t, fakeguest.New(nil))
	s, err := dial(t, guest.UnixDialer(path)).Start(t.Context(), guest.Cmd{Argv: []string{"cat"}, Detach: true, NoStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := s.Wait(); err != nil || st.Code != 0 {
		t.Errorf("cat has ended with %+v, %v", st, err)
	}
}

func TestGuest_refuses_what_cannot_be(t *testing.T) {
	g := fakeguest.New(fstest.MapFS{"etc/motd": {Data: []byte("hello")}})
	full := false
	g.Changed = func(fstest.MapFS) error {
		if full {
			return syscall.ENOSPC
		}
		return nil
	}
	path, _ := serve(t, g)
	c := dial(t, guest.UnixDialer(path))
	write := func(name string) error {
		return c.WriteFile(t.Context(), name, strings.NewReader("x"), guest.WriteOptions{})
	}
	var out bytes.Buffer
	if n, err := c.ReadFile(t.Context(), "/etc/motd", &out, 1, 3); n != 3 || err != nil || out.String() != "ell" {
		t.Errorf("a part of a file: %d %q, %v", n, &out, err)
	}
	for what, err := range map[string]error{
		"a relative path":               write("a"),
		"a directory":                   write("/etc"),
		"below a file":                  write("/etc/motd/a"),
		"below what is not there":       write("/nothing/a"),
		"a directory that is there":     c.Mkdir(t.Context(), "/etc", 0, false),
		"what is not there, elsewhere":  c.Rename(t.Context(), "/a", "/b"),
		"into itself":                   c.Rename(t.Context(), "/etc", "/etc/a"),
		"a link, which no guest has":    c.Symlink(t.Context(), "/a", "/b"),
		"a directory that is not empty": c.Remove(t.Context(), "/etc", false),
	} {
		if !errors.Is(err, guest.ErrRemote) {
			t.Errorf("%s: %v", what, err)
		}
	}
	full = true
	if err := write("/a"); !errors.Is(err, guest.ErrFull) {
		t.Errorf("on a full disk: %v", err)
	}
}
