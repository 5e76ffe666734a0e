package balloon

import (
	"bytes"
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The queues of a driver that has accepted all features.
const (
	queueStats  = 2
	queueReport = 3
)

func pageNumbers(gpas ...guestmem.GPA) []byte {
	var p []byte
	for _, gpa := range gpas {
		p = binary.LittleEndian.AppendUint32(p, uint32(gpa/PageSize))
	}
	return p
}

func fillPages(t testing.TB, mem *guestmem.Memory, gpa guestmem.GPA, pages int) {
	t.Helper()
	if err := mem.Write(gpa, bytes.Repeat([]byte{0x5a}, pages*PageSize)); err != nil {
		t.Fatal(err)
	}
}

// kept shows which of the pages that fillPages filled are unchanged.
func kept(t testing.TB, mem *guestmem.Memory, gpa guestmem.GPA, pages int) string {
	t.Helper()
	p := make([]byte, pages*PageSize)
	if err := mem.Read(gpa, p); err != nil {
		t.Fatal(err)
	}
	var s []byte
	for i := range pages {
		switch page := p[i*PageSize : (i+1)*PageSize]; bytes.Count(page, page[:1]) {
		case PageSize:
			s = append(s, map[byte]byte{0x5a: 'x', 0: '.'}[page[0]])
		default:
			s = append(s, '?')
		}
	}
	return string(s)
}

func exercise(t testing.TB, d *devicetest.Driver) {
	mem := d.Mem()
	base := devicetest.FreeGPA + 16*PageSize
	fillPages(t, mem, base, 8)
	d.Queue(queueInflate).Do([][]byte{pageNumbers(base+2*PageSize, base+PageSize), pageNumbers(base + 5*PageSize)})
	if got := kept(t, mem, base, 8); got != "x..xx.xx" {
		t.Fatalf("after inflating: %s", got)
	}
	d.Queue(queueDeflate).Do([][]byte{pageNumbers(base + PageSize)})
	if err := mem.Write(base+PageSize, []byte{1}); err != nil {
		t.Fatal(err)
	}

	r := d.Queue(queueReport).Submit(nil, 3*PageSize)
	buf := r.Buffers()[0].GPA
	if _, used := r.Wait(); used != 0 {
		t.Fatalf("a report was written to: %d bytes", used)
	}
	if got := kept(t, mem, buf, 3); got != "..." {
		t.Fatalf("after reporting: %s", got)
	}
}

func TestConformance(t *testing.T) {
	devicetest.Run(t, devicetest.Case{
		New: func(t testing.TB, mem *guestmem.Memory) devices.Device {
			return New(mem, Options{OnError: func(err error) { t.Errorf("host error: %v", err) }})
		},
		Exercise: exercise,
		Idle:     map[int]func(testing.TB, *devicetest.Driver){queueStats: nil}, // the owner asks for no statistics
	})
}

func start(t *testing.T, memory func(*guestmem.Memory) Discarder, features uint64) (*devicetest.Driver, *Device) {
	t.Helper()
	mem := devicetest.NewMemory(t)
	dev := New(memory(mem), Options{})
	d := devicetest.NewDriver(t, dev, mem)
	d.Start(features)
	return d, dev
}

func ram(mem *guestmem.Memory) Discarder { return mem }

// Older versions, which asked the guest for memory and statistics, saved both.
func TestState_of_an_older_version_stays_as_it_is(t *testing.T) {
	var e devices.Encoder
	e.Uint32(10)
	e.Uint32(7)
	e.Bool(true)
	e.Bool(true)
	e.Uint16(5)
	for i := range uint64(8) {
		e.Uint64(i + 1)
	}
	dev := New(&recorder{}, Options{})
	if err := dev.Import(e.Payload(stateKind, stateVersion)); err != nil {
		t.Fatal(err)
	}
	if p, err := dev.Export(); err != nil || !bytes.Equal(p.Data, e.Data()) {
		t.Errorf("% x became % x, %v", e.Data(), p.Data, err)
	}
	d := devicetest.NewDriver(t, dev, devicetest.NewMemory(t))
	d.Start(devicetest.AllFeatures)
	if got := binary.LittleEndian.Uint32(d.Config(configTarget, 4)); got != 10 {
		t.Errorf("the guest is asked for %d pages, want 10", got)
	}
	d.Write32(devicetest.RegConfig+configActual, 7)
	d.Write32(devicetest.RegConfig+configTarget, 99) // read-only
	if dev.actual != 7 || dev.target != 10 {
		t.Errorf("actual %d, target %d", dev.actual, dev.target)
	}
	d.Reset()
	if dev.actual != 0 {
		t.Errorf("the balloon has %d pages after a reset", dev.actual)
	}
}

// recorder is a host that records the discarded ranges.
type recorder struct {
	mu     sync.Mutex
	ranges []guestmem.Range
	err    error
}

func (r *recorder) Discard(gpa guestmem.GPA, n uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ranges = append(r.ranges, guestmem.Range{GPA: gpa, Len: uint32(n)})
	return r.err
}

func TestNeighbouring_pages_go_together(t *testing.T) {
	r := &recorder{}
	d, dev := start(t, func(*guestmem.Memory) Discarder { return r }, devicetest.AllFeatures)
	d.Queue(queueInflate).Do([][]byte{pageNumbers(5*PageSize, 3*PageSize, 4*PageSize, 4*PageSize, 9*PageSize)})
	d.Close()
	want := []guestmem.Range{{GPA: 3 * PageSize, Len: 3 * PageSize}, {GPA: 9 * PageSize, Len: PageSize}}
	if len(r.ranges) != 2 || r.ranges[0] != want[0] || r.ranges[1] != want[1] {
		t.Errorf("discarded %+v, want %+v", r.ranges, want)
	}
	if s := dev.Stats(); s.Inflated.Load() != 4*PageSize {
		t.Errorf("%+v", s)
	}
}

func TestPages_that_are_not_RAM_are_counted_and_nothing_else_happens(t *testing.T) {
	d, dev := start(t, ram, devicetest.AllFeatures)
	base := devicetest.FreeGPA + 16*PageSize
	fillPages(t, d.Mem(), base, 2)
	d.Queue(queueInflate).Do([][]byte{pageNumbers(devicetest.MemorySize, base, 3<<30, 0xffffffff*PageSize)})
	if got := kept(t, d.Mem(), base, 2); got != ".x" {
		t.Errorf("pages: %s", got)
	}
	if s := dev.Stats(); s.BadPages.Load() != 3 || s.Inflated.Load() != PageSize || s.HostErrors.Load() != 0 {
		t.Errorf("%+v", s)
	}
	if s := d.Status(); s&devicetest.StatusNeedsReset != 0 {
		t.Errorf("status %#x", s)
	}
}

func TestEndless_list_is_done_only_so_far(t *testing.T) {
	r := &recorder{}
	d, dev := start(t, func(*guestmem.Memory) Discarder { return r }, devicetest.AllFeatures)
	list := make([]byte, 4*(MaxPages+1000)+3)
	d.Queue(queueInflate).Do([][]byte{list})
	d.Close()
	if s := dev.Stats(); s.BadPages.Load() != 1000 || len(r.ranges) != MaxPages/pieceLen {
		t.Errorf("%+v, %d discards", s, len(r.ranges))
	}
}

func TestHost_error_is_reported_once_and_the_guest_goes_on(t *testing.T) {
	r := &recorder{err: errors.New("no")}
	var told atomic.Int32
	mem := devicetest.NewMemory(t)
	dev := New(r, Options{OnError: func(err error) {
		if !errors.Is(err, r.err) {
			t.Errorf("told %v", err)
		}
		told.Add(1)
	}})
	d := devicetest.NewDriver(t, dev, mem)
	d.Start(devicetest.AllFeatures)
	for range 3 {
		d.Queue(queueInflate).Do([][]byte{pageNumbers(0)})
		d.Queue(queueReport).Do(nil, PageSize)
	}
	if n := told.Load(); n != 1 {
		t.Errorf("told %d times", n)
	}
	if s := dev.Stats(); s.HostErrors.Load() != 6 || s.Inflated.Load() != 0 || s.Reported.Load() != 0 {
		t.Errorf("%+v", s)
	}
}

func TestQueues_are_numbered_without_gaps(t *testing.T) {
	for _, tc := range []struct {
		name     string
		features uint64
		report   int
	}{
		{"all features", devicetest.AllFeatures, 3},
		{"no statistics", devicetest.AllFeatures &^ featureStats, 2},
	} {
		d, dev := start(t, ram, tc.features)
		d.Queue(tc.report).Do(nil, 2*PageSize)
		if s := dev.Stats(); s.Reported.Load() != 2*PageSize {
			t.Errorf("%s: %+v", tc.name, s)
		}
	}
}
