package relay

import (
	"errors"
	"io"
	"net"
	"sync"
)

// Endpoint is the socket, or whatever stands for one, whose bytes a stream carries.
type Endpoint interface {
	io.ReadWriteCloser
	// CloseWrite ends the direction to the endpoint.
	CloseWrite() error
	// Reset closes the endpoint so that its peer takes it for broken, as far as there
	// is a way.
	Reset() error
}

// Socket makes an endpoint of a connection of TCP or of a Unix socket. A Unix socket
// knows no reset: its peer sees the end instead.
func Socket(c net.Conn) Endpoint {
	switch c := c.(type) {
	case *net.TCPConn:
		return tcpEndpoint{c}
	case *net.UnixConn:
		return unixEndpoint{c}
	}
	return plainEndpoint{c}
}

type tcpEndpoint struct{ *net.TCPConn }

func (e tcpEndpoint) Reset() error {
	_ = e.SetLinger(0) // a reset in place of the end
	return e.Close()
}

type unixEndpoint struct{ *net.UnixConn }

func (e unixEndpoint) Reset() error { return e.Close() }

// plainEndpoint is a connection whose directions cannot be ended separately.
type plainEndpoint struct{ net.Conn }

func (e plainEndpoint) CloseWrite() error { return nil }
func (e plainEndpoint) Reset() error      { return e.Close() }

// Join carries bytes both ways between a stream and an endpoint until both directions
// have ended, or either is broken, which breaks the other. Both are closed then. It
// returns how many bytes went to the stream and came from it. To stop it, call Abort of
// the stream.
//
// An endpoint that takes no more, and has not ended its own direction, may have said
// something before it went: that gets through first. What comes for it meanwhile is
// dropped, and both are broken in the end.
func Join(s *Stream, e Endpoint) (out, in int64, err error) {
	j := &join{stream: s, endpoint: e}
	var wg sync.WaitGroup
	wg.Go(func() { j.outward(&out) })
	wg.Go(func() { j.inward(&in) })
	wg.Wait()
	_ = s.Abort()
	_ = e.Close()
	return out, in, j.err
}

// join is what the two directions of a joined pair know of each other.
type join struct {
	stream   *Stream
	endpoint Endpoint

	mu         sync.Mutex
	out, in    bool  // the direction has ended well
	unwritable error // the endpoint takes no more
	err        error // the first that broke the pair
}

// fail breaks both ends.
func (j *join) fail(err error) {
	j.mu.Lock()
	if j.err == nil {
		j.err = err
	}
	j.mu.Unlock()
	_ = j.stream.Abort()
	_ = j.endpoint.Reset()
}

// ended notes that a direction has ended well.
func (j *join) ended(direction *bool) {
	j.mu.Lock()
	*direction = true
	both := j.out && j.in
	var err error
	if j.out {
		err = j.unwritable
	}
	j.mu.Unlock()
	switch {
	case err != nil:
		j.fail(err)
	case both:
		_ = j.stream.Abort()
	}
}

// outward carries what the endpoint says.
func (j *join) outward(n *int64) {
	rerr, err := j.stream.readFrom(j.endpoint, n)
	if err == nil && !errors.Is(rerr, io.EOF) {
		err = rerr
	}
	if err == nil {
		err = j.refusal()
	}
	if err == nil {
		err = j.stream.CloseWrite()
	}
	if err != nil {
		j.fail(err)
		return
	}
	j.ended(&j.out)
}

// inward carries what the stream says.
func (j *join) inward(n *int64) {
	if _, err := j.stream.WriteTo(sink{j, n}); err != nil {
		j.fail(err)
		return
	}
	if err := j.endpoint.CloseWrite(); err != nil {
		j.refused(err)
	}
	if j.refusal() == nil {
		j.ended(&j.in)
	}
	j.stream.awaitGone()
	j.mu.Lock()
	early := !j.out
	j.mu.Unlock()
	if early {
		j.fail(ErrCut)
	}
}

// refusal is why the endpoint takes no more, nil if it does.
func (j *join) refusal() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.unwritable
}

// refused notes that the endpoint takes no more. That breaks the pair at once if the
// endpoint has nothing more to say either.
func (j *join) refused(err error) {
	j.mu.Lock()
	if j.unwritable == nil {
		j.unwritable = err
	}
	over := j.out
	j.mu.Unlock()
	if over {
		j.fail(err)
	}
}

// sink is the endpoint for what comes to it. It keeps the endpoint's errors apart from
// those of the stream.
type sink struct {
	*join
	n *int64 // bytes that the endpoint has taken
}

// Write implements io.Writer. It does not fail: the stream is read to its end, so that it
// is seen when it is cut.
func (s sink) Write(p []byte) (int, error) {
	if s.refusal() == nil {
		n, err := s.endpoint.Write(p)
		*s.n += int64(n)
		if err != nil {
			s.refused(err)
		}
	}
	return len(p), nil
}
