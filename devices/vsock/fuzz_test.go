package vsock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/devices"
)

// check returns an error unless all invariants of a paused engine hold.
func (e *engine) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if e.loop.Failed() {
		return nil
	}
	open, connecting, parked, large, buffered, keyed, queued := 0, 0, 0, 0, 0, 0, 0
	for i, c := range e.slots {
		if c == nil {
			continue
		}
		unclaimed := c.state == stateParked || c.state == stateRequested && e.parked == c
		switch {
		case c.state == stateConnecting:
			connecting++
		case unclaimed:
			parked++
		default:
			open++
		}
		if c.slot != int32(i) {
			bad("slot %d has connection of slot %d", i, c.slot)
		}
		if c.alloc == largeBuffer {
			large++
		}
		if c.backlog.n > int(c.alloc) || len(c.backlog.buf) > int(c.alloc) {
			bad("%d bytes buffered with %d advertised", c.backlog.n, c.alloc)
		}
		if c.received-c.forwarded != uint32(c.backlog.n) {
			bad("%d received, %d forwarded, %d buffered", c.received, c.forwarded, c.backlog.n)
		}
		buffered += c.backlog.n
		if e.conns[c.key] == c {
			keyed++
		} else if c.state != stateHandshake && c.state != stateDraining {
			bad("a connection in state %d is not found by its ports", c.state)
		}
		if c.queued {
			queued++
		}
		if c.state == stateClosing && c.deadline == 0 {
			bad("a closing connection without a time limit")
		}
		if (c.fd < 0) != (c.state == stateClosing || c.state == stateConnecting || unclaimed) {
			bad("descriptor %d in state %d", c.fd, c.state)
		}
	}
	if keyed != len(e.conns) {
		bad("%d ports known, %d connections have them", len(e.conns), keyed)
	}
	listed := 0
	for c := e.head; c != nil && listed <= open+parked; c = c.next {
		listed++
		if !c.queued || e.slots[c.slot] != c {
			bad("a connection that is gone is queued")
		}
		if c.next == nil && e.tail != c {
			bad("the queue does not end at its tail")
		}
	}
	if listed != queued {
		bad("%d connections in the queue, %d think so", listed, queued)
	}
	if calls := int(e.inbox.calls.Load()); calls < connecting || calls+open > MaxConnections {
		bad("%d connections wait for an answer, %d calls, %d open", connecting, calls, open)
	}
	if open != e.open || open > MaxConnections || large != e.large || large > largeBuffers {
		bad("%d open (counted %d), %d large (counted %d)", open, e.open, large, e.large)
	}
	if parked > maxParked || (parked == 1) != (e.parked != nil) {
		bad("%d connections are parked, one of them %p", parked, e.parked)
	}
	if e.resetsCount > maxResets {
		bad("%d resets", e.resetsCount)
	}
	if got := e.stats.Buffered.Load(); got != uint64(buffered) {
		bad("%d bytes buffered, counted %d", buffered, got)
	}
	return errors.Join(errs...)
}

