package fs

import (
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
)

// Too many files, or a position beyond the end of one, are the guest's own failure. The machine's owner, who would
// log each failure, hears of none.
func TestAttack_limits_that_a_guest_reaches_are_no_failures_of_the_host(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	c := &client{t: t}
	c.Driver = devicetest.NewDriver(t, New(openDir(t, dir, true), "share", Options{OnError: func(err error) {
		t.Errorf("the owner was told: %v", err)
	}}), devicetest.NewMemory(t))
	c.Start(devicetest.AllFeatures)
	c.mustDo(opInit, 0, words(7, 37, 1<<20, ^uint32(0)), initOutSize)
	f := c.lookup(rootID, "f")
	fh := c.open(f, unix.O_RDWR)
	c.want(unix.ENXIO, opLseek, f, append(longs(fh, 1000), words(unix.SEEK_DATA, 0)...), 8)
	c.WithDevice(func(dev devices.Device) {
		d := dev.(*Device)
		d.mu.Lock()
		defer d.mu.Unlock()
		for len(d.handles) < MaxHandles {
			d.tree.open(d.nodes[f], -1, 0, false)
		}
	})
	c.want(unix.ENFILE, opOpen, f, words(0, 0), openOutSize)
	c.want(unix.ENFILE, opOpendir, rootID, words(0, 0), openOutSize)
}

// A guest has gigabytes allocated, or a disk's worth written back. While a pause is requested, such a slow request
// stops between two pieces, or continues without the worker. It is repeated after the pause.
func TestAttack_pause_does_not_wait_for_allocations_and_fsync(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	mem := devicetest.NewMemory(t)
	vq, err := virtq.New(mem, virtq.Layout{Size: 8, Desc: 0x10000, Avail: 0x20000, Used: 0x30000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	kick, err := devices.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer kick.Close()
	q := &devices.Queue{Queue: vq, Kick: kick}
	w := q.StartWorker(func() {})
	defer w.Stop()
	d := New(openDir(t, dir, true), "share", Options{})
	defer d.Reset()
	fd, err := unix.Open(filepath.Join(dir, "f"), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	d.started = true
	h := d.tree.open(d.root, fd, unix.O_RDWR, false)
	fallocate := func(at, length uint64, mode uint32) error {
		body := append(longs(h.id, at, length), words(mode, 0)...)
		return d.fallocate(&request{queue: q, body: parser{b: body}})
	}
	allocate := func() error { return fallocate(0, allocatePiece+4096, 0) }
	fsync := func() error { return d.fsync(&request{queue: q, body: parser{b: append(longs(h.id), words(0, 0)...)}}) }
	size := func() int64 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Fatal(err)
		}
		return st.Size
	}
	if err := w.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := allocate(); !errors.Is(err, devices.ErrAgain) || size() != 0 {
		t.Errorf("an allocation while a pause is wanted: %v, the file has %d bytes", err, size())
	}
	// fsync runs in another goroutine. It may end before the worker looks, which is rare, and then reports success.
	var again error
	for range 100 {
		if again = fsync(); again != nil {
			break
		}
	}
	if !errors.Is(again, devices.ErrAgain) {
		t.Errorf("fsync while a pause is wanted: %v", again)
	}
	w.Resume()
	if err := errors.Join(allocate(), fsync()); err != nil || size() != allocatePiece+4096 {
		t.Errorf("after the pause: %v, the file has %d bytes", err, size())
	}
	// A range without blocks takes a system call for each piece, so its length is bounded.
	const free = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	for length, want := range map[uint64]error{allocateEnd / 2: nil, allocateEnd + 1: unix.EFBIG, math.MaxInt64: unix.EFBIG} {
		if err := fallocate(0, length, free); !errors.Is(err, want) {
			t.Errorf("freeing %d bytes: %v, want %v", length, err, want)
		}
	}
	if err := fallocate(allocateEnd, 1, 0); !errors.Is(err, unix.EFBIG) {
		t.Errorf("allocating a byte beyond the end: %v, want EFBIG", err)
	}
}

// A guest forgets a directory of which it still knows a file, and exchanges that file with one elsewhere. Its state
// must have the directory that the other file is in then.
func TestAttack_exchange_out_of_a_forgotten_directory_leaves_a_state_that_cannot_be_restored(t *testing.T) {
	dir := t.TempDir()
	c := start(t, dir, true)
	mkdir := func(name string) uint64 {
		return binary.LittleEndian.Uint64(c.mustDo(opMkdir, rootID, append(words(0o755, 0), text(name)...), entrySize))
	}
	from, to := mkdir("from"), mkdir("to")
	c.create(from, "a", unix.O_RDWR, 0o644)
	c.create(to, "b", unix.O_RDWR, 0o644)
	c.Queue(queueHiprio).Do([][]byte{header(opForget, 0, from, 8), longs(1)})
	c.mustDo(opRename2, from, append(append(longs(to), words(unix.RENAME_EXCHANGE, 0)...), text("a", "b")...), 0)
	c.move(dir)
}
