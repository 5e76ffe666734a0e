package vsock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

func TestHost_connects_to_guest_and_bytes_flow_both_ways(t *testing.T) {
	g := newGuest(t, 64)
	c, s := g.connect(5000)
	for _, n := range []int{1, 100, rxBuffer - headerSize, rxBuffer, 70000} {
		data := pattern(byte(n), n)
		go c.Write(data)
		if !bytes.Equal(s.read(n), data) {
			t.Fatalf("%d bytes to the guest differ", n)
		}
		s.write(data[:min(n, 65536)])
		readFull(t, c, data[:min(n, 65536)])
	}
}

func TestGuest_connects_to_host_and_bytes_flow_both_ways(t *testing.T) {
	g := newGuest(t, 64)
	c, s := g.open(1234, 7)
	s.write([]byte("hello"))
	readFull(t, c, []byte("hello"))
	c.Write([]byte("world"))
	if got := s.read(5); string(got) != "world" {
		t.Fatalf("got %q", got)
	}
}

func TestRequest_to_port_without_listener_is_reset(t *testing.T) {
	g := newGuest(t, 4)
	s := &stream{g: g, local: 9, remote: 99}
	s.send(opRequest, 0)
	if p := g.receive(opReset); p.srcPort != 99 || p.dstPort != 9 {
		t.Fatalf("got %v", p)
	}
}

func TestRefusal_of_guest_closes_client_without_OK(t *testing.T) {
	g := newGuest(t, 4)
	c := g.dial(1)
	p := g.receive(opRequest)
	(&stream{g: g, local: 1, remote: p.srcPort}).send(opReset, 0)
	wantEOF(t, c)
}

func TestClient_need_not_wait_for_OK(t *testing.T) {
	g := newGuest(t, 4)
	c, err := net.Dial("unix", g.path)
	must(t, err)
	defer c.Close()
	c.Write([]byte("CONNECT 52\nearly"))
	p := g.receive(opRequest)
	s := &stream{g: g, local: 52, remote: p.srcPort, alloc: 1000}
	s.send(opResponse, 0)
	if got := s.read(5); string(got) != "early" {
		t.Fatalf("got %q", got)
	}
}

func TestBad_lines_close_the_client(t *testing.T) {
	g := newGuest(t, 4)
	for _, line := range []string{
		"\n", "CONNECT\n", "CONNECT \n", "CONNECT x\n", "connect 1\n", "CONNECT -1\n", "CONNECT +1\n", "CONNECT 4294967295\n",
		"CONNECT 4294967296\n", "CONNECT 1 \n", "CONNECT 000000000000000000000000000000000000001\n", "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		c, err := net.Dial("unix", g.path)
		must(t, err)
		c.Write([]byte(line))
		c.SetDeadline(time.Now().Add(60 * time.Second))
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
			t.Errorf("line %q: Read = %d, %v; want the end", line, n, err)
		}
		c.Close()
	}
	g.silent(10 * time.Millisecond)
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func TestLine_may_come_in_pieces(t *testing.T) {
	g := newGuest(t, 4)
	c, err := net.Dial("unix", g.path)
	must(t, err)
	defer c.Close()
	for _, part := range []string{"CON", "NECT 1", "7", "\n"} {
		c.Write([]byte(part))
		time.Sleep(5 * time.Millisecond)
	}
	if p := g.receive(opRequest); p.dstPort != 17 {
		t.Fatalf("got %v", p)
	}
}

func TestHalf_close_of_client_reaches_guest_and_reply_comes_back(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	c.Write([]byte("question"))
	must(t, c.(*net.UnixConn).CloseWrite())
	if got := s.read(8); string(got) != "question" {
		t.Fatalf("got %q", got)
	}
	if p := g.receive(opShutdown); p.flags != shutdownSend {
		t.Fatalf("got %v", p)
	}
	s.write([]byte("answer"))
	s.send(opShutdown, shutdownBoth)
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "answer" {
		t.Fatalf("got %q, %v", got, err)
	}
	g.receive(opReset)
}

func TestHalf_close_of_guest_reaches_client_and_reply_comes_back(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	s.write([]byte("question"))
	s.send(opShutdown, shutdownSend)
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "question" {
		t.Fatalf("got %q, %v", got, err)
	}
	c.Write([]byte("answer"))
	c.Close()
	if got := s.read(6); string(got) != "answer" {
		t.Fatalf("got %q", got)
	}
	if p := g.receive(opShutdown); p.flags != shutdownBoth {
		t.Fatalf("got %v", p)
	}
	s.send(opReset, 0)
	g.silent(10 * time.Millisecond)
}

