package guest_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// liar is a guest that answers each connection of the forward port with the given bytes. It then keeps the
// connection open until the host closes it or ends the listener.
func liar(t *testing.T, say func(n int) []byte) *guest.Client {
	t.Helper()
	return clientOf(t, lies(t, say))
}

func clientOf(t *testing.T, dial guest.Dialer) *guest.Client {
	t.Helper()
	c, err := guest.Dial(t.Context(), dial)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// lies returns a Dialer that leads to a liar.
func lies(t *testing.T, say func(n int) []byte) guest.Dialer {
	t.Helper()
	var (
		wg sync.WaitGroup
		mu sync.Mutex
		n  int
	)
	t.Cleanup(wg.Wait)
	return func(_ context.Context, port uint32) (net.Conn, error) {
		host, evil := net.Pipe()
		if port != agentpb.ForwardPort {
			wg.Go(func() { io.Copy(io.Discard, evil); evil.Close() })
			return host, nil
		}
		mu.Lock()
		words := say(n)
		n++
		mu.Unlock()
		wg.Go(func() {
			defer evil.Close()
			go func() { evil.Write(words) }()
			var head [agentpb.ForwardRequestSize]byte
			var m agentpb.ForwardRequest
			if _, err := io.ReadFull(evil, head[:]); err != nil || m.Decode(&head) != nil {
				return
			}
			if m.Op == agentpb.OpListen {
				io.CopyN(io.Discard, evil, int64(m.Length)+1)
				return
			}
			io.Copy(io.Discard, evil)
		})
		return host, nil
	}
}

func forwardAnswer(code agentpb.ForwardCode, text string) []byte {
	var b [agentpb.ForwardAnswerSize]byte
	(&agentpb.ForwardAnswer{Code: code, Length: len(text)}).Encode(&b)
	return append(b[:], text...)
}

func always(p []byte) func(int) []byte { return func(int) []byte { return p } }

func TestHostileForward_answers_end_the_dial_and_not_the_host(t *testing.T) {
	long := forwardAnswer(agentpb.CodeOK, "")
	binary.BigEndian.PutUint16(long[6:], 65535)
	for name, say := range map[string][]byte{
		"no answer of the protocol": []byte("HTTP/1.1 200 OK\r\n\r\n"),
		"another version":           {'D', 'F', 9, 0, 0, 0, 0, 0},
		"a text that is too long":   long,
	} {
		if _, err := liar(t, always(say)).Dial(t.Context(), "tcp", "x:1"); !errors.Is(err, guest.ErrProtocol) {
			t.Errorf("%s: got %v, want ErrProtocol", name, err)
		}
	}
	_, err := liar(t, always(forwardAnswer(200, "\x1b[2J\nforged"))).Dial(t.Context(), "tcp", "x:1")
	var fe *guest.ForwardError
	if !errors.As(err, &fe) || strings.ContainsAny(err.Error(), "\x1b\n") {
		t.Errorf("got %q", err)
	}
	if _, err := liar(t, always(forwardAnswer(agentpb.CodeOK, "short"))).Listen(t.Context(), "tcp", "x:1"); !errors.Is(err, guest.ErrProtocol) {
		t.Errorf("a listener without a token: %v", err)
	}
}

func TestHostileForward_silence_ends_with_the_context(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := liar(t, always(nil)).Dial(ctx, "tcp", "x:1"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestHostileForward_silence_ends_with_the_client(t *testing.T) {
	asked := make(chan struct{})
	c := liar(t, func(int) []byte { close(asked); return nil })
	done := make(chan error, 1)
	go func() {
		_, err := c.Dial(context.Background(), "tcp", "x:1")
		done <- err
	}()
	<-asked
	c.Close()
	if err := <-done; !errors.Is(err, guest.ErrConnectionLost) {
		t.Errorf("got %v", err)
	}
}

func TestHostileForward_a_stream_that_breaks_the_rules_is_cut(t *testing.T) {
	say := append(forwardAnswer(agentpb.CodeOK, "addr"), bytes.Repeat([]byte{0xff}, 1000)...)
	conn, err := liar(t, always(say)).Dial(t.Context(), "tcp", "x:1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); !errors.Is(err, guest.ErrProtocol) {
		t.Errorf("got %v", err)
	}
}

func TestHostileForward_announcements_of_nothing_are_passed_over(t *testing.T) {
	head := func(token uint64, from string) []byte {
		var b [agentpb.AnnouncementSize]byte
		(&agentpb.Announcement{Token: token, Length: len(from)}).Encode(&b)
		return append(b[:], from...)
	}
	const lies = 5
	c := liar(t, func(n int) []byte {
		switch {
		case n == 0:
			say := forwardAnswer(agentpb.CodeOK, "12345678[::]:80")
			for i := range uint64(lies) {
				say = append(say, head(i, "nobody\x1b")...)
			}
			long := head(9, "")
			binary.BigEndian.PutUint16(long[8:], 60000)
			return append(say, long...)
		case n == lies:
			return forwardAnswer(agentpb.CodeOK, "")
		}
		return forwardAnswer(agentpb.CodeNotFound, "gone")
	})
	l, err := c.Listen(t.Context(), "tcp", "x:1")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := l.AcceptGuest()
	if err != nil {
		t.Fatal(err)
	}
	if got := conn.RemoteAddr().String(); strings.Contains(got, "\x1b") {
		t.Errorf("an address %q", got)
	}
	conn.Abort()
	if _, err := l.AcceptGuest(); !errors.Is(err, guest.ErrProtocol) {
		t.Errorf("an announcement with an address of 60000 bytes: %v", err)
	}
	if _, err := l.AcceptGuest(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after that: %v", err)
	}
}

func TestHostileForward_a_connection_that_is_not_handed_over_is_passed_over(t *testing.T) {
	c := liar(t, func(n int) []byte {
		switch n {
		case 0:
			say := forwardAnswer(agentpb.CodeOK, "12345678[::]:80")
			for i := range uint64(2) {
				var b [agentpb.AnnouncementSize]byte
				(&agentpb.Announcement{Token: i}).Encode(&b)
				say = append(say, b[:]...)
			}
			return say
		case 1:
			return []byte("nonsense")
		}
		return forwardAnswer(agentpb.CodeOK, "")
	})
	l, err := c.Listen(t.Context(), "tcp", "x:1")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := l.AcceptGuest()
	if err != nil {
		t.Fatal(err)
	}
	conn.Abort()
}

func TestListener_a_connection_waits_until_there_are_descriptors(t *testing.T) {
	good := lies(t, func(n int) []byte {
		if n == 0 {
			var b [agentpb.AnnouncementSize]byte
			(&agentpb.Announcement{Token: 7}).Encode(&b)
			return append(forwardAnswer(agentpb.CodeOK, "12345678[::]:80"), b[:]...)
		}
		return forwardAnswer(agentpb.CodeOK, "")
	})
	n := 0
	c := clientOf(t, func(ctx context.Context, port uint32) (net.Conn, error) {
		if port == agentpb.ForwardPort {
			if n++; n == 2 {
				return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("socket", syscall.EMFILE)}
			}
		}
		return good(ctx, port)
	})
	l, err := c.Listen(t.Context(), "tcp", "x:1")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.AcceptGuest(); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("got %v, want EMFILE", err)
	}
	conn, err := l.AcceptGuest()
	if err != nil {
		t.Fatal(err)
	}
	conn.Abort()
}

func TestForwardMessages_are_read_as_they_were_written(t *testing.T) {
	for _, m := range []agentpb.ForwardRequest{
		{Op: agentpb.OpDial, Network: agentpb.TCP, Length: 10, TimeoutMs: 5000},
		{Op: agentpb.OpListen, Network: agentpb.Unix, Length: 512},
		{Op: agentpb.OpAccept, Length: 16},
	} {
		var b [agentpb.ForwardRequestSize]byte
		m.Encode(&b)
		var got agentpb.ForwardRequest
		if err := got.Decode(&b); err != nil || got != m {
			t.Errorf("got %+v, %v, want %+v", got, err, m)
		}
		for i := range b {
			bad := b
			bad[i] ^= 0x80
			if err := got.Decode(&bad); err == nil && i < 3 {
				t.Errorf("byte %d of a request may be anything", i)
			}
		}
	}
	for _, m := range []agentpb.ForwardRequest{{Op: agentpb.OpDial, Length: 513}, {Op: agentpb.OpDial}, {Op: agentpb.OpAccept, Length: 8}, {Op: 4, Length: 1}} {
		var b [agentpb.ForwardRequestSize]byte
		m.Encode(&b)
		if err := m.Decode(&b); !errors.Is(err, agentpb.ErrForward) {
			t.Errorf("%+v: %v", m, err)
		}
	}
}
