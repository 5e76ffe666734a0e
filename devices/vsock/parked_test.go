package vsock

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
)

// park has the guest accept a connection without a client.
func (g *guest) park(port uint32) *stream {
	g.t.Helper()
	must(g.t, g.dev.Park(port))
	p := g.receive(opRequest)
	if p.dstPort != port {
		g.t.Fatalf("got %v", p)
	}
	s := &stream{g: g, local: port, remote: p.srcPort, alloc: largeBuffer}
	s.send(opResponse, 0)
	g.wait("the connection to be parked", g.hasParked)
	return s
}

func (g *guest) hasParked() bool {
	return g.paused(func(e *engine) bool { return e.parked != nil && e.parked.state == stateParked })
}

func (g *guest) hasNone() bool { return g.paused(func(e *engine) bool { return e.parked == nil }) }

// takesOver checks that a client for the port is connected to s without a request to the guest.
func (s *stream) takesOver(port uint32) net.Conn {
	s.g.t.Helper()
	c := s.g.dial(port)
	var ok [3]byte
	readFull(s.g.t, c, []byte("OK "))
	for ok[0] != '\n' {
		if _, err := c.Read(ok[:1]); err != nil {
			s.g.t.Fatal(err)
		}
	}
	_, err := c.Write([]byte("ping"))
	must(s.g.t, err)
	if got := s.read(4); string(got) != "ping" {
		s.g.t.Fatalf("the guest got %q", got)
	}
	s.write([]byte("pong"))
	readFull(s.g.t, c, []byte("pong"))
	return c
}

func TestParked_connection_is_the_next_client_s(t *testing.T) {
	g := newGuest(t, 16)
	s := g.park(1024)
	if st := g.dev.Stats(); st.Open.Load() != 0 || st.Uses.Load() != 0 {
		t.Error("a parked connection counts as use")
	}
	must(t, g.dev.Park(1024)) // there is one
	must(t, g.dev.Park(80))
	g.silent(5 * time.Millisecond)
	g.connect(80) // another port
	c := s.takesOver(1024)
	must(t, c.Close())
	g.receive(opShutdown)
	s.send(opReset, 0)
	g.connect(1024)
	g.park(1024).takesOver(1024)
}

func TestParked_connection_is_for_Dial_too_but_not_for_DialFresh(t *testing.T) {
	g := newGuest(t, 16)
	s := g.park(1024)
	fresh := make(chan dialed, 1)
	go func() {
		c, err := g.dev.DialFresh(t.Context(), 1024)
		fresh <- dialed{c, err}
	}()
	p := g.receive(opRequest)
	other := &stream{g: g, local: 1024, remote: p.srcPort, alloc: largeBuffer}
	other.send(opResponse, 0)
	d := <-fresh
	must(t, d.err)
	defer d.Close()
	c, err := g.dev.Dial(t.Context(), 1024)
	must(t, err)
	defer c.Close()
	_, err = c.Write([]byte("to s"))
	must(t, err)
	if got := s.read(4); string(got) != "to s" {
		t.Fatalf("got %q", got)
	}
}

func TestParked_connection_outlives_a_restore_and_others_to_its_port_are_reset(t *testing.T) {
	g := newGuest(t, 16)
	g.postEvents(8)
	_, old := g.connect(1024)
	s := g.park(1024)
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n = n.restore(filepath.Join(t.TempDir(), "third.sock")) // it never ran
	n.resume()
	if p := n.receive(opReset); p.srcPort != old.remote || p.dstPort != 1024 {
		t.Fatalf("got %v", p)
	}
	n.silent(5 * time.Millisecond)
	n.noEvent()
	s.g = n
	s.takesOver(1024)
	if _, next := n.connect(1024); next.remote == s.remote || next.remote == old.remote {
		t.Errorf("port %d is used again", next.remote)
	}
}

func TestParked_connection_ends_with_a_restore_that_ends_others_by_an_event(t *testing.T) {
	g := newGuest(t, 16)
	g.postEvents(8)
	g.connect(80)
	s := g.park(1024)
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n.resume()
	n.receiveEvent()
	n.postEvents(1)
	if !n.hasNone() {
		t.Error("there is a parked connection")
	}
	_, next := n.connect(1024)
	if next.remote == s.remote {
		t.Errorf("port %d is used again", next.remote)
	}
}

func TestParked_connection_without_event_buffers_is_reset_beside_others(t *testing.T) {
	g := newGuest(t, 16)
	_, a := g.connect(80)
	s := g.park(1024)
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n.resume()
	for _, want := range []*stream{a, s} {
		if p := n.receive(opReset); p.srcPort != want.remote || p.dstPort != want.local {
			t.Fatalf("got %v, want a reset of port %d", p, want.local)
		}
	}
}

