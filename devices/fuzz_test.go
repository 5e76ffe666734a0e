package devices_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/balloon"
	"github.com/drowse-vm/drowse/devices/blk"
	"github.com/drowse-vm/drowse/devices/handover"
	"github.com/drowse-vm/drowse/devices/mmio"
	"github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/devices/serial"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The machine of a fuzz target: guest memory with rings from 1 MiB on, and a window of buffers at 8 MiB.
const (
	ringsAt    = 1 << 20
	ringStride = 1 << 16
	availOff   = 0x4000
	usedOff    = 0x8000
	// Indirect tables, one for each head.
	tablesOff   = 0xc000
	tableStride = 128
	windowAt    = 8 << 20
	windowSize  = 64 << 10
	pattern     = 0xa5
)

// zeros never ends. Random numbers would differ between runs.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// discarded counts what a balloon gives back, and discards nothing.
type discarded struct{ calls, bytes atomic.Uint64 }

func (d *discarded) Discard(gpa guestmem.GPA, n uint64) error {
	d.calls.Add(1)
	d.bytes.Add(n)
	if uint64(gpa) > devicetest.MemorySize || n > devicetest.MemorySize-uint64(gpa) {
		return guestmem.ErrRange
	}
	return nil
}

// sink is a network that takes frames and sends none.
type sink struct{ fd int }

func (s sink) FD() int             { return s.fd }
func (sink) SetOffloads(int) error { return nil }

// rig is one device behind a transport. Each run of a fuzz target uses it again, after a reset.
type rig struct {
	mem    *guestmem.Memory
	dev    devices.Device
	tr     *mmio.Transport
	failed atomic.Pointer[error] // the error that the owner was told
	good   int                   // the queue that gives every request back
	kicks  []*devices.Event
	idle   int           // the queue whose kicks the device does not take; 0 if there is none
	work   func() uint64 // the bytes that the device says it has moved; nil if it does not say
}

// newRigs makes the devices for FuzzRequests.
func newRigs(t testing.TB) []*rig {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	ram, err := unix.MemfdCreate("disk", unix.MFD_CLOEXEC) // flushes to it cost nothing
	must(err)
	must(unix.Ftruncate(ram, 1<<20))
	file := devicetest.NewDisk(t, os.NewFile(uintptr(ram), "disk"))
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(err)
	stop := make(chan struct{})
	go func() { // take the frames
		defer close(stop)
		p := make([]byte, 1<<17)
		fds := []unix.PollFd{{Fd: int32(pair[1]), Events: unix.POLLIN}}
		for {
			if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
				return
			}
			if n, err := unix.Read(pair[1], p); n == 0 && err == nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		unix.Close(pair[0])
		<-stop
		unix.Close(pair[1])
	})
	mem := devicetest.NewMemory(t)
	gone := &discarded{}
	disk := &rig{good: 0}
	nic, err := net.New(mem, sink{pair[0]}, net.Config{MAC: net.MAC{2, 0, 0, 0, 0, 1}})
	must(err)
	b := blk.New(file, blk.Options{OnError: func(err error) { disk.failed.Store(&err) }})
	disk.dev, disk.work = b, func() uint64 { s := b.Stats(); return s.ReadBytes.Load() + s.WrittenBytes.Load() }
	rigs := []*rig{
		disk,
		{dev: nic, good: 1, work: func() uint64 { return nic.Stats().FramesFromGuest.Load() }},
		{dev: balloon.New(gone, balloon.Options{}), good: 0, idle: 2}, // the owner asks for no statistics
		{dev: rng.New(rng.Options{Source: zeros{}}), good: 0},
	}
	for _, r := range rigs {
		r.mem = mem
		irq, err := devices.NewEvent()
		must(err)
		for range r.dev.QueueSizes() {
			kick, err := devices.NewEvent()
			must(err)
			r.kicks = append(r.kicks, kick)
		}
		r.tr, err = mmio.New(r.dev, mem, irq, mmio.Options{Kicks: r.kicks, OnError: func(err error) { r.failed.Store(&err) }})
		must(err)
		t.Cleanup(func() { must(errors.Join(r.tr.Close(), irq.Close())) })
	}
	return rigs
}

