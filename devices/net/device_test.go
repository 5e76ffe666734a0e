package net

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var testMAC = MAC{2, 0, 0, 1, 2, 3}

// wire is a backend on one end of a socket pair. The test has the other end.
type wire struct {
	fd, peer int
	offloads atomic.Int64
	err      error
}

func newWire(t testing.TB) *wire {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	must(t, unix.SetNonblock(fds[0], true))
	w := &wire{fd: fds[0], peer: fds[1]}
	t.Cleanup(func() {
		unix.Close(w.fd)
		unix.Close(w.peer)
	})
	return w
}

func (w *wire) FD() int { return w.fd }

func (w *wire) SetOffloads(flags int) error {
	w.offloads.Store(int64(flags))
	return w.err
}

func (w *wire) send(t testing.TB, frame []byte) {
	t.Helper()
	if _, err := unix.Write(w.peer, append(make([]byte, HeaderSize), frame...)); err != nil {
		t.Fatal(err)
	}
}

// receive returns the guest's next frame and its header, or nil if none comes within wait.
func (w *wire) receive(t testing.TB, wait time.Duration) (header, frame []byte) {
	t.Helper()
	tv := unix.NsecToTimeval(int64(wait))
	must(t, unix.SetsockoptTimeval(w.peer, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv))
	p := make([]byte, HeaderSize+maxFrame+1)
	n, err := w.read(p)
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	must(t, err)
	return p[:HeaderSize], p[HeaderSize:n]
}

// read reads one packet. Linux does not restart a receive with a timeout after a signal (signal(7)), such as those
// that Go's scheduler preempts with.
func (w *wire) read(p []byte) (int, error) {
	for {
		if n, err := unix.Read(w.peer, p); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func frame(seed, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7) ^ byte(i>>8) ^ byte(seed)
	}
	binary.BigEndian.PutUint32(p[ethernetHeader:], uint32(seed))
	return p
}

func serialOf(frame []byte) uint32 {
	if len(frame) < ethernetHeader+4 {
		return 0
	}
	return binary.BigEndian.Uint32(frame[ethernetHeader:])
}

const allButTSO = devicetest.AllFeatures &^ featureGuestTSO

type nic struct {
	*devicetest.Driver
	dev *Device
	w   *wire
}

func start(t testing.TB, cfg Config, features uint64) nic {
	t.Helper()
	w := newWire(t)
	mem := devicetest.NewMemory(t)
	if cfg.MAC == (MAC{}) {
		cfg.MAC = testMAC
	}
	dev, err := New(mem, w, cfg)
	must(t, err)
	d := devicetest.NewDriver(t, dev, mem)
	d.Start(features)
	return nic{d, dev, w}
}

func (n nic) post(sizes ...int) *devicetest.Request { return n.Queue(queueRX).Submit(nil, sizes...) }

func (n nic) transmit(header, frame []byte) *devicetest.Request {
	if header == nil {
		header = make([]byte, HeaderSize)
	}
	cut := len(frame) / 3
	return n.Queue(queueTX).Submit([][]byte{header, frame[:cut+1], frame[cut+1:]})
}

// until fails the test unless f becomes true.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen", what)
		}
	}
}

func TestFrames_go_both_ways(t *testing.T) {
	n := start(t, Config{}, devicetest.AllFeatures)
	for _, size := range []int{60, 1000, 1514} {
		n.transmit(nil, frame(size, size)).Wait()
		if _, got := n.w.receive(t, 10*time.Second); !bytes.Equal(got, frame(size, size)) {
			t.Fatalf("frame of %d bytes from the guest: got %d bytes", size, len(got))
		}
		r := n.post(100, 1600)
		n.w.send(t, frame(size, size))
		data, used := r.Wait()
		if int(used) != HeaderSize+size || !bytes.Equal(data[HeaderSize:used], frame(size, size)) {
			t.Fatalf("frame of %d bytes to the guest: got %d bytes", size, used)
		}
		if binary.LittleEndian.Uint16(data[headerNumBuffers:]) != 1 {
			t.Fatalf("header % x", data[:HeaderSize])
		}
	}
	st := n.dev.Stats()
	if st.FramesToGuest.Load() != 3 || st.FramesFromGuest.Load() != 3 {
		t.Errorf("%+v", st)
	}
}

