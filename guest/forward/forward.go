//go:build linux

package forward

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/internal/relay"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/wait"
)

// DefaultMaxConns is how many connections a Forward carries at once by default. A VM's vsock device has room for
// 1024 of all kinds.
const DefaultMaxConns = 256

// Forward accepts connections and connects each to a counterpart from Dial.
type Forward struct {
	// Accept waits for the next connection. Its error is net.ErrClosed once the listener is closed.
	Accept func() (net.Conn, error)
	// Dial makes the counterpart of an accepted connection. One of the two must be a socket of the host, the other a
	// *guest.Conn. Its context ends with Serve's.
	Dial func(context.Context) (net.Conn, error)
	// MaxConns bounds the connections carried at once; further ones wait to be accepted. 0 means DefaultMaxConns.
	MaxConns int
	// Failed, if not nil, is called for connections that got no counterpart. It may be called from any goroutine.
	Failed func(error)
}

// reset breaks an end of a carried connection, if its kind can be reset.
func reset(c net.Conn) {
	if g, ok := c.(*guest.Conn); ok {
		_ = g.Abort()
		return
	}
	_ = relay.Socket(c).Reset()
}

// Serve carries connections until Accept fails or ctx ends. It then resets the open ones. It returns Accept's error,
// or nil if that is net.ErrClosed or ctx has ended. The caller must close Accept's listener when ctx ends.
func (f *Forward) Serve(ctx context.Context) error {
	limit := f.MaxConns
	if limit == 0 {
		limit = DefaultMaxConns
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	room := make(chan struct{}, limit)
	for {
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		c, err := f.Accept()
		if err != nil {
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED) {
				// The connection waits in the kernel's queue until there are descriptors.
				<-room
				f.failed(err)
				if wait.For(ctx, acceptPause) != nil {
					return nil
				}
				continue
			}
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		wg.Go(func() {
			defer func() { <-room }()
			f.carry(ctx, c)
		})
	}
}

// acceptPause is how long a forward waits for descriptors.
const acceptPause = 100 * time.Millisecond

func (f *Forward) failed(err error) {
	if f.Failed != nil {
		f.Failed(err)
	}
}

// carry carries bytes between a connection and its counterpart until both directions have ended, either is broken,
// or ctx ends, which resets both.
func (f *Forward) carry(ctx context.Context, a net.Conn) {
	b, err := f.Dial(ctx)
	if err != nil {
		reset(a)
		f.failed(err)
		return
	}
	if _, ok := a.(*guest.Conn); !ok {
		a, b = b, a
	}
	inside, ok := a.(*guest.Conn)
	if _, both := b.(*guest.Conn); !ok || both {
		reset(a)
		reset(b)
		f.failed(errEnds)
		return
	}
	outside := relay.Socket(b)
	stop := context.AfterFunc(ctx, func() {
		_ = inside.Abort()
		_ = outside.Reset()
	})
	defer stop()
	_, _, _ = relay.Join(inside, outside) // both peers see how the connection ended
}

var errEnds = errors.New("forward: one end of a connection is the host's and one the guest's")

// Listen listens at an address of the host. A Unix socket has the permissions 0600 before any other user can reach
// it, and is removed when the listener is closed. The error is fs.ErrExist if its path already exists.
func Listen(ctx context.Context, a Address) (net.Listener, error) {
	if a.Network != "unix" {
		var lc net.ListenConfig
		return lc.Listen(ctx, a.Network, a.Address)
	}
	l, err := osfile.ListenUnixNew(ctx, a.Address)
	if errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("%w: remove it if nobody listens there", err)
	}
	if err != nil {
		return nil, fmt.Errorf("listen at unix:%s: %w", a.Address, err)
	}
	return l, nil
}

// Dial connects to an address of the host.
func Dial(ctx context.Context, a Address) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, a.Network, a.Address)
}
