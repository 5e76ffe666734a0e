package sshd_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/sshd"
)

func session(t *testing.T, c *ssh.Client) *ssh.Session {
	t.Helper()
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestSession_exits_are_told_by_status_or_by_signal(t *testing.T) {
	c := start(t).dial(t)
	for command, want := range map[string]struct {
		status int
		signal string
	}{
		"exit 0":                   {0, ""},
		"exit 42":                  {42, ""},
		"kill -TERM $$":            {0, "TERM"},
		"kill -KILL $$":            {0, "KILL"},
		"kill -TRAP $$; sleep 100": {128 + 5, ""}, // a signal that the protocol does not name
	} {
		err := session(t, c).Run(command)
		var exit *ssh.ExitError
		switch {
		case want.status == 0 && want.signal == "":
			if err != nil {
				t.Errorf("%s: %v", command, err)
			}
		case !errors.As(err, &exit) || exit.Signal() != want.signal || want.signal == "" && exit.ExitStatus() != want.status:
			t.Errorf("%s: got %v", command, err)
		}
	}
}

func TestSession_signals_reach_the_command(t *testing.T) {
	s := session(t, start(t).dial(t))
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(`trap 'echo got; exit 3' USR1; echo ready; while :; do sleep 0.1; done`); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	if err := s.Signal(ssh.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	got, _ := io.ReadAll(out)
	var exit *ssh.ExitError
	if err := s.Wait(); !errors.As(err, &exit) || exit.ExitStatus() != 3 || string(got) != "got\n" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestSession_terminals_have_size_modes_and_environment(t *testing.T) {
	s := session(t, start(t).dial(t))
	if err := s.Setenv("COLOUR", "green and blue"); err != nil {
		t.Fatal(err)
	}
	if err := s.RequestPty("vt220", 30, 100, ssh.TerminalModes{ssh.ECHO: 0, ssh.VINTR: 7, ssh.ONLCR: 0, ssh.TTY_OP_ISPEED: 14400}); err != nil {
		t.Fatal(err)
	}
	pipe, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(`stty size; stty -a; echo "$TERM/$COLOUR"; trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.1; done`); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for b := make([]byte, 1); !strings.HasSuffix(out.String(), "ready\n"); {
		if _, err := io.ReadFull(pipe, b); err != nil {
			t.Fatalf("%v after %q", err, out.String())
		}
		out.Write(b)
	}
	for i := range 100 {
		if s.WindowChange(50+i%3, 120) != nil {
			break // one is enough
		}
	}
	rest, _ := io.ReadAll(pipe)
	out.Write(rest)
	if err := s.Wait(); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	for _, want := range []string{" -echo ", "intr = ^G", "-onlcr", "vt220/green and blue\n", "30 100\n", " 120\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %s", want, out.String())
		}
	}
}

func TestSession_refuses_what_it_does_not_serve(t *testing.T) {
	c := start(t).dial(t)
	s := session(t, c)
	if err := s.RequestSubsystem("netconf"); err == nil {
		t.Error("an unknown subsystem")
	}
	for _, name := range []string{"auth-agent-req@openssh.com", "x11-req", "break", "something@else"} {
		if ok, err := s.SendRequest(name, true, nil); ok || err != nil {
			t.Errorf("%s: %v, %v", name, ok, err)
		}
	}
	for _, name := range []string{"pty-req", "env", "exec", "signal", "window-change"} {
		if ok, err := s.SendRequest(name, true, []byte{0, 0, 0, 200, 'x'}); ok || err != nil {
			t.Errorf("a malformed %s: %v, %v", name, ok, err)
		}
	}
	if err := s.Setenv("A=B", "x"); err == nil {
		t.Error("a variable named A=B")
	}
	n := 0
	for s.Setenv("VARIABLE", "x") == nil {
		if n++; n > sshd.MaxEnv {
			t.Fatal("more variables than the limit")
		}
	}
	if n != sshd.MaxEnv {
		t.Errorf("%d variables were taken, want %d", n, sshd.MaxEnv)
	}
	if err := session(t, c).Setenv("BIG", strings.Repeat("x", sshd.MaxEnvBytes)); err == nil {
		t.Error("a variable that is too long")
	}
	if err := s.Run("true"); err != nil {
		t.Errorf("a command after all that: %v", err)
	}
	if _, _, err := c.OpenChannel("x11", nil); err == nil {
		t.Error("an unknown channel")
	}
	if _, _, err := c.OpenChannel("direct-tcpip", []byte{1}); err == nil {
		t.Error("a malformed channel")
	}
	if ok, _, err := c.SendRequest("keepalive@openssh.com", true, nil); ok || err != nil {
		t.Errorf("a keepalive: %v, %v", ok, err)
	}
}

func TestSession_one_command_a_channel(t *testing.T) {
	s := session(t, start(t).dial(t))
	if err := s.Start("cat"); err != nil {
		t.Fatal(err)
	}
	if ok, err := s.SendRequest("exec", true, ssh.Marshal(struct{ C string }{"echo second"})); ok || err != nil {
		t.Errorf("a second command: %v, %v", ok, err)
	}
}

func TestConnection_channels_beyond_the_limit_are_refused(t *testing.T) {
	c := start(t).dial(t)
	var open []ssh.Channel
	for {
		ch, reqs, err := c.OpenChannel("session", nil)
		if err != nil {
			var refused *ssh.OpenChannelError
			if !errors.As(err, &refused) || refused.Reason != ssh.ResourceShortage {
				t.Errorf("got %v", err)
			}
			break
		}
		go ssh.DiscardRequests(reqs)
		if open = append(open, ch); len(open) > sshd.MaxChannels {
			t.Fatal("more channels than the limit")
		}
	}
	if len(open) != sshd.MaxChannels {
		t.Errorf("%d channels, want %d", len(open), sshd.MaxChannels)
	}
}

func TestConnection_a_client_that_leaves_ends_its_commands(t *testing.T) {
	h := start(t)
	c := h.dial(t)
	path := filepath.Join(t.TempDir(), "fifo")
	s := session(t, c)
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("mkfifo " + path + "; echo ready; exec sleep 1000 3> " + path); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path) // blocks until the command opens it
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c.Close()
	if _, err := f.Read(make([]byte, 1)); err != io.EOF { // returns when the command ends
		t.Errorf("got %v", err)
	}
}