func (r *rig) read(reg uint64) uint32 {
	var p [4]byte
	r.tr.ReadIO(reg, p[:])
	return binary.LittleEndian.Uint32(p[:])
}

func (r *rig) write(reg uint64, v uint32) {
	var p [4]byte
	binary.LittleEndian.PutUint32(p[:], v)
	r.tr.WriteIO(reg, p[:])
}

func ring(q int) guestmem.GPA { return ringsAt + guestmem.GPA(q)*ringStride }

// start takes the device from any state to DRIVER_OK, with all its queues and without the features in drop.
func (r *rig) start(t testing.TB, drop uint64) {
	t.Helper()
	r.write(devicetest.RegStatus, 0)
	if s := r.read(devicetest.RegStatus); s != 0 {
		t.Fatalf("status %#x after a reset", s)
	}
	r.write(devicetest.RegStatus, devicetest.StatusAcknowledge)
	r.write(devicetest.RegStatus, devicetest.StatusAcknowledge|devicetest.StatusDriver)
	features := (r.dev.Features() | devicetest.FeatureVersion1 | devicetest.FeatureIndirect | devicetest.FeatureEventIdx) &^ drop
	for i := range uint32(2) {
		r.write(devicetest.RegDriverFeaturesSel, i)
		r.write(devicetest.RegDriverFeatures, uint32(features>>(32*i)))
	}
	const ready = devicetest.StatusAcknowledge | devicetest.StatusDriver | devicetest.StatusFeaturesOK
	r.write(devicetest.RegStatus, ready)
	for q, size := range r.dev.QueueSizes() {
		if err := r.mem.Zero(ring(q), ringStride); err != nil {
			t.Fatal(err)
		}
		r.write(devicetest.RegQueueSel, uint32(q))
		r.write(devicetest.RegQueueNum, uint32(size))
		r.write(devicetest.RegQueueDesc, uint32(ring(q)))
		r.write(devicetest.RegQueueDriver, uint32(ring(q)+availOff))
		r.write(devicetest.RegQueueDevice, uint32(ring(q)+usedOff))
		r.write(devicetest.RegQueueReady, 1)
	}
	r.write(devicetest.RegStatus, ready|devicetest.StatusDriverOK)
	if s := r.read(devicetest.RegStatus); s != ready|devicetest.StatusDriverOK {
		t.Fatalf("status %#x after DRIVER_OK", s)
	}
}

