package serial

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type port struct {
	*UART
	edges atomic.Int64
}

func newPort(t *testing.T, w io.Writer) *port {
	p := &port{}
	p.UART = New(w, func() { p.edges.Add(1) })
	t.Cleanup(func() { p.Close() })
	return p
}

func (p *port) in(off uint64) byte {
	var b [1]byte
	p.ReadIO(off, b[:])
	return b[0]
}

func (p *port) out(off uint64, v byte) { p.WriteIO(off, []byte{v}) }

// edgesOf says how many edges f causes.
func (p *port) edgesOf(f func()) int64 {
	before := p.edges.Load()
	f()
	return p.edges.Load() - before
}

// buffer is a bytes.Buffer that a goroutine may fill while a test looks at it.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// The sequence of Linux's autoconfig(), drivers/tty/serial/8250/8250_port.c.
func TestLinux_probe_finds_a_16550_a(t *testing.T) {
	p := newPort(t, nil)
	p.out(regIER, 0)
	if v := p.in(regIER); v != 0 {
		t.Fatalf("IER = %#x after writing 0", v)
	}
	p.out(regIER, 0x0f)
	if v := p.in(regIER); v != 0x0f {
		t.Fatalf("IER = %#x after writing 0x0f", v)
	}
	p.out(regIER, 0)
	mcr := p.in(regMCR)
	p.out(regMCR, mcrLoop|mcrOut2|mcrRTS)
	if v := p.in(regMSR) & 0xf0; v != 0x90 {
		t.Fatalf("MSR in loopback = %#x, want 0x90", v)
	}
	p.out(regMCR, mcr)
	p.out(regLCR, 0xbf)
	p.out(regIIR, 0)
	p.out(regLCR, 0)
	p.out(regIIR, fcrEnable)
	if v := p.in(regIIR) >> 6; v != 3 {
		t.Fatalf("IIR>>6 = %d with the FIFO on, want 3", v)
	}
	// Nothing newer than a 16550A.
	p.out(regLCR, 0x80)
	if p.in(regIIR) == 0 {
		t.Fatal("there seems to be an EFR with LCR = 0x80")
	}
	p.out(regLCR, 0xbf)
	if p.in(regIIR) == 0 {
		t.Fatal("there seems to be an EFR with LCR = 0xbf")
	}
	p.out(regLCR, 0)
	p.out(regIER, 0x40)
	if p.in(regIER) != 0 {
		t.Fatal("there seems to be a UUE bit in IER")
	}
	// serial8250_startup: a port that is all ones is not there.
	if p.in(regLSR) == 0xff {
		t.Fatal("LSR is all ones")
	}
	for _, v := range []byte{0x55, 0xaa} {
		p.out(regScratch, v)
		if p.in(regScratch) != v {
			t.Fatal("the scratch register does not hold")
		}
	}
}

// serial8250_THRE_test: enabling the interrupt again must raise it again.
func TestTransmit_interrupt_rises_each_time_it_is_enabled(t *testing.T) {
	p := newPort(t, nil)
	for i := range 3 {
		if n := p.edgesOf(func() { p.out(regIER, ierTransmit) }); n != 1 {
			t.Fatalf("round %d: %d edges, want 1", i, n)
		}
		if v := p.in(regIIR); v != iirTransmit {
			t.Fatalf("round %d: IIR = %#x", i, v)
		}
		if v := p.in(regIIR); v != iirNone {
			t.Fatalf("round %d: IIR = %#x when read again", i, v)
		}
		p.out(regIER, 0)
	}
}

