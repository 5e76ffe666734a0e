package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

// testWait bounds the wait for what happens at once on any machine that works.
const testWait = time.Minute

// guestPort is the guest's end. It passes each datagram to got, and answers with "re " and the datagram.
type guestPort struct {
	*net.UDPConn
	at  netip.AddrPort
	got chan string
}

func listenGuest(t *testing.T, at string) *guestPort {
	t.Helper()
	addr, err := net.ResolveUDPAddr("udp4", at)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.ListenUDP("udp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	g := &guestPort{c, c.LocalAddr().(*net.UDPAddr).AddrPort(), make(chan string, 1000)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			g.got <- string(b[:n])
			_, _ = c.WriteToUDPAddrPort(append([]byte("re "), b[:n]...), from)
		}
	}()
	t.Cleanup(func() {
		c.Close()
		<-ended
	})
	return g
}

func (g *guestPort) want(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-g.got:
		if got != want {
			t.Fatalf("the guest got %.40q, want %q", got, want)
		}
	case <-time.After(testWait):
		t.Fatalf("the guest has not got %q", want)
	}
}

// A vm sleeps and wakes when the test says so.
type vm struct {
	guest netip.AddrPort
	awake chan struct{} // closed when it may wake
	wakes atomic.Int32
	holds atomic.Int32 // current holds
	err   error

	mu     sync.Mutex
	asleep chan struct{} // closed when it sleeps
}

type holdOf struct {
	v      *vm
	asleep chan struct{}
	once   sync.Once
}

func (h *holdOf) Done() <-chan struct{} { return h.asleep }
func (h *holdOf) Release()              { h.once.Do(func() { h.v.holds.Add(-1) }) }

// sleep ends all holds, after which the VM can be woken again.
func (v *vm) sleep() {
	v.mu.Lock()
	defer v.mu.Unlock()
	close(v.asleep)
	v.asleep = make(chan struct{})
}

func (v *vm) wake(ctx context.Context) (held, netip.AddrPort, error) {
	v.wakes.Add(1)
	select {
	case <-v.awake:
	case <-ctx.Done():
		return nil, netip.AddrPort{}, ctx.Err()
	}
	if v.err != nil {
		return nil, netip.AddrPort{}, v.err
	}
	v.holds.Add(1)
	v.mu.Lock()
	defer v.mu.Unlock()
	return &holdOf{v: v, asleep: v.asleep}, v.guest, nil
}

// newTestListener listens for a VM's port. Without sleeps the VM is already awake.
func newTestListener(t *testing.T, listen string, v *vm, sleeps bool) *udpListener {
	t.Helper()
	v.awake, v.asleep = make(chan struct{}), make(chan struct{})
	if !sleeps {
		close(v.awake)
	}
	s := &supervisor{o: Options{MaxConns: 3}, log: slog.New(slog.DiscardHandler)}
	h := &udpListener{publishedPort: publishedPort{v: s, port: port{"a", netip.MustParseAddrPort(listen), v.guest.Port(), netpolicy.UDP}}, wake: v.wake}
	h.unanswered, h.answered = time.Hour, time.Hour
	if err := h.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.close()
		s.carried.Wait()
		if n := v.holds.Load(); n != 0 {
			t.Errorf("%d holds are left", n)
		}
		if h.bytes != 0 || len(h.sessions) != 0 {
			t.Errorf("%d bytes of %d sessions are left", h.bytes, len(h.sessions))
		}
	})
	return h
}

func (h *udpListener) address() netip.AddrPort { return h.conn.LocalAddr().(*net.UDPAddr).AddrPort() }

// client connects to a listener, by its own address if to is not valid.
func client(t *testing.T, h *udpListener, to netip.Addr) *net.UDPConn {
	t.Helper()
	if !to.IsValid() {
		to = h.address().Addr()
	}
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, h.address().Port())))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func send(t *testing.T, c *net.UDPConn, text string) {
	t.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
}

func receive(t *testing.T, c *net.UDPConn, want string) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(testWait)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1<<16)
	n, err := c.Read(b)
	if err != nil || string(b[:n]) != want {
		t.Fatalf("got %.40q, %v, want %q", b[:n], err, want)
	}
}

// until waits until done is true, which another goroutine causes.
func until(t *testing.T, h *udpListener, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(testWait); ; time.Sleep(time.Millisecond) {
		h.mu.Lock()
		ok := done()
		h.mu.Unlock()
		if ok {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after %v: not %s", testWait, what)
		}
	}
}

