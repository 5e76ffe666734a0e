package blk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const diskSize = 8 << 20

func newImage(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return path
}

func newFile(t testing.TB, size int64, readOnly bool) Backend {
	t.Helper()
	f, err := os.OpenFile(newImage(t, size), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if !readOnly {
		return devicetest.NewDisk(t, f)
	}
	b, err := NewImage(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// disk is a driver that makes block requests.
type disk struct {
	t testing.TB
	*devicetest.Driver
}

func header(kind uint32, sector uint64) []byte {
	p := make([]byte, headerSize)
	binary.LittleEndian.PutUint32(p, kind)
	binary.LittleEndian.PutUint64(p[8:], sector)
	return p
}

func (d disk) do(kind uint32, sector uint64, out [][]byte, in ...int) (data []byte, status byte) {
	d.t.Helper()
	data, _ = d.Queue(0).Do(append([][]byte{header(kind, sector)}, out...), append(in, statusSize)...)
	return data[:len(data)-1], data[len(data)-1]
}

func (d disk) mustDo(kind uint32, sector uint64, out [][]byte, in ...int) []byte {
	d.t.Helper()
	data, status := d.do(kind, sector, out, in...)
	if status != statusOK {
		d.t.Fatalf("request %d at sector %d: status %d (%v)", kind, sector, status, d.HostError())
	}
	return data
}

func ranges(rs ...[3]uint64) []byte {
	var p []byte
	for _, r := range rs {
		p = binary.LittleEndian.AppendUint64(p, r[0])
		p = binary.LittleEndian.AppendUint32(p, uint32(r[1]))
		p = binary.LittleEndian.AppendUint32(p, uint32(r[2]))
	}
	return p
}

func pattern(n int, seed byte) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*31)>>1 ^ byte(i>>8) ^ seed
	}
	return p
}

// exercise writes and reads in pieces of odd sizes, with several requests at once.
func exercise(t testing.TB, drv *devicetest.Driver) {
	d := disk{t, drv}
	data := pattern(24*SectorSize, 7)
	d.mustDo(typeOut, 100, [][]byte{data[:1000], data[1000:1001], data[1001:]})
	if got := d.mustDo(typeIn, 100, nil, 3, 5000, len(data)-5003); !bytes.Equal(got, data) {
		t.Fatal("what was read is not what was written")
	}
	var rs []*devicetest.Request
	for i := range 40 {
		rs = append(rs, d.Queue(0).Submit([][]byte{header(typeOut, uint64(1000+i)), pattern(SectorSize, byte(i))}, statusSize))
	}
	for i, r := range rs {
		if status, used := r.Wait(); status[0] != statusOK || used != 1 {
			t.Fatalf("write %d: status %d, used %d", i, status[0], used)
		}
	}
	all := d.mustDo(typeIn, 1000, nil, 40*SectorSize)
	for i := range 40 {
		if !bytes.Equal(all[i*SectorSize:(i+1)*SectorSize], pattern(SectorSize, byte(i))) {
			t.Fatalf("sector %d differs", 1000+i)
		}
	}
	d.mustDo(typeFlush, 0, nil)
}

func TestConformance(t *testing.T) {
	f := newFile(t, diskSize, false)
	devicetest.Run(t, devicetest.Case{
		New: func(t testing.TB, _ *guestmem.Memory) devices.Device {
			return New(f, Options{Serial: "conformance", OnError: func(err error) { t.Errorf("host error: %v", err) }})
		},
		Exercise: exercise,
	})
}

func start(t testing.TB, b Backend, o Options) disk {
	t.Helper()
	mem := devicetest.NewMemory(t)
	d := devicetest.NewDriver(t, New(b, o), mem)
	d.Start(devicetest.AllFeatures)
	return disk{t, d}
}

func TestConfiguration_says_what_the_disk_is(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		d := start(t, newFile(t, diskSize, readOnly), Options{})
		le := binary.LittleEndian
		if got := le.Uint64(d.Config(configCapacity, 8)); got != diskSize/SectorSize {
			t.Errorf("capacity %d", got)
		}
		if got := le.Uint32(d.Config(configSegMax, 4)); got != MaxSegments {
			t.Errorf("seg_max %d", got)
		}
		if got := le.Uint32(d.Config(configBlkSize, 4)); got != SectorSize {
			t.Errorf("blk_size %d", got)
		}
		if got := d.Features()&featureRO != 0; got != readOnly {
			t.Errorf("RO %v, want %v", got, readOnly)
		}
		if got := d.Features()&(featureDiscard|featureWriteZeroes) == 0; got != readOnly {
			t.Errorf("read-only %v, but discard %v", readOnly, !got)
		}
	}
}