func TestLarge_segment_is_spread_over_merged_buffers(t *testing.T) {
	n := start(t, Config{}, devicetest.AllFeatures)
	var rs []*devicetest.Request
	for range 50 {
		rs = append(rs, n.post(12, 1488))
	}
	const size = 60000
	n.w.send(t, frame(1, size))
	var got []byte
	count := (size + HeaderSize + 1499) / 1500
	for i := range count {
		data, used := rs[i].Wait()
		if i == 0 && int(binary.LittleEndian.Uint16(data[headerNumBuffers:])) != count {
			t.Fatalf("header % x, want %d buffers", data[:HeaderSize], count)
		}
		got = append(got, data[:used]...)
	}
	if !bytes.Equal(got[HeaderSize:], frame(1, size)) {
		t.Fatal("the segment differs")
	}
	if left := n.Queue(queueRX).InFlight(); left != 50-count {
		t.Errorf("%d buffers left, want %d", left, 50-count)
	}
}

func TestFrame_without_merged_buffers_needs_a_buffer_of_its_own(t *testing.T) {
	n := start(t, Config{}, allButTSO&^featureMrgRxbuf)
	small := n.post(HeaderSize, 488)
	big := n.post(HeaderSize, 1514) // the least that virtio requires
	n.w.send(t, frame(1, 1000))
	until(t, "the frame to be dropped", func() bool { return n.dev.Stats().TooLong.Load() == 1 })
	n.w.send(t, frame(2, 400))
	if data, used := small.Wait(); used != HeaderSize+400 || serialOf(data[HeaderSize:]) != 2 {
		t.Fatalf("%d bytes", used)
	}
	n.w.send(t, frame(3, 1514))
	data, used := big.Wait()
	if used != HeaderSize+1514 || !bytes.Equal(data[HeaderSize:used], frame(3, 1514)) || binary.LittleEndian.Uint16(data[headerNumBuffers:]) != 1 {
		t.Fatalf("%d bytes, header % x", used, data[:HeaderSize])
	}
}

func TestFew_buffers_delay_but_do_not_freeze_reception(t *testing.T) {
	// Segments of 64 KiB could arrive, and the guest never has room for one.
	n := start(t, Config{}, devicetest.AllFeatures)
	fastest := time.Hour
	for i := range 100 {
		began := time.Now()
		r := n.post(1600)
		n.w.send(t, frame(i, 200))
		if data, _ := r.Wait(); serialOf(data[HeaderSize:]) != uint32(i) {
			t.Fatalf("frame %d differs", i)
		}
		fastest = min(fastest, time.Since(began))
	}
	// On a busy machine many take longer, but not all.
	if fastest >= rxPatience {
		t.Errorf("the fastest of 100 frames took %v: each has waited", fastest)
	}
	r := n.post(1600)
	n.w.send(t, frame(1, 30000))
	until(t, "the frame to be dropped", func() bool { return n.dev.Stats().TooLong.Load() == 1 })
	n.w.send(t, frame(7, 200))
	if data, _ := r.Wait(); serialOf(data[HeaderSize:]) != 7 {
		t.Error("the frame after it differs")
	}
}

func TestFrames_wait_while_the_guest_has_no_buffers(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	for i := range 10 {
		n.w.send(t, frame(i, 100))
	}
	// The other direction still works.
	for i := range 10 {
		n.transmit(nil, frame(i, 100)).Wait()
		if _, got := n.w.receive(t, 10*time.Second); serialOf(got) != uint32(i) {
			t.Fatalf("frame %d did not come", i)
		}
	}
	for i := range 10 {
		if data, _ := n.post(1600).Wait(); serialOf(data[HeaderSize:]) != uint32(i) {
			t.Fatalf("frame %d differs", i)
		}
	}
}

