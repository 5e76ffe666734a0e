package vsock

import (
	"bytes"
	"errors"
	"io"
	"math"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestHeaderLies(t *testing.T) {
	for name, tc := range map[string]struct {
		change     func(p *packet)
		reset      bool // the connection ends with a reset
		violations uint64
		ignored    uint64
	}{
		"payload longer than the packet":    {func(p *packet) { p.len++ }, true, 1, 0},
		"payload of 4 GiB":                  {func(p *packet) { p.len = math.MaxUint32 }, true, 1, 0},
		"payload shorter than the packet":   {func(p *packet) { p.len = 2 }, false, 0, 0},
		"somebody else's source":            {func(p *packet) { p.srcCID = 43 }, false, 0, 1},
		"the host as source":                {func(p *packet) { p.srcCID = HostCID }, false, 0, 1},
		"source above 32 bits":              {func(p *packet) { p.srcCID |= 1 << 32 }, false, 0, 1},
		"another guest as destination":      {func(p *packet) { p.dstCID = 43 }, false, 0, 1},
		"itself as destination":             {func(p *packet) { p.dstCID = testCID }, false, 0, 1},
		"the hypervisor as destination":     {func(p *packet) { p.dstCID = 0 }, false, 0, 1},
		"operation 0":                       {func(p *packet) { p.op = 0 }, true, 1, 0},
		"operation 8":                       {func(p *packet) { p.op = 8 }, true, 1, 0},
		"operation 65535":                   {func(p *packet) { p.op = 65535 }, true, 1, 0},
		"a request on an open connection":   {func(p *packet) { p.op = opRequest }, true, 1, 0},
		"a response on an open connection":  {func(p *packet) { p.op = opResponse }, true, 1, 0},
		"a credit update with payload":      {func(p *packet) { p.op = opCreditUpdate }, false, 0, 0},
		"a shutdown with no known flag set": {func(p *packet) { p.op, p.flags = opShutdown, 0xfffffffc }, false, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, 16)
			c, s := g.connect(80)
			p := s.data([]byte("data"))
			tc.change(&p)
			g.send(p)
			if tc.reset {
				if p := g.receive(opReset); p.srcPort != s.remote || p.dstPort != s.local {
					t.Fatalf("got %v", p)
				}
				wantEOF(t, c)
			} else {
				s.write([]byte("end"))
				got := make([]byte, 100)
				n, _ := io.ReadAtLeast(c, got, 3)
				if !bytes.HasSuffix(got[:n], []byte("end")) {
					t.Fatalf("read %q", got[:n])
				}
			}
			if st := g.dev.Stats(); st.Violations.Load() != tc.violations || st.Ignored.Load() != tc.ignored {
				t.Errorf("%d violations, %d ignored; want %d, %d", st.Violations.Load(), st.Ignored.Load(), tc.violations, tc.ignored)
			}
		})
	}
}

func TestUnknown_socket_type_is_reset(t *testing.T) {
	g := newGuest(t, 4)
	s := &stream{g: g, local: 1, remote: 2}
	h := s.header(opRequest)
	h.typ = 2
	g.send(packet{header: h})
	if p := g.receive(opReset); p.typ != 2 || p.srcPort != 2 || p.dstPort != 1 {
		t.Fatalf("got %v", p)
	}
}

func TestEvery_operation_on_an_unknown_connection_but_reset_is_reset(t *testing.T) {
	g := newGuest(t, 16)
	for op := range uint16(10) {
		s := &stream{g: g, local: 1, remote: 2}
		s.send(op, 0)
		if op != opReset {
			g.receive(opReset)
		}
	}
	g.silent(5 * time.Millisecond)
}

func TestAnswers_to_a_request_that_was_never_delivered_are_violations(t *testing.T) {
	g := newGuest(t, 0)
	c := g.dial(80)
	g.wait("the connection", func() bool { return g.paused(func(e *engine) bool { return len(e.conns) == 1 }) })
	s := &stream{g: g, local: 80, remote: firstHostPort}
	s.send(opResponse, 0)
	wantEOF(t, c)
	g.post(4)
	g.receive(opReset)
}

