package sshd_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/crypto/ssh"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agent/sftp"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/agenttest"
	"github.com/drowse-vm/drowse/guest/sshd"
)

// TestMain also makes the test binary the agent's program for file transfer: the agent executes its own program,
// which is this one.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == agentpb.SubsystemSFTP {
		if err := sftp.Serve(os.Stdin, os.Stdout, os.Getenv("HOME")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// A host is an SSH server for an agent on this machine, on a port for the tests' clients.
type host struct {
	guest  *agenttest.Guest
	addr   string
	key    ssh.PublicKey
	config string // for OpenSSH's clients, which know the guest as "vm"
}

func start(t *testing.T) *host {
	t.Helper()
	g := agenttest.Start(t)
	client := g.Client(t)
	dir := t.TempDir()
	key, known, err := sshd.LoadHostKey(filepath.Join(dir, "ssh"))
	if err != nil {
		t.Fatal(err)
	}
	s := &sshd.Server{HostKey: key, Use: func(_ context.Context, f func(*guest.Client) error) error { return f(client) }}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { _ = s.Serve(ctx, c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		cancel()
		wg.Wait()
	})
	h := &host{guest: g, addr: l.Addr().String(), key: key.PublicKey(), config: filepath.Join(dir, "config")}
	_, port, _ := net.SplitHostPort(h.addr)
	text := fmt.Sprintf("Host vm\n HostName 127.0.0.1\n Port %s\n User root\n HostKeyAlias %s\n UserKnownHostsFile %s\n GlobalKnownHostsFile /dev/null\n StrictHostKeyChecking yes\n BatchMode yes\n LogLevel ERROR\n",
		port, sshd.HostKeyAlias, known)
	if err := os.WriteFile(h.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return h
}

// run runs an OpenSSH program or rsync with the configuration.
func (h *host) run(t *testing.T, stdin, name string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	if name == "rsync" {
		args = append([]string{"-e", "ssh -F " + h.config}, args...)
	} else {
		args = append([]string{"-F", h.config}, args...)
	}
	if _, err := exec.LookPath(name); err != nil {
		t.Fatalf("%v: install it with scripts/deps test", err)
	}
	cmd := exec.CommandContext(t.Context(), name, args...)
	var out, errs strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// must is run, but fails the test on an error.
func (h *host) must(t *testing.T, stdin, name string, args ...string) string {
	t.Helper()
	out, errs, err := h.run(t, stdin, name, args...)
	if err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, errs)
	}
	return out
}

// dial connects with the client of x/crypto.
func (h *host) dial(t *testing.T) *ssh.Client {
	t.Helper()
	c, err := ssh.Dial("tcp", h.addr, &ssh.ClientConfig{User: "root", HostKeyCallback: ssh.FixedHostKey(h.key)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
