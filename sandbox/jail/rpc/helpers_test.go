package rpc

import (
	"context"
	"encoding/json"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

type osFiles = []*os.File

// pair makes a keeper and a child that follow the rules.
func pair(t testing.TB, keeper, child Options) (*Conn, *Conn) {
	t.Helper()
	k, c, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	return connect(t, k, keeper), connect(t, c, child)
}

func connect(t testing.TB, f *os.File, o Options) *Conn {
	t.Helper()
	c, err := New(f, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// A hostile is a peer that sends what it likes.
type hostile struct {
	t  testing.TB
	fd int
}

// against makes a keeper with a hostile child.
func against(t testing.TB, o Options, stall time.Duration) (*Conn, *hostile) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c, err := newConn(os.NewFile(uintptr(fds[0]), "keeper"), o, stall)
	if err != nil {
		t.Fatal(err)
	}
	h := &hostile{t, fds[1]}
	t.Cleanup(func() { h.close(); c.Close() })
	return c, h
}

func (h *hostile) close() {
	if h.fd >= 0 {
		unix.Close(h.fd)
		h.fd = -1
	}
}

func (h *hostile) send(packet []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	return unix.Sendmsg(h.fd, packet, oob, nil, unix.MSG_NOSIGNAL)
}

// packet makes a packet with a header that may lie.
func packet(k kind, id uint64, method string, files, total int, part string) []byte {
	m := message{kind: k, id: id, method: method, body: make([]byte, total), files: make([]*os.File, files)}
	return append(m.header(nil), part...)
}

func openFDs(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// sameFDs fails if the test leaves descriptors open. Call it first: it makes the poller have its own.
func sameFDs(t *testing.T) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	w.Close()
	before := openFDs(t)
	t.Cleanup(func() {
		if after := openFDs(t); after != before {
			t.Errorf("%d descriptors are open, and were %d", after, before)
		}
	})
}

func temp(t testing.TB, text string) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "test")
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	return f
}

// echo replies with what it gets.
func echo(_ context.Context, _ string, body []byte, files []*os.File) (any, []*os.File, error) {
	return json.RawMessage(body), files, nil
}

// until waits for a condition that comes by itself.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 10_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("%s: it does not come", what)
}