// settle lets the device handle its kicks, and returns when it stands still. It waits for all chains of the queue
// that gives everything back. The other queues may keep theirs.
func (r *rig) settle(t testing.TB, next []uint16) {
	t.Helper()
	for q := range next {
		r.write(devicetest.RegQueueNotify, uint32(q))
	}
	for q, kick := range r.kicks {
		if q > 0 && q == r.idle {
			continue
		}
		wait(t, "somebody who takes the kick", func() bool {
			fds := []unix.PollFd{{Fd: int32(kick.FD()), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 0)
			return n == 0 && err == nil
		})
	}
	if r.dev.ID() != devices.IDNet { // the other end may not take all
		wait(t, "all chains of a queue that waits for nothing", func() bool { return r.usedIndex(t, r.good) == next[r.good] })
	}
	if err := r.tr.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) usedIndex(t testing.TB, q int) uint16 {
	t.Helper()
	n, err := r.mem.LoadUint16(ring(q) + usedOff + 2)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func wait(t testing.TB, what string, f func() bool) {
	t.Helper()
	for n := 0; !f(); n++ {
		runtime.Gosched()
		if n > 1000 {
			time.Sleep(50 * time.Microsecond)
		}
		if n > 400_000 {
			t.Fatalf("%s did not come", what)
		}
	}
}

// works makes one small request, which the device must answer.
func (r *rig) works(t testing.TB) {
	t.Helper()
	r.start(t, 0)
	ch := chain{queue: r.good, segs: []devicetest.Desc{{Addr: windowAt, Len: 64}, {Addr: windowAt + 4096, Len: 64, Flags: devicetest.DescWrite}}}
	if err := r.mem.Zero(windowAt, 64); err != nil {
		t.Fatal(err)
	}
	next := make([]uint16, len(r.dev.QueueSizes()))
	head := make([]uint16, len(next))
	if err := ch.lay(r, head, next); err != nil {
		t.Fatal(err)
	}
	r.write(devicetest.RegQueueNotify, uint32(r.good))
	wait(t, "the answer to a small request", func() bool {
		return r.usedIndex(t, r.good) == 1
	})
}

// chain is a request of a fuzz target.
type chain struct {
	queue    int
	indirect bool
	segs     []devicetest.Desc
	writable uint64
	head     uint16
}

// lay puts the chain into its queue: descriptors from free on, and the next entry of the avail ring.
func (c *chain) lay(r *rig, free, next []uint16) error {
	size := r.dev.QueueSizes()[c.queue]
	c.head = free[c.queue]
	at, index := ring(c.queue), c.head
	var err error
	put := func(base guestmem.GPA, i uint16, e devicetest.Desc) {
		var p [16]byte
		binary.LittleEndian.PutUint64(p[:], uint64(e.Addr))
		binary.LittleEndian.PutUint32(p[8:], e.Len)
		binary.LittleEndian.PutUint16(p[12:], e.Flags)
		binary.LittleEndian.PutUint16(p[14:], e.Next)
		err = errors.Join(err, r.mem.Write(base+16*guestmem.GPA(i), p[:]))
	}
	base := at
	if c.indirect {
		base, index = at+tablesOff+guestmem.GPA(c.head)*tableStride, 0
		put(at, c.head, devicetest.Desc{Addr: base, Len: uint32(16 * len(c.segs)), Flags: devicetest.DescIndirect})
		free[c.queue]++
	} else {
		free[c.queue] += uint16(len(c.segs))
	}
	for i, e := range c.segs {
		if i < len(c.segs)-1 {
			e.Flags, e.Next = e.Flags|devicetest.DescNext, index+1
		}
		put(base, index, e)
		index++
	}
	err = errors.Join(err, r.mem.StoreUint16(at+availOff+4+2*guestmem.GPA(next[c.queue]%size), c.head))
	next[c.queue]++
	return errors.Join(err, r.mem.StoreUint16(at+availOff+2, next[c.queue]))
}

// bits takes numbers from a fuzz target's input, and zeros at its end.
type bits struct{ p []byte }

func (b *bits) u8() byte {
	if len(b.p) == 0 {
		return 0
	}
	v := b.p[0]
	b.p = b.p[1:]
	return v
}

func (b *bits) u16() uint16 { return uint16(b.u8()) | uint16(b.u8())<<8 }

func (b *bits) take(n int) []byte {
	n = min(n, len(b.p))
	v := b.p[:n]
	b.p = b.p[n:]
	return v
}

// maxChains and maxSegs bound one run.
const (
	maxChains = 10 // the smallest queue has 64 descriptors
	maxSegs   = 6
)

// decode makes chains from the input, and fills what the device may read. It marks the window's bytes that the
// device may write in allowed.
func (r *rig) decode(t testing.TB, b *bits, window, allowed []byte) (all []*chain, total uint64) {
	sizes := r.dev.QueueSizes()
	for len(b.p) > 0 && len(all) < maxChains {
		c := &chain{queue: int(b.u8()) % len(sizes)}
		shape := b.u8()
		c.indirect = shape&0x80 != 0
		bad, writing := false, false
		for range int(shape&0x7f)%maxSegs + 1 {
			how := b.u8()
			off := int(b.u16())
			n := int(b.u16()) % 4096
			e := devicetest.Desc{Addr: windowAt + guestmem.GPA(off), Len: uint32(n)}
			if how&1 != 0 {
				e.Flags = devicetest.DescWrite
			}
			switch how >> 4 {
			case 1:
				e.Addr, bad = devicetest.MemorySize, true
			case 2:
				e.Addr = devicetest.MemorySize - 8
				bad = bad || n > 8
			case 3:
				e.Addr, bad = ^guestmem.GPA(0), true
			case 4:
				e.Addr, e.Len, e.Flags = 16<<20, 32<<20, 0 // much, and only readable
			}
			if e.Len == 0 || writing && e.Flags == 0 {
				bad = true
			}
			writing = writing || e.Flags != 0
			total += uint64(e.Len)
			c.segs = append(c.segs, e)
			if e.Addr >= windowAt && e.Addr < windowAt+windowSize && e.Flags == 0 {
				copy(window[off:], b.take(n))
			}
		}
		for _, e := range c.segs {
			if e.Flags == 0 || bad {
				continue
			}
			c.writable += uint64(e.Len)
			if e.Addr < windowAt || e.Addr >= windowAt+windowSize {
				continue
			}
			off := int(e.Addr - windowAt)
			for i := off; i < min(off+int(e.Len), windowSize); i++ {
				allowed[i] = 1
			}
		}
		all = append(all, c)
	}
	return all, total
}

// FuzzRequests gives devices chains of all kinds through real queues. The device writes only where it may, gives
// back no more than it got, moves no more bytes than the chains have, asks for no reset, reports nothing to its
// owner, and works after a reset.
func FuzzRequests(f *testing.F) {
	le := binary.LittleEndian
	seg := func(how byte, off, n uint16, content ...byte) []byte {
		return append(le.AppendUint16(le.AppendUint16([]byte{how}, off), n), content...)
	}
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	// The disk: a read, a write, a discard, 32 MiB of readable data. The NIC: a frame. The balloon: pages, a report.
	f.Add(byte(0), byte(0), join([]byte{0, 2}, seg(0, 0, 16, make([]byte, 16)...), seg(1, 4096, 512), seg(1, 64, 1)))
	f.Add(byte(0), byte(0), join([]byte{0, 0x82}, seg(0, 0, 16, append([]byte{1}, make([]byte, 15)...)...), seg(0, 4096, 512, make([]byte, 512)...), seg(1, 64, 1)))
	f.Add(byte(0), byte(1), join([]byte{0, 2}, seg(0, 0, 16, append([]byte{11}, make([]byte, 15)...)...), seg(0, 64, 16, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0), seg(1, 256, 1)))
	f.Add(byte(0), byte(0), join([]byte{0, 2}, seg(0, 0, 16, make([]byte, 16)...), seg(0x40, 0, 1), seg(1, 64, 1)))
	f.Add(byte(1), byte(0), join([]byte{1, 0}, seg(0, 0, 80, make([]byte, 80)...), []byte{0, 0}, seg(1, 4096, 2000)))
	f.Add(byte(2), byte(0), join([]byte{0, 0}, seg(0, 0, 16, 1, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff), []byte{3, 0}, seg(1, 4096, 4095), []byte{2, 0}, seg(0, 0, 20)))
	f.Add(byte(3), byte(2), join([]byte{1, 0}, seg(0, 0, 5, 'h', 'e', 'l', 'l', 'o'), []byte{0, 0}, seg(1, 64, 64)))
	f.Add(byte(4), byte(3), join([]byte{0, 1}, seg(1, 0, 100), seg(1, 5000, 3000), []byte{0, 0}, seg(0x11, 0, 1), []byte{0, 0}, seg(0x31, 0, 9)))
	rigs := newRigs(f)
	f.Fuzz(func(t *testing.T, kind, drop byte, data []byte) {
		r := rigs[int(kind)%len(rigs)]
		r.failed.Store(nil)
		r.start(t, uint64(drop&3)<<28)
		window, allowed := bytes.Repeat([]byte{pattern}, windowSize), make([]byte, windowSize)
		all, total := r.decode(t, &bits{data}, window, allowed)
		if err := r.mem.Write(windowAt, window); err != nil {
			t.Fatal(err)
		}
		queues := len(r.dev.QueueSizes())
		free, next := make([]uint16, queues), make([]uint16, queues)
		for _, c := range all {
			if drop&1 != 0 {
				c.indirect = false
			}
			if err := c.lay(r, free, next); err != nil {
				t.Fatal(err)
			}
		}
		var before uint64
		if r.work != nil {
			before = r.work()
		}
		r.settle(t, next)
		if s := r.read(devicetest.RegStatus); s&devicetest.StatusNeedsReset != 0 {
			t.Errorf("status %#x: the rings are good", s)
		}
		if err := r.failed.Load(); err != nil {
			t.Errorf("the owner was told: %v", *err)
		}
		if r.work != nil && r.work()-before > total {
			t.Errorf("%d bytes were moved for chains of %d", r.work()-before, total)
		}
		got := make([]byte, windowSize)
		if err := r.mem.Read(windowAt, got); err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i] != window[i] && allowed[i] == 0 {
				t.Fatalf("byte %#x was changed, which no chain lets the device write", i)
			}
		}
		r.checkUsed(t, all, next)
		if err := r.tr.Resume(); err != nil {
			t.Fatal(err)
		}
		r.works(t)
	})
}

