package relay

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/guest/internal/flow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair returns two ends of a connection of Unix sockets.
func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	end := func(fd int) net.Conn {
		f := os.NewFile(uintptr(fd), "pair")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	return end(fds[0]), end(fds[1])
}

// tcpPair returns two ends of a connection of TCP.
func tcpPair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); d.Close() })
	return c.(*net.TCPConn), d.(*net.TCPConn)
}

func noise(n int, seed byte) []byte {
	p := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(p)
	return p
}

func TestStream_ends_each_direction_by_itself(t *testing.T) {
	c, d := pair(t)
	a, b := NewStream(c), NewStream(d)
	if _, err := a.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(b); err != nil || string(got) != "question" {
		t.Fatalf("read %q, %v", got, err)
	}
	if _, err := b.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(struct{ io.Reader }{a}); err != nil || string(got) != "answer" {
		t.Fatalf("read %q, %v", got, err)
	}
	if _, err := a.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after the end: %v", err)
	}
}

func TestStream_a_connection_without_its_end_is_cut(t *testing.T) {
	for name, leave := range map[string]func(*Stream, net.Conn){
		"closed":         func(s *Stream, _ net.Conn) { s.Abort() },
		"in a head":      func(_ *Stream, c net.Conn) { c.Write([]byte{kindData, 0}); c.Close() },
		"in a frame":     func(_ *Stream, c net.Conn) { c.Write([]byte{kindData, 0, 0, 9, 'x'}); c.Close() },
		"instead of end": func(_ *Stream, c net.Conn) { c.Write([]byte{kindEnd, 0, 0}); c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			for _, copied := range []bool{false, true} {
				c, d := pair(t)
				a, b := NewStream(c), NewStream(d)
				if _, err := a.Write([]byte("some")); err != nil {
					t.Fatal(err)
				}
				leave(a, c)
				var got bytes.Buffer
				var err error
				if copied {
					_, err = b.WriteTo(&got)
				} else {
					_, err = io.Copy(&got, struct{ io.Reader }{b})
				}
				if !errors.Is(err, ErrCut) || !errors.Is(err, syscall.ECONNRESET) || !bytes.HasPrefix(got.Bytes(), []byte("some")) {
					t.Errorf("read %q, %v", got.String(), err)
				}
			}
		})
	}
}

func TestStream_breaking_the_protocol_ends_it(t *testing.T) {
	for name, say := range map[string][]byte{
		"another kind":         {7, 0, 0, 1, 'x'},
		"an empty frame":       {kindData, 0, 0, 0},
		"a frame too long":     {kindData, 1, 0, 1},
		"an end with bytes":    {kindEnd, 0, 0, 1, 'x'},
		"bytes after the end":  {kindEnd, 0, 0, 0, 'x'},
		"a second end":         {kindEnd, 0, 0, 0, kindEnd, 0, 0, 0},
		"zeros":                {0, 0, 0, 0},
		"bytes of a plain one": []byte("GET / HTTP/1.1\r\n\r\n"),
	} {
		t.Run(name, func(t *testing.T) {
			for _, copied := range []bool{false, true} {
				c, d := pair(t)
				if _, err := c.Write(say); err != nil {
					t.Fatal(err)
				}
				b := NewStream(d)
				var err error
				if copied {
					_, err = b.WriteTo(io.Discard)
				} else {
					_, err = io.Copy(io.Discard, struct{ io.Reader }{b})
				}
				if !errors.Is(err, flow.ErrProtocol) {
					t.Errorf("got %v, want ErrProtocol", err)
				}
				if _, err := c.Read(make([]byte, 1)); err == nil {
					t.Error("the connection is still open")
				}
			}
		})
	}
}

// chain joins two TCP sockets by a stream and returns the outer ends.
func chain(t *testing.T) (left, right *net.TCPConn, wait func()) {
	t.Helper()
	l, li := tcpPair(t)
	r, ri := tcpPair(t)
	c, d := pair(t)
	var wg sync.WaitGroup
	wg.Go(func() { Join(NewStream(c), Socket(li)) })
	wg.Go(func() { Join(NewStream(d), Socket(ri)) })
	return l, r, wg.Wait
}

func TestJoin_moves_bytes_both_ways_at_once_unchanged(t *testing.T) {
	left, right, wait := chain(t)
	defer wait()
	const size = 8<<20 + 17
	var wg sync.WaitGroup
	for i, c := range []*net.TCPConn{left, right} {
		wg.Go(func() {
			if _, err := c.Write(noise(size, byte(i))); err != nil {
				t.Error(err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, noise(size, byte(1-i))) {
				t.Errorf("%d bytes have arrived, changed or not all, %v", len(got), err)
			}
		})
	}
	wg.Wait()
}

func TestJoin_a_half_that_has_ended_leaves_the_other_open(t *testing.T) {
	left, right, wait := chain(t)
	defer wait()
	left.Write([]byte("in"))
	left.CloseWrite()
	if got, err := io.ReadAll(right); err != nil || string(got) != "in" {
		t.Fatalf("read %q, %v", got, err)
	}
	right.Write([]byte("out"))
	right.CloseWrite()
	if got, err := io.ReadAll(left); err != nil || string(got) != "out" {
		t.Fatalf("read %q, %v", got, err)
	}
}

func TestJoin_a_reset_comes_out_as_a_reset(t *testing.T) {
	for _, ended := range []bool{false, true} {
		left, right, wait := chain(t)
		left.Write([]byte("x"))
		if _, err := io.ReadFull(right, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if ended {
			// The other end has ended its direction and waits for an answer.
			right.CloseWrite()
			if _, err := left.Read(make([]byte, 1)); err != io.EOF {
				t.Fatalf("read %v, want the end", err)
			}
		}
		left.SetLinger(0)
		left.Close()
		if _, err := right.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read %v, want a reset", err)
		}
		wait()
	}
}

func TestJoin_what_a_server_says_before_it_hangs_up_arrives(t *testing.T) {
	// The server answers before it has read the request, and closes.
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		c.Write([]byte("too large"))
		c.Close()
	}()
	server, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c, d := pair(t)
	var wg sync.WaitGroup
	wg.Go(func() { Join(NewStream(d), Socket(server)) })
	s := NewStream(c)
	wg.Go(func() { s.Write(noise(1<<20, 1)); s.CloseWrite() })
	got := make([]byte, 9)
	if _, err := io.ReadFull(s, got); err != nil || string(got) != "too large" {
		t.Errorf("read %q, %v", got, err)
	}
	s.Abort()
	wg.Wait()
}