func TestParked_connection_that_the_guest_has_not_accepted_is_not_kept(t *testing.T) {
	g := newGuest(t, 16)
	g.postEvents(8)
	must(t, g.dev.Park(1024))
	p := g.receive(opRequest)
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n.resume()
	n.receiveEvent()
	n.postEvents(1)
	late := &stream{g: n, local: 1024, remote: p.srcPort, alloc: largeBuffer}
	late.send(opResponse, 0)
	if p := n.receive(opReset); p.srcPort != late.remote {
		t.Fatalf("got %v", p)
	}
	n.park(1024).takesOver(1024)
}

func TestParked_connection_on_which_the_guest_speaks_is_reset(t *testing.T) {
	for name, tt := range map[string]struct {
		say      func(s *stream)
		answered bool
	}{
		"data":     {func(s *stream) { s.write([]byte("lost?")) }, true},
		"its end":  {func(s *stream) { s.send(opShutdown, shutdownSend) }, true},
		"an offer": {func(s *stream) { s.send(opRequest, 0) }, true},
		"nonsense": {func(s *stream) { s.send(77, 0) }, true},
		"a reset":  {func(s *stream) { s.send(opReset, 0) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, 16)
			s := g.park(1024)
			tt.say(s)
			if tt.answered {
				if p := g.receive(opReset); p.srcPort != s.remote {
					t.Fatalf("got %v", p)
				}
			}
			g.wait("the connection to go", g.hasNone)
			g.connect(1024)
			if left := g.paused(func(e *engine) bool { return e.open == 1 && len(e.conns) == 1 && e.large == 1 }); !left {
				t.Error("the parked connection is still counted")
			}
			g.park(1024).takesOver(1024)
		})
	}
}

func TestParked_connection_without_credit_waits_for_it(t *testing.T) {
	g := newGuest(t, 16)
	must(t, g.dev.Park(1024))
	s := &stream{g: g, local: 1024, remote: g.receive(opRequest).srcPort}
	s.send(opResponse, 0) // with room for nothing
	g.wait("the connection to be parked", g.hasParked)
	s.send(opCreditRequest, 0)
	g.receive(opCreditUpdate)
	c, err := g.dev.Dial(t.Context(), 1024)
	must(t, err)
	defer c.Close()
	_, err = c.Write([]byte("ping"))
	must(t, err)
	g.receive(opCreditRequest)
	s.alloc = largeBuffer
	s.send(opCreditUpdate, 0)
	if got := s.read(4); string(got) != "ping" {
		t.Fatalf("got %q", got)
	}
}

func TestPark_that_the_guest_refuses_leaves_nothing(t *testing.T) {
	g := newGuest(t, 16)
	must(t, g.dev.Park(1024))
	p := g.receive(opRequest)
	(&stream{g: g, local: 1024, remote: p.srcPort}).send(opReset, 0)
	g.wait("the connection to go", g.hasNone)
	must(t, g.dev.Reset())
	if err := g.dev.Park(1024); !errors.Is(err, errNoDriver) {
		t.Errorf("without a driver: got %v", err)
	}
	must(t, g.dev.Close())
	if err := g.dev.Park(1024); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: got %v", err)
	}
}

func TestImport_reads_states_with_and_without_parked_connections(t *testing.T) {
	s := state{cid: 77, nextPort: firstHostPort, live: []key{{1, 2}}, parked: []parked{{key{1024, firstHostPort}, 9}}}
	v2 := s.encode()
	many := s
	many.parked = append(many.parked, s.parked...)
	for name, tt := range map[string]struct {
		version uint32
		data    []byte
		parked  int
		want    error
	}{
		"version 2":               {2, v2, 1, nil},
		"version 1":               {1, v2[:len(v2)-16], 0, nil},
		"version 1 and more":      {1, v2, 0, devices.ErrPayload},
		"version 2 without them":  {2, v2[:len(v2)-16], 0, devices.ErrPayload},
		"version 2 cut in one":    {2, v2[:len(v2)-1], 0, devices.ErrPayload},
		"version 2 with too many": {2, many.encode(), 0, devices.ErrPayload},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := New(newMemory(t), Config{CID: 3, Path: filepath.Join(t.TempDir(), "a")})
			must(t, err)
			defer d.Close()
			if err := d.Import(devices.Payload{Kind: stateKind, Version: tt.version, Data: tt.data}); !errors.Is(err, tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
			if tt.want == nil && (len(d.carried.parked) != tt.parked || len(d.carried.live) != 1) {
				t.Errorf("got %+v", d.carried)
			}
		})
	}
}

// A pause does not touch the parked connection.
func TestParked_connection_outlives_a_pause(t *testing.T) {
	g := newGuest(t, 16)
	s := g.park(1024)
	must(t, g.dev.Pause(context.Background()))
	_, err := g.dev.Export()
	must(t, err)
	must(t, g.dev.Resume())
	s.takesOver(1024)
}