func TestFrames_that_have_come_reach_the_guest_before_the_pause(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	n.w.send(t, frame(7, 100))
	// Without a buffer the device waits for a kick, which does not come. So the pause takes the frame.
	for i := range 2 {
		n.transmit(nil, frame(i, 100)).Wait() // so that a whole turn found no buffer
		n.w.receive(t, 10*time.Second)
	}
	r, err := n.Queue(queueRX).Add(nil, 1600)
	must(t, err)
	must(t, n.dev.Pause(t.Context()))
	if got := n.dev.Stats().FramesToGuest.Load(); got != 1 {
		t.Errorf("%d frames reached the guest by the end of the pause, want 1", got)
	}
	must(t, n.dev.Resume())
	if data, _ := r.Wait(); serialOf(data[HeaderSize:]) != 7 {
		t.Error("another frame came")
	}
}

func TestFull_backend_delays_and_does_not_freeze(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	var rs []*devicetest.Request
	const frames = 80
	for i := range frames {
		rs = append(rs, n.transmit(nil, frame(i, 60000)))
	}
	until(t, "the backend to be full", func() bool { return n.dev.Stats().Waits.Load() > 0 })
	// The other direction still works.
	r := n.post(1600)
	n.w.send(t, frame(5, 100))
	r.Wait()
	for i := range frames {
		if _, got := n.w.receive(t, 10*time.Second); !bytes.Equal(got, frame(i, 60000)) {
			t.Fatalf("frame %d: %d bytes", i, len(got))
		}
	}
	for _, r := range rs {
		r.Wait()
	}
}

