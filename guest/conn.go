package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// frameConn checks what the guest sends before ttrpc sees it: the size and the kind of every frame, and that it
// belongs to the call that is under way. So a guest cannot make the host allocate at will, or fill its memory or log
// with unexpected messages.
//
// A frame's header has ten bytes: length and stream id, both 32 bits and big-endian, then type and flags.
type frameConn struct {
	net.Conn

	// expected is the stream id that the guest may use; 0 is none.
	expected atomic.Uint32
	fault    atomic.Pointer[error] // why this side closed the connection

	// pending counts messages that were passed to ttrpc and not yet taken from it.
	pending atomic.Int32

	header [frameHeader]byte
	pass   []byte // part of header not yet handed on
	body   uint32 // bytes of the frame still to come
	ended  uint32 // stream id of the call that ended last
	late   int    // answers to that call after its end
}

const (
	frameHeader   = 10
	frameResponse = 2
	frameData     = 3
	frameClosed   = 1 // flag: the last message of its stream

	// maxPending is below the 64 messages that ttrpc buffers for a stream, and above a window of data plus the other
	// messages that may come with it.
	maxPending = agentpb.Window + 16
)

// Read returns bytes of frames that have been checked.
func (c *frameConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for len(c.pass) == 0 && c.body == 0 {
		if n, err := io.ReadFull(c.Conn, c.header[:]); err != nil {
			if n > 0 {
				err = lost(err)
			}
			return 0, err
		}
		length, drop, err := c.check()
		if err != nil {
			c.fault.CompareAndSwap(nil, &err)
			c.Conn.Close()
			return 0, err
		}
		if drop {
			if _, err := io.CopyN(io.Discard, c.Conn, int64(length)); err != nil {
				return 0, lost(err)
			}
			continue
		}
		c.pass, c.body = c.header[:], length
	}
	if len(c.pass) > 0 {
		n := copy(p, c.pass)
		c.pass = c.pass[n:]
		return n, nil
	}
	n, err := c.Conn.Read(p[:min(uint64(len(p)), uint64(c.body))])
	c.body -= uint32(n)
	if err != nil && c.body > 0 {
		err = lost(err)
	}
	return n, err
}

// lost is the error of a connection that ended within a message. ttrpc takes io.EOF for an ordinary end, which it is
// only between two messages.
func lost(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%w: %w", ErrConnectionLost, err)
}

// check decides on the frame whose header was read. It returns the frame's length, and whether to drop the frame.
func (c *frameConn) check() (length uint32, drop bool, err error) {
	length = binary.BigEndian.Uint32(c.header[0:])
	id := binary.BigEndian.Uint32(c.header[4:])
	kind, flags := c.header[8], c.header[9]
	expected := c.expected.Load()
	switch {
	case length > agentpb.MaxMessage:
		return 0, false, fmt.Errorf("%w: a message of %d bytes", ErrProtocol, length)
	case kind != frameResponse && kind != frameData:
		return 0, false, fmt.Errorf("%w: a message of type %d", ErrProtocol, kind)
	case id != 0 && id == c.ended && id != expected && kind == frameResponse && c.late < maxPending:
		// ttrpc answers what was sent to a stream before the sender knew of its end.
		c.late++
		return length, true, nil
	case id == 0 || id != expected:
		return 0, false, fmt.Errorf("%w: a message for call %d, which is not under way", ErrProtocol, id)
	}
	if c.pending.Add(1) > maxPending {
		return 0, false, fmt.Errorf("%w: more than %d messages ahead of their acknowledgement", ErrProtocol, maxPending)
	}
	if kind == frameResponse || flags&frameClosed != 0 {
		c.expected.CompareAndSwap(id, 0)
		c.ended, c.late = id, 0
	}
	return length, false, nil
}

// taken notes that a message was taken from ttrpc.
func (c *frameConn) taken() { c.pending.Add(-1) }

// err returns why this side closed the connection, if it did, else err.
func (c *frameConn) err(err error) error {
	if f := c.fault.Load(); f != nil && err != nil {
		return *f
	}
	return err
}
