package devicetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/mmio"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Case is one device for Run.
type Case struct {
	// New makes a device, not yet activated, on the same host side each time: the same disk, the same socket. The
	// suite calls it several times in one test, on any goroutine, whenever the device moves. At most one of the
	// devices is active. New must close what it opens with t.Cleanup.
	New func(t testing.TB, mem *guestmem.Memory) devices.Device

	// Exercise makes requests of a started device and checks the answers. The suite calls it again and again, on
	// the test's goroutine, also while the device is paused, resumed or moved. The effects of an earlier call may
	// be undone: a hostile driver may have used the device, or a reset may have emptied its queues.
	Exercise func(t testing.TB, d *Driver)

	// Idle has the queues whose buffers the device takes only when the host has something for the guest, such as
	// received packets. The function gives the device something, so that it looks at the queue; nil means that
	// this is not possible.
	Idle map[int]func(t testing.TB, d *Driver)

	// Features are the features that the driver accepts, in addition to VERSION_1; zero means all.
	Features uint64

	// Pauses is how often the device is paused under load; zero means 1000.
	Pauses int
	// Moves is how often it is moved under load; zero means 100.
	Moves int
}

// featureSets are the ways in which a driver can use queues.
var featureSets = []struct {
	name string
	drop uint64
}{
	{"all features", 0},
	{"without indirect tables", FeatureIndirect},
	{"without event index", FeatureEventIdx},
	{"with plain queues", FeatureIndirect | FeatureEventIdx},
}

// Run takes the device through the whole suite. Each part is a subtest.
func Run(t *testing.T, c Case) {
	if c.Features == 0 {
		c.Features = AllFeatures
	}
	if c.Pauses == 0 {
		c.Pauses = 1000
	}
	if c.Moves == 0 {
		c.Moves = 100
	}
	for _, part := range []struct {
		name string
		run  func(*testing.T, Case)
	}{
		{"identity registers", identity},
		{"requests", requests},
		{"reset in each state", resetInEachState},
		{"features that are not offered are refused", refusedFeatures},
		{"features are fixed by FEATURES_OK", fixedFeatures},
		{"status cannot skip or take back a step", statusOrder},
		{"activation happens once", activatedOnce},
		{"queue registers are fixed once the queue or the device runs", fixedQueues},
		{"impossible queues need a reset", impossibleQueues},
		{"a device that is started without queues is no failure of the host", missingQueues},
		{"every register at every width in every state", registerWalk},
		{"pauses lose nothing", pauseUnderLoad},
		{"a paused device does nothing until it resumes", pausedIsQuiet},
		{"a pause ends with its context", pauseContext},
		{"moves lose nothing", moveUnderLoad},
		{"an unacknowledged interrupt is sent again", pendingInterrupt},
		{"state of every stage can be moved", moveInEachState},
		{"damaged state is refused", damagedState},
		{"hostile chains", hostileChains},
		{"hostile rings", hostileRings},
		{"rings and descriptors that change meanwhile", mutatedRings},
	} {
		t.Run(part.name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			// Registered first, so it runs after everything else is closed.
			t.Cleanup(func() {
				if err := goleak.Find(before); err != nil {
					t.Error(err)
				}
			})
			part.run(t, c)
		})
	}
}

func (c Case) start(t testing.TB, drop uint64) *Driver {
	t.Helper()
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	d.Start(c.Features &^ drop)
	return d
}

// works checks that the device still works, or works again after a reset.
func (c Case) works(t testing.TB, d *Driver) {
	t.Helper()
	d.Start(c.Features)
	c.Exercise(t, d)
}