func TestHeader_lies_are_dropped_and_counted(t *testing.T) {
	header := func(flags, gso byte, hdrLen, size, start, offset uint16) []byte {
		p := make([]byte, HeaderSize)
		p[headerFlags], p[headerGSOType] = flags, gso
		le := binary.LittleEndian
		le.PutUint16(p[headerLen:], hdrLen)
		le.PutUint16(p[headerGSOSize:], size)
		le.PutUint16(p[headerCsumStart:], start)
		le.PutUint16(p[headerCsumOffset:], offset)
		return p
	}
	for _, tc := range []struct {
		name     string
		header   []byte
		size     int
		features uint64
		ok       bool
	}{
		{"plain", header(0, 0, 0, 0, 0, 0), 100, allButTSO, true},
		{"checksum", header(1, 0, 0, 0, 34, 16), 100, allButTSO, true},
		{"checksum at the last bytes", header(1, 0, 0, 0, 34, 64), 100, allButTSO, true},
		{"checksum beyond the frame", header(1, 0, 0, 0, 34, 65), 100, allButTSO, false},
		{"checksum far beyond", header(1, 0, 0, 0, 65535, 65535), 100, allButTSO, false},
		{"checksum not agreed on", header(1, 0, 0, 0, 34, 16), 100, allButTSO &^ featureCsum, false},
		{"segment of TCPv4", header(1, 1, 54, 1448, 34, 16), 5000, allButTSO, true},
		{"segment of TCPv4 with ECN", header(1, 0x81, 54, 1448, 34, 16), 5000, allButTSO, true},
		{"segment of TCPv6", header(1, 4, 74, 1428, 54, 16), 5000, allButTSO, true},
		{"segment without checksum", header(0, 1, 54, 1448, 34, 16), 5000, allButTSO, false},
		{"segments of no bytes", header(1, 1, 54, 0, 34, 16), 5000, allButTSO, false},
		{"headers longer than the frame", header(1, 1, 5001, 1448, 34, 16), 5000, allButTSO, false},
		{"TCPv4 not agreed on", header(1, 1, 54, 1448, 34, 16), 5000, allButTSO &^ featureHostTSO4, false},
		{"TCPv6 not agreed on", header(1, 4, 54, 1448, 34, 16), 5000, allButTSO &^ featureHostTSO6, false},
		{"ECN not agreed on", header(1, 0x81, 54, 1448, 34, 16), 5000, allButTSO &^ featureHostECN, false},
		{"UDP fragments", header(1, 3, 54, 1448, 34, 6), 5000, allButTSO, false},
		{"UDP segments", header(1, 5, 54, 1448, 34, 6), 5000, allButTSO, false},
		{"unknown segments", header(1, 2, 54, 1448, 34, 6), 5000, allButTSO, false},
		{"ECN without segments", header(1, 0x80, 54, 1448, 34, 6), 5000, allButTSO, false},
		{"shortest", header(0, 0, 0, 0, 0, 0), 14 + 4, allButTSO, true},
		{"longest", header(0, 0, 0, 0, 0, 0), maxFrame, allButTSO, true},
		{"too long", header(0, 0, 0, 0, 0, 0), maxFrame + 1, allButTSO, false},
	} {
		n := start(t, Config{}, tc.features)
		n.transmit(tc.header, frame(9, tc.size)).Wait()
		h, got := n.w.receive(t, map[bool]time.Duration{true: 10 * time.Second, false: 2 * time.Millisecond}[tc.ok])
		if tc.ok && (!bytes.Equal(got, frame(9, tc.size)) || !bytes.Equal(h, tc.header)) || !tc.ok && got != nil {
			t.Errorf("%s: %d bytes came through", tc.name, len(got))
		}
		if st := n.dev.Stats(); (st.Malformed.Load() == 0) != tc.ok {
			t.Errorf("%s: %+v", tc.name, st)
		}
	}
	n := start(t, Config{}, allButTSO)
	for _, size := range []int{1, HeaderSize - 1, HeaderSize, HeaderSize + minFrame - 1} {
		n.Queue(queueTX).Do([][]byte{make([]byte, size)})
	}
	if st := n.dev.Stats(); st.Malformed.Load() != 4 {
		t.Errorf("short packets: %+v", st)
	}
}

func TestShort_frames_of_the_host_are_dropped_and_counted(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	r := n.post(1600)
	for _, size := range []int{1, HeaderSize, HeaderSize + minFrame - 1} {
		_, err := unix.Write(n.w.peer, make([]byte, size))
		must(t, err)
	}
	n.w.send(t, frame(3, 100))
	if data, _ := r.Wait(); serialOf(data[HeaderSize:]) != 3 {
		t.Error("another frame came")
	}
	if st := n.dev.Stats(); st.TooShort.Load() != 3 {
		t.Errorf("%+v", st)
	}
}

func TestBuffers_that_cannot_take_a_header_come_back_empty(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	tiny := n.post(HeaderSize - 1)
	fine := n.post(1600)
	n.w.send(t, frame(3, 100))
	if _, used := tiny.Wait(); used != 0 {
		t.Errorf("%d bytes in the tiny buffer", used)
	}
	if data, _ := fine.Wait(); serialOf(data[HeaderSize:]) != 3 {
		t.Error("the frame differs")
	}
}

func TestOffloads_are_those_that_the_driver_accepts(t *testing.T) {
	for _, tc := range []struct {
		features uint64
		want     int
	}{
		{0, 0},
		{featureGuestTSO, 0},
		{featureGuestCsum, unix.TUN_F_CSUM},
		{featureGuestCsum | featureGuestECN, unix.TUN_F_CSUM},
		{featureGuestCsum | featureGuestTSO4, unix.TUN_F_CSUM | unix.TUN_F_TSO4},
		{featureGuestCsum | featureGuestTSO | featureGuestECN, unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN},
	} {
		if n := start(t, Config{}, tc.features); n.w.offloads.Load() != int64(tc.want) {
			t.Errorf("features %#x: offloads %#x, want %#x", tc.features, n.w.offloads.Load(), tc.want)
		}
	}
}