func TestData_before_the_response_is_a_violation(t *testing.T) {
	g := newGuest(t, 4)
	c := g.dial(80)
	p := g.receive(opRequest)
	s := &stream{g: g, local: 80, remote: p.srcPort}
	s.write([]byte("x"))
	g.receive(opReset)
	wantEOF(t, c)
}

func TestData_after_its_end_is_a_violation(t *testing.T) {
	g := newGuest(t, 8)
	_, s := g.connect(80)
	s.send(opShutdown, shutdownSend)
	s.write([]byte("x"))
	g.receive(opReset)
	if v := g.dev.Stats().Violations.Load(); v != 1 {
		t.Errorf("%d violations", v)
	}
}

func TestShort_packets_and_buffers_are_counted_and_skipped(t *testing.T) {
	g := newGuest(t, 0)
	g.tx.add(txPool, headerSize-1, false)
	g.rx.add(rxPool, headerSize, true) // no room for payload
	g.rx.add(rxPool, 1, true)
	g.rx.kick.Signal()
	g.tx.kick.Signal()
	g.dial(80)
	g.wait("three chains to come back", func() bool {
		st := g.dev.Stats()
		return st.Violations.Load() == 1 && st.ShortBuffers.Load() == 2
	})
	for range 2 {
		if _, n, ok := g.rx.reap(); !ok || n != 0 {
			t.Fatalf("a short buffer came back with %d bytes, %v", n, ok)
		}
	}
	g.post(4)
	g.receive(opRequest)
}

func TestBuffers_split_over_many_descriptors_are_filled_right(t *testing.T) {
	g := newGuest(t, 4)
	c, s := g.connect(80)
	for range 3 {
		if _, ok := g.next(); ok {
			t.Fatal("unexpected packet")
		}
	}
	// The posted buffers fill first.
	data := pattern(9, 4*(rxBuffer-headerSize))
	c.Write(data)
	var got []byte
	for range 4 {
		var p packet
		g.wait("data", func() bool { var ok bool; p, ok = g.next(); return ok })
		got = append(got, p.payload...)
	}
	if !bytes.Equal(got, data) {
		t.Fatal("data differs")
	}
	s.forwarded += uint32(len(data))
	// Now one chain whose descriptors split the header.
	sizes := []uint32{1, 42, 3, 100, 1, 53}
	var ids []uint16
	at := guestmem.GPA(rxPool)
	for range sizes {
		ids = append(ids, g.rx.take())
	}
	for i, n := range sizes {
		flags, next := uint16(2), uint16(0)
		if i+1 < len(sizes) {
			flags, next = 3, ids[i+1]
		}
		g.rx.descriptor(ids[i], at, n, flags, next)
		at += guestmem.GPA(n) // contiguous, so that it can be read as one
	}
	g.rx.buf[ids[0]] = rxPool
	g.rx.publish(ids[0])
	g.rx.kick.Signal()
	c.Write(data[:300])
	var p packet
	g.wait("data", func() bool { var ok bool; p, ok = g.next(); return ok })
	if !bytes.Equal(p.payload, data[:200-headerSize]) {
		t.Fatalf("%d bytes, or other ones", len(p.payload))
	}
}

func TestGuest_that_ignores_credit_is_reset(t *testing.T) {
	g := newGuest(t, 64)
	c, s := g.connect(80)
	chunk := make([]byte, 65536)
	for range 100 {
		s.write(chunk)
		if g.dev.Stats().Violations.Load() > 0 {
			break
		}
	}
	g.receiveAfterCredit(opReset)
	st := g.dev.Stats()
	if st.Violations.Load() != 1 || st.Buffered.Load() > largeBuffer {
		t.Errorf("%+v", st)
	}
	if n, err := io.Copy(io.Discard, c); err != nil || n == 0 || n > 1<<20 {
		t.Errorf("the client read %d bytes, %v", n, err)
	}
}