// checkUsed checks the used chains: each came back once, with no more bytes written than it can hold.
func (r *rig) checkUsed(t *testing.T, all []*chain, next []uint16) {
	t.Helper()
	for q := range next {
		idx := r.usedIndex(t, q)
		if idx > next[q] {
			t.Fatalf("queue %d: %d chains were given back of %d", q, idx, next[q])
		}
		seen := map[uint32]bool{}
		for i := range idx {
			var e [8]byte
			if err := r.mem.Read(ring(q)+usedOff+4+8*guestmem.GPA(i), e[:]); err != nil {
				t.Fatal(err)
			}
			head, n := binary.LittleEndian.Uint32(e[:]), binary.LittleEndian.Uint32(e[4:])
			most := uint64(0)
			for _, c := range all {
				if c.queue == q && uint32(c.head) == head {
					most = c.writable
				}
			}
			if seen[head] || uint64(n) > most {
				t.Fatalf("queue %d: chain %d came back with %d bytes written, it has room for %d (twice: %t)", q, head, n, most, seen[head])
			}
			seen[head] = true
		}
	}
}

// FuzzRegisters accesses registers at any offset, width and value, in any order. No access fails, one of an odd
// width reads zeros below the configuration space, and a reset brings the device back from any state.
func FuzzRegisters(f *testing.F) {
	op := func(write byte, off uint16, width byte, v uint32) []byte {
		return binary.LittleEndian.AppendUint32(append(binary.LittleEndian.AppendUint16([]byte{write}, off), width), v)
	}
	up := bytes.Join([][]byte{
		op(1, devicetest.RegStatus, 4, 1), op(1, devicetest.RegStatus, 4, 3), op(1, devicetest.RegDriverFeaturesSel, 4, 1),
		op(1, devicetest.RegDriverFeatures, 4, 1), op(1, devicetest.RegStatus, 4, 11), op(1, devicetest.RegQueueSel, 4, 0),
		op(1, devicetest.RegQueueNum, 4, 64), op(1, devicetest.RegQueueDesc, 4, ringsAt), op(1, devicetest.RegQueueDriver, 4, ringsAt+availOff),
		op(1, devicetest.RegQueueDevice, 4, ringsAt+usedOff), op(1, devicetest.RegQueueReady, 4, 1), op(1, devicetest.RegStatus, 4, 15),
		op(1, devicetest.RegQueueNotify, 4, 0), op(0, devicetest.RegInterruptStatus, 4, 0),
	}, nil)
	for kind := range byte(5) {
		f.Add(kind, up)
	}
	f.Add(byte(0), op(0, devicetest.RegConfig+3, 8, 0))
	f.Add(byte(2), op(1, devicetest.RegConfig+4, 4, 77))
	f.Add(byte(1), op(1, devicetest.RegQueueNum, 2, 1<<15))
	rigs := newRigs(f)
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		r := rigs[int(kind)%len(rigs)]
		r.failed.Store(nil)
		r.write(devicetest.RegStatus, 0)
		// Sequences that start a queue find empty rings.
		for q := range r.dev.QueueSizes() {
			if err := r.mem.Zero(ring(q), ringStride); err != nil {
				t.Fatal(err)
			}
		}
		for b, n := (bits{data}), 0; len(b.p) > 0 && n < 200; n++ {
			write, off, width := b.u8(), uint64(b.u16())%(mmio.WindowSize+16), int(b.u8())%17
			var p [16]byte
			if copy(p[:4], b.take(4)); write&1 != 0 {
				r.tr.WriteIO(off, p[:width])
				continue
			}
			r.tr.ReadIO(off, p[:width])
			odd := off < devicetest.RegConfig && (width != 4 || off%4 != 0) || off >= 0x200
			if odd && !bytes.Equal(p[:width], make([]byte, width)) {
				t.Fatalf("a read of %d bytes at %#x gives % x", width, off, p[:width])
			}
		}
		if err := r.failed.Load(); err != nil {
			t.Errorf("the owner was told: %v", *err)
		}
		r.works(t)
	})
}