func TestConnection_a_command_that_nobody_reads_holds_up_itself_alone(t *testing.T) {
	c := start(t).dial(t)
	flood := session(t, c)
	out, err := flood.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := flood.Start("exec yes"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	if got, err := session(t, c).Output("echo beside"); err != nil || string(got) != "beside\n" {
		t.Errorf("got %q, %v", got, err)
	}
	// The client leaves in the middle of the guest's flood. The check at the end of the test finds anything that
	// stays.
	c.Close()
}

func TestConnection_listeners_are_bounded_and_end_with_it(t *testing.T) {
	h := start(t)
	c := h.dial(t)
	dir := t.TempDir()
	for i := range sshd.MaxListeners {
		if _, err := c.ListenUnix(filepath.Join(dir, strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.ListenUnix(filepath.Join(dir, "more")); err == nil {
		t.Error("more listeners than the limit")
	}
	if ok, _, err := c.SendRequest("cancel-streamlocal-forward@openssh.com", true, ssh.Marshal(struct{ Path string }{"/nothing"})); ok || err != nil {
		t.Errorf("the end of a listener that is not there: %v, %v", ok, err)
	}
	conn, err := net.Dial("unix", filepath.Join(dir, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c.Close()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlives the one that carried it")
	}
}

func TestServe_a_name_that_is_too_long_is_refused(t *testing.T) {
	h := start(t)
	_, err := ssh.Dial("tcp", h.addr, &ssh.ClientConfig{User: strings.Repeat("x", sshd.MaxUser+1), HostKeyCallback: ssh.FixedHostKey(h.key)})
	if err == nil {
		t.Error("a client with a name that is too long has logged in")
	}
}

// A client's request to a silent guest waits, and ends with the client.
func TestServe_a_guest_that_is_silent_ends_with_the_client(t *testing.T) {
	key, _, err := sshd.LoadHostKey(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{}, 2)
	s := &sshd.Server{HostKey: key, Use: func(ctx context.Context, _ func(*guest.Client) error) error {
		asked <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	served := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			err = s.Serve(context.Background(), conn)
		}
		served <- err
	}()
	c, err := ssh.Dial("tcp", l.Addr().String(), &ssh.ClientConfig{User: "root", HostKeyCallback: ssh.FixedHostKey(key.PublicKey())})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if s, err := c.NewSession(); err != nil || s.Run("true") == nil {
			t.Errorf("a command has run in a guest that is silent, or %v", err)
		}
	})
	wg.Go(func() {
		if _, err := c.Dial("tcp", "127.0.0.1:1"); err == nil {
			t.Error("a connection to a guest that is silent")
		}
	})
	<-asked
	<-asked
	c.Close()
	wg.Wait()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
}

func TestForward_both_ways_over_TCP_and_Unix_sockets(t *testing.T) {
	c := start(t).dial(t)
	sock := filepath.Join(t.TempDir(), "s")
	for _, network := range []string{"tcp", "unix"} {
		address := map[string]string{"tcp": "127.0.0.1:0", "unix": sock}[network]
		l, err := c.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					io.Copy(conn, conn)
					conn.(interface{ CloseWrite() error }).CloseWrite()
					conn.Close()
				})
			}
		})
		address = l.Addr().String()
		if network == "unix" {
			address = sock
		}
		for _, dial := range []func(string, string) (net.Conn, error){net.Dial, c.Dial} {
			conn, err := dial(network, address)
			if err != nil {
				t.Fatal(err)
			}
			msg := bytes.Repeat([]byte("0123456789"), 100_000)
			wg.Go(func() {
				conn.Write(msg)
				conn.(interface{ CloseWrite() error }).CloseWrite()
			})
			if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, msg) {
				t.Errorf("%s: %d bytes came back, %v", network, len(got), err)
			}
			conn.Close()
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if conn, err := c.Dial(network, address); err == nil {
			conn.Close()
			t.Errorf("%s: the listener is still there after it was closed", network)
		}
	}
}