func TestClient_that_does_not_read_stalls_its_own_connection_only(t *testing.T) {
	g := newGuest(t, 64)
	slow, s1 := g.connect(80)
	quick, s2 := g.connect(81)
	data := pattern(5, largeBuffer)
	for at := 0; at < len(data); at += 65536 {
		s1.write(data[at : at+65536])
	}
	for i := range 20 {
		s2.write(data[i : i+100])
		readFull(t, quick, data[i:i+100])
		quick.Write(data[i : i+50])
		for {
			p := g.receiveAfterCredit(opData)
			if p.srcPort == s2.remote {
				break
			}
		}
	}
	if st := g.dev.Stats(); st.Buffered.Load() == 0 || st.Buffered.Load() > largeBuffer {
		t.Errorf("%d bytes buffered", st.Buffered.Load())
	}
	readFull(t, slow, data)
	g.wait("the buffer to be empty", func() bool { return g.dev.Stats().Buffered.Load() == 0 })
	// All credit has come back.
	s1.send(opCreditRequest, 0)
	g.wait("full credit", func() bool {
		p, ok := g.next()
		return ok && p.op == opCreditUpdate && p.srcPort == s1.remote && p.fwdCnt == largeBuffer
	})
}

func TestGuest_without_receive_buffers_stalls_nobody_and_gets_everything_later(t *testing.T) {
	g := newGuest(t, 1)
	c, s := g.connect(80) // takes the buffer and posts one
	data := pattern(7, 100000)
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		written <- err
	}()
	// The direction to the host works all the while.
	for range 50 {
		s.write(data[:1000])
		readFull(t, c, data[:1000])
	}
	var got []byte
	for len(got) < len(data) {
		p := g.receive(opData)
		got = append(got, p.payload...)
		s.forwarded += p.len
	}
	must(t, <-written)
	if !bytes.Equal(got, data) {
		t.Fatal("data differs")
	}
}

func TestNo_byte_is_sent_beyond_the_guests_credit(t *testing.T) {
	for _, alloc := range []uint32{0, 1, 1000, 5000} {
		g := newGuest(t, 64)
		c := g.dial(80)
		p := g.receive(opRequest)
		s := &stream{g: g, local: 80, remote: p.srcPort, alloc: alloc}
		s.send(opResponse, 0)
		readFull(t, c, []byte("OK 1073741824\n"))
		data := pattern(8, 20000)
		go c.Write(data)
		var got []byte
		for len(got) < len(data) {
			var window uint32
			for window < s.alloc {
				p := g.receive(opData)
				window += p.len
				got = append(got, p.payload...)
				if len(got) == len(data) {
					break
				}
			}
			if window > s.alloc {
				t.Fatalf("%d bytes with a credit of %d", window, s.alloc)
			}
			if len(got) == len(data) {
				break
			}
			g.receive(opCreditRequest)
			g.silent(2 * time.Millisecond)
			s.forwarded += window
			if s.alloc < 1000 {
				s.alloc = 10000
			}
			s.send(opCreditUpdate, 0)
		}
		if !bytes.Equal(got, data) {
			t.Fatalf("credit %d: data differs", alloc)
		}
	}
}

func TestCredit_that_shrinks_or_runs_backwards_sends_nothing(t *testing.T) {
	g := newGuest(t, 64)
	c, s := g.connect(80)
	c.Write(make([]byte, 5000))
	s.read(5000)
	for _, lie := range []struct{ alloc, forwarded uint32 }{{1000, 0}, {5000, 0}, {0, 5000}, {100, 1 << 31}, {10, 4990}} {
		s.alloc, s.forwarded = lie.alloc, lie.forwarded
		s.send(opCreditUpdate, 0)
		g.wait("the packet", func() bool { _, _, ok := g.tx.reap(); return ok })
		if lie.alloc == 1000 {
			c.Write([]byte("x"))
			g.receive(opCreditRequest)
		}
		g.silent(2 * time.Millisecond)
	}
	s.alloc, s.forwarded = 100, 5000
	s.send(opCreditUpdate, 0)
	s.read(1)
}

