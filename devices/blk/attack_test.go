package blk

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// watched is a disk that sees whether a pause is requested, and delays its first request until then.
type watched struct {
	Backend
	dev     *Device
	hold    bool // the first request, until a pause is requested
	held    chan struct{}
	after   atomic.Int64 // bytes begun since a pause was requested, including the request under way
	flushes atomic.Int64
	gate    chan struct{} // of flushes; nil if there is none
}

func (w *watched) at(n int64) {
	if w.hold && w.after.Load() == 0 {
		select {
		case w.held <- struct{}{}:
		default:
		}
		for !w.dev.queue.Yield() {
			time.Sleep(50 * time.Microsecond)
		}
		w.after.Add(n)
	} else if w.dev.queue.Yield() {
		w.after.Add(n)
	}
}

func (w *watched) ReadExtent(off, n int64) (*os.File, int64, int64, error) {
	w.at(n)
	return w.Backend.ReadExtent(off, n)
}

func (w *watched) WriteExtent(off, n int64) (*os.File, int64, int64, error) {
	w.at(n)
	return w.Backend.WriteExtent(off, n)
}

func (w *watched) Discard(off, n int64) error {
	w.at(n)
	return w.Backend.Discard(off, n)
}

func (w *watched) WriteZeroes(off, n int64, mayUnmap bool) error {
	w.at(n)
	return w.Backend.WriteZeroes(off, n, mayUnmap)
}

func (w *watched) Flush() error {
	w.flushes.Add(1)
	if w.gate != nil {
		<-w.gate
	}
	return w.Backend.Flush()
}

func newWatched(t *testing.T, size int64) (*watched, disk) {
	t.Helper()
	w := &watched{Backend: newFile(t, size, false), held: make(chan struct{}, 1)}
	w.dev = New(w, Options{})
	d := disk{t, devicetest.NewDriver(t, w.dev, devicetest.NewMemory(t))}
	d.Start(devicetest.AllFeatures)
	return w, d
}

// chain lays a request out as an indirect table in free memory, and makes it available. Its pieces may overlap.
func (d disk) chain(at guestmem.GPA, head uint16, descs []devicetest.Desc) {
	d.t.Helper()
	table := make([]byte, 16*len(descs))
	for i, e := range descs {
		p := table[16*i:]
		if i < len(descs)-1 {
			e.Flags |= devicetest.DescNext
			e.Next = uint16(i + 1)
		}
		binary.LittleEndian.PutUint64(p, uint64(e.Addr))
		binary.LittleEndian.PutUint32(p[8:], e.Len)
		binary.LittleEndian.PutUint16(p[12:], e.Flags)
		binary.LittleEndian.PutUint16(p[14:], e.Next)
	}
	q := d.Queue(0)
	if err := d.Mem().Write(at, table); err != nil {
		d.t.Fatal(err)
	}
	if err := q.WriteDesc(head, devicetest.Desc{Addr: at, Len: uint32(len(table)), Flags: devicetest.DescIndirect}); err != nil {
		d.t.Fatal(err)
	}
	if err := q.Publish(head); err != nil {
		d.t.Fatal(err)
	}
}

func (d disk) used() uint16 {
	_, _, used := d.Queue(0).Rings()
	n, err := d.Mem().LoadUint16(used + 2)
	if err != nil {
		d.t.Fatal(err)
	}
	return n
}

