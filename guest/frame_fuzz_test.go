package guest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// saidConn is a connection to a guest that has sent everything.
type saidConn struct {
	net.Conn
	said   io.Reader
	closed bool
}

func (c *saidConn) Read(p []byte) (int, error) { return c.said.Read(p) }
func (c *saidConn) Close() error               { c.closed = true; return nil }

// seedFrame returns a frame with n bytes of content.
func seedFrame(id uint32, kind, flags byte, n int) []byte {
	b := make([]byte, frameHeader+n)
	binary.BigEndian.PutUint32(b, uint32(n))
	binary.BigEndian.PutUint32(b[4:], id)
	b[8], b[9] = kind, flags
	return b
}

// FuzzFrameConn has a guest send arbitrary bytes. frameConn must pass on only whole frames of the current call, none
// too long, no more than the client takes, and none after the first that breaks the rules.
func FuzzFrameConn(f *testing.F) {
	join := func(list ...[]byte) []byte { return bytes.Join(list, nil) }
	f.Add(join(seedFrame(1, frameData, 0, 5), seedFrame(1, frameResponse, 0, 3), seedFrame(1, frameResponse, 0, 9), seedFrame(3, frameResponse, 0, 0)), byte(7), byte(0))
	f.Add(join(seedFrame(1, frameData, frameClosed, 5), seedFrame(3, frameData, 0, 3)), byte(1), byte(3))
	f.Add(bytes.Repeat(seedFrame(1, frameData, 0, 0), maxPending+2), byte(200), byte(1))
	f.Add(seedFrame(1, frameData, 0, 9)[:12], byte(3), byte(0))
	f.Add(append(seedFrame(1, frameData, 0, 0), 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 3, 0), byte(3), byte(0))
	f.Fuzz(func(t *testing.T, said []byte, size, how byte) {
		conn := &saidConn{said: bytes.NewReader(said)}
		c := &frameConn{Conn: conn}
		c.expected.Store(1)
		next, takes := uint32(1), how&1 == 1
		var header []byte
		body, untaken := 0, 0
		p := make([]byte, int(size)+1)
		for {
			n, err := c.Read(p)
			for _, b := range p[:n] {
				if body > 0 {
					body--
					continue
				}
				if header = append(header, b); len(header) < frameHeader {
					continue
				}
				length, id, kind := binary.BigEndian.Uint32(header), binary.BigEndian.Uint32(header[4:]), header[8]
				if length > agentpb.MaxMessage || kind != frameResponse && kind != frameData || id != next {
					t.Fatalf("a frame of %d bytes of kind %d for call %d was passed on, in call %d", length, kind, id, next)
				}
				if untaken++; untaken > maxPending {
					t.Fatalf("%d frames were passed on that nobody has taken", untaken)
				}
				if takes {
					c.taken()
					untaken--
				}
				if last := kind == frameResponse || header[9]&frameClosed != 0; last != (c.expected.Load() == 0) {
					t.Fatalf("after a frame of kind %d and flags %#x the call is under way: %v", kind, header[9], !last)
				} else if last && how&2 != 0 {
					next += 2
					c.expected.Store(next)
				} else if last {
					next = 0 // no further frame may come
				}
				header, body = header[:0], int(length)
			}
			if err == nil {
				if n == 0 {
					t.Fatal("nothing was read, and no error")
				}
				continue
			}
			broken := errors.Is(err, ErrProtocol)
			if broken != conn.closed || broken != (c.fault.Load() != nil) || broken != errors.Is(c.err(io.EOF), ErrProtocol) {
				t.Fatalf("it ended with %v; the connection is closed: %v", err, conn.closed)
			}
			if !broken && errors.Is(err, io.EOF) != (len(header) == 0 && body == 0 && !errors.Is(err, ErrConnectionLost)) {
				t.Fatalf("it ended with %v, %d bytes before the end of a frame", err, body)
			}
			if (len(header) > 0 || body > 0) && !errors.Is(err, ErrConnectionLost) {
				t.Fatalf("it ended within a frame with %v", err)
			}
			return
		}
	})
}