func TestCredit_is_not_advertised_more_often_than_half_a_buffer(t *testing.T) {
	g := newGuest(t, 64)
	c, s := g.connect(80)
	chunk := make([]byte, 4096)
	const total = 4 << 20
	updates, room := 0, largeBuffer
	var credited uint32
	for sent := 0; sent < total; sent += len(chunk) {
		g.wait("credit", func() bool {
			for {
				p, ok := g.next()
				if !ok {
					break
				}
				g.post(1)
				if p.op != opCreditUpdate {
					t.Fatalf("received %v", p)
				}
				updates++
				room += int(p.fwdCnt - credited)
				credited = p.fwdCnt
			}
			return room >= len(chunk)
		})
		s.write(chunk)
		room -= len(chunk)
		readFull(t, c, chunk)
	}
	if limit := total/(largeBuffer/2) + 1; updates > limit {
		t.Errorf("%d credit updates for %d bytes, want at most %d", updates, total, limit)
	}
}

func TestRequest_and_reply_take_no_extra_packets_and_one_interrupt_each(t *testing.T) {
	g := newGuest(t, 64)
	c, s := g.connect(80)
	before, interrupts := g.dev.Stats().PacketsToGuest.Load(), g.count()
	const rounds = 100
	for range rounds {
		c.Write([]byte("request"))
		s.read(7)
		s.write([]byte("reply"))
		readFull(t, c, []byte("reply"))
	}
	if n := g.dev.Stats().PacketsToGuest.Load() - before; n != rounds {
		t.Errorf("%d packets to the guest for %d requests", n, rounds)
	}
	// A transmitted buffer may come back with its own interrupt when the test is slow.
	if n := g.count() - interrupts; n > rounds+rounds/2 {
		t.Errorf("%d interrupts for %d requests", n, rounds)
	}
}

func TestStorms_of_packets_leave_nothing_behind(t *testing.T) {
	for name, op := range map[string]uint16{
		"data": opData, "request": opRequest, "response": opResponse, "shutdown": opShutdown,
		"credit request": opCreditRequest, "reset": opReset, "unknown": 77,
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, 0) // never reads
			before := openFiles(t)
			var m0, m1 runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m0)
			for i := range 3 * maxResets {
				s := &stream{g: g, local: uint32(i), remote: uint32(i) ^ 0x5555}
				h := s.header(op)
				h.flags = uint32(i)
				g.put(packet{header: h})
				if i%64 == 0 {
					g.tx.kick.Signal()
				}
			}
			g.tx.kick.Signal()
			g.wait("all packets to be taken", func() bool { return g.dev.Stats().PacketsFromGuest.Load() == 3*maxResets })
			if n := g.paused(func(e *engine) bool { return e.resetsCount <= maxResets && len(e.conns) == 0 }); !n {
				t.Error("connections or resets beyond their limit")
			}
			runtime.GC()
			runtime.ReadMemStats(&m1)
			if grown := int64(m1.HeapAlloc) - int64(m0.HeapAlloc); grown > 4<<20 {
				t.Errorf("the heap has grown by %d bytes", grown)
			}
			if after := openFiles(t); after > before {
				t.Errorf("%d files open before, %d after", before, after)
			}
			// The device still works.
			g.dial(80)
			g.post(200)
			g.wait("a request among the resets", func() bool {
				for {
					p, ok := g.next()
					if !ok || p.op == opRequest {
						return ok
					}
					g.post(1)
				}
			})
		})
	}
}

func TestCredit_request_storm_on_one_connection_is_answered_at_most_once_per_buffer(t *testing.T) {
	g := newGuest(t, 2)
	_, s := g.connect(80)
	for range 1000 {
		g.put(packet{header: s.header(opCreditRequest)})
		g.tx.kick.Signal()
	}
	g.wait("all packets", func() bool { return g.dev.Stats().PacketsFromGuest.Load() >= 1001 })
	if !g.paused(func(e *engine) bool { return e.resetsCount == 0 && e.open == 1 }) {
		t.Error("something was queued")
	}
}