func TestGuest_that_will_not_receive_fails_the_clients_writes(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	s.send(opShutdown, shutdownReceive)
	for deadline := time.Now().Add(60 * time.Second); ; {
		if _, err := c.Write([]byte("x")); err != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the client can still write")
		}
		time.Sleep(time.Millisecond)
	}
	s.write([]byte("still here"))
	readFull(t, c, []byte("still here"))
}

func TestClient_that_closes_ends_both_directions(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	c.Close()
	if p := g.receive(opShutdown); p.flags != shutdownBoth {
		t.Fatalf("got %v", p)
	}
	// Already in flight; the device accepts it.
	s.write([]byte("late"))
	s.send(opReset, 0)
	g.silent(10 * time.Millisecond)
	g.wait("the connection to go", func() bool { return g.paused(func(e *engine) bool { return e.open == 0 }) })
}

// paused runs f on the engine during a pause.
func (g *guest) paused(f func(e *engine) bool) bool {
	g.t.Helper()
	must(g.t, g.dev.Pause(context.Background()))
	defer func() { must(g.t, g.dev.Resume()) }()
	return f(g.dev.engine)
}

func TestGuests_last_bytes_reach_a_slow_client_after_the_connection_has_ended(t *testing.T) {
	for _, end := range []string{"shutdown", "reset"} {
		t.Run(end, func(t *testing.T) {
			g := newGuest(t, 16)
			c, s := g.connect(80)
			data := pattern(1, largeBuffer)
			for at := 0; at < len(data); at += 32768 {
				s.write(data[at : at+32768])
			}
			if end == "shutdown" {
				s.send(opShutdown, shutdownBoth)
				g.receiveAfterCredit(opReset)
			} else {
				s.send(opReset, 0)
			}
			time.Sleep(20 * time.Millisecond)
			readFull(t, c, data)
			wantEOF(t, c)
		})
	}
}

func TestBytes_go_both_ways_at_once_on_many_connections(t *testing.T) {
	g := newGuest(t, 200)
	const conns, size = 8, 300000
	type pair struct {
		c net.Conn
		s *stream
	}
	byPort := map[uint32]*pair{}
	got := map[uint32][]byte{}
	errs := make(chan error, 2*conns)
	for i := range conns {
		c, s := g.connect(uint32(100 + i))
		byPort[s.local] = &pair{c, s}
	}
	for i := range conns {
		c := byPort[uint32(100+i)].c
		go func() {
			_, err := c.Write(pattern(byte(i), size))
			errs <- err
		}()
		go func() {
			p := make([]byte, size)
			_, err := io.ReadFull(c, p)
			if err == nil && !bytes.Equal(p, pattern(byte(i+100), size)) {
				err = fmt.Errorf("connection %d: bytes from the guest differ", i)
			}
			errs <- err
		}()
	}
	sent := map[uint32]int{}
	room := map[uint32]int{}
	for port := range byPort {
		room[port] = largeBuffer
	}
	credited := map[uint32]uint32{}
	done := 0
	for done < 2*conns {
		for port, p := range byPort {
			n := min(size-sent[port], 20000, room[port])
			if n > 0 {
				p.s.write(pattern(byte(port), size)[sent[port] : sent[port]+n])
				sent[port] += n
				room[port] -= n
			}
		}
		g.wait("a packet or the end", func() bool {
			p, ok := g.next()
			if ok {
				g.post(1)
				s := byPort[p.dstPort].s
				room[p.dstPort] += int(p.fwdCnt - credited[p.dstPort])
				credited[p.dstPort] = p.fwdCnt
				switch p.op {
				case opData:
					got[p.dstPort] = append(got[p.dstPort], p.payload...)
					s.forwarded += p.len
					if s.forwarded%65536 < p.len {
						s.send(opCreditUpdate, 0)
					}
				case opCreditRequest:
					s.send(opCreditUpdate, 0)
				case opCreditUpdate:
				default:
					t.Fatalf("received %v", p)
				}
				return true
			}
			select {
			case err := <-errs:
				must(t, err)
				done++
				return true
			default:
				return false
			}
		})
	}
	g.wait("the rest", func() bool {
		for {
			p, ok := g.next()
			if !ok {
				break
			}
			g.post(1)
			if p.op == opData {
				got[p.dstPort] = append(got[p.dstPort], p.payload...)
			}
		}
		for port := range byPort {
			if len(got[port]) < size {
				return false
			}
		}
		return true
	})
	for port := range byPort {
		if !bytes.Equal(got[port], pattern(byte(port-100), size)) {
			t.Errorf("connection to port %d: bytes to the guest differ", port)
		}
	}
}
