package console

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// screen is a writer that a test can look at.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *screen) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b.Reset()
}

func typeIn(d *devicetest.Driver, text string) (n int) {
	d.WithDevice(func(dev devices.Device) { n = dev.(*Device).Input([]byte(text)) })
	return n
}

func TestConformance(t *testing.T) {
	var out screen
	var sequence atomic.Uint64
	devicetest.Run(t, devicetest.Case{
		New: func(t testing.TB, _ *guestmem.Memory) devices.Device {
			dev := New(&out, Options{})
			t.Cleanup(func() { dev.Close() })
			return dev
		},
		Exercise: func(t testing.TB, d *devicetest.Driver) {
			mark := fmt.Sprintf("<%d>", sequence.Add(1))
			// Printed text arrives whole and in order.
			out.clear()
			d.Queue(queueTransmit).Do([][]byte{[]byte("print"), []byte("ed "), []byte(mark)})
			devicetest.WaitFor(t, "the output", func() bool { return strings.Contains(out.String(), "printed "+mark) })
			// Typed text does too, after what an earlier driver has left.
			if n := typeIn(d, "typed "+mark); n != len(mark)+6 {
				t.Fatalf("%d bytes were taken", n)
			}
			var got []byte
			for !bytes.HasSuffix(got, []byte("typed "+mark)) {
				p, used := d.Queue(queueReceive).Do(nil, 3, 4)
				if used == 0 {
					t.Fatal("an empty buffer came back")
				}
				got = append(got, p[:used]...)
			}
		},
		Idle: map[int]func(testing.TB, *devicetest.Driver){
			queueReceive: func(_ testing.TB, d *devicetest.Driver) { typeIn(d, "x") },
		},
	})
}

func start(t *testing.T, w *stuckWriter) (*devicetest.Driver, *Device) {
	t.Helper()
	dev := New(w, Options{Columns: 80, Rows: 25})
	t.Cleanup(func() { dev.Close() })
	t.Cleanup(w.release)
	d := devicetest.NewDriver(t, dev, devicetest.NewMemory(t))
	d.Start(devicetest.AllFeatures)
	return d, dev
}

// stuckWriter blocks until it is released, and then takes all.
type stuckWriter struct {
	screen
	once sync.Once
	gate chan struct{}
}

func newStuckWriter() *stuckWriter { return &stuckWriter{gate: make(chan struct{})} }

func (w *stuckWriter) release() { w.once.Do(func() { close(w.gate) }) }

func (w *stuckWriter) Write(p []byte) (int, error) {
	<-w.gate
	return w.screen.Write(p)
}

func TestSizeIsInTheConfigurationAndChanges(t *testing.T) {
	d, dev := start(t, newStuckWriter())
	size := func() (uint16, uint16) {
		c := d.Config(0, 4)
		return binary.LittleEndian.Uint16(c), binary.LittleEndian.Uint16(c[2:])
	}
	if c, r := size(); c != 80 || r != 25 {
		t.Errorf("%d columns, %d rows", c, r)
	}
	before := d.ConfigChanges()
	dev.Resize(132, 50)
	devicetest.WaitFor(t, "the interrupt", func() bool { return d.ConfigChanges() > before })
	if c, r := size(); c != 132 || r != 50 {
		t.Errorf("%d columns, %d rows", c, r)
	}
}

func TestStuckWriterDelaysTheGuestOnceAndNeverPause(t *testing.T) {
	w := newStuckWriter()
	d, dev := start(t, w)
	begin := time.Now()
	line := bytes.Repeat([]byte("a"), 1<<10)
	for range 1000 {
		d.Queue(queueTransmit).Do([][]byte{line})
	}
	if err := d.Transport().Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("a stuck writer held the guest up for %v", took)
	}
	dropped := dev.Stats().OutputDropped
	if min := uint64(1000<<10 - devices.OutputSize - 64<<10); dropped < min {
		t.Errorf("%d bytes dropped, want at least %d", dropped, min)
	}
	if err := d.Transport().Resume(); err != nil {
		t.Fatal(err)
	}
	w.release()
	// A writer that has not come back yet is not waited for.
	devicetest.WaitFor(t, "the writer's return", func() bool { return w.String() != "" })
	d.Queue(queueTransmit).Do([][]byte{[]byte("and on it goes")})
	devicetest.WaitFor(t, "the output", func() bool { return strings.HasSuffix(w.String(), "and on it goes") })
	if got := uint64(len(w.String())); got+dropped != 1000<<10+14 {
		t.Errorf("%d bytes came out and %d were dropped of %d", got, dropped, 1000<<10+14)
	}
}