func TestLink_that_goes_down_drops_frames_of_the_guest_and_keeps_those_for_it(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	status := func() uint16 { return binary.LittleEndian.Uint16(n.Config(configStatus, 2)) }
	if status() != statusLinkUp {
		t.Fatal("the link is down at first")
	}
	n.dev.SetLink(false)
	until(t, "the interrupt", func() bool { return n.ConfigChanges() == 1 })
	if status() != 0 {
		t.Error("the guest sees the link up")
	}
	n.transmit(nil, frame(1, 100)).Wait()
	if _, got := n.w.receive(t, 2*time.Millisecond); got != nil {
		t.Error("a frame got out")
	}
	r := n.post(1600)
	n.w.send(t, frame(2, 100))
	select {
	case <-r.Done():
		t.Error("a frame got in")
	case <-time.After(5 * time.Millisecond):
	}
	n.dev.SetLink(true)
	if data, _ := r.Wait(); serialOf(data[HeaderSize:]) != 2 {
		t.Error("the frame differs")
	}
	until(t, "the second interrupt", func() bool { return n.ConfigChanges() == 2 })
	if st := n.dev.Stats(); st.LinkDown.Load() != 1 || status() != statusLinkUp {
		t.Errorf("%+v, status %d", st, status())
	}
}

func TestClone_keeps_its_link_down_until_told(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	n.w.send(t, frame(4, 100))
	clone, err := New(n.Mem(), n.w, Config{MAC: MAC{2, 9, 9, 9, 9, 9}, LinkDown: true})
	must(t, err)
	must(t, n.Move(clone))
	until(t, "the interrupt", func() bool { return n.ConfigChanges() == 1 })
	if got := n.Config(0, 8); !bytes.Equal(got, append(testMAC[:], 0, 0)) {
		t.Errorf("configuration % x", got)
	}
	r := n.post(1600)
	n.transmit(nil, frame(1, 100)).Wait()
	time.Sleep(2 * time.Millisecond)
	if clone.Link() || clone.Stats().LinkDown.Load() != 1 || n.Queue(queueRX).InFlight() != 1 {
		t.Error("the clone's link is not down")
	}
	clone.SetLink(true)
	if data, _ := r.Wait(); serialOf(data[HeaderSize:]) != 4 {
		t.Error("the frame that waited is lost")
	}
	until(t, "the second interrupt", func() bool { return n.ConfigChanges() == 2 })
	// The driver already knew this state from another process, and is not told again.
	next, err := New(n.Mem(), n.w, Config{MAC: testMAC})
	must(t, err)
	must(t, n.Move(next))
	n.transmit(nil, frame(6, 100)).Wait()
	if n.ConfigChanges() != 2 {
		t.Error("an interrupt without a change")
	}
}

// A waking guest sends and receives nothing until it is released. It loses no frame, and does not notice.
func TestHeld_device_keeps_frames_of_both_sides_until_released(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	for i := range 2 {
		// The second time it goes to sleep while held.
		held, err := New(n.Mem(), n.w, Config{MAC: testMAC, Held: true})
		must(t, err)
		must(t, n.Move(held))
		if i == 0 {
			n.transmit(nil, frame(1, 100))
			n.w.send(t, frame(2, 100))
			n.post(1600)
		}
		if _, got := n.w.receive(t, 5*time.Millisecond); got != nil {
			t.Error("a frame got out")
		}
		if n.Queue(queueRX).InFlight() != 1 || n.Queue(queueTX).InFlight() != 1 || !held.Link() || n.ConfigChanges() != 0 {
			t.Errorf("in flight %d and %d, link %v, %d changes", n.Queue(queueRX).InFlight(), n.Queue(queueTX).InFlight(), held.Link(), n.ConfigChanges())
		}
		if i == 1 {
			held.Release()
			held.Release()
		}
	}
	if _, got := n.w.receive(t, 10*time.Second); serialOf(got) != 1 {
		t.Error("the guest's frame is lost")
	}
	until(t, "the guest's frame", func() bool { return n.Queue(queueRX).InFlight() == 0 && n.Queue(queueTX).InFlight() == 0 })
	n.transmit(nil, frame(3, 100)).Wait()
	if _, got := n.w.receive(t, 10*time.Second); serialOf(got) != 3 {
		t.Error("a frame after that is lost")
	}
	if n.ConfigChanges() != 0 {
		t.Error("the guest was told of something")
	}
}