func identity(t *testing.T, c Case) {
	mem := NewMemory(t)
	dev := c.New(t, mem)
	d := NewDriver(t, dev, mem)
	if v := d.Read32(RegMagic); v != 0x74726976 {
		t.Errorf("magic %#x", v)
	}
	if v := d.Read32(RegVersion); v != 2 {
		t.Errorf("version %d", v)
	}
	if v := d.Read32(RegDeviceID); v != uint32(dev.ID()) || v == 0 {
		t.Errorf("device type %d", v)
	}
	want := dev.Features() | FeatureVersion1 | FeatureIndirect | FeatureEventIdx
	if got := d.Offered(); got != want {
		t.Errorf("offers %#x, want %#x", got, want)
	}
	for _, sel := range []uint32{2, 3, 1 << 31, ^uint32(0)} {
		d.Write32(RegDeviceFeaturesSel, sel)
		if v := d.Read32(RegDeviceFeatures); v != 0 {
			t.Errorf("feature word %d is %#x", sel, v)
		}
	}
	for i := range uint32(70) {
		d.Write32(RegQueueSel, i)
		want := uint32(0)
		if sizes := dev.QueueSizes(); int(i) < len(sizes) {
			want = uint32(sizes[i])
		}
		if got := d.Read32(RegQueueNumMax); got != want {
			t.Errorf("queue %d has size %d, want %d", i, got, want)
		}
	}
	d.Write32(RegQueueSel, ^uint32(0))
	if got := d.Read32(RegQueueNumMax) + d.Read32(RegQueueReady); got != 0 {
		t.Errorf("a queue that does not exist reads %d", got)
	}
}

func requests(t *testing.T, c Case) {
	for _, f := range featureSets {
		t.Run(f.name, func(t *testing.T) {
			d := c.start(t, f.drop)
			for range 3 {
				c.Exercise(t, d)
			}
			if err := d.HostError(); err != nil {
				t.Errorf("host error: %v", err)
			}
			if s := d.Transport().Stats(); s.BadChains != 0 || s.NeedsReset != 0 {
				t.Errorf("a good driver was found bad: %+v", s)
			}
		})
	}
}

// stages are the states that a driver takes a device through; the last one runs.
var stages = []struct {
	name   string
	status uint32
}{
	{"untouched", 0},
	{"acknowledged", StatusAcknowledge},
	{"with a driver", StatusAcknowledge | StatusDriver},
	{"with features", StatusAcknowledge | StatusDriver | StatusFeaturesOK},
	{"with queues", StatusAcknowledge | StatusDriver | StatusFeaturesOK},
	{"running", StatusAcknowledge | StatusDriver | StatusFeaturesOK | StatusDriverOK},
	{"used", StatusAcknowledge | StatusDriver | StatusFeaturesOK | StatusDriverOK},
	{"given up by its driver", StatusAcknowledge | StatusDriver | StatusFeaturesOK | StatusDriverOK | StatusFailed},
}

// bring takes a fresh or reset device to stage n.
func (c Case) bring(t testing.TB, d *Driver, n int) {
	t.Helper()
	if n >= 1 {
		d.AddStatus(StatusAcknowledge)
	}
	if n >= 2 {
		d.AddStatus(StatusDriver)
	}
	if n >= 3 && !d.accept(d.Offered()&(c.Features|FeatureVersion1)) {
		t.Fatal("features were refused")
	}
	if n >= 4 {
		d.SetupQueues()
	}
	if n >= 5 {
		d.AddStatus(StatusDriverOK)
	}
	if n >= 6 {
		c.Exercise(t, d)
	}
	if n >= 7 {
		d.AddStatus(StatusFailed)
	}
	if s := d.Status(); s != stages[n].status {
		t.Fatalf("%s: status %#x, want %#x", stages[n].name, s, stages[n].status)
	}
}

