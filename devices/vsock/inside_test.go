package vsock

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

type dialed struct {
	net.Conn
	err error
}

// dialInside calls Dial in the background.
func (g *guest) dialInside(ctx context.Context, port uint32) <-chan dialed {
	out := make(chan dialed, 1)
	go func() {
		c, err := g.dev.Dial(ctx, port)
		out <- dialed{c, err}
	}()
	return out
}

func TestDial_connects_to_the_guest_and_is_no_use(t *testing.T) {
	g := newGuest(t, 16)
	out := g.dialInside(t.Context(), 80)
	p := g.receive(opRequest)
	if p.dstPort != 80 {
		t.Fatalf("got %v", p)
	}
	s := &stream{g: g, local: 80, remote: p.srcPort, alloc: largeBuffer}
	s.send(opResponse, 0)
	s.write([]byte("hello")) // comes with the answer; nothing precedes it
	d := <-out
	must(t, d.err)
	defer d.Close()
	readFull(t, d, []byte("hello"))
	_, err := d.Write([]byte("there"))
	must(t, err)
	if got := s.read(5); string(got) != "there" {
		t.Fatalf("got %q", got)
	}
	if st := g.dev.Stats(); st.Open.Load() != 0 || st.Uses.Load() != 0 {
		t.Error("it counts as use")
	}
	must(t, d.Conn.(*net.UnixConn).CloseWrite())
	if p := g.receive(opShutdown); p.flags != shutdownSend {
		t.Fatalf("got %v", p)
	}
	s.send(opReset, 0)
	wantEOF(t, d)
}

func TestDial_that_fails_leaves_nothing(t *testing.T) {
	g := newGuest(t, 16)
	files := openFiles(t)
	refuse := func(op uint16) {
		p := g.receive(opRequest)
		(&stream{g: g, local: p.dstPort, remote: p.srcPort}).send(op, 0)
	}
	out := g.dialInside(t.Context(), 80)
	refuse(opReset)
	if d := <-out; !errors.Is(d.err, errRefused) {
		t.Errorf("refused by the guest: got %v", d.err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	out = g.dialInside(ctx, 80)
	p := g.receive(opRequest)
	cancel()
	if d := <-out; !errors.Is(d.err, context.Canceled) {
		t.Errorf("given up: got %v", d.err)
	}
	if q := g.receive(opReset); q.srcPort != p.srcPort {
		t.Errorf("got %v for %v", q, p)
	}
	must(t, g.dev.Pause(t.Context()))
	ctx, cancel = context.WithCancel(t.Context())
	out = g.dialInside(ctx, 80)
	g.wait("the dial to wait", g.dev.inbox.news.Load)
	cancel()
	if d := <-out; !errors.Is(d.err, context.Canceled) {
		t.Errorf("given up during a pause: got %v", d.err)
	}
	if n := len(g.dev.inbox.dials); n != 0 {
		t.Errorf("%d dials left", n)
	}
	out = g.dialInside(t.Context(), 80)
	g.wait("the dial to wait", func() bool {
		g.dev.inbox.mu.Lock()
		defer g.dev.inbox.mu.Unlock()
		return len(g.dev.inbox.dials) == 1
	})
	must(t, g.dev.Reset())
	if d := <-out; !errors.Is(d.err, errRefused) {
		t.Errorf("while the driver resets the device: got %v", d.err)
	}
	if _, err := g.dev.Dial(t.Context(), 80); !errors.Is(err, errNoDriver) {
		t.Errorf("without a driver: got %v", err)
	}
	if _, err := g.dev.Dial(t.Context(), anyPort); err == nil {
		t.Error("a port that is none was accepted")
	}
	must(t, g.dev.Close())
	if _, err := g.dev.Dial(t.Context(), 80); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: got %v", err)
	}
	// Those of the device itself are gone too.
	if n := openFiles(t); n > files {
		t.Errorf("%d files are open, %d before", n, files)
	}
}

func TestDial_of_a_device_that_has_failed_is_refused(t *testing.T) {
	g := newGuest(t, 4)
	must(t, g.mem.StoreUint16(g.tx.layout.Avail+2, g.tx.avail+txSize+1))
	g.tx.kick.Signal()
	g.wait("the device to fail", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.broken != nil
	})
	if _, err := g.dev.Dial(t.Context(), 80); !errors.Is(err, errRefused) {
		t.Errorf("got %v", err)
	}
}

func TestListen_comes_before_Connect_and_is_no_use(t *testing.T) {
	g, calls := newPathlessGuest(t, 16)
	l, err := g.dev.Listen(7)
	must(t, err)
	if _, err := g.dev.Listen(7); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a second listener: got %v", err)
	}
	s := g.request(9, 7)
	g.receive(opResponse)
	c, err := l.Accept()
	must(t, err)
	defer c.Close()
	s.write([]byte("ping"))
	readFull(t, c, []byte("ping"))
	_, err = io.WriteString(c, "pong")
	must(t, err)
	if got := s.read(4); string(got) != "pong" {
		t.Fatalf("got %q", got)
	}
	if st := g.dev.Stats(); st.Open.Load() != 0 || st.Uses.Load() != 0 {
		t.Error("it counts as use")
	}
	g.request(9, 8)
	(<-calls.made).done(-1, false, errTest)
	g.receive(opReset)

	must(t, l.Close())
	must(t, l.Close())
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: got %v", err)
	}
	g.request(10, 7)
	(<-calls.made).accept(t)
	g.receive(opResponse)
	l, err = g.dev.Listen(7)
	must(t, err)
	accepted := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		accepted <- err
	}()
	must(t, g.dev.Close())
	if err := <-accepted; !errors.Is(err, net.ErrClosed) {
		t.Errorf("a listener of a closed device: got %v", err)
	}
	must(t, l.Close())
	if _, err := g.dev.Listen(7); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Listen after Close: got %v", err)
	}
}

func TestAttack_flood_of_requests_to_a_listener_that_does_not_accept_is_bounded(t *testing.T) {
	g := newGuest(t, 64)
	files := openFiles(t)
	l, err := g.dev.Listen(7)
	must(t, err)
	refused := 0
	for i := range uint32(3 * acceptBacklog) {
		s := g.request(i, 7)
		var p packet
		g.wait("an answer", func() (ok bool) { p, ok = g.next(); return ok })
		g.post(1)
		switch p.op {
		case opReset:
			refused++
		case opResponse:
			s.send(opReset, 0)
		default:
			t.Fatalf("got %v", p)
		}
	}
	if refused != 2*acceptBacklog {
		t.Errorf("%d connections were refused, want %d", refused, 2*acceptBacklog)
	}
	g.wait("the device's ends to be closed", func() bool { return openFiles(t) <= files+acceptBacklog })
	must(t, l.Close())
	if n := openFiles(t); n != files {
		t.Errorf("%d files are open, %d before", n, files)
	}
}