func TestBackend_that_fails_gives_the_device_up(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	n.post(1600)
	// Reading a directory always fails.
	fd, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, unix.Dup3(fd, n.w.fd, unix.O_CLOEXEC))
	n.transmit(nil, frame(1, 100))
	until(t, "the failure to be reported", func() bool { return n.Status()&devicetest.StatusNeedsReset != 0 })
	// The owner hears of it right after the driver.
	until(t, "the owner to be told", func() bool { return n.HostError() != nil })
	var failed *BackendError
	if err := n.HostError(); !errors.As(err, &failed) {
		t.Errorf("the owner was told %v", err)
	}
}

func TestRefused_offloads_fail_the_activation(t *testing.T) {
	w := newWire(t)
	w.err = errors.New("no such ioctl")
	mem := devicetest.NewMemory(t)
	dev, err := New(mem, w, Config{MAC: testMAC})
	must(t, err)
	d := devicetest.NewDriver(t, dev, mem)
	if !d.Negotiate(devicetest.AllFeatures) {
		t.Fatal("features refused")
	}
	d.SetupQueues()
	d.AddStatus(devicetest.StatusDriverOK)
	if d.Status()&devicetest.StatusNeedsReset == 0 || !errors.Is(d.HostError(), w.err) {
		t.Errorf("status %#x, %v", d.Status(), d.HostError())
	}
}

func TestNew_refuses_bad_configurations(t *testing.T) {
	mem := devicetest.NewMemory(t)
	for name, cfg := range map[string]Config{
		"no MAC":            {},
		"a multicast MAC":   {MAC: MAC{1, 0, 0x5e, 0, 0, 1}},
		"the broadcast MAC": {MAC: MAC{255, 255, 255, 255, 255, 255}},
	} {
		if _, err := New(mem, newWire(t), cfg); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	d, err := New(mem, newWire(t), Config{MAC: testMAC})
	must(t, err)
	var p [configSize + 4]byte
	d.ReadConfig(0, p[:])
	if want := append(testMAC[:], 1, 0, 1, 0, 0, 0, 0, 0, 0, 0); !bytes.Equal(p[:], want) {
		t.Errorf("configuration % x, want % x", p, want)
	}
}

func TestImport_refuses_bad_states_and_changes_nothing(t *testing.T) {
	mem := devicetest.NewMemory(t)
	d, err := New(mem, newWire(t), Config{MAC: testMAC})
	must(t, err)
	good, err := d.Export()
	must(t, err)
	with := func(data []byte) devices.Payload {
		return devices.Payload{Kind: good.Kind, Version: good.Version, Data: data}
	}
	for name, p := range map[string]devices.Payload{
		"another kind":    {Kind: "virtio-blk", Version: good.Version, Data: good.Data},
		"another version": {Kind: good.Kind, Version: 9, Data: good.Data},
		"nothing":         with(nil),
		"cut short":       with(good.Data[:len(good.Data)-1]),
		"a byte more":     with(append(bytes.Clone(good.Data), 0)),
		"multicast":       with([]byte{1, 0, 0, 0, 0, 1, 1, 1}),
		"no MAC":          with([]byte{0, 0, 0, 0, 0, 0, 1, 1}),
		"a link of 2":     with([]byte{2, 0, 0, 0, 0, 1, 2, 1}),
	} {
		if err := d.Import(p); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: got %v, want ErrPayload", name, err)
		}
	}
	if again, err := d.Export(); err != nil || !bytes.Equal(again.Data, good.Data) {
		t.Errorf("state % x, %v", again.Data, err)
	}
	must(t, d.Import(good))
}

