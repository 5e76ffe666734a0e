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

func statistic(tag uint16, v uint64) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint16(nil, tag), v)
}

func fillPages(t testing.TB, mem *guestmem.Memory, gpa guestmem.GPA, pages int) {
	t.Helper()
	if err := mem.Write(gpa, bytes.Repeat([]byte{0x5a}, pages*PageSize)); err != nil {
		t.Fatal(err)
	}
}

// kept says which of the pages that fillPages has filled are still so.
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

var sequence atomic.Uint64

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

	free := sequence.Add(1)
	s := d.Queue(queueStats).Submit([][]byte{append(statistic(4, free), statistic(5, 1<<30)...)})
	device := func() (dev *Device) {
		d.WithDevice(func(x devices.Device) { dev = x.(*Device) })
		return dev
	}
	devicetest.WaitFor(t, "statistics", func() bool {
		got, ok := device().GuestStats()
		return ok && got.Free == free && got.Total == 1<<30
	})
	d.WithDevice(func(x devices.Device) { x.(*Device).RequestStats() })
	s.Wait()
}

func TestConformance(t *testing.T) {
	devicetest.Run(t, devicetest.Case{
		New: func(t testing.TB, mem *guestmem.Memory) devices.Device {
			return New(mem, Options{OnError: func(err error) { t.Errorf("host error: %v", err) }})
		},
		Exercise: exercise,
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

func TestTargetReachesTheGuestAndItsAnswerTheHost(t *testing.T) {
	d, dev := start(t, ram, devicetest.AllFeatures)
	before := d.ConfigChanges()
	dev.SetTarget(10*PageSize + 1)
	devicetest.WaitFor(t, "the interrupt", func() bool { return d.ConfigChanges() > before })
	if got := binary.LittleEndian.Uint32(d.Config(configTarget, 4)); got != 10 {
		t.Errorf("the guest is asked for %d pages, want 10", got)
	}
	d.Write32(devicetest.RegConfig+configActual, 7)
	d.Write32(devicetest.RegConfig+configTarget, 99) // read-only
	if s := dev.Stats(); s.Actual != 7*PageSize || s.Target != 10*PageSize {
		t.Errorf("%+v", s)
	}
	dev.SetTarget(1 << 60)
	if s := dev.Stats(); s.Target != (1<<32-1)*PageSize {
		t.Errorf("target %d", s.Target)
	}
	d.Reset()
	if s := dev.Stats(); s.Actual != 0 {
		t.Errorf("the balloon has %d bytes after a reset", s.Actual)
	}
}

// recorder is a host that counts what it gets.
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

func TestNeighbouringPagesGoTogether(t *testing.T) {
	r := &recorder{}
	d, dev := start(t, func(*guestmem.Memory) Discarder { return r }, devicetest.AllFeatures)
	d.Queue(queueInflate).Do([][]byte{pageNumbers(5*PageSize, 3*PageSize, 4*PageSize, 4*PageSize, 9*PageSize)})
	d.Close()
	want := []guestmem.Range{{GPA: 3 * PageSize, Len: 3 * PageSize}, {GPA: 9 * PageSize, Len: PageSize}}
	if len(r.ranges) != 2 || r.ranges[0] != want[0] || r.ranges[1] != want[1] {
		t.Errorf("discarded %+v, want %+v", r.ranges, want)
	}
	if s := dev.Stats(); s.Inflated != 4*PageSize {
		t.Errorf("%+v", s)
	}
}

func TestPagesThatAreNotRAMAreCountedAndNothingElseHappens(t *testing.T) {
	d, dev := start(t, ram, devicetest.AllFeatures)
	base := devicetest.FreeGPA + 16*PageSize
	fillPages(t, d.Mem(), base, 2)
	d.Queue(queueInflate).Do([][]byte{pageNumbers(devicetest.MemorySize, base, 3<<30, 0xffffffff*PageSize)})
	if got := kept(t, d.Mem(), base, 2); got != ".x" {
		t.Errorf("pages: %s", got)
	}
	if s := dev.Stats(); s.BadPages != 3 || s.Inflated != PageSize || s.HostErrors != 0 {
		t.Errorf("%+v", s)
	}
	if s := d.Status(); s&devicetest.StatusNeedsReset != 0 {
		t.Errorf("status %#x", s)
	}
}

func TestEndlessListIsDoneOnlySoFar(t *testing.T) {
	r := &recorder{}
	d, dev := start(t, func(*guestmem.Memory) Discarder { return r }, devicetest.AllFeatures)
	list := make([]byte, 4*(MaxPages+1000)+3)
	d.Queue(queueInflate).Do([][]byte{list})
	d.Close()
	if s := dev.Stats(); s.BadPages != 1000 || len(r.ranges) != MaxPages/pieceLen {
		t.Errorf("%+v, %d discards", s, len(r.ranges))
	}
}

func TestHostErrorIsReportedOnceAndTheGuestGoesOn(t *testing.T) {
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
	if s := dev.Stats(); s.HostErrors != 6 || s.Inflated != 0 || s.Reported != 0 {
		t.Errorf("%+v", s)
	}
}

func TestQueuesAreNumberedWithoutGaps(t *testing.T) {
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
		if s := dev.Stats(); s.Reported != 2*PageSize {
			t.Errorf("%s: %+v", tc.name, s)
		}
	}
}

func TestStatisticsAreBounded(t *testing.T) {
	d, dev := start(t, ram, devicetest.AllFeatures)
	var raw []byte
	for tag := range uint16(8) {
		raw = append(raw, statistic(tag, uint64(tag)+1)...)
	}
	raw = append(raw, statistic(8, 99)...)
	raw = append(raw, statistic(0xffff, 99)...)
	for len(raw) < 1<<20 {
		raw = append(raw, statistic(100, 1)...)
	}
	raw = append(raw, statistic(0, 1000)...) // beyond the bound
	d.Queue(queueStats).Submit([][]byte{raw})
	want := GuestStats{1, 2, 3, 4, 5, 6, 7, 8}
	devicetest.WaitFor(t, "statistics", func() bool { got, _ := dev.GuestStats(); return got == want })
	// A second buffer, which no driver sends, returns the first.
	d.Queue(queueStats).Submit([][]byte{statistic(0, 50)})
	devicetest.WaitFor(t, "the first buffer", func() bool { return d.Queue(queueStats).InFlight() == 1 })
}
