package rng

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	devicetest.Run(t, devicetest.Case{
		New: func(testing.TB, *guestmem.Memory) devices.Device { return New(Options{}) },
		Exercise: func(t testing.TB, d *devicetest.Driver) {
			a, n := d.Queue(0).Do(nil, 16, 3, 45)
			b, m := d.Queue(0).Do(nil, 64)
			if n != 64 || m != 64 {
				t.Fatalf("%d and %d bytes, want 64", n, m)
			}
			if bytes.Equal(a, b) {
				t.Fatal("two requests got the same bytes")
			}
			if bytes.Count(a, []byte{0xee}) > 32 {
				t.Fatalf("the buffer was not filled: % x", a)
			}
		},
	})
}

func start(t *testing.T, source io.Reader) *devicetest.Driver {
	t.Helper()
	d := devicetest.NewDriver(t, New(Options{Source: source}), devicetest.NewMemory(t))
	d.Start(devicetest.AllFeatures)
	return d
}

// pattern is a source that gives the bytes 0, 1, 2, ...
type pattern struct{ n byte }

func (s *pattern) Read(p []byte) (int, error) {
	// Short reads are allowed.
	p = p[:1+len(p)/2]
	for i := range p {
		p[i] = s.n
		s.n++
	}
	return len(p), nil
}

func TestBuffer_is_filled_from_the_source_in_order(t *testing.T) {
	d := start(t, &pattern{})
	got, used := d.Queue(0).Do(nil, 5000, 1, 5000)
	if used != 10001 {
		t.Fatalf("used %d", used)
	}
	for i, b := range got {
		if b != byte(i) {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
}

func TestHuge_buffer_gets_no_more_than_the_limit(t *testing.T) {
	d := start(t, &pattern{})
	got, used := d.Queue(0).Do(nil, 8<<20)
	if used != MaxRequest {
		t.Fatalf("used %d, want %d", used, MaxRequest)
	}
	if rest := got[MaxRequest:]; bytes.Count(rest, []byte{0xee}) != len(rest) {
		t.Fatal("the buffer was written beyond the limit")
	}
}

func TestBuffer_that_cannot_be_written_gets_nothing(t *testing.T) {
	d := start(t, nil)
	if _, used := d.Queue(0).Do([][]byte{make([]byte, 64)}); used != 0 {
		t.Fatalf("used %d", used)
	}
}

func TestFailing_source_gives_the_device_up(t *testing.T) {
	d := start(t, io.LimitReader(&pattern{}, 100))
	r := d.Queue(0).Submit(nil, 200)
	devicetest.WaitFor(t, "NEEDS_RESET", func() bool { return d.Status()&devicetest.StatusNeedsReset != 0 })
	devicetest.WaitFor(t, "the owner to be told", func() bool { return d.HostError() != nil }) // right after the driver
	if err := d.HostError(); !errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, virtq.ErrDriver) {
		t.Errorf("the owner was told %v", err)
	}
	select {
	case <-r.Done():
		t.Error("a request that failed was answered")
	default:
	}
}
