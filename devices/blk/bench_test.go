package blk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

type silent struct{}

func (silent) Queue()           {}
func (silent) Config()          {}
func (silent) NeedsReset(error) {}

// served is a device whose queue the caller serves, not a worker, with one request that is repeated.
type served struct {
	*Device
	mem   *guestmem.Memory
	chain virtq.Chain
	avail uint16
}

func newServed(tb testing.TB, kind uint32, n uint32) *served {
	tb.Helper()
	const descs, avail, used, data = 0x10000, 0x20000, 0x30000, 0x100000
	mem := devicetest.NewMemory(tb)
	d := New(newFile(tb, diskSize, false), Options{})
	q, err := virtq.New(mem, virtq.Layout{Size: QueueSize, Desc: descs, Avail: avail, Used: used}, virtq.FeatureEventIdx)
	if err != nil {
		tb.Fatal(err)
	}
	kick, err := devices.NewEvent()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { kick.Close() })
	d.queue, d.accepted = &devices.Queue{Queue: q, Kick: kick}, d.Features()
	dataFlags := uint16(devicetest.DescNext)
	if kind == typeIn {
		dataFlags |= devicetest.DescWrite
	}
	for i, e := range []devicetest.Desc{
		{Addr: data, Len: headerSize, Flags: devicetest.DescNext, Next: 1},
		{Addr: data + 4096, Len: n / 2, Flags: dataFlags, Next: 2},
		{Addr: data + 4<<20, Len: n / 2, Flags: dataFlags, Next: 3},
		{Addr: data + 100, Len: statusSize, Flags: devicetest.DescWrite},
	} {
		var p [16]byte
		binary.LittleEndian.PutUint64(p[:], uint64(e.Addr))
		binary.LittleEndian.PutUint32(p[8:], e.Len)
		binary.LittleEndian.PutUint16(p[12:], e.Flags)
		binary.LittleEndian.PutUint16(p[14:], e.Next)
		err = errors.Join(err, mem.Write(descs+guestmem.GPA(16*i), p[:]))
	}
	if err := errors.Join(err, mem.Write(data, header(kind, 8))); err != nil {
		tb.Fatal(err)
	}
	return &served{Device: d, mem: mem}
}

func (s *served) request(tb testing.TB) {
	s.avail++
	if err := s.mem.StoreUint16(0x20002, s.avail); err != nil {
		tb.Fatal(err)
	}
	if err := s.queue.Serve(silent{}, &s.chain, s.handle); err != nil {
		tb.Fatal(err)
	}
}

func TestReads_and_writes_allocate_nothing(t *testing.T) {
	for kind, name := range map[uint32]string{typeIn: "read", typeOut: "write", typeGetID: "serial number"} {
		s := newServed(t, kind, 8192)
		if n := testing.AllocsPerRun(100, func() { s.request(t) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
		if s.queue.Broken() != nil || kind == typeIn && s.Stats().Reads.Load() != 101 || kind == typeOut && s.Stats().Writes.Load() != 101 {
			t.Errorf("%s: %+v, %v", name, s.Stats(), s.queue.Broken())
		}
	}
}

func BenchmarkRequest(b *testing.B) {
	for kind, name := range map[uint32]string{typeIn: "read", typeOut: "write"} {
		for _, n := range []uint32{4 << 10, 64 << 10} {
			b.Run(fmt.Sprintf("%s-%dKiB", name, n>>10), func(b *testing.B) {
				s := newServed(b, kind, n)
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					s.request(b)
				}
			})
		}
	}
}
