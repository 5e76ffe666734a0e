package vsock

import (
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// calls are the calls of Config.Connect that the test answers.
type calls struct{ made chan *connectCall }

type connectCall struct {
	port uint32
	done func(fd int, own bool, err error)
}

func newCalls() *calls { return &calls{made: make(chan *connectCall, 2*MaxConnections)} }

func (c *calls) connect(port uint32, done func(int, bool, error)) { c.made <- &connectCall{port, done} }

// poll returns the next call, or nil.
func (c *calls) poll() *connectCall {
	select {
	case call := <-c.made:
		return call
	default:
		return nil
	}
}

// accept answers with a socket, and returns its other end.
func (c *connectCall) accept(t testing.TB) net.Conn {
	t.Helper()
	return c.acceptAs(t, false)
}

func (c *connectCall) acceptAs(t testing.TB, own bool) net.Conn {
	t.Helper()
	pair, err := socketPair()
	must(t, err)
	conn, err := socketConn(pair[1])
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	c.done(pair[0], own, nil)
	return conn
}

// newPathlessGuest makes an active guest of a device that has its listener and connections from its owner.
func newPathlessGuest(t testing.TB, rxBuffers int) (*guest, *calls) {
	t.Helper()
	c := newCalls()
	g := inactivePathlessGuest(t, newMemory(t), c)
	g.activate(false)
	g.post(rxBuffers)
	return g, c
}

func inactivePathlessGuest(t testing.TB, mem *guestmem.Memory, c *calls) *guest {
	t.Helper()
	path := filepath.Join(t.TempDir(), "v.sock")
	l, err := net.Listen("unix", path)
	must(t, err)
	t.Cleanup(func() { l.Close() })
	f, err := l.(*net.UnixListener).File()
	must(t, err)
	defer f.Close()
	return inactiveGuestOf(t, mem, path, Config{CID: testCID, Listener: f, Connect: c.connect})
}

// request sends a request of the guest, and returns its stream.
func (g *guest) request(local, port uint32) *stream {
	s := &stream{g: g, local: local, remote: port, alloc: largeBuffer}
	s.send(opRequest, 0)
	return s
}

var errTest = errors.New("refused by the test")

func TestConnect_answers_the_guests_connections(t *testing.T) {
	g, calls := newPathlessGuest(t, 16)
	if left, err := filepath.Glob(g.path + "?*"); len(left) > 0 || err != nil {
		t.Errorf("the device made %v, %v", left, err)
	}
	g.connect(80) // by the listener
	s := g.request(9, 7)
	call := <-calls.made
	if call.port != 7 {
		t.Fatalf("called for port %d", call.port)
	}
	g.silentNow()
	c := call.accept(t)
	g.receive(opResponse)
	s.write([]byte("ping"))
	readFull(t, c, []byte("ping"))
	_, err := c.Write([]byte("pong"))
	must(t, err)
	if got := s.read(4); string(got) != "pong" {
		t.Fatalf("got %q", got)
	}
	g.request(10, 7)
	(<-calls.made).done(-1, false, errTest)
	if p := g.receive(opReset); p.dstPort != 10 || p.srcPort != 7 {
		t.Fatalf("got %v", p)
	}
}

// silentNow checks that the device has sent nothing up to now.
func (g *guest) silentNow() {
	g.t.Helper()
	g.paused(func(*engine) bool { return true })
	if p, ok := g.next(); ok {
		g.t.Fatalf("received %v, want nothing", p)
	}
}

func TestConnect_that_answers_at_once_works(t *testing.T) {
	g := inactivePathlessGuest(t, newMemory(t), newCalls())
	hosts := make(chan int, 1)
	g.dev.connect = func(_ uint32, done func(int, bool, error)) {
		pair, err := socketPair()
		must(t, err)
		hosts <- pair[1]
		done(pair[0], true, nil)
	}
	g.activate(false)
	g.post(4)
	g.request(9, 7)
	g.receive(opResponse)
	unix.Close(<-hosts)
}

func TestUses_are_connections_that_Connect_does_not_call_own(t *testing.T) {
	for _, own := range []bool{true, false} {
		g, calls := newPathlessGuest(t, 16)
		g.request(9, 7)
		call, st := <-calls.made, g.dev.Stats()
		g.silentNow()
		if st.Open.Load() != 0 || st.Uses.Load() != 0 {
			t.Errorf("a connection without an answer counts as use")
		}
		c := call.acceptAs(t, own)
		g.receive(opResponse)
		want := uint64(1)
		if own {
			want = 0
		}
		if st.Open.Load() != want || st.Uses.Load() != want {
			t.Errorf("own %v: open %d, ever %d", own, st.Open.Load(), st.Uses.Load())
		}
		c.Close()
		g.receive(opShutdown)
		must(t, g.dev.Reset())
		if st.Open.Load() != 0 {
			t.Errorf("own %v: %d open after a reset", own, st.Open.Load())
		}
	}
}

func TestLate_socket_for_a_guest_that_has_given_up_is_closed(t *testing.T) {
	for name, giveUp := range map[string]func(g *guest, s *stream){
		"reset by the guest":       func(_ *guest, s *stream) { s.send(opReset, 0) },
		"shut down by the guest":   func(_ *guest, s *stream) { s.send(opShutdown, shutdownBoth) },
		"used before it was open":  func(_ *guest, s *stream) { s.write([]byte("x")) },
		"credit asked for early":   func(_ *guest, s *stream) { s.send(opCreditRequest, 0) },
		"answered by the guest":    func(_ *guest, s *stream) { s.send(opResponse, 0) },
		"reset with the device":    func(g *guest, _ *stream) { must(g.t, g.dev.Reset()) },
		"closed with the device":   func(g *guest, _ *stream) { must(g.t, g.dev.Close()) },
		"of a device that is gone": func(g *guest, _ *stream) { g.dev.engine.loop.Stop(); g.dev.inbox.detach(); g.dev.engine = nil },
	} {
		t.Run(name, func(t *testing.T) {
			g, calls := newPathlessGuest(t, 16)
			s := g.request(9, 7)
			call := <-calls.made
			giveUp(g, s)
			g.wait("the connection to go", func() bool {
				return g.dev.engine == nil || g.paused(func(e *engine) bool { return len(e.conns) == 0 })
			})
			wantEOF(t, call.accept(t))
			g.wait("the answer to be taken", func() bool { return g.dev.inbox.calls.Load() == 0 })
		})
	}
}

func TestLate_socket_never_becomes_a_connection_of_the_next_driver(t *testing.T) {
	g, calls := newPathlessGuest(t, 16)
	g.request(9, 7)
	old := <-calls.made
	must(t, g.dev.Reset())
	n := g.nextDriver()
	n.request(9, 7)
	c := <-calls.made
	wantEOF(t, old.accept(t))
	n.silentNow()
	c.accept(t)
	n.receive(opResponse)
}

// nextDriver is another driver of a device that was reset.
func (g *guest) nextDriver() *guest {
	g.t.Helper()
	for _, r := range []**ring{&g.rx, &g.tx, &g.ev} {
		(*r).kick.Close()
		must(g.t, g.mem.Zero((*r).layout.Desc, 0x8000))
		*r = newRing(g.t, g.mem, (*r).layout.Desc, (*r).layout.Size)
	}
	g.activate(false)
	g.post(16)
	return g
}

func TestRequest_again_for_the_same_ports_replaces_one_without_an_answer(t *testing.T) {
	g, calls := newPathlessGuest(t, 16)
	g.request(9, 7)
	first := <-calls.made
	g.request(9, 7)
	second := <-calls.made
	wantEOF(t, first.accept(t))
	g.silentNow()
	second.accept(t)
	g.receive(opResponse)
}

func TestConnect_without_an_answer_is_reset_in_the_end(t *testing.T) {
	defer func(d time.Duration) { requestTimeout = d }(requestTimeout)
	requestTimeout = 20 * time.Millisecond
	g, calls := newPathlessGuest(t, 16)
	g.request(9, 7)
	call := <-calls.made
	g.receive(opReset)
	wantEOF(t, call.accept(t))
}

func TestAttack_flood_of_requests_without_an_answer_is_bounded(t *testing.T) {
	const resets = 3 // of the device by its driver
	g, calls := newPathlessGuest(t, 64)
	files := openFiles(t)
	for range resets {
		for i := range uint32(MaxConnections) {
			s := g.request(i, 7)
			s.send(opReset, 0)
			g.request(i, 8)
			for {
				if _, ok := g.next(); !ok {
					break
				}
				g.post(1)
			}
		}
		g.wait("all packets to be taken", func() bool { return g.tx.used == g.tx.avail || reapAll(g.tx) })
		if !g.paused(func(e *engine) bool {
			if err := e.check(); err != nil {
				t.Error(err)
			}
			return len(e.slots) <= MaxConnections && len(e.conns) <= MaxConnections
		}) {
			t.Error("more connections than the limit")
		}
		if n := len(calls.made); n != MaxConnections {
			t.Fatalf("%d calls without an answer, want %d", n, MaxConnections)
		}
		must(t, g.dev.Reset())
		g.nextDriver()
	}
	if n := openFiles(t); n != files {
		t.Errorf("%d files are open, %d before", n, files)
	}
	var hosts []net.Conn
	for c := calls.poll(); c != nil; c = calls.poll() {
		hosts = append(hosts, c.accept(t))
	}
	for _, c := range hosts {
		wantEOF(t, c)
		c.Close()
	}
	if n := openFiles(t); n != files {
		t.Errorf("%d files are open in the end, %d before", n, files)
	}
	g.request(1, 7)
	(<-calls.made).accept(t)
	g.receive(opResponse)
}

func reapAll(r *ring) bool {
	for {
		if _, _, ok := r.reap(); !ok {
			return r.used == r.avail
		}
	}
}

func TestAnswers_during_a_pause_come_after_it(t *testing.T) {
	g, calls := newPathlessGuest(t, 16)
	g.request(9, 7)
	call := <-calls.made
	must(t, g.dev.Pause(t.Context()))
	_, err := g.dev.Export()
	must(t, err)
	c := call.accept(t)
	if p, ok := g.next(); ok {
		t.Fatalf("received %v during a pause", p)
	}
	must(t, g.dev.Resume())
	g.receive(opResponse)
	_, err = c.Write([]byte("x"))
	must(t, err)
	g.receive(opData)
}

func TestConnection_without_an_answer_is_reset_after_a_restore(t *testing.T) {
	g, calls := newPathlessGuest(t, 16)
	g.postEvents(8)
	g.request(9, 7)
	call := <-calls.made
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n.resume()
	if p := n.receive(opReset); p.srcPort != 7 || p.dstPort != 9 {
		t.Fatalf("got %v", p)
	}
	n.noEvent()
	wantEOF(t, call.accept(t))
}
