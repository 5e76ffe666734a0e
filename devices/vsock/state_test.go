package vsock

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
)

// restore pauses g, saves it, closes its device, and makes another guest over the same memory from the saved state,
// as the machine of another process would be.
func (g *guest) restore(path string) *guest {
	g.t.Helper()
	must(g.t, g.dev.Pause(context.Background()))
	p, err := g.dev.Export()
	must(g.t, err)
	positions := g.positions()
	must(g.t, g.dev.Close())
	n := inactiveGuest(g.t, g.mem, path)
	// The rings are in guest memory; only the kicks are new.
	for _, r := range []struct{ from, to *ring }{{g.rx, n.rx}, {g.tx, n.tx}, {g.ev, n.ev}} {
		kick := r.to.kick
		*r.to = *r.from
		r.to.kick, r.from.kick = kick, r.to.kick
		newKick, err := devices.NewEvent()
		must(g.t, err)
		r.from.kick = newKick
	}
	must(g.t, n.dev.Import(p))
	n.activate(true, positions...)
	return n
}

func (g *guest) resume() { must(g.t, g.dev.Resume()) }

// receiveEvent waits for an event and checks it.
func (g *guest) receiveEvent() {
	g.t.Helper()
	g.wait("an event", func() bool {
		head, n, ok := g.ev.reap()
		if !ok {
			return false
		}
		var id [eventSize]byte
		must(g.t, g.mem.Read(g.ev.buf[head], id[:]))
		if n != eventSize || id != [eventSize]byte{} {
			g.t.Fatalf("event of %d bytes: %v", n, id)
		}
		return true
	})
}

func (g *guest) noEvent() {
	g.t.Helper()
	if _, _, ok := g.ev.reap(); ok {
		g.t.Fatal("an unexpected event")
	}
}

func TestConnections_outlive_a_pause(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	for range 3 {
		must(t, g.dev.Pause(context.Background()))
		must(t, g.dev.Pause(context.Background()))
		if _, err := g.dev.Export(); err != nil {
			t.Fatal(err)
		}
		c.Write([]byte("ping"))
		s.write([]byte("pong"))
		g.silent(5 * time.Millisecond)
		must(t, g.dev.Resume())
		if got := s.read(4); string(got) != "ping" {
			t.Fatalf("got %q", got)
		}
		readFull(t, c, []byte("pong"))
	}
	g.noEvent()
}

func TestPause_touches_no_guest_memory_until_resume(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	must(t, g.dev.Pause(context.Background()))
	g.mem.TakeDirty(func(uint64) {})
	c.Write([]byte("data"))
	g.dial(81)
	g.rx.kick.Signal()
	g.tx.kick.Signal()
	g.ev.kick.Signal()
	time.Sleep(10 * time.Millisecond)
	g.mem.TakeDirty(func(page uint64) { t.Errorf("page %d was written while the device was paused", page) })
	must(t, g.dev.Resume())
	if got := s.read(4); string(got) != "data" {
		t.Fatalf("got %q", got)
	}
	g.receive(opRequest)
}