// Seventy descriptors over the same memory make a request of almost 4 GiB, and the ring holds 256 of them.
func TestAttack_requests_of_four_gibibytes_over_the_same_memory_fail_at_once(t *testing.T) {
	for name, c := range map[string]struct {
		kind  uint32
		flags uint16
	}{"reads": {typeIn, devicetest.DescWrite}, "writes": {typeOut, 0}} {
		t.Run(name, func(t *testing.T) {
			w, d := newWatched(t, 8<<30)
			const header, status, table = devicetest.FreeGPA, devicetest.FreeGPA + 4096, devicetest.FreeGPA + 8192
			var h [headerSize]byte
			binary.LittleEndian.PutUint32(h[:], c.kind)
			if err := d.Mem().Write(header, h[:]); err != nil {
				t.Fatal(err)
			}
			if err := d.Mem().Write(status, []byte{0xff}); err != nil {
				t.Fatal(err)
			}
			descs := []devicetest.Desc{{Addr: header, Len: headerSize}}
			for range 70 {
				descs = append(descs, devicetest.Desc{Addr: 0, Len: 56 << 20, Flags: c.flags})
			}
			if c.kind == typeIn {
				for i := range descs[1:] {
					descs[i+1].Addr, descs[i+1].Len = 40<<20, 8<<20 // not over the rings
				}
				descs = append(descs, descs[1:]...)
			}
			descs = append(descs, devicetest.Desc{Addr: status, Len: statusSize, Flags: devicetest.DescWrite})
			for i := range uint16(QueueSize) {
				d.chain(table+guestmem.GPA(16*QueueSize)*guestmem.GPA(i), i, descs)
			}
			d.Queue(0).ForceKick()
			begin := time.Now()
			if err := d.Transport().Pause(context.Background()); err != nil {
				t.Fatal(err)
			}
			t.Logf("the pause took %v", time.Since(begin))
			if err := d.Transport().Resume(); err != nil {
				t.Fatal(err)
			}
			devicetest.WaitFor(t, "all requests", func() bool { return d.used() == QueueSize })
			var got [1]byte
			if err := d.Mem().Read(status, got[:]); err != nil || got[0] != statusIOError {
				t.Errorf("the status is %d, %v", got[0], err)
			}
			if s := w.dev.Stats(); s.Refused.Load() != QueueSize || s.ReadBytes.Load()+s.WrittenBytes.Load() != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// The ring is full of the largest allowed requests when a pause comes.
func TestAttack_pause_waits_for_a_piece_of_one_request_of_a_flood(t *testing.T) {
	for name, c := range map[string]struct {
		kind  uint32
		out   []byte
		in    int
		most  int64
		count int
	}{
		"reads":    {kind: typeIn, in: 4 * transferPiece, most: transferPiece, count: 4},
		"writes":   {kind: typeOut, out: make([]byte, 4*transferPiece), most: transferPiece, count: 4},
		"discards": {kind: typeDiscard, out: ranges([3]uint64{0, MaxDiscardSectors, 0}, [3]uint64{0, MaxDiscardSectors, 0}), most: discardPiece, count: 64},
		"zeroes":   {kind: typeWriteZeroes, out: ranges([3]uint64{0, MaxZeroSectors, 1}, [3]uint64{0, MaxZeroSectors, 1}), most: zeroPiece, count: 64},
	} {
		t.Run(name, func(t *testing.T) {
			w, d := newWatched(t, 2<<30)
			w.hold = true
			var rs []*devicetest.Request
			for range c.count {
				out, in := [][]byte{header(c.kind, 0)}, []int{statusSize}
				if c.in > 0 {
					in = []int{c.in, statusSize}
				} else {
					out = append(out, c.out)
				}
				rs = append(rs, d.Queue(0).Submit(out, in...))
			}
			<-w.held
			begin := time.Now()
			if err := d.Transport().Pause(context.Background()); err != nil {
				t.Fatal(err)
			}
			took, after := time.Since(begin), w.after.Load()
			t.Logf("the pause took %v, in which %d bytes were done", took, after)
			if after == 0 || after > c.most {
				t.Errorf("%d bytes were done after the pause was wanted, want %d at most", after, c.most)
			}
			w.hold = false
			if err := d.Transport().Resume(); err != nil {
				t.Fatal(err)
			}
			for i, r := range rs {
				if data, _ := r.Wait(); data[len(data)-1] != statusOK {
					t.Fatalf("request %d of the flood: status %d", i, data[len(data)-1])
				}
			}
		})
	}
}

// A flush takes as long as the host's disk needs. A pause does not wait for it. The guest gets its completion only
// from a flush that began after the pause.
func TestAttack_pause_does_not_wait_for_a_flush(t *testing.T) {
	w, d := newWatched(t, diskSize)
	w.gate = make(chan struct{})
	r := d.Queue(0).Submit([][]byte{header(typeFlush, 0)}, statusSize)
	devicetest.WaitFor(t, "the flush", func() bool { return w.flushes.Load() == 1 })
	if err := d.Transport().Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-r.Done():
		t.Fatal("the guest was told of a flush that is not done")
	default:
	}
	close(w.gate)
	if err := d.Transport().Resume(); err != nil {
		t.Fatal(err)
	}
	if status, _ := r.Wait(); status[0] != statusOK || w.flushes.Load() != 2 || w.dev.Stats().Flushes.Load() != 1 {
		t.Errorf("status %d after %d flushes, %+v", status[0], w.flushes.Load(), w.dev.Stats())
	}
}

// The limits in the configuration space are those of the device. A driver that keeps to them never exceeds the limit
// of one request.
func TestLimits_that_a_driver_is_told_keep_it_below_the_largest_request(t *testing.T) {
	_, d := newWatched(t, 2*MaxRequest)
	le := binary.LittleEndian
	size, segments := le.Uint32(d.Config(configSizeMax, 4)), le.Uint32(d.Config(configSegMax, 4))
	if d.Offered()&featureSizeMax == 0 || d.Offered()&featureSegMax == 0 {
		t.Error("the limits are not offered")
	}
	if n := uint64(size) * uint64(segments); n > MaxRequest || size < guestmem.PageSize {
		t.Errorf("%d pieces of %d bytes are %d, more than %d", segments, size, n, MaxRequest)
	}
	// Both halves of each request lie in the same memory.
	const half, header, status = MaxRequest / 2, devicetest.FreeGPA, devicetest.FreeGPA + 4096
	for i, c := range []struct{ more, want uint32 }{{0, statusOK}, {SectorSize, statusIOError}} {
		if err := errors.Join(d.Mem().Zero(header, headerSize), d.Mem().Write(status, []byte{0xff})); err != nil {
			t.Fatal(err)
		}
		d.chain(devicetest.FreeGPA+8192, uint16(i), []devicetest.Desc{
			{Addr: header, Len: headerSize},
			{Addr: 16 << 20, Len: half, Flags: devicetest.DescWrite},
			{Addr: 16 << 20, Len: half + c.more, Flags: devicetest.DescWrite},
			{Addr: status, Len: statusSize, Flags: devicetest.DescWrite},
		})
		d.Queue(0).ForceKick()
		devicetest.WaitFor(t, "the request", func() bool { return int(d.used()) == i+1 })
		var got [1]byte
		if err := d.Mem().Read(status, got[:]); err != nil || uint32(got[0]) != c.want {
			t.Errorf("a request of %d bytes: status %d, want %d (%v)", MaxRequest+c.more, got[0], c.want, err)
		}
	}
}
