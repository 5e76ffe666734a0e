package relay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// Frames.
const (
	headSize = 4
	// MaxFrame is the most that a frame carries, in bytes: enough for a UDP datagram.
	MaxFrame = 64 << 10

	kindData = 1
	kindEnd  = 2
)

// ErrCut says that the other end of a stream is gone without having ended it: data may be missing. It is a
// connection reset.
var ErrCut = fmt.Errorf("the forwarded connection was cut: %w", syscall.ECONNRESET)

// Stream is a connection of frames: a net.Conn whose two directions end separately. A Read, a Write and the other
// calls may run concurrently.
type Stream struct {
	conn net.Conn
	// Local and Remote are the results of LocalAddr and RemoteAddr; nil means the connection's addresses.
	Local, Remote net.Addr
	// Gone, if set before the first use, is called once when the stream is closed, with the bytes that were sent and
	// received until then.
	Gone func(sent, received int64)

	sent, received atomic.Int64

	readMu sync.Mutex // held by the reader
	in     parser
	// raw are bytes that were read from the connection and not yet parsed, data those that were parsed and not yet
	// returned. Both are parts of buf, which Read allocates: a small one until full says that it was filled. WriteTo uses
	// the pool.
	buf, raw, data []byte
	full           bool

	writeMu sync.Mutex // held by the writer
	ended   atomic.Bool
	closed  atomic.Bool
}

var errAfterEnd = fmt.Errorf("%w: bytes after the end of a stream", flow.ErrProtocol)

// NewStream makes a stream of a connection, which must have no other use from then on.
func NewStream(c net.Conn) *Stream { return &Stream{conn: c} }

// parser takes frames apart. The zero value is at the beginning of a stream.
type parser struct {
	head  [headSize]byte
	have  int // bytes of head
	left  int // bytes of the frame's data still to come
	ended bool
}

// next returns the data at the beginning of p that belongs to one frame, and how many bytes of p it used. data may
// be empty although bytes were used.
func (s *parser) next(p []byte) (data []byte, used int, err error) {
	if s.ended && len(p) > 0 {
		return nil, 0, errAfterEnd
	}
	if s.left == 0 {
		n := copy(s.head[s.have:], p)
		s.have += n
		used = n
		if s.have < headSize {
			return nil, used, nil
		}
		s.have = 0
		v := binary.BigEndian.Uint32(s.head[:])
		kind, length := v>>24, int(v&(1<<24-1))
		switch {
		case kind == kindEnd && length == 0:
			s.ended = true
			return nil, used, nil
		case kind != kindData || length == 0 || length > MaxFrame:
			return nil, used, fmt.Errorf("%w: a frame of kind %d with %d bytes", flow.ErrProtocol, kind, length)
		}
		s.left = length
	}
	n := min(s.left, len(p)-used)
	data = p[used : used+n]
	s.left -= n
	return data, used + n, nil
}

func head(b []byte, kind byte, length int) {
	binary.BigEndian.PutUint32(b, uint32(kind)<<24|uint32(length))
}

// Read reads data of the stream. It returns io.EOF at the end, and ErrCut if the stream was cut.
func (s *Stream) Read(p []byte) (int, error) {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	if s.buf == nil {
		s.buf = make([]byte, firstBuffer)
	}
	for len(s.data) == 0 {
		if len(s.raw) > 0 {
			data, used, err := s.in.next(s.raw)
			if err != nil {
				return 0, s.broken(err)
			}
			s.data, s.raw = data, s.raw[used:]
			continue
		}
		if s.in.ended {
			return 0, io.EOF
		}
		if s.full {
			s.buf, s.full = make([]byte, BufferSize), false
		}
		n, err := s.conn.Read(s.buf)
		s.raw, s.full = s.buf[:n], n == firstBuffer
		if n == 0 && err != nil {
			return 0, s.cut(err)
		}
	}
	n := copy(p, s.data)
	s.data = s.data[n:]
	s.received.Add(int64(n))
	return n, nil
}

// cut returns the error for a connection that broke off.
func (s *Stream) cut(err error) error {
	switch {
	case s.closed.Load():
		return net.ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return err
	}
	return ErrCut
}

// broken closes a connection whose other end broke the protocol.
func (s *Stream) broken(err error) error {
	_ = s.Abort()
	return err
}

// WriteTo implements io.WriterTo. It holds a buffer only while there are bytes to move.
func (s *Stream) WriteTo(w io.Writer) (written int64, err error) {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	give := func(data []byte) error {
		s.received.Add(int64(len(data)))
		n, err := w.Write(data)
		written += int64(n)
		return err
	}
	parse := func(p []byte) error {
		for len(p) > 0 {
			data, used, err := s.in.next(p)
			if err != nil {
				return s.broken(err)
			}
			p = p[used:]
			if len(data) > 0 {
				if err := give(data); err != nil {
					return err
				}
			}
		}
		if s.in.ended {
			return errEnd
		}
		return nil
	}
	if len(s.data) > 0 {
		err = give(s.data)
	}
	if err == nil {
		err = parse(s.raw)
	}
	if err == nil {
		s.buf, s.raw, s.data = nil, nil, nil
		var rerr error
		rerr, err = chunks(s.conn, func(buf *buffer, n int) error { return parse(buf[headSize : headSize+n]) })
		if err == nil {
			return written, s.cut(rerr)
		}
	}
	if errors.Is(err, errEnd) {
		return written, nil
	}
	return written, err
}