func resetInEachState(t *testing.T, c Case) {
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	for i := range stages {
		for _, paused := range []bool{false, true} {
			c.bring(t, d, i)
			if paused {
				if err := d.Transport().Pause(context.Background()); err != nil {
					t.Fatal(err)
				}
			}
			d.Reset()
			if v := d.Read32(RegInterruptStatus); v != 0 {
				t.Errorf("%s: interrupt status %#x after a reset", stages[i].name, v)
			}
			for q := uint32(0); ; q++ {
				d.Write32(RegQueueSel, q)
				if d.Read32(RegQueueNumMax) == 0 {
					break
				}
				if d.Read32(RegQueueReady) != 0 {
					t.Errorf("%s: queue %d is ready after a reset", stages[i].name, q)
				}
			}
			d.Reset()
			if paused {
				if err := d.Transport().Resume(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	c.works(t, d)
}

func refusedFeatures(t *testing.T, c Case) {
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	offered := d.Offered()
	for bit := range 64 {
		f := uint64(1) << bit
		if offered&f != 0 {
			continue
		}
		d.Reset()
		if d.accept(offered | f) {
			t.Errorf("feature %d was accepted but is not offered", bit)
		}
		d.AddStatus(StatusDriverOK)
		if d.Status()&StatusDriverOK != 0 {
			t.Errorf("the device runs without an agreement on features")
		}
	}
	d.Reset()
	if d.accept(offered &^ FeatureVersion1) {
		t.Error("a driver without VERSION_1 was accepted")
	}
	// A bit in a word of features that does not exist.
	d.Reset()
	d.AddStatus(StatusAcknowledge | StatusDriver)
	d.Write32(RegDriverFeaturesSel, 2)
	d.Write32(RegDriverFeatures, 1)
	if d.accept(offered) {
		t.Error("feature 64 was accepted")
	}
	c.works(t, d)
}

func fixedFeatures(t *testing.T, c Case) {
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	// Before DRIVER, and after FEATURES_OK, the device ignores features.
	d.Write32(RegDriverFeaturesSel, 0)
	d.Write32(RegDriverFeatures, ^uint32(0))
	if !d.accept(d.Offered() & (c.Features | FeatureVersion1)) {
		t.Fatal("features were refused")
	}
	d.Write32(RegDriverFeatures, 0)
	d.SetupQueues()
	d.AddStatus(StatusDriverOK)
	c.Exercise(t, d)
}

func statusOrder(t *testing.T, c Case) {
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	for _, s := range []uint32{
		StatusDriver, StatusFeaturesOK, StatusDriverOK, StatusNeedsReset, 16, 32, 1 << 8, 1 << 31,
		StatusDriverOK | StatusFeaturesOK | StatusDriver,
	} {
		d.Write32(RegStatus, s)
		if got := d.Status(); got != 0 {
			t.Errorf("writing status %#x to a reset device gives %#x", s, got)
			d.Reset()
		}
	}
	d.AddStatus(StatusAcknowledge | StatusDriver)
	for _, s := range []uint32{StatusAcknowledge, StatusDriver, StatusAcknowledge | StatusDriver | StatusDriverOK} {
		d.Write32(RegStatus, s)
		if got := d.Status(); got != StatusAcknowledge|StatusDriver {
			t.Errorf("writing status %#x gives %#x", s, got)
		}
	}
	d.AddStatus(StatusFailed)
	d.accept(d.Offered())
	if got := d.Status(); got != StatusAcknowledge|StatusDriver|StatusFailed {
		t.Errorf("a failed device goes on to status %#x", got)
	}
	c.works(t, d)
}

// counted counts the calls of the transport to a device.
type counted struct {
	devices.Device
	activations, resets atomic.Int32
}

func (c *counted) Activate(a devices.Activation) error {
	c.activations.Add(1)
	return c.Device.Activate(a)
}

func (c *counted) Reset() error {
	c.resets.Add(1)
	return c.Device.Reset()
}

func activatedOnce(t *testing.T, c Case) {
	mem := NewMemory(t)
	dev := &counted{Device: c.New(t, mem)}
	d := NewDriver(t, dev, mem)
	d.Start(c.Features)
	for range 3 {
		d.AddStatus(StatusDriverOK)
		d.AddStatus(StatusFeaturesOK)
		d.Write32(RegStatus, StatusAcknowledge|StatusDriver|StatusFeaturesOK|StatusDriverOK)
	}
	if n := dev.activations.Load(); n != 1 {
		t.Errorf("activated %d times", n)
	}
	c.Exercise(t, d)
}

// queueRegisters are the registers that lay out a queue.
var queueRegisters = []uint64{
	RegQueueNum, RegQueueDesc, RegQueueDesc + 4, RegQueueDriver, RegQueueDriver + 4, RegQueueDevice, RegQueueDevice + 4,
}

func fixedQueues(t *testing.T, c Case) {
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	// Before FEATURES_OK the device ignores the layout.
	d.AddStatus(StatusAcknowledge | StatusDriver)
	d.Write32(RegQueueSel, 0)
	d.Write32(RegQueueReady, 1)
	if d.Read32(RegQueueReady) != 0 {
		t.Error("a queue became ready before FEATURES_OK")
	}
	spoil := func() {
		for q := range d.Queues() {
			d.Write32(RegQueueSel, uint32(q))
			for _, reg := range queueRegisters {
				for _, v := range []uint32{0, 2, 1 << 15, ^uint32(0)} {
					d.Write32(reg, v)
				}
			}
		}
	}
	d.Reset()
	c.bring(t, d, 4)
	spoil()
	d.AddStatus(StatusDriverOK)
	c.Exercise(t, d)
	spoil()
	for q := range d.Queues() {
		d.Write32(RegQueueSel, uint32(q))
		d.Write32(RegQueueReady, 0)
		if d.Read32(RegQueueReady) != 1 {
			t.Errorf("queue %d was taken from a running device", q)
		}
	}
	c.Exercise(t, d)
	// A layout that was accepted after all would show when the state moves.
	if err := d.Move(c.New(t, mem)); err != nil {
		t.Fatal(err)
	}
	c.Exercise(t, d)
}

func impossibleQueues(t *testing.T, c Case) {
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	for _, tc := range []struct {
		name string
		reg  uint64
		v    uint32
	}{
		{"size zero", RegQueueNum, 0},
		{"size not a power of two", RegQueueNum, 3},
		{"size beyond the largest", RegQueueNum, 1 << 15},
		{"size beyond 16 bits", RegQueueNum, 1<<16 | 4},
		{"descriptors misaligned", RegQueueDesc, uint32(ringsGPA) + 8},
		{"avail ring misaligned", RegQueueDriver, uint32(ringsGPA) + 1},
		{"used ring misaligned", RegQueueDevice, uint32(ringsGPA) + 2},
		{"descriptors across the end of RAM", RegQueueDesc, MemorySize - 16},
		{"avail ring across the end of RAM", RegQueueDriver, MemorySize - 4},
		{"used ring across the end of RAM", RegQueueDevice, MemorySize - 4},
		{"descriptors beyond RAM", RegQueueDesc + 4, 1},
		{"used ring at the top of the address space", RegQueueDevice + 4, ^uint32(0)},
	} {
		d.Reset()
		c.bring(t, d, 4)
		d.Write32(RegQueueSel, 0)
		d.Write32(RegQueueReady, 0)
		d.Write32(tc.reg, tc.v)
		d.Write32(RegQueueReady, 1)
		d.AddStatus(StatusDriverOK)
		if s := d.Status(); s&StatusNeedsReset == 0 {
			t.Errorf("%s: status %#x, want NEEDS_RESET", tc.name, s)
		}
		d.ForceKickAll()
	}
	if err := d.HostError(); err != nil {
		t.Errorf("what the guest did was reported as the host's error: %v", err)
	}
	c.works(t, d)
}

// missingQueues starts the device without any of its queues, and without each of them. It may do without or need a
// reset.
func missingQueues(t *testing.T, c Case) {
	mem := NewMemory(t)
	dev := c.New(t, mem)
	d := NewDriver(t, dev, mem)
	for missing := -1; missing < len(dev.QueueSizes()); missing++ {
		d.Reset()
		c.bring(t, d, 4)
		for q := range dev.QueueSizes() {
			if missing < 0 || q == missing {
				d.Write32(RegQueueSel, uint32(q))
				d.Write32(RegQueueReady, 0)
			}
		}
		d.AddStatus(StatusDriverOK)
		d.ForceKickAll()
		if err := d.HostError(); err != nil {
			t.Fatalf("queue %d (-1: all) is missing, and that was reported as the host's error: %v", missing, err)
		}
	}
	c.works(t, d)
}

// ForceKickAll kicks every queue that the device could have.
func (d *Driver) ForceKickAll() {
	for i := range uint32(mmio.MaxQueues) {
		d.Write32(RegQueueNotify, i)
	}
}

func registerWalk(t *testing.T, c Case) {
	mem := NewMemory(t)
	d := NewDriver(t, c.New(t, mem), mem)
	r := newRand(1)
	values := []uint32{0, 1, 2, 3, 4, 8, 11, 15, 64, 128, 256, 1 << 16, 1 << 31, ^uint32(0), uint32(ringsGPA), uint32(buffersGPA)}
	buf := make([]byte, 16)
	widths := []int{1, 2, 4, 8, 3, 16}
	for i := range stages {
		d.Reset()
		c.bring(t, d, i)
		// Every access once, in this state: only an aligned 32-bit read may show something below the configuration
		// space.
		for off := uint64(0); off < mmio.WindowSize-16; off++ {
			for _, n := range widths {
				p := buf[:n]
				for k := range p {
					p[k] = 0xaa
				}
				d.ReadRaw(off, p)
				if (n != 4 || off%4 != 0) && off < RegConfig || off >= 0x200 {
					if slices.ContainsFunc(p, func(b byte) bool { return b != 0 }) {
						t.Fatalf("%s: a read of %d bytes at %#x gives % x", stages[i].name, n, off, p)
					}
				}
			}
		}
		// Writes of a wrong width change nothing.
		status := d.Status()
		for off := uint64(0); off < RegConfig; off++ {
			for _, n := range widths {
				if n == 4 && off%4 == 0 {
					continue
				}
				d.WriteRaw(off, make([]byte, n))
			}
		}
		if s := d.Status(); s != status {
			t.Fatalf("%s: writes of odd widths changed the status from %#x to %#x", stages[i].name, status, s)
		}
		// Then random accesses in any order.
		for range 4000 {
			off := uint64(r.IntN(0x210))
			if r.IntN(4) != 0 {
				off &^= 3
			}
			p := buf[:widths[r.IntN(len(widths))]]
			if r.IntN(3) == 0 {
				d.ReadRaw(off, p)
				continue
			}
			for k := range p {
				p[k] = byte(values[r.IntN(len(values))] >> (8 * (k % 4)))
			}
			d.WriteRaw(off, p)
		}
	}
	d.Reset()
	if err := d.HostError(); err != nil {
		t.Errorf("what the guest did was reported as the host's error: %v", err)
	}
	c.works(t, d)
}

// underLoad runs f, which gets random numbers, next to the case's requests.
func (c Case) underLoad(t *testing.T, d *Driver, f func(r func(n int) int) error) {
	t.Helper()
	done := make(chan error, 1)
	r := newRand(2)
	go func() {
		err := errors.New("it was given up")
		defer func() { done <- err }()
		err = f(r.IntN)
	}()
	for {
		c.Exercise(t, d)
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			c.Exercise(t, d)
			if s := d.Transport().Stats(); s.BadChains != 0 || s.NeedsReset != 0 {
				t.Errorf("a good driver was found bad: %+v", s)
			}
			if err := d.HostError(); err != nil {
				t.Errorf("host error: %v", err)
			}
			return
		default:
		}
	}
}

func pauseUnderLoad(t *testing.T, c Case) {
	d := c.start(t, 0)
	c.underLoad(t, d, func(intn func(int) int) error {
		for range c.Pauses {
			if err := d.PauseAndResume(time.Duration(intn(300)) * time.Microsecond); err != nil {
				return err
			}
			time.Sleep(time.Duration(intn(300)) * time.Microsecond)
		}
		return nil
	})
}

func moveUnderLoad(t *testing.T, c Case) {
	for _, f := range featureSets {
		t.Run(f.name, func(t *testing.T) {
			d := c.start(t, f.drop)
			c.underLoad(t, d, func(intn func(int) int) error {
				for range c.Moves / len(featureSets) {
					if err := d.Move(c.New(t, d.mem)); err != nil {
						return err
					}
					time.Sleep(time.Duration(intn(2000)) * time.Microsecond)
				}
				return nil
			})
		})
	}
}

func pausedIsQuiet(t *testing.T, c Case) {
	d := c.start(t, 0)
	c.Exercise(t, d)
	ctx := context.Background()
	for range 2 { // a second pause changes nothing
		if err := d.Transport().Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.Transport().Export(); err != nil {
		t.Fatal(err)
	}
	d.mem.TakeDirty(func(uint64) {})
	d.ForceKickAll()
	time.Sleep(5 * time.Millisecond)
	d.mem.TakeDirty(func(page uint64) {
		// The driver's own page: it may still be looking at an interrupt.
		for _, q := range d.started() {
			if page == uint64(q.avail)/guestmem.PageSize {
				return
			}
		}
		t.Errorf("a paused device wrote to page %#x", page)
	})
	if err := d.Transport().Resume(); err != nil {
		t.Fatal(err)
	}
	if err := d.Transport().Resume(); err != nil {
		t.Fatal(err)
	}
	c.Exercise(t, d)
	if _, err := d.Transport().Export(); !errors.Is(err, devices.ErrNotPaused) {
		t.Errorf("exporting a running device: %v, want ErrNotPaused", err)
	}
}

func pauseContext(t *testing.T, c Case) {
	d := c.start(t, 0)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 50 {
		// It may succeed, if nothing has to be waited for.
		if err := d.Transport().Pause(ctx); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Fatalf("got %v", err)
			}
		} else if err := d.Transport().Resume(); err != nil {
			t.Fatal(err)
		}
		c.Exercise(t, d)
	}
}

func pendingInterrupt(t *testing.T, c Case) {
	d := c.start(t, 0)
	c.Exercise(t, d)
	// The interrupt is sent, but the edge is lost before the driver sees it.
	taken := d.irq.Taken()
	d.deaf.Store(true)
	d.Transport().Queue()
	WaitFor(t, "the edge", func() bool { return d.irq.Taken() > taken })
	if d.Read32(RegInterruptStatus)&1 == 0 {
		t.Fatal("the interrupt status does not show it")
	}
	before := d.Interrupts()
	d.deaf.Store(false)
	if err := d.Move(c.New(t, d.mem)); err != nil {
		t.Fatal(err)
	}
	WaitFor(t, "the interrupt", func() bool { return d.Interrupts() > before })
	c.Exercise(t, d)
}

// WaitFor fails the test unless f comes true within Timeout.
func WaitFor(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Timeout); !f(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen within %v", what, Timeout)
		}
	}
}

