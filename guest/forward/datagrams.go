//go:build linux

package forward

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/internal/relay"
)

// Defaults and bounds of Datagrams.
const (
	// DefaultMaxSessions is how many senders are served at once. A VM's agent has room for as many in all its
	// forwards together.
	DefaultMaxSessions = 64
	// DefaultSessionIdle is how long a session lasts without a datagram.
	DefaultSessionIdle = time.Minute
	// maxWaiting is how many datagrams of one sender may wait to be carried into the guest; more are lost.
	maxWaiting = 64
)

// ErrSessions says that datagrams were lost because there are too many senders.
var ErrSessions = errors.New("forward: too many senders of datagrams at once")

// Datagrams carries UDP datagrams that come to a socket of the host on from sockets in the guest, one for each
// sender, and carries answers back. Like UDP itself it loses what it has no room for, but what arrives is whole and
// in order.
type Datagrams struct {
	// Conn is the socket of the host. Serve closes it.
	Conn net.PacketConn
	// Dial makes a socket in the guest: guest.Client.Dial with "udp". Its context ends with Serve's.
	Dial func(context.Context) (*guest.Conn, error)
	// MaxSessions and Idle bound sessions; 0 means the defaults.
	MaxSessions int
	Idle        time.Duration
	// Failed, if not nil, is called for each session that could not connect, and for the first sender in a row that
	// found no room. It may be called from any goroutine.
	Failed func(error)
}

// session is one sender. It is the endpoint that relay.JoinDatagrams joins with the guest's connection.
type session struct {
	socket net.PacketConn
	from   net.Addr
	idle   time.Duration
	queue  chan []byte
	last   atomic.Int64 // Unix time of the last datagram, in nanoseconds
	closed chan struct{}
	once   sync.Once
}

func (s *session) touch() { s.last.Store(time.Now().UnixNano()) }

// Read takes the next datagram. It returns io.EOF when no datagram has come or gone back for the idle time.
func (s *session) Read(b []byte) (int, error) {
	for left := s.idle; left > 0; left = s.idle - time.Since(time.Unix(0, s.last.Load())) {
		select {
		case p := <-s.queue:
			return copy(b, p), nil
		case <-time.After(left):
		case <-s.closed:
			return 0, net.ErrClosed
		}
	}
	return 0, io.EOF
}

// Write sends an answer to the sender, which may be lost.
func (s *session) Write(b []byte) (int, error) {
	s.touch()
	_, _ = s.socket.WriteTo(b, s.from)
	return len(b), nil
}

func (s *session) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// Serve carries datagrams until ctx ends or the socket fails.
func (d *Datagrams) Serve(ctx context.Context) error {
	limit := d.MaxSessions
	if limit == 0 {
		limit = DefaultMaxSessions
	}
	idle := d.Idle
	if idle == 0 {
		idle = DefaultSessionIdle
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { d.Conn.Close() })
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // guards what follows
		open = make(map[string]*session)
	)
	defer func() {
		cancel()
		stop()
		d.Conn.Close()
		wg.Wait()
	}()
	full := false
	buf := make([]byte, relay.MaxDatagram)
	for {
		n, from, err := d.Conn.ReadFrom(buf)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("forward: %w", err)
		}
		key := from.String()
		mu.Lock()
		s := open[key]
		if s == nil && len(open) < limit {
			full = false
			s = &session{socket: d.Conn, from: from, idle: idle, queue: make(chan []byte, maxWaiting), closed: make(chan struct{})}
			open[key] = s
			wg.Go(func() {
				d.carry(ctx, s)
				mu.Lock()
				delete(open, key)
				mu.Unlock()
			})
		}
		mu.Unlock()
		if s == nil {
			if !full {
				full = true
				d.failed(fmt.Errorf("%w: %d", ErrSessions, limit))
			}
			continue
		}
		s.touch()
		select {
		case s.queue <- bytes.Clone(buf[:n]):
		default: // lost
		}
	}
}

func (d *Datagrams) failed(err error) {
	if d.Failed != nil {
		d.Failed(err)
	}
}

// carry serves one sender until its session has been idle for too long, or the connection to the guest ends.
func (d *Datagrams) carry(ctx context.Context, s *session) {
	c, err := d.Dial(ctx)
	if err != nil {
		if ctx.Err() == nil {
			d.failed(err)
		}
		return
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Abort() })
	defer stop()
	relay.JoinDatagrams(c, s)
}
