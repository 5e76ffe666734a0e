package forward_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/forward"
	"github.com/drowse-vm/drowse/guest/internal/agenttest"
)

// echoUDP answers each datagram with itself, and "who" with the sender's address.
func echoUDP(t *testing.T) (address string) {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			p := buf[:n]
			if string(p) == "who" {
				p = []byte(from.String())
			}
			_, _ = c.WriteTo(p, from)
		}
	})
	t.Cleanup(func() { c.Close(); wg.Wait() })
	return c.LocalAddr().String()
}

// datagrams carries datagrams to an address until the test ends.
func datagrams(t *testing.T, d *forward.Datagrams, g *agenttest.Guest, to string) (address string) {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d.Conn = c
	if d.Dial == nil {
		d.Dial = func(ctx context.Context) (*guest.Conn, error) { return g.Client(t).Dial(ctx, "udp", to) }
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- d.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return c.LocalAddr().String()
}

func dialUDP(t *testing.T, address string) net.Conn {
	t.Helper()
	c, err := net.Dial("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a datagram until any answer comes, also a late one to an earlier datagram. Any may be lost.
func ask(t *testing.T, c net.Conn, p []byte) []byte {
	t.Helper()
	buf := make([]byte, 1<<16)
	for range 100 {
		if _, err := c.Write(p); err != nil {
			t.Fatal(err)
		}
		if err := c.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(buf); err == nil {
			return buf[:n]
		}
	}
	t.Fatalf("no answer to %d bytes", len(p))
	return nil
}

func TestDatagrams_are_whole_and_come_back_to_who_has_sent_them(t *testing.T) {
	g := agenttest.Start(t)
	address := datagrams(t, &forward.Datagrams{}, g, echoUDP(t))
	for i := range 3 {
		c := dialUDP(t, address)
		for _, n := range []int{1, 0, 1400, 40_000, 65_507, 17} {
			p := bytes.Repeat([]byte{byte(i + n)}, n)
			if got := ask(t, c, p); !bytes.Equal(got, p) {
				t.Fatalf("sender %d: %d bytes came back as %d", i, n, len(got))
			}
		}
	}
	seen := map[string]bool{}
	for range 3 {
		seen[string(ask(t, dialUDP(t, address), []byte("who")))] = true
	}
	if len(seen) != 3 {
		t.Errorf("three senders are seen in the guest as %v", seen)
	}
}

func TestDatagrams_a_session_that_is_idle_or_cut_makes_room_for_another(t *testing.T) {
	for _, cut := range []bool{false, true} {
		t.Run(fmt.Sprintf("cut: %v", cut), func(t *testing.T) {
			g := agenttest.Start(t)
			to := echoUDP(t)
			var failed atomic.Int64
			d := &forward.Datagrams{MaxSessions: 1, Idle: time.Hour, Failed: func(err error) {
				if !errors.Is(err, forward.ErrSessions) {
					t.Errorf("got %v", err)
				}
				failed.Add(1)
			}}
			if !cut {
				d.Idle = 50 * time.Millisecond
			}
			address := datagrams(t, d, g, to)
			first := ask(t, dialUDP(t, address), []byte("who"))
			if cut {
				other := dialUDP(t, address)
				for failed.Load() == 0 { // until there is no room
					if _, err := other.Write([]byte("who")); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Millisecond)
				}
				g.Cut()
			}
			if second := ask(t, dialUDP(t, address), []byte("who")); bytes.Equal(first, second) {
				t.Errorf("both senders are %s in the guest", first)
			}
		})
	}
}

func TestDatagrams_to_where_nobody_listens_end_nothing(t *testing.T) {
	g := agenttest.Start(t)
	l, c := lateListener(t, g)
	defer l.Close()
	got := make(chan bool)
	go func() {
		defer close(got)
		_, _, _ = l.ReadFrom(make([]byte, 10))
	}()
	for {
		if _, err := c.Write([]byte("found")); err != nil {
			t.Fatal(err)
		}
		select {
		case <-got:
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// lateListener sends datagrams to a port without a listener, and then listens there. If another process takes the
// port meanwhile, it tries a different one.
func lateListener(t *testing.T, g *agenttest.Guest) (l net.PacketConn, c net.Conn) {
	t.Helper()
	const tries = 20
	for range tries {
		free, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		to := free.LocalAddr().String()
		free.Close()
		c := dialUDP(t, datagrams(t, &forward.Datagrams{}, g, to))
		for range 10 {
			if _, err := c.Write([]byte("lost")); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
		l, err := net.ListenPacket("udp", to)
		if err == nil {
			return l, c
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	t.Fatalf("somebody has taken each of %d ports", tries)
	return nil, nil
}

func TestDatagrams_more_sockets_than_the_agent_has_room_for_are_refused(t *testing.T) {
	c := agenttest.Start(t).Client(t)
	to := echoUDP(t)
	for range forward.DefaultMaxSessions {
		conn, err := c.Dial(t.Context(), "udp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	conn, err := c.Dial(t.Context(), "udp", to)
	if err == nil {
		conn.Close()
		t.Error("there is room for one more")
	}
}
