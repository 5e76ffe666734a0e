package balloon

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// spied is a balloon whose first discard waits until a pause is requested.
type spied struct {
	*Device
	queues []*devices.Queue
	queue  int
	hold   atomic.Bool
	held   chan struct{}
	after  atomic.Int64 // discards since a pause was requested
	bytes  atomic.Int64
}

func (s *spied) Activate(a devices.Activation) error {
	s.queues = a.Queues
	return s.Device.Activate(a)
}

func (s *spied) Discard(_ guestmem.GPA, n uint64) error {
	q := s.queues[s.queue]
	if s.hold.CompareAndSwap(true, false) {
		close(s.held)
		for !q.Yield() {
			time.Sleep(50 * time.Microsecond)
		}
	}
	if q.Yield() {
		s.after.Add(1)
		s.bytes.Add(int64(n))
	}
	return nil
}

// The guest sends lists of 65536 pages without neighbours, and reports all of RAM a hundred times. A pause waits for
// a small part of the first request.
func TestAttack_pause_waits_for_a_part_of_one_request(t *testing.T) {
	list := make([]guestmem.GPA, MaxPages)
	for i := range list {
		list[i] = guestmem.GPA(i) * 2 * PageSize
	}
	for name, c := range map[string]struct {
		queue    int
		discards int64
		bytes    int64
	}{
		"inflate": {queueInflate, pieceLen, pieceLen * PageSize},
		"report":  {queueReport, 1, reportPiece},
	} {
		t.Run(name, func(t *testing.T) {
			s := &spied{queue: c.queue, held: make(chan struct{})}
			s.Device = New(s, Options{})
			d := devicetest.NewDriver(t, s, devicetest.NewMemory(t))
			d.Start(devicetest.AllFeatures)
			s.hold.Store(true)
			q := d.Queue(c.queue)
			if c.queue == queueInflate {
				for range 40 {
					q.Submit([][]byte{pageNumbers(list...)})
				}
			} else {
				for i := range q.Size() {
					e := devicetest.Desc{Len: devicetest.MemorySize, Flags: devicetest.DescWrite}
					if i < 60 {
						e.Flags, e.Next = e.Flags|devicetest.DescNext, i+1
					}
					if err := q.WriteDesc(i, e); err != nil {
						t.Fatal(err)
					}
				}
				for range q.Size() {
					if err := q.Publish(0); err != nil {
						t.Fatal(err)
					}
				}
				q.ForceKick()
			}
			<-s.held
			begin := time.Now()
			if err := d.Transport().Pause(context.Background()); err != nil {
				t.Fatal(err)
			}
			t.Logf("the pause took %v, in which %d discards were done", time.Since(begin), s.after.Load())
			if n, b := s.after.Load(), s.bytes.Load(); n > c.discards || b > c.bytes {
				t.Errorf("%d discards of %d bytes were done after the pause was wanted, want %d of %d at most", n, b, c.discards, c.bytes)
			}
			if err := d.Transport().Resume(); err != nil {
				t.Fatal(err)
			}
			devicetest.WaitFor(t, "the rest", func() bool {
				_, _, used := q.Rings()
				n, err := d.Mem().LoadUint16(used + 2)
				return err == nil && n >= 40
			})
		})
	}
}
