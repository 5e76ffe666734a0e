package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/sshd"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

// forwardsEndWithTheSleep opens connections through both ends of the guest's loopback, puts the VM to sleep under
// them, and connects again after the wake.
func forwardsEndWithTheSleep(t *testing.T, e *guesttest.Env, name string) {
	c := e.Agent(name)
	l, err := c.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	connect := func(c *guest.Client, l *guest.Listener) (in, out *guest.Conn) {
		t.Helper()
		in, err := c.Dial(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if out, err = l.AcceptGuest(); err != nil {
			t.Fatal(err)
		}
		return in, out
	}
	in, out := connect(c, l)
	data := make([]byte, 150_001)
	rand.NewChaCha8([32]byte{4}).Read(data)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := in.Write(data); err != nil {
			t.Error(err)
		}
		if err := in.CloseWrite(); err != nil {
			t.Error(err)
		}
	})
	if got, err := io.ReadAll(out); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes have arrived, changed or not all, %v", len(got), err)
	}
	wg.Wait()
	// One direction has ended, the other is open. The sleep must reset the open one, not end it.
	if _, err := out.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(in, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	e.Sleep(name)
	if _, err := in.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection that the sleep has cut gives %v", err)
	}
	if _, err := l.AcceptGuest(); !errors.Is(err, guest.ErrConnectionLost) {
		t.Errorf("a listener that the sleep has cut gives %v", err)
	}
	e.Wake(name)
	c = e.Agent(name)
	// The agent learns of the sleep after the wake, and only then frees the address.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		if l, err = c.Listen(t.Context(), "tcp", address); err == nil {
			break
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	in.Close()
	out.Close()
	in, out = connect(c, l)
	if err := out.Abort(); err != nil {
		t.Error(err)
	}
	if _, err := in.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection that the other end has reset gives %v", err)
	}
	if _, err := c.Dial(t.Context(), "tcp", "127.0.0.1:1"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a port at which nobody listens gives %v", err)
	}
	in.Close()
	l.Close()
}

// sshServesAGuestWithoutAServer uses OpenSSH's clients.
func sshServesAGuestWithoutAServer(t *testing.T, e *guesttest.Env, name string) {
	dir := t.TempDir()
	key, known, err := sshd.LoadHostKey(filepath.Join(dir, "ssh"))
	if err != nil {
		t.Fatal(err)
	}
	client := e.Agent(name)
	s := &sshd.Server{HostKey: key, Use: func(_ context.Context, f func(*guest.Client) error) error { return f(client) }}
	l, err := net.Listen("tcp", "127.0.0.1:0")
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
			wg.Go(func() { _ = s.Serve(t.Context(), c) })
		}
	})
	defer wg.Wait()
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	config := filepath.Join(dir, "config")
	text := fmt.Sprintf("Host vm\n HostName 127.0.0.1\n Port %s\n User root\n HostKeyAlias %s\n UserKnownHostsFile %s\n GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n BatchMode yes\n LogLevel ERROR\n",
		port, sshd.HostKeyAlias, known)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(name string, args ...string) (string, string, error) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, append([]string{"-F", config}, args...)...)
		var out, errs strings.Builder
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader("in\n"), &out, &errs
		err := cmd.Run()
		return out.String(), errs.String(), err
	}
	out, errs, err := run("ssh", "vm", "cat; pwd; echo err >&2; exit 3")
	var exit *exec.ExitError
	if out != "in\n/root\n" || errs != "err\n" || !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("ssh: %q, %q, %v", out, errs, err)
	}
	data := make([]byte, 150_001)
	rand.NewChaCha8([32]byte{5}).Read(data)
	if err := os.WriteFile(filepath.Join(dir, "data"), data, 0o640); err != nil {
		t.Fatal(err)
	}
	batch := filepath.Join(dir, "batch")
	if err := os.WriteFile(batch, []byte("put -p "+dir+"/data copied\nget -p copied "+dir+"/back\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, errs, err := run("sftp", "-b", batch, "vm"); err != nil {
		t.Fatalf("sftp: %v: %s", err, errs)
	}
	if fi, err := client.Stat(t.Context(), "/root/copied"); err != nil || fi.Mode.Perm() != 0o640 || fi.Size != int64(len(data)) {
		t.Errorf("in the guest: %+v, %v", fi, err)
	}
	if back, err := os.ReadFile(filepath.Join(dir, "back")); err != nil || !bytes.Equal(back, data) {
		t.Errorf("%d bytes came back, changed or not all, %v", len(back), err)
	}
}
