package relay

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"syscall"
)

// MaxDatagram is the most that a datagram carries, in bytes. UDP has room for less.
const MaxDatagram = 1<<16 - 1

// lengthSize is what stands before each datagram in a stream: its length, big-endian, in bytes.
const lengthSize = 2

// DatagramBuffer is room for a datagram and what stands before it in a stream.
type DatagramBuffer [lengthSize + MaxDatagram]byte

// Room is where the datagram goes.
func (b *DatagramBuffer) Room() []byte { return b[lengthSize:] }

// WriteTo writes the first n bytes of Room to a stream as one datagram.
func (b *DatagramBuffer) WriteTo(s io.Writer, n int) error {
	binary.BigEndian.PutUint16(b[:], uint16(n))
	_, err := s.Write(b[:lengthSize+n])
	return err
}

// DatagramReader takes datagrams out of a stream.
type DatagramReader struct{ r *bufio.Reader }

// NewDatagramReader reads from a stream that nobody else reads from.
func NewDatagramReader(s io.Reader) DatagramReader {
	const buffered = 4 << 10 // bytes: some datagrams of usual size
	return DatagramReader{bufio.NewReaderSize(s, buffered)}
}

// Read reads the next one into b, and returns its length: 0 is one without content.
func (d DatagramReader) Read(b *DatagramBuffer) (int, error) {
	var head [lengthSize]byte
	if _, err := io.ReadFull(d.r, head[:]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(head[:]))
	if _, err := io.ReadFull(d.r, b.Room()[:n]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, err
	}
	return n, nil
}

// lost says of an error of a socket of UDP that only a datagram was lost, as the network may lose any.
func lost(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{
		syscall.ECONNREFUSED, syscall.EMSGSIZE, syscall.ENOBUFS, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM, syscall.EAGAIN,
	}, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// JoinDatagrams carries datagrams between a stream and a connected socket of UDP until the stream ends, and
// closes both. What the socket does not take is lost.
func JoinDatagrams(s *Stream, c net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer c.Close()
		r, buf := NewDatagramReader(s), new(DatagramBuffer)
		for {
			n, err := r.Read(buf)
			if err != nil {
				return
			}
			if _, err := c.Write(buf.Room()[:n]); err != nil && !lost(err) {
				return
			}
		}
	}()
	buf := new(DatagramBuffer)
	for {
		n, err := c.Read(buf.Room())
		if lost(err) {
			continue // one such error for each datagram that nobody took
		}
		if err != nil || buf.WriteTo(s, n) != nil {
			break
		}
	}
	c.Close()
	_ = s.Abort()
	<-done
}
