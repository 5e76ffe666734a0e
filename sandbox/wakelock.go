package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// WakeLock keeps a VM from going to sleep by itself, for uses that its own process does not see. Release ends it,
// and must be called. A requested sleep still takes place: then Done is closed, and the sleep waits up to a second
// for Release.
type WakeLock struct {
	cancel  context.CancelFunc
	done    chan struct{} // closed when the lock holds no more
	ended   chan struct{} // closed when the lock's goroutine has ended
	network *spec.NetworkInfo
}

// Network returns the VM's network as it was when the lock was granted. Its warnings can change later, its addresses
// cannot. It is nil without a network, or if the VM's process is of an older drowse that does not report it.
func (h *WakeLock) Network() *spec.NetworkInfo { return h.network }

// WakeLock keeps a running VM awake. It returns ErrNotRunning if the VM sleeps, or has just gone to sleep. ctx is
// only for the call.
func (b *Sandbox) WakeLock(ctx context.Context) (*WakeLock, error) {
	s, name := b.host, b.name
	held, cancel := context.WithCancel(context.WithoutCancel(ctx))
	h := &WakeLock{cancel: cancel, done: make(chan struct{}), ended: make(chan struct{})}
	stop := context.AfterFunc(ctx, cancel)
	granted := make(chan struct{})
	over := sync.OnceFunc(func() { close(h.done) })
	var err error
	go func() {
		defer close(h.ended)
		defer over()
		err = control.Read(held, s.State, name, "/hold", func(body io.Reader) error {
			answer := bufio.NewReaderSize(body, control.MaxHoldLine)
			line, err := answer.ReadSlice('\n')
			if err != nil {
				return err
			}
			if h.network, err = control.ParseHeld(line); err != nil {
				return err
			}
			close(granted)
			_, _ = answer.ReadByte() // the lock ends, or the process does
			over()
			<-held.Done() // Release
			return nil
		})
	}()
	select {
	case <-granted:
		if stop() {
			return h, nil
		}
		// The call was canceled just now.
	case <-h.ended:
	}
	cancel()
	<-h.ended
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, err
}

// WakeWithLock is WakeLock that first wakes a VM that sleeps (BringUp), and holds it from its first moment on.
func (b *Sandbox) WakeWithLock(ctx context.Context) (*WakeLock, error) {
	return inUse(b, func() (*WakeLock, error) { return b.WakeLock(ctx) }, func() (*WakeLock, error) {
		_, h, err := b.wakeWithLock(ctx)
		return h, err
	})
}

// wakeWithLock wakes a VM that sleeps. If another caller was waking it, or it was awake, there is no lock.
func (b *Sandbox) wakeWithLock(ctx context.Context) (control.Report, *WakeLock, error) {
	s, name := b.host, b.name
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return control.Report{}, nil, fmt.Errorf("waking %s: %w", name, err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "hold")
	conn, err := control.FileConn(os.NewFile(uintptr(fds[0]), "hold"))
	if err != nil {
		return control.Report{}, nil, errors.Join(fmt.Errorf("waking %s: %w", name, err), theirs.Close())
	}
	rep, err := s.wake(ctx, name, theirs, false)
	if err = errors.Join(err, theirs.Close()); err != nil {
		return rep, nil, errors.Join(err, conn.Close())
	}
	h := &WakeLock{cancel: func() { conn.Close() }, done: make(chan struct{}), ended: make(chan struct{})}
	answer := bufio.NewReaderSize(conn, control.MaxHoldLine)
	// The VM's process sent the line before the report. There is none if another process is the VM's.
	if err := conn.SetReadDeadline(time.Now().Add(control.DismissTime)); err != nil {
		return rep, nil, errors.Join(err, conn.Close())
	}
	line, err := answer.ReadSlice('\n')
	if err == nil {
		h.network, err = control.ParseHeld(line)
	}
	if err == nil {
		err = conn.SetReadDeadline(time.Time{})
	}
	if err != nil {
		return rep, nil, conn.Close()
	}
	go func() {
		defer close(h.ended)
		defer close(h.done)
		_, _ = answer.ReadByte() // the lock ends, the process does, or Release is called
	}()
	return rep, h, nil
}

// Done returns a channel that is closed when the VM must sleep or no longer runs, or Release was called.
func (h *WakeLock) Done() <-chan struct{} { return h.done }

// Release lets the VM sleep again. It may be called more than once.
func (h *WakeLock) Release() {
	h.cancel()
	<-h.ended
}