func TestEach_output_after_an_empty_interrupt_raises_again(t *testing.T) {
	var out buffer
	p := newPort(t, &out)
	p.out(regIER, ierTransmit)
	for _, c := range []byte("hello") {
		if p.in(regIIR) != iirTransmit {
			t.Fatal("no transmit interrupt")
		}
		if n := p.edgesOf(func() { p.out(regData, c) }); n != 1 {
			t.Fatalf("%d edges after an output, want 1", n)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if out.String() != "hello" {
		t.Fatalf("output %q", out.String())
	}
}

// loop has the guest send itself text.
func (p *port) loop(text string) {
	mcr := p.in(regMCR)
	p.out(regMCR, mcr|mcrLoop)
	for _, c := range []byte(text) {
		p.out(regData, c)
	}
	p.out(regMCR, mcr)
}

func TestInput_interrupts_until_it_is_read(t *testing.T) {
	p := newPort(t, nil)
	p.out(regIER, ierReceive)
	if n := p.edgesOf(func() { p.loop("ab") }); n != 1 {
		t.Fatalf("%d edges, want 1", n)
	}
	for _, want := range []byte("ab") {
		if p.in(regIIR) != iirReceive || p.in(regLSR)&lsrReady == 0 {
			t.Fatal("no input announced")
		}
		if got := p.in(regData); got != want {
			t.Fatalf("read %q, want %q", got, want)
		}
	}
	if p.in(regIIR) != iirNone || p.in(regLSR)&lsrReady != 0 || p.in(regData) != 0 {
		t.Fatal("input announced when there is none")
	}
}

func TestInput_flood_is_bounded(t *testing.T) {
	p := newPort(t, nil)
	// A guest that floods itself in loopback.
	for range 3 {
		p.loop(strings.Repeat("y", 2*InputSize))
		if len(p.input) != InputSize || cap(p.input) > 2*InputSize {
			t.Fatalf("%d bytes of input, room for %d", len(p.input), cap(p.input))
		}
		p.in(regData)
		if len(p.input) != InputSize-1 {
			t.Fatalf("%d bytes of input after one was read", len(p.input))
		}
	}
}

func TestClearing_the_FIFO_drops_sixteen_bytes(t *testing.T) {
	p := newPort(t, nil)
	p.loop("0123456789abcdefREST")
	p.out(regIIR, fcrEnable|fcrClear)
	if got := p.in(regData); got != 'R' {
		t.Fatalf("first byte after clearing is %q", got)
	}
	p.out(regIIR, fcrClear)
	p.out(regIIR, fcrClear)
	if p.in(regLSR)&lsrReady != 0 {
		t.Fatal("input is left after clearing")
	}
}

func TestDivisor_latch_hides_data(t *testing.T) {
	var out buffer
	p := newPort(t, &out)
	p.out(regLCR, lcrDLAB)
	p.out(regData, 0x34)
	p.out(regIER, 0x12)
	if p.in(regData) != 0x34 || p.in(regIER) != 0x12 {
		t.Fatal("the divisor does not hold")
	}
	p.out(regLCR, 3)
	if p.in(regIER) != 0 {
		t.Fatal("the divisor went to IER")
	}
	p.Close()
	if out.String() != "" {
		t.Fatalf("the divisor was sent: %q", out.String())
	}
}

func TestAny_access_of_any_width_is_harmless(t *testing.T) {
	p := newPort(t, nil)
	for off := uint64(0); off < 20; off++ {
		for _, n := range []int{0, 1, 2, 4, 8, 3} {
			b := bytes.Repeat([]byte{0xff}, n)
			p.WriteIO(off, b)
			p.ReadIO(off, b)
			for i, v := range b {
				if i > 0 && v != 0 {
					t.Fatalf("byte %d of a read of %d at %d is %#x", i, n, off, v)
				}
			}
		}
	}
}

// stuck blocks in Write until it is released.
type stuck struct{ release chan struct{} }

func (s *stuck) Write(p []byte) (int, error) {
	<-s.release
	return len(p), nil
}

func TestStuck_writer_blocks_neither_guest_nor_pause_and_output_is_kept(t *testing.T) {
	w := &stuck{make(chan struct{})}
	p := newPort(t, w)
	defer close(w.release)
	start := time.Now()
	for range 3 * devices.OutputSize {
		p.out(regData, 'x')
	}
	if err := p.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Fatalf("it took %v", d)
	}
	if p.UART.out.Dropped() == 0 {
		t.Fatal("nothing was dropped")
	}
	s, err := p.Export()
	if err != nil {
		t.Fatal(err)
	}
	var out buffer
	q := newPort(t, &out)
	if err := q.Import(s); err != nil {
		t.Fatal(err)
	}
	if err := q.Resume(); err != nil {
		t.Fatal(err)
	}
	q.Close()
	if n := len(out.String()); n < devices.OutputSize-4096 || n > devices.OutputSize {
		t.Fatalf("%d bytes came out after the import", n)
	}
}

func TestPause_ends_with_its_context(t *testing.T) {
	w := &stuck{make(chan struct{})}
	p := newPort(t, w)
	defer close(w.release)
	p.out(regData, 'x')
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.Pause(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

func TestState_goes_on_in_another_port(t *testing.T) {
	p := newPort(t, nil)
	p.out(regIIR, fcrEnable)
	p.out(regIER, ierReceive|ierTransmit)
	p.out(regMCR, 0x0b)
	p.out(regLCR, 3)
	p.out(regScratch, 0x77)
	p.in(regIIR)
	if err := p.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	if n := p.edgesOf(func() { p.loop("typed while paused") }); n != 0 {
		t.Fatalf("a paused port raised %d edges", n)
	}
	s, err := p.Export()
	if err != nil {
		t.Fatal(err)
	}
	q := newPort(t, nil)
	if err := q.Import(s); err != nil {
		t.Fatal(err)
	}
	if q.edges.Load() != 0 {
		t.Fatal("an edge before Resume")
	}
	if n := q.edgesOf(func() { q.Resume() }); n != 1 {
		t.Fatalf("%d edges at Resume, want 1", n)
	}
	if v := q.in(regIIR); v != iirFIFO|iirReceive {
		t.Fatalf("IIR = %#x", v)
	}
	if q.in(regIER) != 3 || q.in(regMCR) != 0x0b || q.in(regLCR) != 3 || q.in(regScratch) != 0x77 || q.in(regData) != 't' {
		t.Fatal("a register differs")
	}
}

func TestDamaged_state_is_refused(t *testing.T) {
	p := newPort(t, nil)
	p.loop("abc")
	good, err := p.Export()
	if err != nil {
		t.Fatal(err)
	}
	for n := range good.Data {
		bad := good
		bad.Data = good.Data[:n]
		if err := newPort(t, nil).Import(bad); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	for name, change := range map[string]func(*devices.Payload){
		"another kind":       func(p *devices.Payload) { p.Kind = "virtio-blk" },
		"a later version":    func(p *devices.Payload) { p.Version++ },
		"bytes left over":    func(p *devices.Payload) { p.Data = append(p.Data, 0) },
		"impossible IER":     func(p *devices.Payload) { p.Data[0] = 0xff },
		"impossible flag":    func(p *devices.Payload) { p.Data[4] = 2 },
		"input beyond limit": func(p *devices.Payload) { p.Data[9] = 0xff },
	} {
		bad := good
		bad.Data = bytes.Clone(good.Data)
		change(&bad)
		if err := newPort(t, nil).Import(bad); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func BenchmarkOutputByte(b *testing.B) {
	u := New(nil, func() {})
	defer u.Close()
	b.ReportAllocs()
	p := []byte{'x'}
	for b.Loop() {
		u.WriteIO(regData, p)
	}
}
