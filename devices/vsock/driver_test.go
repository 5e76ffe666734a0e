package vsock

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// testCID is the guest's context ID in the tests.
const testCID = 42

// ring is the driver's end of a virtqueue, laid out by hand in guest memory. Each chain is one descriptor, or two if
// the header has its own.
type ring struct {
	t      testing.TB
	mem    *guestmem.Memory
	layout virtq.Layout
	kick   *devices.Event
	avail  uint16
	used   uint16
	free   []uint16
	next   map[uint16]uint16 // second descriptor of a chain
	buf    map[uint16]guestmem.GPA
}

func newRing(t testing.TB, mem *guestmem.Memory, base guestmem.GPA, size uint16) *ring {
	kick, err := devices.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	r := &ring{
		t: t, mem: mem, kick: kick,
		layout: virtq.Layout{Size: size, Desc: base, Avail: base + 0x4000, Used: base + 0x5000},
		next:   map[uint16]uint16{},
		buf:    map[uint16]guestmem.GPA{},
	}
	for i := range size {
		r.free = append(r.free, size-1-i)
	}
	return r
}

func (r *ring) descriptor(i uint16, addr guestmem.GPA, n uint32, flags, next uint16) {
	var d [16]byte
	le := binary.LittleEndian
	le.PutUint64(d[:], uint64(addr))
	le.PutUint32(d[8:], n)
	le.PutUint16(d[12:], flags)
	le.PutUint16(d[14:], next)
	must(r.t, r.mem.Write(r.layout.Desc+16*guestmem.GPA(i), d[:]))
}

func (r *ring) take() uint16 {
	if len(r.free) == 0 {
		r.t.Fatal("the test driver is out of descriptors")
	}
	i := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	return i
}

// publish makes the chain at head available.
func (r *ring) publish(head uint16) {
	must(r.t, r.mem.StoreUint16(r.layout.Avail+4+2*guestmem.GPA(r.avail%r.layout.Size), head))
	r.avail++
	must(r.t, r.mem.StoreUint16(r.layout.Avail+2, r.avail))
}

// add makes one buffer available.
func (r *ring) add(addr guestmem.GPA, n uint32, writable bool) uint16 {
	i := r.take()
	flags := uint16(0)
	if writable {
		flags = 2
	}
	r.descriptor(i, addr, n, flags, 0)
	r.buf[i] = addr
	r.publish(i)
	return i
}

// add2 makes a chain of two readable buffers available.
func (r *ring) add2(a guestmem.GPA, an uint32, b guestmem.GPA, bn uint32) uint16 {
	i, j := r.take(), r.take()
	r.descriptor(i, a, an, 1, j)
	r.descriptor(j, b, bn, 0, 0)
	r.next[i] = j
	r.buf[i] = a
	r.publish(i)
	return i
}

// reap takes one used chain.
func (r *ring) reap() (head uint16, n uint32, ok bool) {
	idx, err := r.mem.LoadUint16(r.layout.Used + 2)
	must(r.t, err)
	if idx == r.used {
		return 0, 0, false
	}
	var e [8]byte
	must(r.t, r.mem.Read(r.layout.Used+4+8*guestmem.GPA(r.used%r.layout.Size), e[:]))
	r.used++
	head = uint16(binary.LittleEndian.Uint32(e[:]))
	r.free = append(r.free, head)
	if j, two := r.next[head]; two {
		r.free = append(r.free, j)
		delete(r.next, head)
	}
	return head, binary.LittleEndian.Uint32(e[4:]), true
}

// packet is what the test guest sends and receives.
type packet struct {
	header
	payload []byte
}

func (p packet) String() string {
	return fmt.Sprintf("op %d, %d:%d to %d:%d, len %d, flags %d, buf_alloc %d, fwd_cnt %d",
		p.op, p.srcCID, p.srcPort, p.dstCID, p.dstPort, p.len, p.flags, p.bufAlloc, p.fwdCnt)
}

// Where the test guest has its rings and buffers.
const (
	rxRing   = 0x10000
	txRing   = 0x20000
	evRing   = 0x30000
	rxPool   = 0x100000
	txPool   = 0x400000
	rxBuffer = 4096
	txBuffer = 65536 + 4096
)

// guest is a driver and the machine around it.
type guest struct {
	t      testing.TB
	mem    *guestmem.Memory
	dev    *Device
	path   string
	rx, tx *ring
	ev     *ring
	feats  uint64

	mu         sync.Mutex
	interrupts int
	broken     error
	wake       chan struct{}
	sleeper    atomic.Pointer[devices.Event] // woken instead of wake, if not nil
}

func (g *guest) Queue() {
	g.mu.Lock()
	g.interrupts++
	g.mu.Unlock()
	if e := g.sleeper.Load(); e != nil {
		e.Signal()
		return
	}
	select {
	case g.wake <- struct{}{}:
	default:
	}
}
func (g *guest) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.interrupts
}