// slowWriter takes its time, but takes all.
type slowWriter struct{ screen }

func (w *slowWriter) Write(p []byte) (int, error) {
	time.Sleep(time.Millisecond)
	return w.screen.Write(p)
}

func TestSlowWriterLosesNothing(t *testing.T) {
	var w slowWriter
	dev := New(&w, Options{})
	defer dev.Close()
	dev.patience = devicetest.Timeout // however busy the host is
	d := devicetest.NewDriver(t, dev, devicetest.NewMemory(t))
	d.Start(devicetest.AllFeatures)
	var want bytes.Buffer
	for i := range 100 {
		p := bytes.Repeat([]byte{byte(i)}, 4<<10)
		want.Write(p)
		d.Queue(queueTransmit).Submit([][]byte{p})
	}
	devicetest.WaitFor(t, "the output", func() bool { return len(w.String()) == want.Len() })
	if w.String() != want.String() || dev.Stats().OutputDropped != 0 {
		t.Errorf("output differs, or was dropped: %+v", dev.Stats())
	}
}

func TestOutputOfOneRequestIsBounded(t *testing.T) {
	var w screen
	dev := New(&w, Options{})
	defer dev.Close()
	dev.patience = devicetest.Timeout
	d := devicetest.NewDriver(t, dev, devicetest.NewMemory(t))
	d.Start(devicetest.AllFeatures)
	d.Queue(queueTransmit).Do([][]byte{make([]byte, MaxOutput+1000)})
	devicetest.WaitFor(t, "the output", func() bool { return len(w.String()) == MaxOutput })
	if n := dev.Stats().OutputDropped; n != 1000 {
		t.Errorf("%d bytes dropped", n)
	}
}

func TestInputFloodIsBounded(t *testing.T) {
	d, dev := start(t, newStuckWriter())
	flood := strings.Repeat("x", 1<<20)
	if n := typeIn(d, flood); n != InputSize {
		t.Errorf("%d bytes taken, want %d", n, InputSize)
	}
	if n := typeIn(d, flood); n != 0 {
		t.Errorf("%d bytes taken more", n)
	}
	if _, used := d.Queue(queueReceive).Do(nil, 10000); used != 10000 {
		t.Errorf("%d bytes read", used)
	}
	if n := typeIn(d, flood); n != 10000 {
		t.Errorf("%d bytes taken after 10000 were read", n)
	}
	if n := dev.Stats().InputRefused; n != 3<<20-InputSize-10000 {
		t.Errorf("%d bytes refused", n)
	}
}

func TestInputFromBeforeTheDriverIsKept(t *testing.T) {
	dev := New(nil, Options{})
	defer dev.Close()
	dev.Input([]byte("early"))
	d := devicetest.NewDriver(t, dev, devicetest.NewMemory(t))
	d.Start(devicetest.AllFeatures)
	if got, used := d.Queue(queueReceive).Do(nil, 16); string(got[:used]) != "early" {
		t.Errorf("read %q", got[:used])
	}
}

func TestUnwrittenOutputMovesWithTheState(t *testing.T) {
	stuck := newStuckWriter()
	d, _ := start(t, stuck)
	d.Queue(queueTransmit).Do([][]byte{bytes.Repeat([]byte("1"), 10<<10)})
	if err := d.Transport().Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	var w screen
	fresh := New(&w, Options{})
	defer fresh.Close()
	if err := d.Move(fresh); err != nil {
		t.Fatal(err)
	}
	d.Queue(queueTransmit).Do([][]byte{[]byte("2")})
	// Of the ten KiB, one write of at most four is with the stuck writer.
	devicetest.WaitFor(t, "the output", func() bool {
		s := w.String()
		return strings.HasSuffix(s, "12") && len(s) >= 6<<10+1
	})
}

func TestFailedWriterLosesOutputAndNothingElse(t *testing.T) {
	dev := New(failing{}, Options{})
	d := devicetest.NewDriver(t, dev, devicetest.NewMemory(t))
	d.Start(devicetest.AllFeatures)
	for range 200 {
		d.Queue(queueTransmit).Do([][]byte{make([]byte, 4<<10)})
	}
	if err := d.Transport().Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if err := dev.Close(); !errors.Is(err, errFailing) {
		t.Errorf("Close: %v", err)
	}
}

var errFailing = errors.New("no screen")

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errFailing }
