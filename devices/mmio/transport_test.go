package mmio

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plain is a device with two queues that does nothing. It can neither be paused nor saved.
type plain struct {
	config      [16]byte
	activateErr error
	resetErr    error
	activation  *devices.Activation
	activations int
	resets      int
}

func (d *plain) ID() devices.ID       { return 42 }
func (d *plain) Features() uint64     { return 1<<0 | 1<<40 }
func (d *plain) QueueSizes() []uint16 { return []uint16{8, 16} }

func (d *plain) ReadConfig(off uint32, p []byte) {
	clear(p)
	if int(off) < len(d.config) {
		copy(p, d.config[off:])
	}
}

func (d *plain) WriteConfig(off uint32, p []byte) {
	if int(off) < len(d.config) {
		copy(d.config[off:], p)
	}
}

func (d *plain) Activate(a devices.Activation) error {
	d.activations++
	d.activation = &a
	return d.activateErr
}

func (d *plain) Reset() error {
	d.resets++
	if d.resetErr != nil {
		return d.resetErr
	}
	d.activation = nil
	return nil
}

// machine is what surrounds a transport.
type machine struct {
	t *testing.T
	*Transport
	irq  *devices.Event
	mem  *guestmem.Memory
	mu   sync.Mutex
	told []error
}

func newMachine(t *testing.T, dev devices.Device) *machine {
	t.Helper()
	mem, err := guestmem.New(guestmem.MinSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	irq, err := devices.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { irq.Close() })
	m := &machine{t: t, irq: irq, mem: mem}
	m.Transport, err = New(dev, mem, irq, Options{OnError: func(err error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.told = append(m.told, err)
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func (m *machine) in(reg uint64) uint32 {
	var p [4]byte
	m.ReadIO(reg, p[:])
	return binary.LittleEndian.Uint32(p[:])
}

func (m *machine) out(reg uint64, v uint32) {
	var p [4]byte
	binary.LittleEndian.PutUint32(p[:], v)
	m.WriteIO(reg, p[:])
}

// signals returns how many edges were sent since the last call.
func (m *machine) signals() uint64 {
	m.t.Helper()
	before := m.irq.Taken()
	m.irq.Signal() // so that Wait does not block
	if err := m.irq.Wait(); err != nil {
		m.t.Fatal(err)
	}
	return m.irq.Taken() - before - 1
}

// start takes the device to DRIVER_OK; queue 1 stays unused.
func (m *machine) start() {
	m.out(regStatus, 0)
	m.out(regStatus, statusAcknowledge)
	m.out(regStatus, statusAcknowledge|statusDriver)
	m.out(regDriverFeaturesSel, 1)
	m.out(regDriverFeatures, 1) // VERSION_1
	m.out(regStatus, statusAcknowledge|statusDriver|statusFeaturesOK)
	m.out(regQueueSel, 0)
	m.out(regQueueNum, 4)
	m.out(regQueueDescLow, 0x10000)
	m.out(regQueueDriverLow, 0x20000)
	m.out(regQueueDeviceLow, 0x30000)
	m.out(regQueueReady, 1)
	m.out(regStatus, statusAcknowledge|statusDriver|statusFeaturesOK|statusDriverOK)
}

func TestDevices_that_cannot_be_are_refused(t *testing.T) {
	for name, sizes := range map[string][]uint16{
		"size zero":           {8, 0},
		"size not a power":    {8, 12},
		"size beyond largest": {2 * virtq.MaxSize},
		"too many queues":     make([]uint16, MaxQueues+1),
	} {
		if _, err := New(sized{&plain{}, sizes}, nil, nil, Options{}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

type sized struct {
	*plain
	sizes []uint16
}

func (s sized) QueueSizes() []uint16 { return s.sizes }

func TestActivation_has_what_the_driver_chose(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	m.start()
	a := dev.activation
	if a == nil {
		t.Fatal("not activated")
	}
	if a.Features != FeatureVersion1 || a.Restored || a.Interrupt == nil || len(a.Queues) != 2 || a.Queues[1] != nil {
		t.Fatalf("%+v", a)
	}
	want := virtq.Layout{Size: 4, Desc: 0x10000, Avail: 0x20000, Used: 0x30000}
	if q := a.Queues[0]; q.Layout() != want || q.Kick != m.kicks[0] {
		t.Fatalf("%+v", q.Layout())
	}
	if all := m.Layouts(); len(all) != 1 || all[0] != want {
		t.Errorf("layouts: %+v", all)
	}
}

func TestKicks_made_ahead_are_taken(t *testing.T) {
	var kicks []*devices.Event
	for range 2 {
		e, err := devices.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.Close() })
		kicks = append(kicks, e)
	}
	for _, wrong := range [][]*devices.Event{{}, kicks[:1]} {
		if _, err := New(&plain{}, nil, nil, Options{Kicks: wrong}); err == nil {
			t.Errorf("%d kick events for two queues: accepted", len(wrong))
		}
	}
	if _, err := New(sized{&plain{}, []uint16{8, 3}}, nil, nil, Options{Kicks: kicks}); err == nil {
		t.Error("a queue of size 3: accepted")
	}
	tr, err := New(&plain{}, nil, nil, Options{Kicks: kicks})
	if err != nil {
		t.Fatal(err)
	}
	for i, k := range kicks {
		// Wait fails for a closed event.
		k.Signal()
		if err := k.Wait(); err != nil {
			t.Errorf("after what failed, event %d: %v", i, err)
		}
		if tr.kicks[i] != k {
			t.Errorf("queue %d has another event", i)
		}
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	if err := kicks[0].Wait(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestBoth_halves_of_an_address_count(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	m.out(regStatus, statusAcknowledge)
	m.out(regStatus, statusAcknowledge|statusDriver)
	m.out(regDriverFeaturesSel, 1)
	m.out(regDriverFeatures, 1)
	m.out(regStatus, statusAcknowledge|statusDriver|statusFeaturesOK)
	m.out(regQueueSel, 1)
	for _, reg := range []uint64{regQueueDescLow, regQueueDriverLow, regQueueDeviceLow} {
		m.out(reg, 0x89abcdef)
		m.out(reg+4, 0x01234567)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	const want = 0x0123456789abcdef
	if l := m.queues[1].layout; l.Desc != want || l.Avail != want || l.Used != want {
		t.Errorf("%+v", l)
	}
}

func TestActivation_that_fails_needs_a_reset(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		told int
	}{
		{"by the guest's fault", fmt.Errorf("no: %w", virtq.ErrLayout), 0},
		{"by the host's", errors.New("no tap"), 1},
	} {
		dev := &plain{activateErr: tc.err}
		m := newMachine(t, dev)
		m.start()
		if s := m.in(regStatus); s != statusAcknowledge|statusDriver|statusFeaturesOK|statusDriverOK|statusNeedsReset {
			t.Errorf("%s: status %#x", tc.name, s)
		}
		if s := m.in(regInterruptStatus); s != interruptConfig || m.signals() != 1 {
			t.Errorf("%s: interrupt status %#x", tc.name, s)
		}
		if len(m.told) != tc.told || tc.told > 0 && !errors.Is(m.told[0], tc.err) {
			t.Errorf("%s: the owner was told %v", tc.name, m.told)
		}
		if dev.resets == 0 {
			t.Errorf("%s: what had been started was not stopped", tc.name)
		}
		// Another try does nothing without a reset, and works with one.
		m.out(regStatus, m.in(regStatus)|statusDriverOK)
		if dev.activations != 1 {
			t.Errorf("%s: activated %d times", tc.name, dev.activations)
		}
		dev.activateErr = nil
		m.start()
		if s := m.in(regStatus); s&statusNeedsReset != 0 || dev.activation == nil {
			t.Errorf("%s: status %#x after another try", tc.name, s)
		}
	}
}

func TestDevice_that_cannot_be_stopped_keeps_asking_for_a_reset(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	m.start()
	dev.resetErr = errors.New("stuck")
	m.out(regStatus, 0)
	if s := m.in(regStatus); s&statusNeedsReset == 0 || s&statusDriverOK == 0 {
		t.Errorf("status %#x", s)
	}
	if len(m.told) != 1 || !errors.Is(m.told[0], dev.resetErr) {
		t.Errorf("the owner was told %v", m.told)
	}
	if err := m.Close(); !errors.Is(err, dev.resetErr) {
		t.Errorf("Close: %v", err)
	}
	dev.resetErr = nil
	m.closed = false
	m.out(regStatus, 0)
	if s := m.in(regStatus); s != 0 {
		t.Errorf("status %#x when it works again", s)
	}
}

func TestEvery_interrupt_is_an_edge(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	// Without a driver the transport interrupts nothing.
	m.Transport.Queue()
	m.Config()
	if m.in(regInterruptStatus) != 0 || m.signals() != 0 {
		t.Error("an interrupt before DRIVER_OK")
	}
	m.start()
	irq := dev.activation.Interrupt
	irq.Queue()
	irq.Queue()
	if s, n := m.in(regInterruptStatus), m.signals(); s != interruptQueue || n != 2 {
		t.Errorf("status %#x after %d edges", s, n)
	}
	// An interrupt between the driver's read and its acknowledgement.
	irq.Queue()
	irq.Config()
	m.out(regInterruptACK, interruptQueue)
	if s, n := m.in(regInterruptStatus), m.signals(); s != interruptConfig || n != 2 {
		t.Errorf("status %#x after %d edges", s, n)
	}
	m.out(regInterruptACK, ^uint32(0))
	irq.NeedsReset(virtq.ErrHeadIndex)
	if s, n := m.in(regInterruptStatus), m.signals(); s != interruptConfig || n != 1 {
		t.Errorf("status %#x after %d edges", s, n)
	}
	if s := m.Stats(); s.Interrupts != 5 || s.NeedsReset != 1 || len(m.told) != 0 {
		t.Errorf("%+v, told %v", s, m.told)
	}
	m.out(regStatus, 0)
	if m.in(regInterruptStatus) != 0 {
		t.Error("a reset leaves an interrupt")
	}
	// A late goroutine of the device's owner.
	irq.Config()
	if m.in(regInterruptStatus) != 0 || m.signals() != 0 {
		t.Error("an interrupt after a reset")
	}
}

func TestInterrupts_that_are_held_come_as_one_with_release(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	m.start()
	irq := dev.activation.Interrupt
	m.Release() // none is held
	m.Hold()
	irq.Queue()
	irq.Config()
	if s, n := m.in(regInterruptStatus), m.signals(); s != interruptQueue|interruptConfig || n != 0 {
		t.Errorf("while they are held: status %d, %d signals", s, n)
	}
	m.Release()
	m.Release()
	if n := m.signals(); n != 1 {
		t.Errorf("%d signals at the release, want 1", n)
	}
	irq.Queue()
	if n := m.signals(); n != 1 {
		t.Errorf("%d signals afterwards, want 1", n)
	}
	// None gets lost between Hold and Release.
	for range 1000 {
		m.Hold()
		var wg sync.WaitGroup
		wg.Go(irq.Queue)
		wg.Go(m.Release)
		wg.Wait()
		if n := m.signals(); n != 1 {
			t.Fatalf("%d signals for one interrupt", n)
		}
	}
}

func TestConfig_generation_moves_with_every_change(t *testing.T) {
	m := newMachine(t, &plain{})
	m.start()
	before := m.in(regConfigGeneration)
	m.Config()
	m.Transport.Queue()
	if after := m.in(regConfigGeneration); after != before+1 {
		t.Errorf("generation %d, then %d", before, after)
	}
}

func TestConfiguration_space_takes_any_width_and_ends_at_its_end(t *testing.T) {
	dev := &plain{}
	for i := range dev.config {
		dev.config[i] = byte(i + 1)
	}
	m := newMachine(t, dev)
	for _, tc := range []struct {
		off  uint64
		n    int
		want []byte
	}{
		{regConfig, 1, []byte{1}},
		{regConfig + 1, 2, []byte{2, 3}},
		{regConfig + 3, 4, []byte{4, 5, 6, 7}},
		{regConfig + 8, 8, []byte{9, 10, 11, 12, 13, 14, 15, 16}},
		{regConfig + 14, 4, []byte{15, 16, 0, 0}},
		{regConfig + 16, 4, []byte{0, 0, 0, 0}},
		{regEnd - 4, 4, []byte{0, 0, 0, 0}},
		{regEnd - 2, 4, []byte{0, 0, 0, 0}},
		{regConfig - 1, 2, []byte{0, 0}},
		{WindowSize - 1, 1, []byte{0}},
	} {
		got := make([]byte, tc.n)
		for i := range got {
			got[i] = 0xaa
		}
		m.ReadIO(tc.off, got)
		if string(got) != string(tc.want) {
			t.Errorf("%d bytes at %#x: % x, want % x", tc.n, tc.off, got, tc.want)
		}
	}
	m.WriteIO(regConfig+2, []byte{0xf1, 0xf2})
	m.WriteIO(regConfig-1, []byte{0xff, 0xff})
	m.WriteIO(regEnd-1, []byte{0xff, 0xff})
	if dev.config[0] != 1 || dev.config[2] != 0xf1 || dev.config[3] != 0xf2 || dev.config[4] != 5 {
		t.Errorf("configuration % x", dev.config)
	}
}

func TestKicks_reach_their_queue(t *testing.T) {
	m := newMachine(t, &plain{})
	m.start()
	for _, v := range []uint32{1, 2, 64, 1 << 16, ^uint32(0)} {
		m.out(QueueNotify, v)
	}
	if err := m.kicks[1].Wait(); err != nil {
		t.Fatal(err)
	}
	if s := m.Stats(); s.Kicks != 1 {
		t.Errorf("%+v", s)
	}
}

func TestShared_memory_regions_do_not_exist(t *testing.T) {
	m := newMachine(t, &plain{})
	for reg := uint64(regSHMLenLow); reg <= regSHMBaseHigh; reg += 4 {
		if v := m.in(reg); v != ^uint32(0) {
			t.Errorf("register %#x reads %#x", reg, v)
		}
	}
}

func TestState_of_a_device_without_any_of_its_own(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	m.start()
	dev.activation.Queues[0].SetPosition(virtq.Position{NextAvail: 7, NextUsed: 6})
	if _, err := m.Export(); !errors.Is(err, devices.ErrNotPaused) {
		t.Errorf("exporting a running device: %v", err)
	}
	if err := m.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	state, err := m.Export()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Import(state); !errors.Is(err, ErrInUse) {
		t.Errorf("importing into a device in use: %v", err)
	}

	fresh := &plain{}
	n := newMachine(t, fresh)
	if err := n.Import(state); err != nil {
		t.Fatal(err)
	}
	if err := n.Import(state); !errors.Is(err, ErrInUse) {
		t.Errorf("importing twice: %v", err)
	}
	if fresh.activations != 0 {
		t.Error("activated by Import")
	}
	if err := n.Resume(); err == nil {
		t.Error("resumed before it was restored")
	}
	// An imported state can be exported again, before Restore and after it.
	for range 2 {
		again, err := n.Export()
		if err != nil || string(again.Data) != string(state.Data) {
			t.Errorf("exported % x, %v, want % x", again.Data, err, state.Data)
		}
		if err := n.Restore(); err != nil {
			t.Fatal(err)
		}
	}
	a := fresh.activation
	if fresh.activations != 1 || !a.Restored || a.Features != FeatureVersion1 || a.Queues[0].Position() != (virtq.Position{NextAvail: 7, NextUsed: 6}) {
		t.Errorf("%d activations, %+v", fresh.activations, a)
	}
	if err := n.Resume(); err != nil {
		t.Fatal(err)
	}
}

func TestState_that_cannot_be_is_refused(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	m.start()
	if err := m.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	good, err := m.Export()
	if err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	// Offsets of the layout in state.go.
	const status, irqs, accepted, beyond, active, count, size0, ready0, desc0 = 4, 8, 28, 36, 37, 38, 40, 42, 43
	for _, tc := range []struct {
		name   string
		change func(p []byte)
	}{
		{"another device", func(p []byte) { p[0]++ }},
		{"unknown status bit", func(p []byte) { p[status] |= 16 }},
		{"running without features", func(p []byte) { p[status] &^= statusFeaturesOK }},
		{"features without a driver", func(p []byte) { p[status] &^= statusDriver }},
		{"a driver without acknowledgement", func(p []byte) { p[status] &^= statusAcknowledge }},
		{"active without DRIVER_OK", func(p []byte) { p[status] &^= statusDriverOK }},
		{"unknown interrupt", func(p []byte) { p[irqs] = 4 }},
		{"feature that is not offered", func(p []byte) { p[accepted] |= 2 }},
		{"no VERSION_1", func(p []byte) { le.PutUint64(p[accepted:], 0) }},
		{"feature beyond 63", func(p []byte) { p[beyond] = 1 }},
		{"flag that is none", func(p []byte) { p[active] = 2 }},
		{"fewer queues", func(p []byte) { p[count] = 1 }},
		{"65535 queues", func(p []byte) { p[count], p[count+1] = 0xff, 0xff }},
		{"queue of size 3", func(p []byte) { p[size0] = 3 }},
		{"queue larger than allowed", func(p []byte) { p[size0] = 16 }},
		{"ready queue of size zero", func(p []byte) { p[size0] = 0 }},
		{"ready flag that is none", func(p []byte) { p[ready0] = 3 }},
		{"queue outside of RAM", func(p []byte) { p[desc0+6] = 1 }},
		{"queue misaligned", func(p []byte) { p[desc0] = 8 }},
		{"state of a device that has none", func(p []byte) { p[len(p)-8] = 1 }},
	} {
		bad := good
		bad.Data = append([]byte(nil), good.Data...)
		tc.change(bad.Data)
		dev := &plain{}
		n := newMachine(t, dev)
		if err := n.Import(bad); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: %v", tc.name, err)
		}
		if dev.activations != 0 || n.in(regStatus) != 0 || n.paused {
			t.Errorf("%s: something has changed", tc.name)
		}
		if err := n.Import(good); err != nil {
			t.Errorf("%s: the good state is refused afterwards: %v", tc.name, err)
		}
	}
}

func TestRestore_that_fails_says_so(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	m.start()
	if err := m.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	state, err := m.Export()
	if err != nil {
		t.Fatal(err)
	}
	fresh := &plain{activateErr: errors.New("no tap")}
	n := newMachine(t, fresh)
	if err := n.Import(state); err != nil {
		t.Fatal(err)
	}
	if err := n.Restore(); !errors.Is(err, fresh.activateErr) {
		t.Fatalf("got %v", err)
	}
	if err := n.Resume(); err == nil {
		t.Error("resumed")
	}
	fresh.activateErr = nil
	if err := errors.Join(n.Restore(), n.Resume()); err != nil {
		t.Errorf("another try: %v", err)
	}
}

// slow can be paused, but not at once.
type slow struct {
	plain
	pauses, resumes atomic.Int32
	release         chan struct{}
}

func (d *slow) Pause(ctx context.Context) error {
	d.pauses.Add(1)
	select {
	case <-d.release:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *slow) Resume() error {
	d.resumes.Add(1)
	return nil
}

func TestInterrupt_registers_do_not_wait_for_a_pause(t *testing.T) {
	dev := &slow{release: make(chan struct{})}
	m := newMachine(t, dev)
	m.start()
	paused := make(chan error)
	go func() { paused <- m.Pause(context.Background()) }()
	for dev.pauses.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	// The device waits for its last request, whose interrupt must get through.
	m.Transport.Queue()
	done := make(chan uint32)
	go func() {
		s := m.in(regInterruptStatus)
		m.out(regInterruptACK, s)
		m.out(QueueNotify, 0)
		_ = m.in(regStatus)
		done <- s
	}()
	select {
	case s := <-done:
		if s != interruptQueue {
			t.Errorf("interrupt status %#x", s)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the handler waits for the pause")
	}
	close(dev.release)
	if err := <-paused; err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(); err != nil || dev.resumes.Load() != 1 {
		t.Fatalf("%v, %d times resumed", err, dev.resumes.Load())
	}
}

func TestPause_that_is_given_up_leaves_the_device_running(t *testing.T) {
	dev := &slow{release: make(chan struct{})}
	m := newMachine(t, dev)
	m.start()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := m.Pause(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if _, err := m.Export(); !errors.Is(err, devices.ErrNotPaused) {
		t.Errorf("exporting: %v", err)
	}
	close(dev.release)
}

func TestDevice_started_in_a_paused_machine_is_paused(t *testing.T) {
	dev := &slow{release: make(chan struct{})}
	close(dev.release)
	m := newMachine(t, dev)
	if err := m.Pause(context.Background()); err != nil || dev.pauses.Load() != 0 {
		t.Fatalf("%v, an inactive device was paused %d times", err, dev.pauses.Load())
	}
	m.start()
	if dev.pauses.Load() != 1 {
		t.Error("it runs")
	}
	if err := m.Resume(); err != nil || dev.resumes.Load() != 1 {
		t.Errorf("%v, resumed %d times", err, dev.resumes.Load())
	}
}

// Several vCPUs access the registers at once, for the race detector.
func TestRegisters_from_several_VCPUs(t *testing.T) {
	dev := &plain{}
	m := newMachine(t, dev)
	var vcpus sync.WaitGroup
	for range 4 {
		vcpus.Add(1)
		go func() {
			defer vcpus.Done()
			for range 200 {
				m.start()
				for reg := uint64(0); reg < 0x110; reg += 4 {
					m.in(reg)
				}
				m.Config()
				m.Transport.Queue()
				m.NeedsReset(virtq.ErrLoop)
				m.out(regInterruptACK, 3)
				m.Stats()
			}
		}()
	}
	for range 100 {
		if err := errors.Join(m.Pause(context.Background()), m.Resume()); err != nil {
			t.Error(err)
		}
	}
	vcpus.Wait()
	m.start()
	if s := m.in(regStatus); s != statusAcknowledge|statusDriver|statusFeaturesOK|statusDriverOK {
		t.Errorf("status %#x", s)
	}
}
