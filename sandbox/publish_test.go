package sandbox_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// counter answers each line and each datagram with its number, and ends a connection when the other side does.
const counter = `
import select, socket
s = socket.create_server(('', 8000), backlog=64)
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
u.bind(('', 8001))
n = 0
print('listens', flush=True)
while True:
    if u in select.select([s, u], [], [])[0]:
        d, a = u.recvfrom(2000)
        n += 1
        u.sendto(b'%d %s' % (n, d), a)
        continue
    c, _ = s.accept()
    try:
        for _ in c.makefile('r'):
            n += 1
            c.sendall(b'%d\n' % n)
    except OSError:
        pass
    c.close()
`

// publishedPortWakes has a supervisor forward connections to a VM that runs, and to one that sleeps.
func publishedPortWakes(t *testing.T, e *guesttest.Env, name string) {
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := free.Addr().String()
	free.Close()
	publish := fmt.Sprintf("publish: [{listen: %q, port: 8000, protocol: tcp}, {listen: %[1]q, port: 8001, protocol: udp}]\n", at)
	if _, err := e.Store.Sandbox(name).SetPolicy(t.Context(), mustPolicy(t, publish)); err != nil {
		t.Fatal(err)
	}
	agent := e.Agent(name)
	if err := agent.WriteFile(t.Context(), "/root/counter.py", strings.NewReader(counter), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	listens := newScreen()
	p, err := agent.Start(t.Context(), guest.Cmd{Argv: []string{"python3", "-S", "-E", "/root/counter.py"}, Detach: true, IO: guest.IO{Stdout: listens}})
	if err != nil {
		t.Fatal(err)
	}
	listens.until(t, "listens\n")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- supervisor.Run(ctx, e.Store, e.Launcher, supervisor.Options{Pool: 1, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	}()
	dial := func() net.Conn {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			c, err := net.Dial("tcp4", at)
			if err == nil {
				t.Cleanup(func() { c.Close() })
				return c
			}
			if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(end) {
				t.Fatal(err)
			}
		}
	}
	ask := func(c net.Conn) string {
		t.Helper()
		if err := c.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintln(c, "more"); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			t.Fatalf("the answer of the guest: %v", err)
		}
		return strings.TrimSpace(line)
	}
	running := dial()
	if got := ask(running); got != "1" {
		t.Errorf("the guest says %q, want 1", got)
	}
	// An end on one side ends the other side as well.
	if err := running.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(running); err != nil || len(rest) != 0 {
		t.Errorf("after the end there are %q, %v", rest, err)
	}

	e.Sleep(name)
	woken := dial()
	if got := ask(woken); got != "2" {
		t.Errorf("the guest that was woken by a connection says %q, want 2", got)
	}
	if r, err := e.Store.State.Get(name); err != nil || r.Phase != state.Running {
		t.Errorf("after it has answered it is %v (%v)", r.Phase, err)
	}

	// A requested sleep cuts a connection, which must end with a reset and not with an ordinary end.
	e.Sleep(name)
	if _, err := io.ReadAll(woken); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection to a VM that was put to sleep ends with %v, want a reset", err)
	}

	// Several connections at once wake one VM.
	answers := make(chan string, 3)
	for range cap(answers) {
		c := dial()
		go func() {
			_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
			_, _ = fmt.Fprintln(c, "more")
			line, err := bufio.NewReader(c).ReadString('\n')
			c.Close()
			answers <- strings.TrimSpace(line) + errorText(err)
		}()
	}
	seen := map[string]bool{}
	for range cap(answers) {
		seen[<-answers] = true
	}
	if !seen["3"] || !seen["4"] || !seen["5"] {
		t.Errorf("three connections at once got %v, want 3, 4 and 5", seen)
	}

	// Datagrams wake the VM as well, and none is lost. Tags that were set meanwhile hold.
	e.Sleep(name)
	if res, err := e.Store.Sandbox(name).SetTags(t.Context(), []string{"asleep"}, nil); err != nil || res.Live {
		t.Errorf("tags of a VM that sleeps: %+v, %v", res, err)
	}
	u, err := net.Dial("udp4", at)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for _, text := range []string{"a", "b"} {
		if _, err := io.WriteString(u, text); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{"6 a", "7 b"} {
		if err := u.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		if n, err := u.Read(b); err != nil || string(b[:n]) != want {
			t.Errorf("a datagram to a VM that slept is answered with %q, %v, want %q", b[:n], err, want)
		}
	}

	if res, err := e.Store.Sandbox(name).SetTags(t.Context(), []string{"awake"}, nil); err != nil || !res.Live || !slices.Contains(res.Tags, "asleep") {
		t.Errorf("tags of the VM that was woken: %+v, %v", res, err)
	}

	// A packet to the VM's own address wakes it as well, but only if the policy allows the packet.
	info, err := e.Store.Sandbox(name).Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e.Sleep(name)
	own := info.Network.Address.String()
	if c, err := net.DialTimeout("tcp4", net.JoinHostPort(own, "8001"), time.Second); err == nil {
		c.Close()
		t.Error("a port that the policy does not name was reached")
	}
	if r, err := e.Store.State.Get(name); err != nil || r.Phase != state.Asleep {
		t.Errorf("after a packet that the policy denies it is %v (%v)", r.Phase, err)
	}
	direct, err := net.DialTimeout("tcp4", net.JoinHostPort(own, "8000"), 2*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	if got := ask(direct); got != "8" {
		t.Errorf("the guest that was woken by a packet says %q, want 8", got)
	}

	// The supervisor stops listening on a port that is no longer published.
	if _, err := e.Store.Sandbox(name).SetPolicy(t.Context(), mustPolicy(t, "rules: []\n")); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.Dial("tcp4", at)
		if errors.Is(err, syscall.ECONNREFUSED) {
			break
		}
		if err == nil {
			c.Close()
		}
		if time.Now().After(end) {
			t.Fatalf("a minute after its port was taken back: %v", err)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("the supervisor: %v", err)
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
