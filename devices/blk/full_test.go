package blk

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
)

// An I/O error in its journal makes a guest's root read-only from then on, even when the host has room again.
func TestAttack_full_host_disk_does_not_reach_the_guest_as_an_IO_error(t *testing.T) {
	for _, tc := range []struct {
		name    string
		request func(d disk) *devicetest.Request
		fill    func(b *broken, full *atomic.Bool)
	}{
		{"a write that the file system refuses", func(d disk) *devicetest.Request {
			return d.Queue(0).Submit([][]byte{header(typeOut, 8), pattern(4096, 5)}, statusSize)
		}, func(b *broken, _ *atomic.Bool) { b.set(fmt.Errorf("the disk: %w", unix.ENOSPC)) }},
		{"a write beyond a quota", func(d disk) *devicetest.Request {
			return d.Queue(0).Submit([][]byte{header(typeOut, 8), pattern(4096, 5)}, statusSize)
		}, func(b *broken, _ *atomic.Bool) { b.set(fmt.Errorf("the disk: %w", unix.EDQUOT)) }},
		{"a write into the reserve", func(d disk) *devicetest.Request {
			return d.Queue(0).Submit([][]byte{header(typeOut, 8), pattern(4096, 5)}, statusSize)
		}, func(_ *broken, full *atomic.Bool) { full.Store(true) }},
		{"zeros that keep their space", func(d disk) *devicetest.Request {
			return d.Queue(0).Submit([][]byte{header(typeWriteZeroes, 0), ranges([3]uint64{8, 8, 0})}, statusSize)
		}, func(_ *broken, full *atomic.Bool) { full.Store(true) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := &broken{Backend: newFile(t, diskSize, false)}
			var full atomic.Bool
			told := make(chan error, 100)
			o := Options{
				OnError: func(err error) { t.Errorf("the owner is told of an I/O error: %v", err) },
				OnFull:  func(err error) { told <- err },
				Space: func(n int64) error {
					if full.Load() {
						return fmt.Errorf("no room for %d bytes: %w", n, unix.ENOSPC)
					}
					return nil
				},
			}
			d := start(t, b, o)
			before := d.mustDo(typeIn, 8, nil, 4096)
			tc.fill(b, &full)
			waits := tc.request(d)
			<-told
			// A request behind it waits as well: none overtakes.
			behind := d.Queue(0).Submit([][]byte{header(typeIn, 8)}, 4096, statusSize)
			if n := d.Queue(0).InFlight(); n != 2 {
				t.Fatalf("%d requests in flight, want both", n)
			}
			// A snapshot has both as not begun, and the device restored from it does them.
			if err := d.Move(New(b, o)); err != nil {
				t.Fatal(err)
			}
			<-told
			if n := d.Queue(0).InFlight(); n != 2 {
				t.Fatalf("%d requests in flight after a move, want both", n)
			}
			b.set(nil)
			full.Store(false)
			if err := d.PauseAndResume(time.Millisecond); err != nil { // as the owner does when there is room
				t.Fatal(err)
			}
			if status, _ := waits.Wait(); status[len(status)-1] != statusOK {
				t.Errorf("the request that waited has status %d", status)
			}
			if data, _ := behind.Wait(); data[4096] != statusOK || bytes.Equal(data[:4096], before) != (tc.name == "zeros that keep their space") {
				t.Errorf("the one behind it has status %d, or does not see what was written", data[4096])
			}
			d.WithDevice(func(dev devices.Device) {
				if s := dev.(*Device).Stats(); s.HostErrors.Load() != 0 || s.Refused.Load() != 0 {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// What a guest reads may still be on its way to the host, and may never come.
func TestAttack_disk_that_lacks_bytes_does_not_reach_the_guest_as_an_IO_error(t *testing.T) {
	b := &broken{Backend: newFile(t, diskSize, false)}
	o := Options{OnError: func(err error) { t.Errorf("the owner is told of an I/O error: %v", err) }}
	d := start(t, b, o)
	want := d.mustDo(typeIn, 8, nil, 4096)
	b.set(fmt.Errorf("the disk: %w", devices.ErrLater))
	read := d.Queue(0).Submit([][]byte{header(typeIn, 8)}, 4096, statusSize)
	write := d.Queue(0).Submit([][]byte{header(typeOut, 16), pattern(512, 5)}, statusSize)
	if err := d.PauseAndResume(time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if n := d.Queue(0).InFlight(); n != 2 {
		t.Fatalf("%d requests in flight, want both", n)
	}
	b.set(nil)
	if err := d.PauseAndResume(time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if got, _ := read.Wait(); got[4096] != statusOK || !bytes.Equal(got[:4096], want[:4096]) {
		t.Errorf("the read has status %d, or other bytes", got[4096])
	}
	if status, _ := write.Wait(); status[len(status)-1] != statusOK {
		t.Errorf("the write has status %d", status)
	}
}
