package relay

import (
	"errors"
	"io"
	"net"
	"sync"
)

// Endpoint is the socket, or its substitute, whose bytes a stream carries.
type Endpoint interface {
	io.ReadWriteCloser
	// CloseWrite ends the direction to the endpoint.
	CloseWrite() error
	// Reset closes the endpoint so that its peer sees a broken connection, if the endpoint's kind can do that.
	Reset() error
}

// Socket makes an endpoint of a TCP or Unix socket connection. Unix sockets have no reset: the peer sees an end
// instead.
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
	_ = e.SetLinger(0) // Close then sends a reset instead of an end
	return e.Close()
}

type unixEndpoint struct{ *net.UnixConn }

func (e unixEndpoint) Reset() error { return e.Close() }

// plainEndpoint is a connection whose directions cannot be ended separately.
type plainEndpoint struct{ net.Conn }

func (e plainEndpoint) CloseWrite() error { return nil }
func (e plainEndpoint) Reset() error      { return e.Close() }

// Join carries bytes both ways between a stream and an endpoint until both directions have ended, or either is
// broken, which breaks the other. It then closes both. It returns how many bytes went to the stream and came from
// it. To stop it, call Abort of the stream.
//
// An endpoint that accepts no more, but has not ended its own direction, may have sent data before it went: Join
// delivers that first. Meanwhile it drops data for the endpoint, and in the end it breaks both.
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

// join is the shared state of the two directions.
type join struct {
	stream   *Stream
	endpoint Endpoint

	mu         sync.Mutex
	out, in    bool  // the direction has ended properly
	unwritable error // why the endpoint accepts no more
	err        error // first error that broke the pair
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

// ended notes that a direction has ended properly.
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

// outward carries data from the endpoint to the stream.
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

// inward carries data from the stream to the endpoint.
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

// refusal returns why the endpoint accepts no more; nil if it still does.
func (j *join) refusal() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.unwritable
}

// refused notes that the endpoint accepts no more. That breaks the pair at once if the endpoint has ended its own
// direction as well.
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

// sink writes to the endpoint. It keeps the endpoint's errors apart from those of the stream.
type sink struct {
	*join
	n *int64 // bytes that the endpoint has accepted
}

// Write implements io.Writer. It never fails, so that inward reads the stream to its end and notices a cut.
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