func (g *guest) Config() {}
func (g *guest) NeedsReset(err error) {
	g.mu.Lock()
	g.broken = err
	g.mu.Unlock()
	g.Queue()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newMemory(t testing.TB) *guestmem.Memory {
	mem, err := guestmem.New(64 << 20)
	must(t, err)
	t.Cleanup(func() { mem.Close() })
	return mem
}

// newGuest makes a device with an active driver, and posts this many receive buffers.
func newGuest(t testing.TB, rxBuffers int) *guest {
	g := inactiveGuest(t, newMemory(t), filepath.Join(t.TempDir(), "v.sock"))
	g.activate(false)
	g.post(rxBuffers)
	return g
}

func inactiveGuest(t testing.TB, mem *guestmem.Memory, path string) *guest {
	return inactiveGuestOf(t, mem, path, Config{CID: testCID, Path: path})
}

// inactiveGuestOf makes a guest of a device with this configuration. Host clients connect to path.
func inactiveGuestOf(t testing.TB, mem *guestmem.Memory, path string, cfg Config) *guest {
	dev, err := New(mem, cfg)
	must(t, err)
	g := &guest{t: t, mem: mem, dev: dev, path: path, wake: make(chan struct{}, 1), feats: virtq.FeatureEventIdx | virtq.FeatureIndirectDesc}
	t.Cleanup(func() { must(t, g.dev.Close()) })
	g.rx = newRing(t, mem, rxRing, rxSize)
	g.tx = newRing(t, mem, txRing, txSize)
	g.ev = newRing(t, mem, evRing, eventSlot)
	t.Cleanup(func() {
		must(t, g.dev.Reset())
		for _, r := range []*ring{g.rx, g.tx, g.ev} {
			r.kick.Close()
		}
	})
	return g
}

func (g *guest) activate(restored bool, positions ...virtq.Position) {
	g.t.Helper()
	a := devices.Activation{Features: g.feats, Interrupt: g, Restored: restored}
	for i, r := range []*ring{g.rx, g.tx, g.ev} {
		q, err := virtq.New(g.mem, r.layout, g.feats)
		must(g.t, err)
		if restored {
			q.SetPosition(positions[i])
		}
		a.Queues = append(a.Queues, &devices.Queue{Queue: q, Kick: r.kick})
	}
	must(g.t, g.dev.Activate(a))
}

// positions returns the queues' positions, when every available chain was either used or not touched.
func (g *guest) positions() []virtq.Position {
	var ps []virtq.Position
	for _, q := range []*queue{g.dev.engine.rx, g.dev.engine.tx, g.dev.engine.event} {
		ps = append(ps, q.Position())
	}
	return ps
}

func (g *guest) post(n int) {
	for range n {
		g.rx.add(rxPool+rxBuffer*guestmem.GPA(g.rx.free[len(g.rx.free)-1]), rxBuffer, true)
	}
	g.rx.kick.Signal()
}

func (g *guest) postEvents(n int) {
	for range n {
		g.ev.add(rxPool-0x1000+8*guestmem.GPA(g.ev.free[len(g.ev.free)-1]), eventSize, true)
	}
	g.ev.kick.Signal()
}

// wait waits until f is true, woken by interrupts.
func (g *guest) wait(what string, f func() bool) {
	g.t.Helper()
	deadline := time.After(60 * time.Second)
	for !f() {
		select {
		case <-g.wake:
		case <-time.After(2 * time.Millisecond):
		case <-deadline:
			g.t.Fatalf("timed out waiting for %s; %+v", what, g.dev.Stats())
		}
	}
}

// next takes the next packet that the device has sent, if any, and frees its descriptor.
func (g *guest) next() (packet, bool) {
	g.t.Helper()
	var p packet
	head, n, ok := g.rx.reap()
	if !ok {
		return p, false
	}
	if n < headerSize {
		g.t.Fatalf("a packet of %d bytes", n)
	}
	raw := make([]byte, n)
	must(g.t, g.mem.Read(g.rx.buf[head], raw))
	p.decode((*[headerSize]byte)(raw))
	p.payload = raw[headerSize:]
	if int(p.len) != len(p.payload) {
		g.t.Fatalf("header says %d bytes, the buffer has %d", p.len, len(p.payload))
	}
	if p.srcCID != HostCID || p.dstCID != g.dev.cid {
		g.t.Fatalf("bad addresses: %v", p)
	}
	return p, true
}

// receive waits for the next packet, checks its operation, and posts a buffer again.
func (g *guest) receive(op uint16) packet {
	g.t.Helper()
	var p packet
	g.wait(fmt.Sprintf("a packet of operation %d", op), func() bool {
		var ok bool
		p, ok = g.next()
		return ok
	})
	if p.op != op {
		g.t.Fatalf("received %v, want operation %d", p, op)
	}
	g.post(1)
	return p
}

// receiveAfterCredit is receive, but skips credit updates.
func (g *guest) receiveAfterCredit(op uint16) packet {
	g.t.Helper()
	for {
		var p packet
		g.wait(fmt.Sprintf("a packet of operation %d", op), func() bool {
			var ok bool
			p, ok = g.next()
			return ok
		})
		g.post(1)
		if p.op == op {
			return p
		}
		if p.op != opCreditUpdate {
			g.t.Fatalf("received %v, want operation %d", p, op)
		}
	}
}

func (g *guest) silent(d time.Duration) {
	g.t.Helper()
	time.Sleep(d)
	if p, ok := g.next(); ok {
		g.t.Fatalf("received %v, want nothing", p)
	}
}

// put queues a packet without a kick, with the header as given.
func (g *guest) put(p packet) {
	for {
		if _, _, ok := g.tx.reap(); !ok {
			break
		}
	}
	var raw [headerSize]byte
	p.encode(&raw)
	g.wait("a tx descriptor", func() bool {
		for len(g.tx.free) < 2 {
			if _, _, ok := g.tx.reap(); !ok {
				return false
			}
		}
		return true
	})
	addr := txPool + txBuffer*guestmem.GPA(g.tx.free[len(g.tx.free)-1])
	must(g.t, g.mem.Write(addr, raw[:]))
	if len(p.payload) == 0 {
		g.tx.add(addr, headerSize, false)
		return
	}
	must(g.t, g.mem.Write(addr+headerSize, p.payload))
	g.tx.add2(addr, headerSize, addr+headerSize, uint32(len(p.payload)))
}

func (g *guest) send(p packet) {
	g.put(p)
	g.tx.kick.Signal()
}

// stream is the guest's end of a connection.
type stream struct {
	g                *guest
	local, remote    uint32
	alloc, forwarded uint32
}

func (s *stream) header(op uint16) header {
	return header{
		srcCID: testCID, dstCID: HostCID, srcPort: s.local, dstPort: s.remote, typ: typeStream, op: op,
		bufAlloc: s.alloc, fwdCnt: s.forwarded,
	}
}

func (s *stream) send(op uint16, flags uint32) {
	h := s.header(op)
	h.flags = flags
	s.g.send(packet{header: h})
}

func (s *stream) data(payload []byte) packet {
	h := s.header(opData)
	h.len = uint32(len(payload))
	return packet{header: h, payload: payload}
}

func (s *stream) write(payload []byte) { s.g.send(s.data(payload)) }

// read receives packets until it has n bytes.
func (s *stream) read(n int) []byte {
	s.g.t.Helper()
	var out []byte
	for len(out) < n {
		p := s.g.receive(opData)
		if p.srcPort != s.remote || p.dstPort != s.local {
			s.g.t.Fatalf("data of another connection: %v", p)
		}
		out = append(out, p.payload...)
		s.forwarded += p.len
	}
	return out
}

// dial connects a host client and sends its line.
func (g *guest) dial(port uint32) net.Conn {
	g.t.Helper()
	c, err := net.Dial("unix", g.path)
	must(g.t, err)
	g.t.Cleanup(func() { c.Close() })
	must(g.t, c.SetDeadline(time.Now().Add(20*time.Second)))
	_, err = fmt.Fprintf(c, "CONNECT %d\n", port)
	must(g.t, err)
	return c
}

// connect makes an established connection from the host.
func (g *guest) connect(port uint32) (net.Conn, *stream) {
	g.t.Helper()
	c := g.dial(port)
	p := g.receive(opRequest)
	if p.dstPort != port || p.typ != typeStream {
		g.t.Fatalf("bad request %v", p)
	}
	s := &stream{g: g, local: port, remote: p.srcPort, alloc: largeBuffer}
	s.send(opResponse, 0)
	want := fmt.Sprintf("OK %d\n", p.srcPort)
	line := make([]byte, len(want))
	if _, err := io.ReadFull(c, line); err != nil || string(line) != want {
		g.t.Fatalf("greeting %q, %v; want %q", line, err, want)
	}
	return c, s
}

// open makes an established connection from the guest.
func (g *guest) open(local, port uint32) (net.Conn, *stream) {
	g.t.Helper()
	l := g.serve(port)
	s := &stream{g: g, local: local, remote: port, alloc: largeBuffer}
	s.send(opRequest, 0)
	c, err := l.Accept()
	must(g.t, err)
	g.t.Cleanup(func() { c.Close() })
	must(g.t, c.SetDeadline(time.Now().Add(20*time.Second)))
	g.receive(opResponse)
	return c, s
}

func (g *guest) serve(port uint32) net.Listener {
	g.t.Helper()
	l, err := net.Listen("unix", fmt.Sprintf("%s_%d", g.path, port))
	must(g.t, err)
	g.t.Cleanup(func() { l.Close() })
	return l
}

// pattern returns n bytes that depend on their positions.
func pattern(seed byte, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i) ^ byte(i>>8) ^ byte(i>>16) ^ seed
	}
	return p
}

func readFull(t testing.TB, c net.Conn, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := io.ReadFull(c, got); err != nil {
		t.Fatalf("read %d bytes of %d: %v", n, len(want), err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the bytes differ")
	}
}

func wantEOF(t testing.TB, c net.Conn) {
	t.Helper()
	n, err := c.Read(make([]byte, 1))
	if n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("Read = %d, %v; want EOF", n, err)
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(fds)
}

func aMoment() time.Time { return time.Now().Add(time.Millisecond) }