func TestServe_a_client_that_does_not_speak_SSH_is_cut_off(t *testing.T) {
	h := start(t)
	for _, say := range []string{"GET / HTTP/1.1\r\n\r\n", strings.Repeat("x", 1<<20), "SSH-2.0-x\r\n" + strings.Repeat("\xff", 1<<16)} {
		c, err := net.Dial("tcp", h.addr)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, say)
		c.(*net.TCPConn).CloseWrite()
		if _, err := io.Copy(io.Discard, c); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("got %v", err)
		}
		c.Close()
	}
}

func TestLoadHostKey_makes_one_key_for_all(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ssh")
	var wg sync.WaitGroup
	keys := make([]string, 8)
	for i := range keys {
		wg.Go(func() {
			key, known, err := sshd.LoadHostKey(dir)
			if err != nil {
				t.Error(err)
				return
			}
			text, err := os.ReadFile(known)
			if want := sshd.HostKeyAlias + " " + string(ssh.MarshalAuthorizedKey(key.PublicKey())); err != nil || string(text) != want {
				t.Errorf("known hosts are %q, %v, want %q", text, err, want)
			}
			keys[i] = string(key.PublicKey().Marshal())
		})
	}
	wg.Wait()
	for _, k := range keys {
		if k != keys[0] {
			t.Error("there is more than one key")
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("in the directory: %v, %v", entries, err)
	}
	path := filepath.Join(dir, "host_key")
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v", fi, err)
	}
	os.Chmod(path, 0o644)
	if _, _, err := sshd.LoadHostKey(dir); err == nil {
		t.Error("a key that others can read is used")
	}
	os.Chmod(path, 0o600)
	os.WriteFile(path, []byte("nonsense"), 0o600)
	if _, _, err := sshd.LoadHostKey(dir); err == nil || !strings.Contains(err.Error(), "remove") {
		t.Errorf("a damaged key: %v", err)
	}
}
