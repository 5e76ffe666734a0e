package guest

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
)

func TestA_connection_that_ends_within_a_message_is_lost(t *testing.T) {
	var header [frameHeader]byte
	binary.BigEndian.PutUint32(header[0:], 8)
	binary.BigEndian.PutUint32(header[4:], 1)
	header[8] = frameData
	whole := append(header[:], "12345678"...)
	for n := range len(whole) + 1 {
		here, there := net.Pipe()
		c := &frameConn{Conn: here}
		c.expected.Store(1)
		go func() {
			_, _ = there.Write(whole[:n])
			there.Close()
		}()
		got, err := io.ReadAll(c)
		within := n > 0 && n < len(whole)
		if within != errors.Is(err, ErrConnectionLost) || !within && err != nil {
			t.Errorf("after %d of %d bytes: %d bytes, %v", n, len(whole), len(got), err)
		}
		here.Close()
	}
}