// stateful is a device as a snapshot sees it.
type stateful interface {
	devices.Stateful
	close()
}

type plainState struct{ devices.Stateful }

func (plainState) close() {}

type closed struct {
	devices.Stateful
	io.Closer
}

func (c closed) close() { _ = c.Close() }

// disk is a disk without content.
type disk struct{ blk.Backend }

func (disk) Size() int64    { return 1 << 20 }
func (disk) ReadOnly() bool { return false }

// importable are the devices without an import target of their own. Shares and vsock have one.
var importable = []struct {
	kind string
	make func(t testing.TB) stateful
}{
	{"virtio-blk", func(testing.TB) stateful { return plainState{blk.New(disk{}, blk.Options{})} }},
	{"virtio-net", func(t testing.TB) stateful {
		d, err := net.New(nil, sink{-1}, net.Config{MAC: net.MAC{2, 0, 0, 0, 0, 1}})
		if err != nil {
			t.Fatal(err)
		}
		return plainState{d}
	}},
	{"virtio-rng", func(testing.TB) stateful { return plainState{rng.New(rng.Options{})} }},
	{"virtio-balloon", func(testing.TB) stateful { return plainState{balloon.New(&discarded{}, balloon.Options{})} }},
	{"serial", func(t testing.TB) stateful {
		d := serial.New(nil, func() {})
		return closed{d, d}
	}},
	{"handover", func(testing.TB) stateful { return plainState{handover.New(nil)} }},
}