func (h *udpListener) holding() (n int) {
	for _, s := range h.sessions {
		n += len(s.held)
	}
	return n
}

func TestHatch_datagrams_wait_for_the_VM_and_come_in_their_order(t *testing.T) {
	g := listenGuest(t, "127.0.0.1:0")
	v := &vm{guest: g.at}
	h := newTestListener(t, "127.0.0.1:0", v, true)
	c := client(t, h, netip.Addr{})
	for _, text := range []string{"one", "two", ""} {
		send(t, c, text)
	}
	until(t, h, "held", func() bool { return h.holding() == 3 })
	close(v.awake)
	for _, text := range []string{"one", "two", ""} {
		g.want(t, text)
		receive(t, c, "re "+text)
	}
	send(t, c, "later")
	g.want(t, "later")
	receive(t, c, "re later")
	// Another sender gets its own session.
	other := client(t, h, netip.Addr{})
	send(t, other, "other")
	g.want(t, "other")
	receive(t, other, "re other")
	if n := v.holds.Load(); n != 2 {
		t.Errorf("%d holds for two senders", n)
	}
}

func TestHatch_what_is_held_has_bounds(t *testing.T) {
	at := func(port uint16) sender {
		return sender{from: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)}
	}
	v := &vm{guest: netip.MustParseAddrPort("127.0.0.1:9")}
	for name, tt := range map[string]struct {
		senders uint16
		each    int // bytes
		n, want int // datagrams of each sender; those held in all
	}{
		"as many datagrams as there may be": {1, 10, maxHeld, maxHeld},
		"more datagrams":                    {1, 10, maxHeld + 5, maxHeld},
		"as many senders as there may be":   {3, 10, 2, 6},
		"more senders":                      {5, 10, 2, 6},
		"more bytes":                        {3, maxDatagram, maxHeld, maxHeldBytes / maxDatagram},
	} {
		t.Run(name, func(t *testing.T) {
			h := newTestListener(t, "127.0.0.1:0", v, true)
			dropped := 0
			for i := range tt.n {
				for s := range tt.senders {
					switch err := h.take(at(1000+s), nil, bytes.Repeat([]byte{byte(i)}, tt.each)); {
					case errors.Is(err, errFull):
						dropped++
					case err != nil:
						t.Fatal(err)
					}
				}
			}
			h.mu.Lock()
			defer h.mu.Unlock()
			if n := h.holding(); n != tt.want || n+dropped != tt.n*int(tt.senders) || h.bytes != n*tt.each {
				t.Errorf("%d are held, %d bytes, and %d were dropped; want %d held", n, h.bytes, dropped, tt.want)
			}
		})
	}
}

func TestHatch_what_has_waited_too_long_is_dropped(t *testing.T) {
	g := listenGuest(t, "127.0.0.1:0")
	v := &vm{guest: g.at}
	h := newTestListener(t, "127.0.0.1:0", v, true)
	c := client(t, h, netip.Addr{})
	send(t, c, "old")
	send(t, c, "new")
	until(t, h, "held", func() bool {
		if h.holding() < 2 {
			return false
		}
		for _, s := range h.sessions {
			s.held[0].at = s.held[0].at.Add(-maxHeldAge)
		}
		return true
	})
	close(v.awake)
	g.want(t, "new")
	receive(t, c, "re new")
}

func TestHatch_a_sleep_ends_the_session_and_the_next_datagram_wakes(t *testing.T) {
	g := listenGuest(t, "127.0.0.1:0")
	v := &vm{guest: g.at}
	h := newTestListener(t, "127.0.0.1:0", v, false)
	c := client(t, h, netip.Addr{})
	send(t, c, "one")
	receive(t, c, "re one")
	v.sleep()
	until(t, h, "without a hold", func() bool { return v.holds.Load() == 0 })
	send(t, c, "two")
	receive(t, c, "re two")
	if n := v.wakes.Load(); n != 2 {
		t.Errorf("woken %d times, want 2", n)
	}
}

// The socket of a session closes before the session is removed. A datagram in between must not be lost.
func TestHatch_a_datagram_at_the_moment_of_a_sleep_wakes(t *testing.T) {
	g := listenGuest(t, "127.0.0.1:0")
	v := &vm{guest: g.at}
	h := newTestListener(t, "127.0.0.1:0", v, false)
	closed := client(t, h, netip.Addr{})
	closed.Close()
	c := client(t, h, netip.Addr{})
	at := c.LocalAddr().(*net.UDPAddr).AddrPort()
	from := sender{from: netip.AddrPortFrom(at.Addr().Unmap(), at.Port())}
	h.mu.Lock()
	h.sessions[from] = &session{sender: from, guest: closed}
	h.mu.Unlock()
	send(t, c, "one")
	receive(t, c, "re one")
}