// FuzzPackets sends packets made by the fuzzer, while host clients connect, talk and leave. The device's counts must
// stay right. Every other script has a device with Config.Connect.
func FuzzPackets(f *testing.F) {
	mem := newMemory(f)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 512 {
			t.Skip("longer scripts only take longer")
		}
		must(t, mem.Zero(rxRing, 0x30000))
		path := filepath.Join(dir, "v")
		cfg := Config{CID: testCID, Path: path}
		calls := newCalls()
		if len(script)%2 == 1 {
			host, err := net.Listen("unix", path)
			must(t, err)
			defer host.Close()
			cfg.Listener, err = host.(*net.UnixListener).File()
			must(t, err)
			defer cfg.Listener.Close()
			cfg.Connect = calls.connect
		}
		g := inactiveGuestOf(t, mem, path, cfg)
		g.activate(false)
		l := g.serve(1)
		_, err := g.dev.Listen(2)
		must(t, err)
		var clients []net.Conn
		defer func() {
			for _, c := range clients {
				c.Close()
			}
		}()
		var requested []uint32
		next := func() byte {
			if len(script) == 0 {
				return 0
			}
			b := script[0]
			script = script[1:]
			return b
		}
		for steps := 0; len(script) > 0 && steps < 64; steps++ {
			switch action := next(); action % 8 {
			case 0: // a raw header
				var raw [headerSize]byte
				script = script[copy(raw[:], script):]
				var h header
				h.decode(&raw)
				g.send(packet{header: h, payload: make([]byte, next())})
			case 1, 2, 3: // a nearly correct packet
				h := header{
					srcCID: testCID, dstCID: HostCID, typ: typeStream, op: uint16(next() % 9), flags: uint32(next()),
					srcPort: uint32(next() % 4), dstPort: uint32(next() % 3), bufAlloc: uint32(next()) << 6, fwdCnt: uint32(int8(next())),
				}
				if len(requested) > 0 && action >= 128 {
					h.dstPort, h.srcPort = requested[int(action)%len(requested)], 5
				}
				n := int(next()) << (action % 16)
				h.len = uint32(n) + uint32(int8(next())/64)
				g.send(packet{header: h, payload: make([]byte, min(n, 65536))})
			case 4: // a host client, or a connection for one
				if action >= 128 {
					must(t, g.dev.Park(5))
				} else if c, err := net.Dial("unix", g.path); err == nil {
					fmt.Fprintf(c, "CONNECT 5\n")
					clients = append(clients, c)
				}
			case 5: // which talks
				if len(clients) > 0 {
					c := clients[int(next())%len(clients)]
					go c.Write(make([]byte, int(next())<<8))
				}
			case 6: // and goes
				if len(clients) > 0 {
					c := clients[int(next())%len(clients)].(*net.UnixConn)
					if next()%2 == 0 {
						c.CloseWrite()
					} else {
						c.Close()
					}
				}
			case 7: // take received packets and post buffers
				for range int(next()) % 16 {
					if p, ok := g.next(); ok && p.op == opRequest {
						requested = append(requested, p.srcPort)
					}
				}
				for range min(int(next())%16, len(g.rx.free)) {
					g.post(1)
				}
				if c := calls.poll(); c != nil {
					if action >= 64 {
						clients = append(clients, c.accept(t))
					} else {
						c.done(-1, false, errors.New("refused"))
					}
				}
				if action >= 128 {
					l.(*net.UnixListener).SetDeadline(aMoment())
					if c, err := l.Accept(); err == nil {
						clients = append(clients, c)
					}
				}
			}
		}
		must(t, g.dev.Pause(context.Background()))
		if err := g.dev.engine.check(); err != nil {
			t.Fatal(err)
		}
		p, err := g.dev.Export()
		must(t, err)
		must(t, g.dev.Reset())
		must(t, g.dev.Import(p))
		if n := g.dev.Stats().Buffered.Load(); n != 0 {
			t.Fatalf("%d bytes buffered by a device that was reset", n)
		}
		must(t, g.dev.Close())
		l.Close()
		for c := calls.poll(); c != nil; c = calls.poll() {
			clients = append(clients, c.accept(t))
		}
		if n := g.dev.inbox.calls.Load(); n != 0 {
			t.Fatalf("%d calls are counted after all were answered", n)
		}
	})
}

// FuzzImport imports states made by the fuzzer.
func FuzzImport(f *testing.F) {
	f.Add((&state{cid: 9, nextPort: firstHostPort, live: []key{{1, 2}}, refused: []key{{3, 4}}}).encode())
	f.Add((&state{cid: 9, nextPort: firstHostPort, live: []key{{1, 2}}, parked: []parked{{key{1, 3}, 4}}}).encode())
	mem := newMemory(f)
	path := filepath.Join(f.TempDir(), "v")
	d, err := New(mem, Config{CID: testCID, Path: path})
	must(f, err)
	f.Cleanup(func() { d.Close() })
	f.Fuzz(func(t *testing.T, data []byte) {
		err := d.Import(devices.Payload{Kind: stateKind, Version: stateVersion, Data: data})
		if err != nil {
			if !errors.Is(err, devices.ErrPayload) {
				t.Fatal(err)
			}
			return
		}
		p, err := d.Export()
		must(t, err)
		if string(p.Data) != string(data) {
			t.Fatalf("%x came back as %x", data, p.Data)
		}
	})
}