// FuzzImport: a state that a device takes is the one that it exports. One that it refuses changes nothing.
func FuzzImport(f *testing.F) {
	for i, d := range importable {
		s := d.make(f)
		p, err := s.Export()
		s.close()
		if err != nil || p.Kind != d.kind {
			f.Fatalf("%s exports %q, %v", d.kind, p.Kind, err)
		}
		f.Add(byte(i), p.Version, p.Data)
	}
	f.Fuzz(func(t *testing.T, which byte, version uint32, data []byte) {
		d := importable[int(which)%len(importable)]
		s := d.make(t)
		defer s.close()
		fresh, err := s.Export()
		if err != nil {
			t.Fatal(err)
		}
		err = s.Import(devices.Payload{Kind: d.kind, Version: version, Data: data})
		after, eerr := s.Export()
		if eerr != nil {
			t.Fatal(eerr)
		}
		switch {
		case err != nil && !errors.Is(err, devices.ErrPayload):
			t.Fatalf("%s: %v is not ErrPayload", d.kind, err)
		case err != nil && !bytes.Equal(after.Data, fresh.Data):
			t.Fatalf("%s was refused (%v) and has changed % x to % x", d.kind, err, fresh.Data, after.Data)
		case err == nil && (version != fresh.Version || !bytes.Equal(after.Data, data)):
			t.Fatalf("%s of version %d: % x became % x", d.kind, version, data, after.Data)
		}
		if err := s.Import(devices.Payload{Kind: d.kind + "x", Version: fresh.Version, Data: data}); !errors.Is(err, devices.ErrPayload) {
			t.Fatalf("another kind: %v", err)
		}
	})
}