func TestHatch_a_session_without_datagrams_ends(t *testing.T) {
	g := listenGuest(t, "127.0.0.1:0")
	v := &vm{guest: g.at}
	h := newTestListener(t, "127.0.0.1:0", v, false)
	h.mu.Lock()
	h.answered = 0
	h.mu.Unlock()
	c := client(t, h, netip.Addr{})
	for i := range 3 {
		text := fmt.Sprint(i)
		send(t, c, text)
		receive(t, c, "re "+text)
		until(t, h, "over", func() bool { return len(h.sessions) == 0 && v.holds.Load() == 0 })
	}
	if n := v.wakes.Load(); n != 3 {
		t.Errorf("%d sessions, want 3", n)
	}
}

func TestHatch_a_VM_that_does_not_wake_is_left_alone_for_a_while(t *testing.T) {
	v := &vm{guest: netip.MustParseAddrPort("127.0.0.1:9"), err: errors.New("it is broken")}
	h := newTestListener(t, "127.0.0.1:0", v, false)
	for i, tt := range []struct {
		last  time.Duration // since the last refusal
		wakes int32
	}{{0, 1}, {-time.Hour, 1}, {refusalTime + time.Second, 2}} {
		h.refused = time.Now().Add(-tt.last) // no other goroutine uses the waker
		if _, _, err := h.turn(t.Context()); !errors.Is(err, v.err) || v.wakes.Load() != tt.wakes {
			t.Errorf("turn %d: %v, tried %d times, want %d", i, err, v.wakes.Load(), tt.wakes)
		}
	}
	// The datagrams for it are dropped.
	if err := h.take(sender{from: netip.MustParseAddrPort("192.0.2.1:1")}, nil, []byte("x")); err != nil {
		t.Fatal(err)
	}
	until(t, h, "forgotten", func() bool { return len(h.sessions) == 0 && h.bytes == 0 })
}

func TestHatch_a_guest_that_does_not_listen_yet_is_asked_again(t *testing.T) {
	g := listenGuest(t, "127.0.0.1:0")
	at := g.at
	g.Close()
	v := &vm{guest: at}
	h := newTestListener(t, "127.0.0.1:0", v, false)
	c := client(t, h, netip.Addr{})
	send(t, c, "nobody is there")
	until(t, h, "delivered", func() bool { return len(h.sessions) == 1 && h.holding() == 0 })
	send(t, c, "still nobody")
	g = listenGuest(t, at.String())
	for end := time.Now().Add(testWait); ; {
		send(t, c, "is somebody there")
		select {
		case <-g.got:
		case <-time.After(10 * time.Millisecond):
			if time.Now().After(end) {
				t.Fatal("the guest has got nothing")
			}
			continue
		}
		break
	}
	if n := v.wakes.Load(); n != 1 {
		t.Errorf("%d sessions, want 1", n)
	}
}

func TestHatch_too_large_a_datagram_is_dropped_and_not_cut(t *testing.T) {
	g := listenGuest(t, "127.0.0.1:0")
	v := &vm{guest: g.at}
	h := newTestListener(t, "127.0.0.1:0", v, false)
	c := client(t, h, netip.Addr{})
	send(t, c, string(make([]byte, maxDatagram+1)))
	largest := string(bytes.Repeat([]byte("x"), maxDatagram-len("re ")))
	send(t, c, largest)
	g.want(t, largest)
	receive(t, c, "re "+largest)
}

// With a listener on all addresses, answers come from the address that the client asked.
func TestHatch_answers_come_from_the_address_that_was_asked(t *testing.T) {
	for listen, to := range map[string][]string{
		"0.0.0.0:0": {"127.0.0.1", "127.0.0.2"},
		"[::]:0":    {"::1", "127.0.0.3", "127.0.0.1"},
	} {
		t.Run(listen, func(t *testing.T) {
			g := listenGuest(t, "127.0.0.1:0")
			h := newTestListener(t, listen, &vm{guest: g.at}, false)
			for _, a := range to {
				// A connected socket receives nothing from another address.
				c := client(t, h, netip.MustParseAddr(a))
				send(t, c, a)
				receive(t, c, "re "+a)
			}
		})
	}
}
