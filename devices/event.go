package devices

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Event is an eventfd(2). KVM signals it as an ioeventfd, or waits for it as an irqfd.
//
// Wait is a plain blocking read, so that a signal wakes the waiting thread itself rather than the Go network poller
// first.
type Event struct {
	fd    int
	taken atomic.Uint64

	// Signal holds mu for reading while it uses the descriptor, so that a late signal never hits a descriptor
	// number that another file has since got.
	mu     sync.RWMutex
	closed bool
}

// NewEvent makes an eventfd whose count is zero.
func NewEvent() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("creating an eventfd: %w", err)
	}
	return &Event{fd: fd}, nil
}

// FD returns the file descriptor, for KVM_IOEVENTFD and KVM_IRQFD.
func (e *Event) FD() int { return e.fd }

// Taken returns how many signals Wait has taken so far.
func (e *Event) Taken() uint64 { return e.taken.Load() }

// Signal adds one to the count and so wakes the waiter. It does not block, and
// does nothing after Close.
func (e *Event) Signal() {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.closed {
		return
	}
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	for {
		_, err := unix.Write(e.fd, one[:])
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Wait blocks until the count is not zero, then clears it. After Close it fails with os.ErrClosed.
func (e *Event) Wait() error {
	var buf [8]byte
	for {
		if e.isClosed() {
			return os.ErrClosed
		}
		_, err := unix.Read(e.fd, buf[:])
		switch {
		case err == nil:
			e.taken.Add(binary.NativeEndian.Uint64(buf[:]))
			return nil
		case errors.Is(err, unix.EINTR):
		default:
			return fmt.Errorf("waiting for an eventfd: %w", err)
		}
	}
}

func (e *Event) isClosed() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.closed
}

// Close releases the descriptor. No goroutine may be in Wait.
func (e *Event) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	return os.NewSyscallError("close eventfd", unix.Close(e.fd))
}
