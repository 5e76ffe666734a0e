package vsock

import (
	"encoding/binary"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/mmio"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
)

// A driver can start a device without queues and reset it a million times a second. None of this is a failure of the
// host. So the machine's owner, who would log each failure, hears of none.
func TestAttack_driver_ok_without_queues_says_nothing_to_the_owner(t *testing.T) {
	const rounds = 100_000
	mem := devicetest.NewMemory(t)
	dev, err := New(mem, Config{CID: testCID, Path: filepath.Join(t.TempDir(), "v.sock")})
	must(t, err)
	t.Cleanup(func() { must(t, dev.Close()) })
	irq, err := devices.NewEvent()
	must(t, err)
	t.Cleanup(func() { irq.Close() })
	var told atomic.Int64
	tr, err := mmio.New(dev, mem, irq, mmio.Options{OnError: func(err error) {
		if told.Add(1) == 1 {
			t.Errorf("the owner was told: %v", err)
		}
	}})
	must(t, err)
	t.Cleanup(func() { must(t, tr.Close()) })
	write := func(reg uint64, v uint32) {
		var p [4]byte
		binary.LittleEndian.PutUint32(p[:], v)
		tr.WriteIO(reg, p[:])
	}
	status := uint32(0)
	for range rounds {
		write(devicetest.RegStatus, 0)
		write(devicetest.RegStatus, devicetest.StatusAcknowledge)
		write(devicetest.RegStatus, devicetest.StatusAcknowledge|devicetest.StatusDriver)
		write(devicetest.RegDriverFeaturesSel, 1)
		write(devicetest.RegDriverFeatures, uint32(devicetest.FeatureVersion1>>32))
		status = devicetest.StatusAcknowledge | devicetest.StatusDriver | devicetest.StatusFeaturesOK
		write(devicetest.RegStatus, status)
		write(devicetest.RegStatus, status|devicetest.StatusDriverOK)
	}
	if s := tr.Stats(); s.NeedsReset != rounds {
		t.Errorf("the device was given up %d times of %d: the attack did not take place", s.NeedsReset, rounds)
	}
	if n := told.Load(); n != 0 {
		t.Errorf("the owner was told %d times", n)
	}
}

// A queue full of packets waits when a pause is requested. The turn under way ends, and the pause takes a bounded
// amount more.
func TestAttack_turn_with_a_full_queue_ends_when_a_pause_is_wanted(t *testing.T) {
	g := newGuest(t, 16)
	must(t, g.dev.Pause(t.Context()))
	// Packets of 32 MiB, of which only the header counts.
	const packets = 200
	for range packets {
		g.tx.add(0x100000, 32<<20, false)
	}
	// The loop stands still, so the test can do its work here.
	e := g.dev.engine
	e.txReady = true
	begin := e.tx.Work()
	must(t, e.turn())
	if n := e.tx.Position().NextAvail; n != 0 {
		t.Errorf("%d packets were taken in a turn while a pause was wanted", n)
	}
	must(t, e.loop.Settle())
	if n := e.tx.Work() - begin; n == 0 || n > devices.SettleBytes+33<<20 {
		t.Errorf("%d bytes of packets were taken for the pause", n)
	}
	must(t, g.dev.Resume())
	g.wait("all packets to be taken", func() bool { return g.dev.Stats().PacketsFromGuest.Load() == packets })
}

// While a pause is requested, the device writes only bounded amounts of what it holds for sockets. All connections
// together may hold 64 MiB, and a guest that floods them could delay its pause by that much.
func TestAttack_pause_does_not_wait_for_all_that_waits_for_sockets(t *testing.T) {
	g := newGuest(t, 16)
	must(t, g.dev.Pause(t.Context()))
	e := g.dev.engine
	total := 0
	var hosts []int
	for i := range 2 * devices.SettleBytes / smallBuffer {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		must(t, err)
		t.Cleanup(func() { unix.Close(pair[1]) })
		c := e.newConn(pair[0], stateOpen, false)
		if c == nil {
			t.Fatal("no room for a connection")
		}
		e.register(c, key{guestPort: uint32(i), hostPort: 1})
		e.takeBuffer(c)
		c.received, c.backlog.n = smallBuffer, smallBuffer
		e.stats.Buffered.Add(smallBuffer)
		e.block(c)
		hosts = append(hosts, pair[1])
		total += smallBuffer
	}
	must(t, e.loop.Settle())
	left := 0
	for _, c := range e.slots {
		left += c.backlog.n
	}
	if taken := total - left; taken == 0 || taken > devices.SettleBytes+largeBuffer {
		t.Errorf("%d bytes of %d were written for the pause, %d may be", taken, total, devices.SettleBytes)
	}
	must(t, g.dev.Resume())
	g.wait("the rest to be written", func() bool {
		there := 0
		for _, fd := range hosts {
			n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
			must(t, err)
			there += n
		}
		return there == total
	})
}

// The device gives receive buffers back that hold no packet. Another vCPU posts them as fast as that, and the device
// would never pause.
func TestAttack_short_receive_buffers_without_end_do_not_hold_a_turn_up(t *testing.T) {
	const short = 1 << 20
	mem := newMemory(t)
	p := &devicetest.Poster{Mem: mem}
	mem.SetResidency(p)
	g := inactiveGuest(t, mem, filepath.Join(t.TempDir(), "v.sock"))
	g.activate(false)
	must(t, g.dev.Pause(t.Context()))
	// The loop stands still, so the test can do its work here.
	e := g.dev.engine
	g.rx.descriptor(0, rxPool, headerSize, 2, 0)
	g.rx.publish(0)
	p.Layout = g.rx.layout
	p.Left.Store(short)
	begin := e.rx.Work()
	if _, err := e.popRX(&e.rxChain[0], begin); err != nil {
		t.Fatal(err)
	}
	if n := e.rx.Work() - begin; n == 0 || n > devices.TurnBytes+1<<20 {
		t.Errorf("buffers of %d units of work were taken in a turn, %d may be", n, devices.TurnBytes)
	}
}