func TestJoin_a_cut_is_seen_although_the_socket_takes_no_more(t *testing.T) {
	app, socket := pair(t)
	if err := app.(*net.UnixConn).CloseRead(); err != nil {
		t.Fatal(err)
	}
	c, d := pair(t)
	var wg sync.WaitGroup
	var err error
	wg.Go(func() { _, _, err = Join(NewStream(d), Socket(socket)) })
	// The application neither reads nor writes.
	s := NewStream(c)
	if _, err := s.Write(noise(1<<20, 2)); err != nil {
		t.Fatal(err)
	}
	s.Abort()
	wg.Wait()
	if !errors.Is(err, ErrCut) {
		t.Errorf("got %v, want ErrCut", err)
	}
	if _, err := app.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the application reads %v, want the end", err)
	}
}

// deaf is an endpoint that accepts no bytes, and ends its direction when end is closed.
type deaf struct {
	refused chan struct{} // closed by the first Write
	once    sync.Once
	end     chan struct{}
	reset   atomic.Bool
}

func (e *deaf) Read([]byte) (int, error) { <-e.end; return 0, io.EOF }
func (e *deaf) Write([]byte) (int, error) {
	e.once.Do(func() { close(e.refused) })
	return 0, syscall.EPIPE
}
func (e *deaf) CloseWrite() error { return syscall.EPIPE }
func (e *deaf) Close() error      { return nil }
func (e *deaf) Reset() error      { e.reset.Store(true); return nil }

func TestJoin_bytes_that_a_socket_did_not_take_end_in_a_cut(t *testing.T) {
	c, d := pair(t)
	e := &deaf{refused: make(chan struct{}), end: make(chan struct{})}
	var wg sync.WaitGroup
	var in int64
	var err error
	wg.Go(func() { _, in, err = Join(NewStream(d), e) })
	s := NewStream(c)
	// Write more than once: Join drops what comes later.
	for range 100 {
		if _, err := s.Write(noise(1<<10, 1)); err != nil {
			t.Fatal(err)
		}
	}
	<-e.refused
	close(e.end)
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, ErrCut) {
		t.Errorf("read %v, want a cut", err)
	}
	wg.Wait()
	if !errors.Is(err, syscall.EPIPE) || in != 0 || !e.reset.Load() {
		t.Errorf("Join gave %d bytes, %v", in, err)
	}
}

func TestJoin_a_cut_resets_the_socket(t *testing.T) {
	r, ri := tcpPair(t)
	c, d := pair(t)
	var wg sync.WaitGroup
	wg.Go(func() { Join(NewStream(d), Socket(ri)) })
	c.Close()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %v, want a reset", err)
	}
	wg.Wait()
}

func TestJoin_waits_for_a_reader_that_is_slow(t *testing.T) {
	left, right, wait := chain(t)
	const size = 16 << 20
	var wg sync.WaitGroup
	sent := make(chan int, 1)
	wg.Go(func() {
		n, _ := left.Write(noise(size, 3))
		sent <- n
	})
	// No reader drains the chain, so the sockets' buffers bound what is under way.
	first := make([]byte, 1)
	if _, err := io.ReadFull(right, first); err != nil {
		t.Fatal(err)
	}
	right.SetLinger(0)
	right.Close()
	if n := <-sent; n == size {
		t.Errorf("%d bytes were taken though nobody has read them", n)
	}
	wg.Wait()
	wait()
}

func FuzzParser(f *testing.F) {
	f.Add([]byte{kindData, 0, 0, 2, 'h', 'i', kindEnd, 0, 0, 0}, uint8(3))
	f.Add([]byte{kindEnd, 0, 0, 0, 1}, uint8(1))
	f.Add([]byte{kindData, 1, 0, 0}, uint8(9))
	f.Fuzz(func(t *testing.T, in []byte, step uint8) {
		parse := func(step int) (out []byte, ended bool, err error) {
			var p parser
			for rest := in; len(rest) > 0; {
				chunk := rest[:min(len(rest), step)]
				for len(chunk) > 0 {
					data, used, err := p.next(chunk)
					if err != nil {
						return out, p.ended, err
					}
					if used == 0 || len(data) > used {
						t.Fatalf("%d of %d bytes used, %d bytes of data", used, len(chunk), len(data))
					}
					out = append(out, data...)
					chunk, rest = chunk[used:], rest[used:]
				}
			}
			return out, p.ended, nil
		}
		whole, ended, err := parse(len(in) + 1)
		parts, ended2, err2 := parse(int(step) + 1)
		if !bytes.Equal(whole, parts) || ended != ended2 || (err == nil) != (err2 == nil) {
			t.Fatalf("at once %q %v %v, in parts %q %v %v", whole, ended, err, parts, ended2, err2)
		}
	})
}
