package agenttest

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agent"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Guest is an agent that runs on this host, with the rights of the test.
type Guest struct {
	// Path is the Unix socket: for guest.UnixDialer.
	Path  string
	conns sync.Map // of net.Conn, the agent's ends
}

// machine is a machine that cannot be changed.
type machine struct{}

func (machine) SetClock(int64, time.Time) error    { return nil }
func (machine) AddEntropy([]byte) error            { return nil }
func (machine) NewIdentity(string) (string, error) { return "", nil }
func (machine) Power(bool) error                   { return nil }
func (machine) Freeze() error                      { return nil }
func (machine) Thaw() error                        { return nil }
func (machine) Trim() error                        { return nil }

// listener hands connections of one port to the agent.
type listener struct {
	ch   chan net.Conn
	done chan struct{}
	once sync.Once
}

func newListener() *listener { return &listener{ch: make(chan net.Conn), done: make(chan struct{})} }

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ch:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *listener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: "agent"} }

// Start starts an agent that ends with the test.
func Start(t testing.TB) *Guest {
	t.Helper()
	return StartWith(t, agent.Config{})
}

// StartWith is Start with some of the agent's configuration.
func StartWith(t testing.TB, c agent.Config) *Guest {
	t.Helper()
	g := &Guest{Path: filepath.Join(t.TempDir(), "vsock")}
	c.Version, c.Machine, c.HookDir = "test", machine{}, filepath.Join(t.TempDir(), "hooks")
	server, err := agent.New(c)
	if err != nil {
		t.Fatal(err)
	}
	outer, err := net.Listen("unix", g.Path)
	if err != nil {
		t.Fatal(err)
	}
	ports := map[int]*listener{agentpb.AgentPort: newListener(), agentpb.ForwardPort: newListener()}
	var wg sync.WaitGroup
	serve := func(serve func(context.Context, net.Listener) error, l net.Listener) {
		wg.Go(func() {
			if err := serve(context.Background(), l); err != nil {
				t.Errorf("serving: %v", err)
			}
		})
	}
	serve(server.Serve, ports[agentpb.AgentPort])
	serve(server.ServeForward, ports[agentpb.ForwardPort])
	wg.Go(func() {
		for {
			c, err := outer.Accept()
			if err != nil {
				return
			}
			var port int
			_, err = fmt.Fscanf(oneByte{c}, "CONNECT %d\n", &port)
			l := ports[port]
			if err != nil || l == nil {
				c.Close()
				continue
			}
			fmt.Fprintf(c, "OK 5000\n")
			g.conns.Store(c, true)
			select {
			case l.ch <- c:
			case <-l.done:
				c.Close()
			}
		}
	})
	t.Cleanup(func() {
		outer.Close()
		server.Close()
		ports[agentpb.ForwardPort].Close()
		wg.Wait()
	})
	return g
}

// oneByte keeps Fscanf from reading ahead.
type oneByte struct{ io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.Reader.Read(p[:1]) }

// Cut ends every connection at once, as the sleep of a VM does.
func (g *Guest) Cut() {
	g.conns.Range(func(k, _ any) bool {
		k.(net.Conn).Close()
		g.conns.Delete(k)
		return true
	})
}

// Client connects to the agent.
func (g *Guest) Client(t testing.TB) *guest.Client {
	t.Helper()
	c, err := guest.Dial(context.Background(), guest.UnixDialer(g.Path))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