func TestConnections_beyond_the_limit_are_refused_and_others_work(t *testing.T) {
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	if limit.Cur < 3*MaxConnections {
		limit.Cur = min(limit.Max, 3*MaxConnections)
		if limit.Cur < 3*MaxConnections {
			t.Skipf("the host allows %d open files, the test needs %d", limit.Max, 3*MaxConnections)
		}
		must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	}
	g := newGuest(t, 128)
	_, s := g.connect(80)
	l := g.serve(7)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	}()
	accepted, refused := 0, 0
	for i := range MaxConnections + 50 {
		r := &stream{g: g, local: uint32(10000 + i), remote: 7, alloc: 1000}
		r.send(opRequest, 0)
		g.wait("an answer", func() bool {
			p, ok := g.next()
			if !ok {
				return false
			}
			g.post(1)
			switch p.op {
			case opResponse:
				accepted++
				if want := uint32(smallBuffer); accepted >= largeBuffers && p.bufAlloc != want {
					t.Fatalf("connection %d advertises %d bytes", accepted, p.bufAlloc)
				}
			case opReset:
				refused++
			default:
				t.Fatalf("received %v", p)
			}
			return true
		})
	}
	// The accepting process may be slow, and its backlog full, so some are refused early. But never too many are
	// accepted.
	if accepted > MaxConnections-1 || accepted+refused != MaxConnections+50 {
		t.Errorf("%d accepted, %d refused", accepted, refused)
	}
	if !g.paused(func(e *engine) bool {
		sum := 0
		for _, c := range e.slots {
			if c != nil {
				sum += int(c.alloc)
			}
		}
		return sum <= largeBuffers*largeBuffer+(MaxConnections-largeBuffers)*smallBuffer
	}) {
		t.Error("the advertised buffers exceed their sum")
	}
	c2, err := net.Dial("unix", g.path)
	must(t, err)
	defer c2.Close()
	s.send(opCreditRequest, 0)
	g.receive(opCreditUpdate)
}

func TestClients_that_say_nothing_are_closed_in_time(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a time limit of seconds")
	}
	t.Parallel()
	g := newGuest(t, 8)
	c, err := net.Dial("unix", g.path)
	must(t, err)
	defer c.Close()
	start := time.Now()
	c.SetDeadline(start.Add(2 * handshakeTimeout))
	wantEOF(t, c)
	if d := time.Since(start); d < handshakeTimeout-time.Second {
		t.Errorf("closed after %v", d)
	}
}

func TestGuest_that_does_not_answer_a_request_is_reset_in_time(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a time limit of seconds")
	}
	t.Parallel()
	g := newGuest(t, 8)
	c := g.dial(80)
	g.receive(opRequest)
	c.SetDeadline(time.Now().Add(2 * requestTimeout))
	wantEOF(t, c)
	g.receive(opReset)
}

func TestBroken_ring_gives_the_device_up_and_frees_the_clients(t *testing.T) {
	for name, q := range map[string]int{"rx": queueRX, "tx": queueTX} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, 8)
			c, s := g.connect(80)
			waiting, err := net.Dial("unix", g.path)
			must(t, err)
			defer waiting.Close()
			r := []*ring{g.rx, g.tx}[q]
			must(t, g.mem.StoreUint16(r.layout.Avail+2, r.avail+rxSize+1))
			s.g.tx.kick.Signal()
			c.Write([]byte("x"))
			c.Read(make([]byte, 1)) // EOF, or a reset because of the unread byte
			g.wait("the device to ask for a reset", func() bool {
				g.mu.Lock()
				defer g.mu.Unlock()
				return g.broken != nil
			})
			if !errors.Is(g.broken, virtq.ErrDriver) {
				t.Errorf("the reason is %v", g.broken)
			}
			must(t, g.dev.Reset())
		})
	}
}

func TestMalformed_chains_are_given_back_and_counted(t *testing.T) {
	g := newGuest(t, 0)
	g.tx.add(0x7fffffff000, 100, false)
	g.tx.kick.Signal()
	g.rx.add(0x7fffffff000, 100, true)
	g.dial(79)
	g.wait("the bad receive buffer", func() bool { _, n, ok := g.rx.reap(); return ok && n == 0 })
	g.post(8)
	g.receive(opRequest)
	_, s := g.connect(80)
	s.write([]byte("x"))
	g.wait("the bad chain to come back", func() bool {
		return g.paused(func(e *engine) bool { return e.rx.BadChains() == 1 && e.tx.BadChains() == 1 })
	})
}
