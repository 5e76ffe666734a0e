package vsock

import (
	"encoding/binary"
	"net"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// lean is a driver that allocates nothing. Every chain is one descriptor that was written once, and is made
// available again under its own number.
type lean struct {
	*guest
	raw  [headerSize]byte
	elem [8]byte
}

// newLean posts all receive buffers and fills the tx descriptors with packets of n bytes of payload on one stream.
func newLean(b *testing.B, n int) (*lean, net.Conn, *stream) {
	g := inactiveGuest(b, newMemory(b), filepath.Join(b.TempDir(), "v.sock"))
	g.feats = 0
	g.activate(false)
	for i := range uint16(rxSize) {
		g.rx.descriptor(i, rxPool+rxBuffer*guestmem.GPA(i), rxBuffer, 2, 0)
		g.rx.publish(i)
	}
	l := &lean{guest: g}
	c := g.dial(80)
	must(b, c.SetDeadline(time.Time{}))
	l.spin(func() bool { return l.used(g.rx) })
	h := l.take(g.rx)
	s := &stream{g: g, local: 80, remote: h.srcPort, alloc: 1 << 30}
	for i := range uint16(txSize) {
		h := s.header(opData)
		h.len = uint32(n)
		h.encode(&l.raw)
		addr := txPool + txBuffer*guestmem.GPA(i)
		must(b, g.mem.Write(addr, l.raw[:]))
		g.tx.descriptor(i, addr, uint32(headerSize+n), 0, 0)
	}
	response := s.header(opResponse)
	response.encode(&l.raw)
	must(b, g.mem.Write(txPool, l.raw[:]))
	g.tx.publish(0)
	g.tx.kick.Signal()
	readFull(b, c, []byte("OK 1073741824\n"))
	l.spin(func() bool { return l.used(g.tx) })
	l.drop(g.tx)
	data := s.header(opData)
	data.len = uint32(n)
	data.encode(&l.raw)
	must(b, g.mem.Write(txPool, l.raw[:]))
	return l, c, s
}

func (l *lean) spin(f func() bool) {
	for i := 0; !f(); i++ {
		if i > 100 {
			runtime.Gosched()
		}
	}
}

func (l *lean) used(r *ring) bool {
	idx, err := l.mem.LoadUint16(r.layout.Used + 2)
	return err == nil && idx != r.used
}

// drop takes one used chain and returns its head.
func (l *lean) drop(r *ring) uint16 {
	must(l.t, l.mem.Read(r.layout.Used+4+8*guestmem.GPA(r.used%r.layout.Size), l.elem[:]))
	r.used++
	return uint16(binary.LittleEndian.Uint32(l.elem[:]))
}

// take receives one packet and posts its buffer again.
func (l *lean) take(r *ring) (h header) {
	head := l.drop(r)
	must(l.t, l.mem.Read(rxPool+rxBuffer*guestmem.GPA(head), l.raw[:]))
	h.decode(&l.raw)
	r.publish(head)
	return h
}

// BenchmarkRoundTrip is a 64-byte request from a host client and the answer of the guest, which sleeps until it is
// interrupted. It wakes sleeping threads four times, the least possible. BenchmarkSocketRoundTrip, without a device
// in between, wakes two.
func BenchmarkRoundTrip(b *testing.B) {
	const n = 64
	l, c, _ := newLean(b, n)
	irq, err := devices.NewEvent()
	must(b, err)
	defer irq.Close()
	l.sleeper.Store(irq)
	defer l.sleeper.Store(nil)
	f, err := c.(*net.UnixConn).File() // in blocking mode
	must(b, err)
	defer f.Close()
	fd := int(f.Fd())
	must(b, unix.SetNonblock(fd, false))
	done := make(chan error, 1)
	start := l.count()
	b.ReportAllocs()
	b.ResetTimer()
	go func() {
		tx := uint16(0)
		for answered := 0; answered < b.N; {
			if err := irq.Wait(); err != nil {
				done <- err
				return
			}
			for l.used(l.tx) {
				l.drop(l.tx)
			}
			for l.used(l.rx) {
				l.take(l.rx)
				l.tx.publish(tx % txSize)
				tx++
				l.tx.kick.Signal()
				answered++
			}
		}
		done <- nil
	}()
	msg := make([]byte, n)
	for range b.N {
		if _, err := unix.Write(fd, msg); err != nil {
			b.Fatal(err)
		}
		if k, err := unix.Read(fd, msg); k != n || err != nil {
			b.Fatal(k, err)
		}
	}
	must(b, <-done)
	b.StopTimer()
	b.ReportMetric(float64(l.count()-start)/float64(b.N), "interrupts/op")
}

func BenchmarkSocketRoundTrip(b *testing.B) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(b, err)
	defer unix.Close(fds[0])
	go func() {
		defer unix.Close(fds[1])
		buf := make([]byte, 64)
		for {
			n, err := unix.Read(fds[1], buf)
			if n <= 0 || err != nil {
				return
			}
			if _, err := unix.Write(fds[1], buf[:n]); err != nil {
				return
			}
		}
	}()
	msg := make([]byte, 64)
	for b.Loop() {
		if _, err := unix.Write(fds[0], msg); err != nil {
			b.Fatal(err)
		}
		if _, err := unix.Read(fds[0], msg); err != nil {
			b.Fatal(err)
		}
	}
	must(b, unix.Shutdown(fds[0], unix.SHUT_RDWR))
}

func BenchmarkToGuest(b *testing.B) {
	const n = 64 << 10
	l, c, s := newLean(b, 1)
	done := make(chan error, 1)
	b.SetBytes(n)
	b.ReportAllocs()
	b.ResetTimer()
	go func() {
		msg := make([]byte, n)
		for range b.N {
			if _, err := c.Write(msg); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	last := uint32(0)
	for total := 0; total < n*b.N; {
		l.spin(func() bool { return l.used(l.rx) })
		h := l.take(l.rx)
		total += int(h.len)
		s.forwarded += h.len
		if s.forwarded-last > 1<<29 {
			last = s.forwarded
			s.send(opCreditUpdate, 0)
		}
		if l.rx.used%64 == 0 {
			l.rx.kick.Signal()
		}
	}
	must(b, <-done)
}

func BenchmarkFromGuest(b *testing.B) {
	const n = 32 << 10
	l, c, _ := newLean(b, n)
	done := make(chan error, 1)
	b.SetBytes(n)
	b.ReportAllocs()
	b.ResetTimer()
	go func() {
		buf := make([]byte, 256<<10)
		for left := n * b.N; left > 0; {
			k, err := c.Read(buf)
			if err != nil {
				done <- err
				return
			}
			left -= k
		}
		done <- nil
	}()
	tx := uint16(0)
	room := largeBuffer
	var credited uint32
	for range b.N {
		for room < n {
			l.spin(func() bool { return l.used(l.rx) })
			h := l.take(l.rx)
			room += int(h.fwdCnt - credited)
			credited = h.fwdCnt
		}
		room -= n
		l.spin(func() bool {
			for l.used(l.tx) {
				l.drop(l.tx)
			}
			return l.tx.avail-l.tx.used < txSize
		})
		l.tx.publish(tx % txSize)
		tx++
		l.tx.kick.Signal()
	}
	must(b, <-done)
}
