package net

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// scribbler acts as another vCPU: it changes guest memory when the device is about to read a certain address.
type scribbler struct {
	at   guestmem.GPA
	then atomic.Pointer[func()] // called once
}

func (s *scribbler) Ensure(gpa guestmem.GPA, _ uint64) error {
	if gpa == s.at {
		if then := s.then.Swap(nil); then != nil {
			(*then)()
		}
	}
	return nil
}

func (s *scribbler) Discarding(guestmem.GPA, uint64) {}

func (*scribbler) Evict(*guestmem.PageSet) (uint64, error) { return 0, nil }

// The device checks a frame's header in a copy while another vCPU rewrites the original. It sends the backend the
// header that it checked.
func TestAttack_header_that_changes_after_it_was_checked_is_not_what_is_sent(t *testing.T) {
	w := newWire(t)
	mem := devicetest.NewMemory(t)
	// The header lies in two pieces. When the device reads the second one, it has read the first.
	const at, half = devicetest.FreeGPA, HeaderSize / 2
	s := &scribbler{at: at + half}
	mem.SetResidency(s)
	dev, err := New(mem, w, Config{MAC: testMAC})
	must(t, err)
	d := devicetest.NewDriver(t, dev, mem)
	d.Start(devicetest.AllFeatures)

	honest := make([]byte, HeaderSize) // a whole frame, with no work left to the host
	payload := frame(1, 200)
	must(t, mem.Write(at, append(bytes.Clone(honest), payload...)))
	q := d.Queue(queueTX)
	must(t, q.WriteDesc(0, devicetest.Desc{Addr: at, Len: half, Flags: devicetest.DescNext, Next: 1}))
	must(t, q.WriteDesc(1, devicetest.Desc{Addr: at + half, Len: uint32(half + len(payload))}))
	scribble := func() {
		// TCP segments of size 0, with headers longer than the frame: valid refuses all of it.
		if err := mem.Write(at, []byte{flagNeedsCsum, gsoTCPv6, 0xff, 0xff, 0, 0}); err != nil {
			t.Error(err)
		}
	}
	s.then.Store(&scribble)
	must(t, q.Publish(0))
	q.ForceKick()
	header, got := w.receive(t, 10*time.Second)
	if s.then.Load() != nil {
		t.Fatal("nothing was changed meanwhile: the attack did not take place")
	}
	if !bytes.Equal(header, honest) || !bytes.Equal(got, payload) {
		t.Errorf("the backend got the header % x, the one that was checked is % x; the frame is the same: %t", header, honest, bytes.Equal(got, payload))
	}
}

// A queue full of frames waits when a pause is requested. The turn under way ends, and the pause sends a bounded
// amount more.
func TestAttack_turn_with_a_full_queue_ends_when_a_pause_is_wanted(t *testing.T) {
	n := start(t, Config{}, devicetest.AllFeatures)
	must(t, n.Transport().Pause(context.Background()))
	const frames = 20
	for i := range frames {
		n.transmit(nil, frame(i, 60000))
	}
	// The loop stands still, so the test can do its work here.
	e := n.dev.engine
	e.txReady = true
	must(t, e.turn())
	if got := n.dev.Stats().FramesFromGuest.Load(); got != 0 {
		t.Errorf("%d frames were sent in a turn while a pause was wanted", got)
	}
	begin := e.tx.Work()
	taken := make(chan error, 1)
	go func() {
		p := make([]byte, HeaderSize+maxFrame)
		for range frames {
			if _, err := n.w.read(p); err != nil {
				taken <- err
				return
			}
		}
		taken <- nil
	}()
	must(t, e.loop.Settle())
	if got := e.tx.Work() - begin; got == 0 || got > devices.SettleBytes+HeaderSize+maxFrame {
		t.Errorf("%d bytes were sent for the pause", got)
	}
	must(t, n.Transport().Resume())
	must(t, <-taken)
}

// The device gives receive buffers back that are too short for a header. Another vCPU posts them as fast as that, and
// the device would never pause.
func TestAttack_short_receive_buffers_without_end_do_not_hold_a_pause_up(t *testing.T) {
	const short = 1 << 20
	w := newWire(t)
	mem := devicetest.NewMemory(t)
	dev, err := New(mem, w, Config{MAC: testMAC})
	must(t, err)
	p := &devicetest.Poster{Mem: mem}
	mem.SetResidency(p)
	d := devicetest.NewDriver(t, dev, mem)
	d.Start(devicetest.AllFeatures)
	must(t, d.Transport().Pause(context.Background()))
	// The loop stands still, so the test can do its work here.
	e := dev.engine
	q := d.Queue(queueRX)
	must(t, q.WriteDesc(0, devicetest.Desc{Addr: devicetest.FreeGPA, Len: HeaderSize - 1, Flags: devicetest.DescWrite}))
	must(t, q.Publish(0))
	p.Layout = e.rx.Layout()
	p.Left.Store(short)
	begin := e.rx.Work()
	must(t, e.loop.Settle())
	if n := e.rx.Work() - begin; n == 0 || n > devices.SettleBytes+1<<20 {
		t.Errorf("buffers of %d units of work were taken for a pause, %d may be", n, devices.SettleBytes)
	}
}
