package gateway

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
)

// hello returns a ClientHello.
func hello(name string, protos ...string) []byte {
	a, b := net.Pipe()
	go func() {
		_ = tls.Client(a, &tls.Config{ServerName: name, NextProtos: protos, InsecureSkipVerify: true}).Handshake()
	}()
	out := make([]byte, 4096)
	n, _ := b.Read(out)
	b.Close()
	a.Close()
	return out[:n]
}

// trickle returns one byte at a time.
type trickle struct{ io.Reader }

// Read implements io.Reader.
func (t trickle) Read(p []byte) (int, error) { return t.Reader.Read(p[:min(len(p), 1)]) }

func TestReadHello_reads_a_name_and_keeps_all_bytes(t *testing.T) {
	want := hello("80-a.d.test", "postgresql")
	more := append(bytes.Clone(want), "early data"...)
	for _, r := range []io.Reader{bytes.NewReader(more), trickle{bytes.NewReader(more)}} {
		got, name, err := readHello(r)
		if err != nil || name != "80-a.d.test" || !bytes.HasPrefix(more, got) || len(got) < len(want) {
			t.Errorf("%q, %d of %d bytes, %v", name, len(got), len(want), err)
		}
	}
}

func TestReadHello_ends_at_its_bound(t *testing.T) {
	// Handshake records of a message that never ends.
	record := append([]byte{22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff}, make([]byte, 0x4000-4)...)
	endless := &repeat{b: record}
	if _, _, err := readHello(endless); !errors.Is(err, ErrRoute) || endless.n > maxHello+len(record) {
		t.Error(err, endless.n)
	}
}

type repeat struct {
	b []byte
	n int
}

// Read implements io.Reader.
func (r *repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = r.b[(r.n+i)%len(r.b)]
	}
	r.n += len(p)
	return len(p), nil
}

func FuzzReadHello(f *testing.F) {
	f.Add(hello("80-a.d.test", "h2"))
	f.Add(hello(""))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0, 1, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, name, err := readHello(bytes.NewReader(b))
		if (err == nil) != (name != "") || !bytes.HasPrefix(b, got) {
			t.Fatal(name, err)
		}
		if err != nil && !errors.Is(err, ErrRoute) {
			t.Fatal(err)
		}
	})
}
