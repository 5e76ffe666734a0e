package net

import (
	"encoding/binary"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// lean is a driver that allocates nothing: each chain is one descriptor that was written once.
type lean struct {
	b      testing.TB
	mem    *guestmem.Memory
	queues [queueCount]struct {
		layout      virtq.Layout
		kick        *devices.Event
		avail, used uint16
	}
}

func (*lean) Queue()           {}
func (*lean) Config()          {}
func (*lean) NeedsReset(error) {}

const (
	leanBuffers = guestmem.GPA(8 << 20)
	leanBuffer  = 2048
)

func newLean(b *testing.B, w *wire, txLen int) *lean {
	l := &lean{b: b, mem: devicetest.NewMemory(b)}
	dev, err := New(l.mem, w, Config{MAC: testMAC})
	must(b, err)
	a := devices.Activation{Features: allButTSO &^ (virtq.FeatureEventIdx | virtq.FeatureIndirectDesc), Interrupt: l}
	for i := range l.queues {
		q := &l.queues[i]
		base := guestmem.GPA(i+1) << 20
		q.layout = virtq.Layout{Size: queueSize, Desc: base, Avail: base + 0x4000, Used: base + 0x5000}
		q.kick, err = devices.NewEvent()
		must(b, err)
		for k := range queueSize {
			var d [16]byte
			binary.LittleEndian.PutUint64(d[:], uint64(leanBuffers)+uint64(i*queueSize+k)*leanBuffer)
			binary.LittleEndian.PutUint32(d[8:], leanBuffer)
			if i == queueTX {
				binary.LittleEndian.PutUint32(d[8:], uint32(txLen))
			} else {
				binary.LittleEndian.PutUint16(d[12:], 2)
			}
			must(b, l.mem.Write(base+guestmem.GPA(16*k), d[:]))
		}
		vq, err := virtq.New(l.mem, q.layout, a.Features)
		must(b, err)
		a.Queues = append(a.Queues, &devices.Queue{Queue: vq, Kick: q.kick})
	}
	must(b, dev.Activate(a))
	b.Cleanup(func() {
		must(b, dev.Reset())
		for i := range l.queues {
			l.queues[i].kick.Close()
		}
	})
	return l
}

func (l *lean) publish(i int) {
	q := &l.queues[i]
	must(l.b, l.mem.StoreUint16(q.layout.Avail+4+2*guestmem.GPA(q.avail%queueSize), q.avail%queueSize))
	q.avail++
	must(l.b, l.mem.StoreUint16(q.layout.Avail+2, q.avail))
}

func (l *lean) reap(i int) bool {
	q := &l.queues[i]
	idx, err := l.mem.LoadUint16(q.layout.Used + 2)
	must(l.b, err)
	if idx == q.used {
		return false
	}
	q.used++
	return true
}

func BenchmarkToGuest(b *testing.B) {
	w := newWire(b)
	l := newLean(b, w, 0)
	for range queueSize {
		l.publish(queueRX)
	}
	l.queues[queueRX].kick.Signal()
	p := make([]byte, HeaderSize+1500)
	b.SetBytes(1500)
	b.ReportAllocs()
	b.ResetTimer()
	done := make(chan error, 1)
	go func() {
		for range b.N {
			if _, err := unix.Write(w.peer, p); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for got := 0; got < b.N; {
		if !l.reap(queueRX) {
			runtime.Gosched()
			continue
		}
		got++
		l.publish(queueRX)
		if got%64 == 0 {
			l.queues[queueRX].kick.Signal()
		}
	}
	must(b, <-done)
}

func BenchmarkFromGuest(b *testing.B) {
	w := newWire(b)
	l := newLean(b, w, HeaderSize+1500)
	b.SetBytes(1500)
	b.ReportAllocs()
	b.ResetTimer()
	done := make(chan error, 1)
	go func() {
		p := make([]byte, 2048)
		for range b.N {
			if _, err := w.read(p); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	q := &l.queues[queueTX]
	for sent := 0; sent < b.N; {
		for l.reap(queueTX) {
		}
		for q.avail-q.used < queueSize && sent < b.N {
			l.publish(queueTX)
			sent++
		}
		q.kick.Signal()
		runtime.Gosched()
	}
	must(b, <-done)
}
