package relay

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"syscall"
)

// MaxDatagram is the most that a datagram carries, in bytes. UDP's own limit is lower.
const MaxDatagram = 1<<16 - 1

// buffered is how many bytes of a stream to read at once: several datagrams of usual size.
const buffered = 4 << 10

// lengthSize is the size of the length before each datagram in a stream: in bytes, big-endian.
const lengthSize = 2

// datagram is a buffer for one datagram with its length in front.
type datagram [lengthSize + MaxDatagram]byte

// room returns the part of the buffer for the datagram itself.
func (b *datagram) room() []byte { return b[lengthSize:] }

// writeTo writes the first n bytes of room to a stream as one datagram.
func (b *datagram) writeTo(s io.Writer, n int) error {
	binary.BigEndian.PutUint16(b[:], uint16(n))
	_, err := s.Write(b[:lengthSize+n])
	return err
}

// readFrom reads the next datagram of a stream, and returns its length, which may be 0.
func (b *datagram) readFrom(s io.Reader) (int, error) {
	if _, err := io.ReadFull(s, b[:lengthSize]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(b[:]))
	_, err := io.ReadFull(s, b.room()[:n])
	return n, err
}

// lost reports whether an error of a UDP socket only means that a datagram was lost, as may happen in any network.
func lost(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{
		syscall.ECONNREFUSED, syscall.EMSGSIZE, syscall.ENOBUFS, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM, syscall.EAGAIN,
	}, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// JoinDatagrams carries datagrams between a stream and a connected UDP socket, or a similar connection, until either
// ends, and closes both. Datagrams that the socket does not accept are lost.
func JoinDatagrams(s *Stream, c io.ReadWriteCloser) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer c.Close()
		r, buf := bufio.NewReaderSize(s, buffered), new(datagram)
		for {
			n, err := buf.readFrom(r)
			if err != nil {
				return
			}
			if _, err := c.Write(buf.room()[:n]); err != nil && !lost(err) {
				return
			}
		}
	}()
	buf := new(datagram)
	for {
		n, err := c.Read(buf.room())
		if lost(err) {
			continue // one such error for each datagram that no socket received
		}
		if err != nil || buf.writeTo(s, n) != nil {
			break
		}
	}
	c.Close()
	_ = s.Abort()
	<-done
}