func TestRequests(t *testing.T) {
	const last = diskSize/SectorSize - 1
	sector := make([]byte, SectorSize)
	type request struct {
		name   string
		kind   uint32
		sector uint64
		out    [][]byte
		in     []int
		want   byte
	}
	all := []request{
		{"read the last sector", typeIn, last, nil, []int{SectorSize}, statusOK},
		{"read across the end", typeIn, last, nil, []int{2 * SectorSize}, statusIOError},
		{"read past the end", typeIn, last + 1, nil, []int{SectorSize}, statusIOError},
		{"read at a sector that overflows", typeIn, 1 << 55, nil, []int{SectorSize}, statusIOError},
		{"read at the largest sector", typeIn, ^uint64(0), nil, []int{SectorSize}, statusIOError},
		{"read part of a sector", typeIn, 0, nil, []int{SectorSize - 1}, statusIOError},
		{"read a sector and a byte", typeIn, 0, nil, []int{SectorSize, 1}, statusIOError},
		{"read nothing", typeIn, 0, nil, nil, statusOK},
		{"read nothing at the end", typeIn, last + 1, nil, nil, statusOK},
		{"read with data to write", typeIn, 0, [][]byte{sector}, []int{SectorSize}, statusIOError},
		{"read into a data part that is only readable", typeIn, 0, [][]byte{sector}, nil, statusIOError},
		{"write across the end", typeOut, last, [][]byte{sector, sector}, nil, statusIOError},
		{"write past the end", typeOut, last + 1, [][]byte{sector}, nil, statusIOError},
		{"write part of a sector", typeOut, 0, [][]byte{sector[:100]}, nil, statusIOError},
		{"write from a data part that is writable", typeOut, 0, nil, []int{SectorSize}, statusIOError},
		{"flush", typeFlush, 0, nil, nil, statusOK},
		{"flush with data", typeFlush, 0, [][]byte{sector}, nil, statusIOError},
		{"serial number", typeGetID, 0, nil, []int{SerialSize}, statusOK},
		{"serial number into less", typeGetID, 0, nil, []int{5}, statusOK},
		{"serial number with data", typeGetID, 0, [][]byte{sector}, []int{SerialSize}, statusIOError},
		{"unknown", 77, 0, nil, nil, statusUnsupported},
		{"unknown with data", 77, 0, [][]byte{sector}, []int{SectorSize}, statusUnsupported},
		{"legacy SCSI command", 2, 0, [][]byte{sector}, []int{SectorSize}, statusUnsupported},
	}
	writable := append([]request{
		{"write the last sector", typeOut, last, [][]byte{sector}, nil, statusOK},
		{"discard", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 8, 0})}, nil, statusOK},
		{"discard two ranges", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 8, 0}, [3]uint64{last, 1, 0})}, nil, statusOK},
		{"discard nothing", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 0, 0})}, nil, statusOK},
		{"discard without a range", typeDiscard, 0, nil, nil, statusIOError},
		{"discard part of a range", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 8, 0})[:15]}, nil, statusIOError},
		{"discard across the end", typeDiscard, 0, [][]byte{ranges([3]uint64{last, 2, 0})}, nil, statusIOError},
		{"discard that overflows", typeDiscard, 0, [][]byte{ranges([3]uint64{^uint64(0), 2, 0})}, nil, statusIOError},
		{"discard of too much at once", typeDiscard, 0, [][]byte{ranges([3]uint64{0, MaxDiscardSectors + 1, 0})}, nil, statusIOError},
		{"discard with the unmap flag", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 8, flagUnmap})}, nil, statusUnsupported},
		{"discard of too many ranges", typeDiscard, 0, [][]byte{make([]byte, (MaxRanges+1)*rangeSize)}, nil, statusIOError},
		{"discard with a bad second range", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 8, 0}, [3]uint64{last, 2, 0})}, nil, statusIOError},
		{"discard with room for data", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 8, 0})}, []int{SectorSize}, statusIOError},
		{"write zeroes", typeWriteZeroes, 0, [][]byte{ranges([3]uint64{8, 8, 0})}, nil, statusOK},
		{"write zeroes and unmap", typeWriteZeroes, 0, [][]byte{ranges([3]uint64{8, 8, flagUnmap})}, nil, statusOK},
		{"write zeroes with an unknown flag", typeWriteZeroes, 0, [][]byte{ranges([3]uint64{8, 8, 2})}, nil, statusUnsupported},
		{"write too many zeroes", typeWriteZeroes, 0, [][]byte{ranges([3]uint64{0, MaxZeroSectors + 1, 0})}, nil, statusIOError},
	}, all...)
	readOnly := append([]request{
		{"write to a read-only disk", typeOut, 0, [][]byte{sector}, nil, statusIOError},
		{"discard on a read-only disk", typeDiscard, 0, [][]byte{ranges([3]uint64{8, 8, 0})}, nil, statusUnsupported},
		{"write zeroes on a read-only disk", typeWriteZeroes, 0, [][]byte{ranges([3]uint64{8, 8, 0})}, nil, statusUnsupported},
	}, all...)
	for _, tc := range []struct {
		name     string
		readOnly bool
		requests []request
	}{{"writable", false, writable}, {"read-only", true, readOnly}} {
		t.Run(tc.name, func(t *testing.T) {
			d := start(t, newFile(t, diskSize, tc.readOnly), Options{OnError: func(err error) { t.Errorf("host error: %v", err) }})
			for _, r := range tc.requests {
				if _, got := d.do(r.kind, r.sector, r.out, r.in...); got != r.want {
					t.Errorf("%s: status %d, want %d", r.name, got, r.want)
				}
			}
			if s := d.Transport().Stats(); s.NeedsReset != 0 || s.BadChains != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestRequests_without_header_or_status_are_given_back(t *testing.T) {
	mem := devicetest.NewMemory(t)
	dev := New(newFile(t, diskSize, false), Options{})
	d := devicetest.NewDriver(t, dev, mem)
	d.Start(devicetest.AllFeatures)
	if _, used := d.Queue(0).Do([][]byte{header(typeOut, 0), make([]byte, SectorSize)}); used != 0 {
		t.Errorf("no room for a status: %d bytes used", used)
	}
	if data, _ := d.Queue(0).Do([][]byte{make([]byte, headerSize-1)}, 1); data[0] != statusIOError {
		t.Errorf("half a header: status %d", data[0])
	}
	if data, _ := d.Queue(0).Do(nil, SectorSize, 1); data[SectorSize] != statusIOError {
		t.Errorf("no header: status %d", data[SectorSize])
	}
	if n := dev.Stats().Refused.Load(); n != 3 {
		t.Errorf("%d refused, want 3", n)
	}
}

func TestRequests_as_long_as_the_queue_allows(t *testing.T) {
	d := start(t, newFile(t, diskSize, false), Options{})
	var out [][]byte
	var in []int
	want := pattern(MaxSegments*SectorSize, 3)
	for i := range MaxSegments {
		out = append(out, want[i*SectorSize:(i+1)*SectorSize])
		in = append(in, SectorSize)
	}
	d.mustDo(typeOut, 64, out)
	if got := d.mustDo(typeIn, 64, nil, in...); !bytes.Equal(got, want) {
		t.Fatal("what was read is not what was written")
	}
}

func TestSerial_number_is_cut_to_twenty_bytes(t *testing.T) {
	for serial, want := range map[string]string{
		"":                        "",
		"short":                   "short",
		strings.Repeat("long", 6): strings.Repeat("long", 5),
	} {
		d := start(t, newFile(t, diskSize, false), Options{Serial: serial})
		got := d.mustDo(typeGetID, 0, nil, SerialSize)
		if string(bytes.TrimRight(got, "\x00")) != want {
			t.Errorf("serial %q reads %q", serial, got)
		}
	}
}

func TestWrite_zeroes_and_discard_clear_the_range_and_nothing_else(t *testing.T) {
	d := start(t, newFile(t, diskSize, false), Options{})
	data := pattern(64*SectorSize, 9)
	for _, flags := range []uint64{0, flagUnmap} {
		d.mustDo(typeOut, 0, [][]byte{data})
		d.mustDo(typeWriteZeroes, 0, [][]byte{ranges([3]uint64{3, 10, flags}, [3]uint64{40, 16, flags})})
		want := bytes.Clone(data)
		clear(want[3*SectorSize : 13*SectorSize])
		clear(want[40*SectorSize : 56*SectorSize])
		if got := d.mustDo(typeIn, 0, nil, len(want)); !bytes.Equal(got, want) {
			t.Errorf("flags %d: the disk differs", flags)
		}
	}
}

// broken is a disk that fails with err.
type broken struct {
	Backend
	mu    sync.Mutex
	err   error
	wrote []error
}

func (b *broken) get() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

func (b *broken) set(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
}

func (b *broken) ReadExtent(off, n int64) (*os.File, int64, int64, error) {
	if err := b.get(); err != nil {
		return nil, 0, 0, err
	}
	return b.Backend.ReadExtent(off, n)
}

func (b *broken) WriteExtent(off, n int64) (*os.File, int64, int64, error) {
	if err := b.get(); err != nil {
		return nil, 0, 0, err
	}
	return b.Backend.WriteExtent(off, n)
}

func (b *broken) Wrote(off, n int64, err error) error {
	b.mu.Lock()
	b.wrote = append(b.wrote, err)
	b.mu.Unlock()
	return b.Backend.Wrote(off, n, err)
}

func (b *broken) Flush() error {
	if err := b.get(); err != nil {
		return err
	}
	return b.Backend.Flush()
}

func TestHost_errors_reach_the_guest_each_time_and_the_owner_once(t *testing.T) {
	b := &broken{Backend: newFile(t, diskSize, false)}
	reported := make(chan error, 100)
	d := start(t, b, Options{OnError: func(err error) { reported <- err }})
	sector := make([]byte, SectorSize)
	for _, errno := range []unix.Errno{unix.EIO, unix.ENOSPC, unix.EIO} {
		b.set(fmt.Errorf("the disk: %w", errno))
		for range 3 {
			if _, s := d.do(typeIn, 0, nil, SectorSize); s != statusIOError {
				t.Errorf("%v: read has status %d", errno, s)
			}
			if _, s := d.do(typeOut, 0, [][]byte{sector}); s != statusIOError {
				t.Errorf("%v: write has status %d", errno, s)
			}
			if _, s := d.do(typeFlush, 0, nil); s != statusIOError {
				t.Errorf("%v: flush has status %d", errno, s)
			}
		}
	}
	close(reported)
	var kinds []error
	for err := range reported {
		kinds = append(kinds, err)
	}
	if len(kinds) != 2 || !errors.Is(kinds[0], unix.EIO) || !errors.Is(kinds[1], unix.ENOSPC) {
		t.Errorf("the owner was told %v", kinds)
	}
	var n uint64
	d.WithDevice(func(dev devices.Device) { n = dev.(*Device).Stats().HostErrors.Load() })
	if n != 27 {
		t.Errorf("%d host errors counted, want 27", n)
	}
	// It recovers.
	b.set(nil)
	d.mustDo(typeOut, 0, [][]byte{sector})
	if s := d.Status(); s&devicetest.StatusNeedsReset != 0 {
		t.Errorf("status %#x", s)
	}
}

func TestTruncated_image_is_an_IO_error_and_every_write_is_ended(t *testing.T) {
	path := newImage(t, diskSize)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b := &broken{Backend: devicetest.NewDisk(t, f)}
	d := start(t, b, Options{})
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	if _, s := d.do(typeIn, 100, nil, SectorSize); s != statusIOError {
		t.Errorf("reading what is not there any more: status %d", s)
	}
	d.mustDo(typeOut, 100, [][]byte{make([]byte, SectorSize)})
	if len(b.wrote) != 1 || b.wrote[0] != nil {
		t.Errorf("Wrote was called with %v", b.wrote)
	}
}

// layered is a disk in stripes: file, zeros, file, ...
type layered struct {
	Backend
	stripe int64
}

func (l layered) ReadExtent(off, n int64) (*os.File, int64, int64, error) {
	length := min(n, l.stripe-off%l.stripe)
	if off/l.stripe%2 == 1 {
		return nil, 0, length, nil
	}
	return l.Backend.ReadExtent(off, length)
}

func (l layered) WriteExtent(off, n int64) (*os.File, int64, int64, error) {
	return l.Backend.WriteExtent(off, min(n, l.stripe-off%l.stripe))
}

func TestRequests_cross_extents(t *testing.T) {
	d := start(t, layered{newFile(t, diskSize, false), 3 * SectorSize}, Options{})
	data := pattern(30*SectorSize, 5)
	d.mustDo(typeOut, 2, [][]byte{data[:777], data[777:]})
	want := bytes.Clone(data)
	for s := range 30 {
		if (s+2)/3%2 == 1 {
			clear(want[s*SectorSize : (s+1)*SectorSize])
		}
	}
	if got := d.mustDo(typeIn, 2, nil, 1, 4000, len(want)-4001); !bytes.Equal(got, want) {
		t.Fatal("what was read is not what was written")
	}
}

type badExtent struct{ Backend }

func (b badExtent) ReadExtent(off, n int64) (*os.File, int64, int64, error) {
	return nil, 0, (off/SectorSize%3 - 1) * 2 * n, nil
}

func TestDisk_that_gives_impossible_extents_is_a_host_error(t *testing.T) {
	var told error
	d := start(t, badExtent{newFile(t, diskSize, false)}, Options{OnError: func(err error) { told = err }})
	for sector := range uint64(3) {
		if _, s := d.do(typeIn, sector, nil, SectorSize); s != statusIOError {
			t.Errorf("sector %d: status %d", sector, s)
		}
	}
	d.Close()
	if told == nil {
		t.Error("the owner was not told")
	}
}

func TestWrites_are_flushed_for_a_driver_that_cannot_flush(t *testing.T) {
	b := &flushes{Backend: newFile(t, diskSize, false)}
	mem := devicetest.NewMemory(t)
	d := disk{t, devicetest.NewDriver(t, New(b, Options{}), mem)}
	for _, tc := range []struct {
		features uint64
		want     int
	}{{devicetest.AllFeatures, 0}, {devicetest.AllFeatures &^ featureFlush, 1}} {
		d.Start(tc.features)
		b.n = 0
		d.mustDo(typeOut, 0, [][]byte{make([]byte, SectorSize)})
		if b.n != tc.want {
			t.Errorf("features %#x: %d flushes, want %d", tc.features, b.n, tc.want)
		}
	}
}

type flushes struct {
	Backend
	n int
}

func (f *flushes) Flush() error {
	f.n++
	return f.Backend.Flush()
}

func TestRequests_need_their_feature(t *testing.T) {
	d := disk{t, devicetest.NewDriver(t, New(newFile(t, diskSize, false), Options{}), devicetest.NewMemory(t))}
	d.Start(0)
	for _, kind := range []uint32{typeDiscard, typeWriteZeroes} {
		if _, s := d.do(kind, 0, [][]byte{ranges([3]uint64{8, 8, 0})}); s != statusUnsupported {
			t.Errorf("request %d: status %d", kind, s)
		}
	}
}

func TestState_of_another_disk_is_refused(t *testing.T) {
	state, err := New(newFile(t, diskSize, false), Options{}).Export()
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]Backend{
		"larger":    newFile(t, 2*diskSize, false),
		"read-only": newFile(t, diskSize, true),
	} {
		if err := New(f, Options{}).Import(state); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestImage_is_a_whole_number_of_sectors_that_readers_share(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, n int) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	open := func(path string) (*Image, error) {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		return NewImage(f)
	}
	for name, path := range map[string]string{
		"empty":       write("empty", 0),
		"odd size":    write("odd", 1000),
		"a directory": dir,
		"a device":    "/dev/null",
	} {
		if f, err := open(path); err == nil {
			f.Close()
			t.Errorf("%s: opened", name)
		}
	}
	path := write("disk", 4096)
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(writer.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := open(path); !errors.Is(err, ErrLocked) {
		t.Errorf("opening a disk that is being written: %v, want ErrLocked", err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		reader, err := open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer reader.Close()
		if err := reader.Discard(0, 512); !errors.Is(err, unix.EROFS) {
			t.Errorf("discarding on a read-only disk: %v", err)
		}
		if err := reader.WriteZeroes(0, 512, false); !errors.Is(err, unix.EROFS) {
			t.Errorf("zeroing a read-only disk: %v", err)
		}
		if _, _, _, err := reader.WriteExtent(0, 512); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to a read-only disk: %v", err)
		}
	}
}
