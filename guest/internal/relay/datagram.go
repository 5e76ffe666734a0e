package relay

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"syscall"
)

// MaxDatagram is the most that a datagram carries, in bytes. UDP has room for less.
const MaxDatagram = 1<<16 - 1

// buffered is how many bytes of a stream are read at once: some datagrams of usual size.
const buffered = 4 << 10

// lengthSize is what stands before each datagram in a stream: its length, big-endian, in bytes.
const lengthSize = 2

// datagram is room for one and what stands before it in a stream.
type datagram [lengthSize + MaxDatagram]byte

// room is where the datagram goes.
func (b *datagram) room() []byte { return b[lengthSize:] }

// writeTo writes the first n bytes of the room to a stream as one datagram.
func (b *datagram) writeTo(s io.Writer, n int) error {
	binary.BigEndian.PutUint16(b[:], uint16(n))
	_, err := s.Write(b[:lengthSize+n])
	return err
}

// readFrom reads the next one of a stream, and returns its length: 0 is one without content.
func (b *datagram) readFrom(s io.Reader) (int, error) {
	if _, err := io.ReadFull(s, b[:lengthSize]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(b[:]))
	_, err := io.ReadFull(s, b.room()[:n])
	return n, err
}

// lost says of an error of a socket of UDP that only a datagram was lost, as the network may lose any.
func lost(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{
		syscall.ECONNREFUSED, syscall.EMSGSIZE, syscall.ENOBUFS, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM, syscall.EAGAIN,
	}, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// JoinDatagrams carries datagrams between a stream and a connected socket of UDP, or what is like one, until either
// ends, and closes both. What the socket does not take is lost.
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
			continue // one such error for each datagram that nobody took
		}
		if err != nil || buf.writeTo(s, n) != nil {
			break
		}
	}
	c.Close()
	_ = s.Abort()
	<-done
}