func TestExport_refuses_a_running_device(t *testing.T) {
	n := start(t, Config{}, allButTSO)
	if _, err := n.dev.Export(); !errors.Is(err, devices.ErrNotPaused) {
		t.Fatalf("got %v", err)
	}
	must(t, n.dev.Pause(context.Background()))
	if _, err := n.dev.Export(); err != nil {
		t.Fatal(err)
	}
	must(t, n.dev.Resume())
}

// collector reads all frames that come out of a wire, from any device.
type collector struct {
	mu   sync.Mutex
	seen map[uint32]int
	done chan struct{}
}

func collect(w *wire) *collector {
	c := &collector{seen: map[uint32]int{}, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		p := make([]byte, HeaderSize+maxFrame)
		for {
			n, err := w.read(p)
			if n <= 0 || err != nil {
				return
			}
			if n > HeaderSize {
				c.mu.Lock()
				c.seen[serialOf(p[HeaderSize:n])]++
				c.mu.Unlock()
			}
		}
	}()
	return c
}

func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	for _, set := range []struct {
		name     string
		features uint64
		pauses   int
		moves    int
	}{
		{"all features", devicetest.AllFeatures, 100, 20},
		{"without segmentation for the guest", allButTSO, 500, 100},
		{"without merged buffers", allButTSO &^ featureMrgRxbuf, 100, 20},
	} {
		t.Run(set.name, func(t *testing.T) {
			w := newWire(t)
			out := collect(w)
			defer func() {
				must(t, unix.Shutdown(w.peer, unix.SHUT_RDWR))
				<-out.done
			}()
			// Serials that garbage of a hostile driver is unlikely to have.
			serial := uint32(0x6472_0000)
			devicetest.Run(t, devicetest.Case{
				New: func(t testing.TB, mem *guestmem.Memory) devices.Device {
					dev, err := New(mem, w, Config{MAC: testMAC})
					must(t, err)
					return dev
				},
				Exercise: func(t testing.TB, d *devicetest.Driver) {
					// Every frame arrives once and in order in both directions, whatever happens in between.
					const batch = 20
					first := serial
					serial += batch
					var sent []*devicetest.Request
					for s := first; s != serial; s++ {
						f := frame(int(s), 100)
						sent = append(sent, d.Queue(queueTX).Submit([][]byte{make([]byte, HeaderSize), f[:30], f[30:]}))
						w.send(t, frame(int(s), 1000))
					}
					for want := first; want != serial; {
						data, used := d.Queue(queueRX).Do(nil, 20, 1600)
						got := serialOf(data[HeaderSize:])
						if got < first {
							continue // of an earlier call that a reset cut short
						}
						if got != want || used != HeaderSize+1000 || !bytes.Equal(data[HeaderSize:used], frame(int(want), 1000)) {
							t.Fatalf("frame %d, %d bytes; want %d", got, used, want)
						}
						want++
					}
					for _, r := range sent {
						r.Wait()
					}
					until(t, fmt.Sprintf("the arrival of frames %d to %d", first, serial), func() bool {
						out.mu.Lock()
						defer out.mu.Unlock()
						for s := first; s != serial; s++ {
							if n := out.seen[s]; n > 1 {
								t.Fatalf("frame %d came %d times", s, n)
							} else if n == 0 {
								return false
							}
						}
						return true
					})
				},
				Idle: map[int]func(testing.TB, *devicetest.Driver){
					queueRX: func(t testing.TB, d *devicetest.Driver) { w.send(t, frame(1, 100)) },
				},
				Features: set.features,
				Pauses:   set.pauses,
				Moves:    set.moves,
			})
		})
	}
}