func moveInEachState(t *testing.T, c Case) {
	for i := range stages {
		t.Run(stages[i].name, func(t *testing.T) {
			mem := NewMemory(t)
			d := NewDriver(t, c.New(t, mem), mem)
			c.bring(t, d, i)
			for range 2 {
				if err := d.Move(c.New(t, mem)); err != nil {
					t.Fatal(err)
				}
			}
			if s := d.Status(); s != stages[i].status {
				t.Fatalf("status %#x after moving, want %#x", s, stages[i].status)
			}
			switch {
			case i < 4:
				d.Reset()
				c.works(t, d)
			case i == 4:
				d.AddStatus(StatusDriverOK)
				c.Exercise(t, d)
			case i < 7:
				c.Exercise(t, d)
			}
			c.works(t, d)
		})
	}
}

func damagedState(t *testing.T, c Case) {
	d := c.start(t, 0)
	c.Exercise(t, d)
	if err := d.Transport().Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	good, err := d.Transport().Export()
	if err != nil {
		t.Fatal(err)
	}
	// A failed import changes nothing, and a reset undoes a successful one, so one device is enough.
	mem := NewMemory(t)
	irq, err := devices.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer irq.Close()
	tr, err := mmio.New(c.New(t, mem), mem, irq, mmio.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	try := func(what string, p devices.Payload, mustFail bool) {
		t.Helper()
		err := tr.Import(p)
		switch {
		case err == nil && mustFail:
			t.Errorf("%s: accepted", what)
		case err != nil && !errors.Is(err, devices.ErrPayload):
			t.Errorf("%s: error %v is not ErrPayload", what, err)
		case err == nil:
			// Some wrong bits cannot be recognized. They must do no harm, and a reset must bring the device back.
			if err := tr.Restore(); err == nil {
				if err := tr.Resume(); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
		tr.WriteIO(RegStatus, make([]byte, 4))
		var s [4]byte
		if tr.ReadIO(RegStatus, s[:]); s != [4]byte{} {
			t.Errorf("%s: status % x after a reset", what, s)
		}
	}
	with := func(data []byte) devices.Payload {
		return devices.Payload{Kind: good.Kind, Version: good.Version, Data: data}
	}
	try("as it is", good, false)
	try("another kind", devices.Payload{Kind: "other", Version: good.Version, Data: good.Data}, true)
	try("another version", devices.Payload{Kind: good.Kind, Version: good.Version + 1, Data: good.Data}, true)
	try("one byte more", with(append(slices.Clone(good.Data), 0)), true)
	try("too much", with(make([]byte, devices.MaxPayload+1)), true)
	step := 1 + len(good.Data)/512
	for n := 0; n < len(good.Data); n += step {
		try(fmt.Sprintf("cut to %d bytes", n), with(good.Data[:n]), true)
	}
	for n := 0; n < len(good.Data); n += step {
		for _, flip := range []byte{0x01, 0x80, 0xff} {
			data := slices.Clone(good.Data)
			data[n] ^= flip
			try(fmt.Sprintf("byte %d changed by %#x", n, flip), with(data), false)
		}
	}
}