// errEnd leaves the read loop at the end frame.
var errEnd = errors.New("end of stream")

// awaitGone waits, after the stream's end, until the other end is gone as well or this one is closed. The other end
// must not send any more.
func (s *Stream) awaitGone() {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	_, err := chunks(s.conn, func(*buffer, int) error { return errAfterEnd })
	if err != nil {
		_ = s.Abort()
	}
}

// Write sends p. It blocks while the other end accepts no more.
func (s *Stream) Write(p []byte) (int, error) {
	s.writeMu.Lock()
	defer s.writeMu.Unlock()
	buf := buffers.Get().(*buffer)
	defer buffers.Put(buf)
	for done := 0; done < len(p); {
		n := copy(buf[headSize:], p[done:])
		if err := s.frame(buf, n); err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

// ReadFrom implements io.ReaderFrom. It holds a buffer only while there are bytes to move.
func (s *Stream) ReadFrom(r io.Reader) (read int64, err error) {
	rerr, werr := s.readFrom(r, &read)
	if werr == nil && !errors.Is(rerr, io.EOF) {
		werr = rerr
	}
	return read, werr
}

func (s *Stream) readFrom(r io.Reader, read *int64) (readErr, writeErr error) {
	return chunks(r, func(buf *buffer, n int) error {
		s.writeMu.Lock()
		defer s.writeMu.Unlock()
		*read += int64(n)
		return s.frame(buf, n)
	})
}

// frame sends n bytes of data, which follow the room for a head in buf. The caller holds writeMu.
func (s *Stream) frame(buf *buffer, n int) error {
	if s.ended.Load() {
		return net.ErrClosed
	}
	head(buf[:], kindData, n)
	if _, err := s.conn.Write(buf[:headSize+n]); err != nil {
		// Part of a frame may have been sent: nothing can follow it.
		s.ended.Store(true)
		return s.cut(err)
	}
	s.sent.Add(int64(n))
	return nil
}

// CloseWrite ends the direction to the other end, after all written data.
func (s *Stream) CloseWrite() error {
	s.writeMu.Lock()
	defer s.writeMu.Unlock()
	if s.ended.Swap(true) {
		return nil
	}
	var b [headSize]byte
	head(b[:], kindEnd, 0)
	if _, err := s.conn.Write(b[:]); err != nil {
		return s.cut(err)
	}
	return nil
}

// Close ends both directions without waiting. If the connection has no room for the end frame, the other end sees a
// cut after the written data. To be sure that all data arrived, use CloseWrite and read to the end.
func (s *Stream) Close() error {
	if !s.ended.Load() && s.writeMu.TryLock() {
		if !s.ended.Swap(true) {
			s.endNow()
		}
		s.writeMu.Unlock()
	}
	return s.Abort()
}

// endNow writes an end frame if there is room for it. The caller holds writeMu.
func (s *Stream) endNow() {
	var b [headSize]byte
	head(b[:], kindEnd, 0)
	sc, ok := s.conn.(syscall.Conn)
	if !ok {
		// Not a socket, such as a net.Pipe.
		_ = s.conn.SetWriteDeadline(time.Now().Add(endPatience))
		_, _ = s.conn.Write(b[:])
		return
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return
	}
	// To the other end, part of a head is a cut, and so is no head.
	_ = rc.Write(func(fd uintptr) bool {
		_, _ = syscall.Write(int(fd), b[:])
		return true
	})
}

// endPatience is the write timeout for connections that cannot tell whether they have room.
const endPatience = 100 * time.Millisecond

// Abort closes the connection at once: the other end sees a cut, unless both directions have ended.
func (s *Stream) Abort() error {
	s.ended.Store(true)
	if s.closed.Swap(true) {
		return nil
	}
	err := s.conn.Close()
	if s.Gone != nil {
		s.Gone(s.sent.Load(), s.received.Load())
	}
	return err
}

// LocalAddr implements net.Conn.
func (s *Stream) LocalAddr() net.Addr {
	if s.Local != nil {
		return s.Local
	}
	return s.conn.LocalAddr()
}

// RemoteAddr implements net.Conn.
func (s *Stream) RemoteAddr() net.Addr {
	if s.Remote != nil {
		return s.Remote
	}
	return s.conn.RemoteAddr()
}

// SetDeadline implements net.Conn.
func (s *Stream) SetDeadline(t time.Time) error { return s.conn.SetDeadline(t) }

// SetReadDeadline implements net.Conn.
func (s *Stream) SetReadDeadline(t time.Time) error { return s.conn.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn. A Write that it interrupts ends the direction.
func (s *Stream) SetWriteDeadline(t time.Time) error { return s.conn.SetWriteDeadline(t) }