func TestPause_delivers_what_the_guest_has_sent(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	for i := range 10 {
		g.put(s.data([]byte{byte(i)}))
	}
	must(t, g.dev.Pause(context.Background()))
	readFull(t, c, []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	must(t, g.dev.Close())
}

func TestBytes_that_the_guest_knows_as_received_outlive_the_process(t *testing.T) {
	g := newGuest(t, 16)
	c, s := g.connect(80)
	data := pattern(3, largeBuffer)
	for at := 0; at < len(data); at += 65536 {
		s.write(data[at : at+65536])
	}
	s.send(opCreditRequest, 0)
	known := int(g.receiveAfterCredit(opCreditUpdate).fwdCnt)
	must(t, g.dev.Pause(context.Background()))
	_, err := g.dev.Export()
	must(t, err)
	must(t, g.dev.Close())
	if known == 0 || known == len(data) {
		t.Fatalf("%d of %d bytes are known as received: the test needs a socket that takes some", known, len(data))
	}
	readFull(t, c, data[:known])
}

func TestPause_returns_when_its_context_ends_and_the_device_runs_on(t *testing.T) {
	g := newGuest(t, 16)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := g.dev.Pause(ctx)
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err == nil {
		must(t, g.dev.Resume())
	}
	g.connect(80)
}

func TestRestored_guest_hears_of_lost_connections_before_anything_else(t *testing.T) {
	g := newGuest(t, 16)
	g.postEvents(8)
	_, old := g.connect(80)
	path := filepath.Join(t.TempDir(), "other.sock")
	n := g.restore(path)
	c := n.dial(81)
	n.silent(20 * time.Millisecond)
	n.noEvent()
	n.resume()
	n.receiveEvent()
	// The driver has not handled the event yet, so nothing else may arrive.
	n.silent(20 * time.Millisecond)
	n.postEvents(1)
	p := n.receive(opRequest)
	if p.dstPort != 81 || p.srcPort == old.remote {
		t.Fatalf("got %v after a connection from port %d", p, old.remote)
	}
	s := &stream{g: n, local: 81, remote: p.srcPort, alloc: largeBuffer}
	s.send(opResponse, 0)
	readFull(t, c, []byte("OK 1073741825\n"))
	// The old connection is unknown.
	old.g = n
	old.write([]byte("x"))
	if p := n.receive(opReset); p.srcPort != old.remote || p.dstPort != 80 {
		t.Fatalf("got %v", p)
	}
	n.noEvent()
}

func TestRestored_guest_that_never_returns_the_event_buffer_gets_packets_in_the_end(t *testing.T) {
	t.Parallel()
	g := newGuest(t, 16)
	g.postEvents(1)
	g.connect(80)
	n := g.restore(filepath.Join(t.TempDir(), "other.sock"))
	n.resume()
	n.receiveEvent()
	start := time.Now()
	n.dial(81)
	n.receive(opRequest)
	if d := time.Since(start); d < ackTimeout/2 {
		t.Errorf("the packet came after %v", d)
	}
}

func TestRestored_guest_without_event_buffers_gets_resets(t *testing.T) {
	g := newGuest(t, 16)
	_, s := g.connect(80)
	n := g.restore(filepath.Join(t.TempDir(), "other.sock"))
	n.dial(81)
	n.resume()
	if p := n.receive(opReset); p.srcPort != s.remote || p.dstPort != 80 {
		t.Fatalf("got %v", p)
	}
	n.receive(opRequest)
}

func TestRestored_guest_without_connections_hears_nothing(t *testing.T) {
	g := newGuest(t, 16)
	g.postEvents(8)
	c, s := g.connect(80)
	c.Close()
	g.receive(opShutdown)
	s.send(opReset, 0)
	n := g.restore(filepath.Join(t.TempDir(), "other.sock"))
	n.resume()
	n.silent(20 * time.Millisecond)
	n.noEvent()
	n.connect(81)
}

func TestSnapshot_before_the_event_is_handled_sends_it_again(t *testing.T) {
	g := newGuest(t, 16)
	g.postEvents(8)
	g.connect(80)
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n.resume()
	n.receiveEvent()
	n = n.restore(filepath.Join(t.TempDir(), "third.sock"))
	n.resume()
	n.receiveEvent()
	n.dial(81)
	n.silent(10 * time.Millisecond)
	n.postEvents(1)
	n.receive(opRequest)
}

func TestSnapshot_of_a_restored_device_that_never_ran_keeps_its_state(t *testing.T) {
	g := newGuest(t, 16)
	g.postEvents(8)
	g.connect(80)
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n = n.restore(filepath.Join(t.TempDir(), "third.sock"))
	n.resume()
	n.receiveEvent()
}

func TestConnect_that_the_guest_still_waits_for_is_reset_after_restore(t *testing.T) {
	g := newGuest(t, 0)
	g.postEvents(8)
	l := g.serve(7)
	s := &stream{g: g, local: 1000, remote: 7, alloc: largeBuffer}
	s.send(opRequest, 0)
	c, err := l.Accept()
	must(t, err)
	defer c.Close()
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n.resume()
	n.noEvent()
	n.post(4)
	if p := n.receive(opReset); p.srcPort != 7 || p.dstPort != 1000 {
		t.Fatalf("got %v", p)
	}
}

func TestRequest_the_guest_never_saw_is_forgotten_by_a_snapshot(t *testing.T) {
	g := newGuest(t, 0)
	g.postEvents(8)
	g.dial(80)
	g.wait("the request to be ready", func() bool {
		return g.paused(func(e *engine) bool { return len(e.conns) == 1 })
	})
	n := g.restore(filepath.Join(t.TempDir(), "second.sock"))
	n.resume()
	n.post(4)
	n.silent(10 * time.Millisecond)
	n.noEvent()
}

func TestDriver_reset_closes_all_connections_and_the_next_driver_starts_afresh(t *testing.T) {
	g := newGuest(t, 16)
	c, _ := g.connect(80)
	waiting := g.dial(81)
	g.receive(opRequest)
	must(t, g.dev.Reset())
	must(t, g.dev.Reset())
	wantEOF(t, c)
	wantEOF(t, waiting)
	late := g.dial(82)
	g.rx = newRing(t, g.mem, rxRing, rxSize)
	g.tx = newRing(t, g.mem, txRing, txSize)
	g.ev = newRing(t, g.mem, evRing, eventSlot)
	for _, base := range []virtq.Layout{g.rx.layout, g.tx.layout, g.ev.layout} {
		must(t, g.mem.Zero(base.Desc, 0x8000))
	}
	g.activate(false)
	g.post(8)
	if p := g.receive(opRequest); p.dstPort != 82 {
		t.Fatalf("got %v", p)
	}
	late.Close()
}

func TestExport_refuses_a_running_device(t *testing.T) {
	g := newGuest(t, 4)
	if _, err := g.dev.Export(); !errors.Is(err, devices.ErrNotPaused) {
		t.Fatalf("got %v", err)
	}
}

func TestImport_takes_over_the_context_ID(t *testing.T) {
	mem := newMemory(t)
	d, err := New(mem, Config{CID: 3, Path: filepath.Join(t.TempDir(), "a")})
	must(t, err)
	defer d.Close()
	s := state{cid: 77, nextPort: firstHostPort + 5, live: []key{{1, 2}}, refused: []key{{3, 4}, {5, 6}}, reset: true}
	must(t, d.Import(devices.Payload{Kind: stateKind, Version: stateVersion, Data: s.encode()}))
	var cid [8]byte
	d.ReadConfig(0, cid[:])
	if cid != [8]byte{77} {
		t.Errorf("config has context ID %v", cid)
	}
	p, err := d.Export()
	must(t, err)
	if string(p.Data) != string(s.encode()) {
		t.Error("the state has changed on its way")
	}
}

func TestImport_refuses_bad_states_and_changes_nothing(t *testing.T) {
	mem := newMemory(t)
	d, err := New(mem, Config{CID: 3, Path: filepath.Join(t.TempDir(), "a")})
	must(t, err)
	defer d.Close()
	good := (&state{cid: 9, nextPort: firstHostPort, live: []key{{1, 2}}}).encode()
	payload := func(data []byte) devices.Payload {
		return devices.Payload{Kind: stateKind, Version: stateVersion, Data: data}
	}
	change := func(at int, v byte) devices.Payload {
		p := append([]byte(nil), good...)
		p[at] = v
		return payload(p)
	}
	for name, p := range map[string]devices.Payload{
		"another kind":                 {Kind: "virtio-net", Version: stateVersion, Data: good},
		"another version":              {Kind: stateKind, Version: stateVersion + 1, Data: good},
		"nothing":                      payload(nil),
		"cut in an entry":              payload(good[:len(good)-5]),
		"cut before the last count":    payload(good[:len(good)-4]),
		"a byte more":                  payload(append(good[:len(good):len(good)], 0)),
		"the host's CID":               change(0, 2),
		"a CID of 33 bits":             change(4, 1),
		"a low port":                   change(11, 0),
		"a flag that is neither":       change(12, 2),
		"too many connections":         change(15, 1),
		"a huge number of connections": change(16, 0xff),
		"a huge number of refusals":    change(len(good)-1, 0xff),
	} {
		if err := d.Import(p); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: got %v, want ErrPayload", name, err)
		}
	}
	var cid [1]byte
	d.ReadConfig(0, cid[:])
	if cid[0] != 3 || d.carried != nil {
		t.Error("a refused state has left traces")
	}
}
