package devices

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newEvent(t testing.TB) *Event {
	t.Helper()
	e, err := NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func TestEvent_counts_and_is_harmless_after_close(t *testing.T) {
	e := newEvent(t)
	for range 3 {
		e.Signal()
	}
	if err := e.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := e.Taken(); n != 3 {
		t.Errorf("%d taken, want 3", n)
	}
	waiting := make(chan error)
	go func() { waiting <- e.Wait() }()
	e.Signal()
	if err := <-waiting; err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// Signal does not write to a file that has since got the descriptor's number.
	f, err := os.Create(t.TempDir() + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	e.Signal()
	if info, err := f.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("a closed event wrote to another file (%v)", err)
	}
	if err := e.Wait(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("waiting for a closed event: %v", err)
	}
}

// registers is a window that records its last access.
type registers struct {
	off  uint64
	data []byte
}

func (r *registers) ReadIO(off uint64, p []byte) {
	r.off = off
	for i := range p {
		p[i] = byte(off) + byte(i)
	}
}

func (r *registers) WriteIO(off uint64, p []byte) { r.off, r.data = off, bytes.Clone(p) }

func TestBus_finds_the_window(t *testing.T) {
	var bus Bus
	low, high, top := &registers{}, &registers{}, &registers{}
	for _, w := range []struct {
		base, size uint64
		io         IO
	}{{0x2000, 0x100, high}, {0x1000, 0x10, low}, {0xffff_ffff_ffff_ff00, 0xff, top}} {
		if err := bus.Add(w.base, w.size, w.io); err != nil {
			t.Fatal(err)
		}
	}
	for _, w := range [][2]uint64{
		{0x2000, 0x100}, {0x1fff, 2}, {0x20ff, 1}, {0x2050, 1}, {0x800, 0x2000}, {0x1000, 1}, {0x3000, 0}, {0xffff_ffff_ffff_fff0, 0x20},
	} {
		if err := bus.Add(w[0], w[1], low); err == nil {
			t.Errorf("a window of %#x bytes at %#x was added", w[1], w[0])
		}
	}
	for _, tc := range []struct {
		addr uint64
		n    int
		want *registers
	}{
		{0x1000, 8, low}, {0x100f, 1, low}, {0x100f, 2, nil}, {0x1010, 1, nil}, {0xfff, 1, nil}, {0xfff, 2, nil},
		{0x2000, 4, high}, {0x20fc, 4, high}, {0x20fd, 4, nil}, {0, 1, nil}, {^uint64(0), 1, nil}, {^uint64(0), 8, nil},
		{0xffff_ffff_ffff_fffe, 1, top}, {0xffff_ffff_ffff_fffe, 2, nil},
	} {
		p := make([]byte, tc.n)
		found := bus.Read(tc.addr, p)
		if found != (tc.want != nil) || bus.Write(tc.addr, p) != found {
			t.Errorf("%d bytes at %#x: found %v", tc.n, tc.addr, found)
			continue
		}
		if !found {
			if bytes.Count(p, []byte{0xff}) != tc.n {
				t.Errorf("%d bytes at %#x: nothing answers, but they read % x", tc.n, tc.addr, p)
			}
			continue
		}
		if len(tc.want.data) != tc.n || !bytes.Equal(tc.want.data, p) || p[0] != byte(tc.want.off) {
			t.Errorf("%d bytes at %#x reached offset %#x with % x", tc.n, tc.addr, tc.want.off, tc.want.data)
		}
	}
	var empty Bus
	if empty.Read(0, make([]byte, 1)) || empty.Write(0, []byte{1}) {
		t.Error("an empty bus answers")
	}
}

func TestDecoder_reads_what_the_encoder_wrote(t *testing.T) {
	var e Encoder
	e.Bool(true)
	e.Uint8(1)
	e.Uint16(0x1234)
	e.Uint32(0x12345678)
	e.Uint64(0x123456789abcdef0)
	e.Bytes([]byte("text"))
	e.Bytes(nil)
	e.Bool(false)
	data := e.Data()
	read := func(data []byte) error {
		d := NewDecoder(data)
		ok := d.Bool() && d.Uint8() == 1 && d.Uint16() == 0x1234 && d.Uint32() == 0x12345678 &&
			d.Uint64() == 0x123456789abcdef0 && string(d.Bytes(4)) == "text" && len(d.Bytes(0)) == 0 && !d.Bool()
		if err := d.Finish(); err != nil {
			return err
		}
		if !ok {
			t.Error("something differs")
		}
		return nil
	}
	if err := read(data); err != nil {
		t.Fatal(err)
	}
	for n := range data {
		if err := read(data[:n]); !errors.Is(err, ErrPayload) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	if err := read(append(bytes.Clone(data), 0)); !errors.Is(err, ErrPayload) {
		t.Errorf("a byte more: %v", err)
	}
	for name, data := range map[string][]byte{
		"a string longer than allowed":  {5, 0, 0, 0, 1, 2, 3, 4, 5},
		"a string longer than the data": {4, 0, 0, 0, 1, 2, 3},
		"a string of 4 GiB":             {255, 255, 255, 255, 1},
	} {
		d := NewDecoder(data)
		if p := d.Bytes(4); p != nil || !errors.Is(d.Finish(), ErrPayload) {
			t.Errorf("%s: % x, %v", name, p, d.Finish())
		}
	}
	d := NewDecoder([]byte{2})
	if d.Bool(); !errors.Is(d.Finish(), ErrPayload) {
		t.Error("2 is a flag")
	}
}

func TestPayload_of_another_kind_is_refused(t *testing.T) {
	good := Payload{Kind: "x", Version: 3}
	if err := good.Check("x", 3); err != nil {
		t.Error(err)
	}
	for name, p := range map[string]Payload{
		"another kind": {Kind: "y", Version: 3},
		"too old":      {Kind: "x", Version: 2},
		"too new":      {Kind: "x", Version: 4},
		"too large":    {Kind: "x", Version: 3, Data: make([]byte, MaxPayload+1)},
	} {
		if err := p.Check("x", 3); !errors.Is(err, ErrPayload) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func startWorker(event *Event, handle func()) *Worker {
	w := newWorker(event, handle)
	go w.run()
	return w
}

func TestWorker_runs_after_each_signal_and_not_while_paused(t *testing.T) {
	e := newEvent(t)
	var calls atomic.Int64
	w := startWorker(e, func() { calls.Add(1) })
	defer w.Stop()
	waitFor(t, func() bool { e.Signal(); return calls.Load() > 0 })
	ctx := context.Background()
	for range 2 {
		if err := w.Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	before := calls.Load()
	for range 10 {
		e.Signal()
	}
	time.Sleep(5 * time.Millisecond)
	if n := calls.Load(); n != before {
		t.Fatalf("called %d times while paused", n-before)
	}
	w.Resume()
	waitFor(t, func() bool { return calls.Load() > before })
}

func TestWorker_resume_runs_it_once_without_a_signal(t *testing.T) {
	e := newEvent(t)
	var calls atomic.Int64
	w := startWorker(e, func() { calls.Add(1) })
	defer w.Stop()
	if err := w.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	w.Resume()
	waitFor(t, func() bool { return calls.Load() == 1 })
}

func waitFor(t testing.TB, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !f(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not happen")
		}
	}
}

func TestWorker_pause_gives_up_with_its_context_and_the_worker_runs_on(t *testing.T) {
	e := newEvent(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	w := startWorker(e, func() { entered <- struct{}{}; <-leave })
	e.Signal()
	<-entered
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	if err := w.Pause(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	leave <- struct{}{}
	e.Signal()
	<-entered
	leave <- struct{}{}
	// With nothing to wait for, Pause succeeds even with an ended context.
	waitFor(t, func() bool { return w.Pause(ctx) == nil })
	w.Stop()
}

// Of two overlapping pauses, one gives up. Neither undoes the other.
func TestWorker_pauses_that_overlap(t *testing.T) {
	e := newEvent(t)
	var calls atomic.Int64
	entered, leave := make(chan struct{}, 10), make(chan struct{})
	w := startWorker(e, func() {
		calls.Add(1)
		entered <- struct{}{}
		<-leave
	})
	e.Signal()
	<-entered
	ctx, cancel := context.WithCancel(context.Background())
	impatient, patient := make(chan error), make(chan error)
	go func() { impatient <- w.Pause(ctx) }()
	go func() { patient <- w.Pause(context.Background()) }()
	time.Sleep(5 * time.Millisecond)
	cancel()
	if err := <-impatient; !errors.Is(err, context.Canceled) {
		t.Fatalf("the impatient one got %v", err)
	}
	e.Signal()
	close(leave)
	if err := <-patient; err != nil {
		t.Fatal(err)
	}
	time.Sleep(5 * time.Millisecond)
	if n := calls.Load(); n != 1 {
		t.Fatalf("called %d times, the last while paused", n)
	}
	w.Resume()
	waitFor(t, func() bool { return calls.Load() >= 2 })
	w.Stop()
}

func TestWorker_stops_from_any_state(t *testing.T) {
	for _, paused := range []bool{false, true} {
		w := startWorker(newEvent(t), func() {})
		if paused {
			if err := w.Pause(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		w.Stop()
		if err := w.Pause(context.Background()); err != nil {
			t.Errorf("pausing a stopped worker: %v", err)
		}
	}
}

func TestWorkers_pause_all_or_none(t *testing.T) {
	a, b := newEvent(t), newEvent(t)
	var calls atomic.Int64
	entered, leave := make(chan struct{}), make(chan struct{})
	ws := Workers{
		startWorker(a, func() { calls.Add(1) }),
		startWorker(b, func() { entered <- struct{}{}; <-leave }),
	}
	b.Signal()
	<-entered
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	if err := ws.Pause(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	before := calls.Load()
	a.Signal()
	waitFor(t, func() bool { return calls.Load() > before })
	close(leave)
	ws.Stop()
}

// interrupts counts the interrupts that a device sends.
type interrupts struct {
	queue, config atomic.Int64
	mu            sync.Mutex
	reasons       []error
}

func (i *interrupts) Queue()  { i.queue.Add(1) }
func (i *interrupts) Config() { i.config.Add(1) }
func (i *interrupts) NeedsReset(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.reasons = append(i.reasons, err)
}

// newQueue fills all descriptors with one readable byte, and makes this many of them available.
func newQueue(t *testing.T, available int) (*Queue, *guestmem.Memory) {
	t.Helper()
	mem, err := guestmem.New(guestmem.MinSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	q, err := virtq.New(mem, virtq.Layout{Size: 256, Desc: 0x10000, Avail: 0x20000, Used: 0x30000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 256 {
		d := make([]byte, 16)
		d[2], d[8] = 1, 1 // one byte at 0x10000
		err = errors.Join(err, mem.Write(0x10000+guestmem.GPA(16*i), d), mem.StoreUint16(0x20004+guestmem.GPA(2*i), uint16(i)))
	}
	if err := errors.Join(err, mem.StoreUint16(0x20002, uint16(available))); err != nil {
		t.Fatal(err)
	}
	return &Queue{Queue: q, Kick: newEvent(t)}, mem
}

func TestServe_returns_after_a_batch_and_kicks_itself(t *testing.T) {
	q, _ := newQueue(t, serveBatch+5)
	var irq interrupts
	var c virtq.Chain
	done := 0
	handle := func(*virtq.Chain) error { done++; return nil }
	if err := q.Serve(&irq, &c, handle); err != nil {
		t.Fatal(err)
	}
	if done != serveBatch || irq.queue.Load() != 1 {
		t.Fatalf("%d chains and %d interrupts in one call", done, irq.queue.Load())
	}
	if err := q.Kick.Wait(); err != nil { // without a kick this would block
		t.Fatal(err)
	}
	if err := q.Serve(&irq, &c, handle); err != nil {
		t.Fatal(err)
	}
	if done != serveBatch+5 || irq.queue.Load() != 2 {
		t.Fatalf("%d chains and %d interrupts in all", done, irq.queue.Load())
	}
	// An empty queue causes no interrupt.
	if err := q.Serve(&irq, &c, handle); err != nil || irq.queue.Load() != 2 {
		t.Fatalf("%d interrupts, %v", irq.queue.Load(), err)
	}
}

func TestServe_takes_what_comes_while_it_ends(t *testing.T) {
	q, mem := newQueue(t, 1)
	var irq interrupts
	var c virtq.Chain
	done := 0
	if err := q.Serve(&irq, &c, func(*virtq.Chain) error {
		done++
		// Without a kick: the device asked for none.
		return mem.StoreUint16(0x20002, uint16(min(done+1, 7)))
	}); err != nil {
		t.Fatal(err)
	}
	if done != 7 {
		t.Fatalf("%d chains done", done)
	}
}

func TestServe_gives_the_device_up_once(t *testing.T) {
	q, _ := newQueue(t, 3)
	var irq interrupts
	var c virtq.Chain
	failed := errors.New("failed")
	calls := 0
	for range 3 {
		if err := q.Serve(&irq, &c, func(*virtq.Chain) error { calls++; return failed }); err != failed {
			t.Fatalf("got %v", err)
		}
	}
	if calls != 1 || len(irq.reasons) != 1 || irq.reasons[0] != failed {
		t.Fatalf("%d calls, reasons %v", calls, irq.reasons)
	}
}

// gated is a writer that blocks until its gate opens.
type gated struct {
	mu   sync.Mutex
	b    strings.Builder
	gate chan struct{}
	err  error
}

func (g *gated) Write(p []byte) (int, error) {
	<-g.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	g.b.Write(p)
	return len(p), g.err
}

func (g *gated) String() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.b.String()
}

func TestOutput_is_written_in_order(t *testing.T) {
	g := &gated{gate: make(chan struct{})}
	close(g.gate)
	o := NewOutput(g)
	var want strings.Builder
	for i := range 5000 {
		s := strings.Repeat(string(rune('a'+i%26)), i%100)
		want.WriteString(s)
		waitFor(t, func() bool { return len(o.Pending())+len(s) <= OutputSize })
		_, _ = o.Write([]byte(s))
	}
	waitFor(t, func() bool { return len(o.Pending()) == 0 }) // Pause may not have the time
	if err := o.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	if g.String() != want.String() || len(o.Pending()) != 0 {
		t.Error("output differs when Pause has drained it")
	}
	_, _ = o.Write([]byte("after"))
	time.Sleep(2 * time.Millisecond)
	if g.String() != want.String() || string(o.Pending()) != "after" {
		t.Error("a paused output goes on")
	}
	o.Resume()
	if err := o.Close(); err != nil || g.String() != want.String()+"after" || o.Dropped() != 0 {
		t.Errorf("after Close: %v, %d dropped", err, o.Dropped())
	}
	_, _ = o.Write([]byte("late"))
	if o.Dropped() != 4 {
		t.Errorf("%d dropped after Close", o.Dropped())
	}
}

func TestOutput_keeps_the_oldest_when_it_is_full(t *testing.T) {
	g := &gated{gate: make(chan struct{})}
	o := NewOutput(g)
	_, _ = o.Write([]byte("x"))
	waitFor(t, func() bool { o.mu.Lock(); defer o.mu.Unlock(); return o.writing })
	full := strings.Repeat("0123456789abcdef", OutputSize/16)
	_, _ = o.Write([]byte(full + "lost"))
	for range 1000 {
		_, _ = o.Write([]byte("lost"))
	}
	if o.Dropped() != 4004 || string(o.Pending()) != full {
		t.Errorf("%d dropped", o.Dropped())
	}
	close(g.gate)
	if err := o.Close(); err != nil || g.String() != "x"+full {
		t.Errorf("%v, %d bytes came out", err, len(g.String()))
	}
}

func TestOutput_drops_all_after_its_writer_has_failed(t *testing.T) {
	g := &gated{gate: make(chan struct{}), err: os.ErrPermission}
	close(g.gate)
	o := NewOutput(g)
	_, _ = o.Write([]byte("x"))
	waitFor(t, func() bool { return o.Err() != nil })
	_, _ = o.Write(make([]byte, 2*OutputSize))
	if err := o.Close(); !errors.Is(err, os.ErrPermission) || o.Dropped() != 2*OutputSize {
		t.Errorf("%v, %d dropped", err, o.Dropped())
	}
}

func TestOutput_of_a_stuck_writer_is_given_up_at_close(t *testing.T) {
	g := &gated{gate: make(chan struct{})}
	o := NewOutput(g)
	_, _ = o.Write(make([]byte, 2*outputChunk))
	waitFor(t, func() bool { o.mu.Lock(); defer o.mu.Unlock(); return o.writing })
	if err := o.Close(); err != nil || o.Dropped() != outputChunk {
		t.Errorf("%v, %d dropped", err, o.Dropped())
	}
	close(g.gate)
	<-o.done
}
