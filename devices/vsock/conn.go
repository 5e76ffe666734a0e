package vsock

import (
	"github.com/drowse-vm/drowse/devices/virtq"
	"golang.org/x/sys/unix"
)

// Limits on connections.
const (
	// MaxConnections bounds all connections of one device together. They include those whose client has not sent its
	// line yet, and calls of Config.Connect without an answer.
	MaxConnections = 1024
	// largeBuffer is how many bytes the guest may have in flight on each of the first largeBuffers connections,
	// smallBuffer on each of the others: 60 MiB altogether.
	largeBuffer  = 256 << 10
	smallBuffer  = 32 << 10
	largeBuffers = 128
)

// Connections from the host get ports from firstHostPort to below lastHostPort: above what services use.
const (
	firstHostPort = 1 << 30
	lastHostPort  = 1 << 31
)

// key identifies a connection. The context IDs are always the same.
type key struct{ guestPort, hostPort uint32 }

type connState uint8

const (
	// stateHandshake: a host client has not sent its line yet.
	stateHandshake connState = iota
	// stateRequested: the device has sent the guest a request, or will, and has no answer yet. Without a socket it is to
	// be parked.
	stateRequested
	// stateParked: the guest has accepted, and no client has come yet: see Device.Park. There is no socket.
	stateParked
	// stateConnecting: Config.Connect has not answered a request of the guest yet. There is no socket.
	stateConnecting
	// stateOpen: bytes flow.
	stateOpen
	// stateClosing: the device has told the guest, or will, that the host's end is gone. The guest has not
	// confirmed.
	stateClosing
	// stateDraining: the connection is over for the guest, but the host client still gets what the guest has sent.
	stateDraining
)

// What the device must tell the guest, besides data.
const (
	sayRequest = 1 << iota
	sayResponse
	sayShutdown
	sayCredit
	sayWantCredit
)

// conn is one connection. It belongs to the engine's goroutine.
type conn struct {
	slot  int32 // in engine.slots
	gen   int32 // distinguishes late events of an earlier connection in the slot
	fd    int   // -1 before the host's end is connected, and after it was closed
	state connState
	key   key
	own   bool // does not count as use: this process is at the host's end, the client said "idle", or there is none yet
	// counted: in engine.open. Only connections without a socket are not.
	counted bool

	dialed chan<- error // gets the outcome of a Device.Dial that waits; else nil

	say    uint8
	queued bool  // in the engine's queue towards the guest
	next   *conn // in that queue

	// readable: the socket may have bytes. A read that finds none clears it; epoll sets it again (edge-triggered).
	readable bool
	eof      bool // the client has ended its direction
	hup      bool // the client has closed
	blocked  bool // the socket takes no more; the loop waits for EPOLLOUT
	burst    int  // receive buffers to fill with one read

	told   uint32 // shutdown flags sent to the guest
	toTell uint32 // shutdown flags that the guest must know
	got    uint32 // shutdown flags received from the guest

	// Towards the guest (virtio 1.2, 5.10.6.3). All counts wrap.
	peerAlloc, peerForwarded uint32
	sent                     uint32
	stalled                  bool // waits for credit

	// From the guest.
	alloc         uint32 // advertised
	received      uint32
	forwarded     uint32 // taken by the socket
	toldForwarded uint32
	backlog       backlog

	deadline int64 // of the state, in the engine's clock; 0 means none
}

// credit returns how many bytes the guest has room for.
func (c *conn) credit() int {
	inFlight := c.sent - c.peerForwarded
	if inFlight >= c.peerAlloc {
		return 0
	}
	return int(c.peerAlloc - inFlight)
}

// wantsRead reports whether bytes of the client may go to the guest.
func (c *conn) wantsRead() bool {
	return c.state == stateOpen && c.readable && !c.eof && c.got&shutdownReceive == 0
}

// backlog is a ring buffer of bytes that a socket did not take at once.
type backlog struct {
	buf  []byte
	from int
	n    int
}

// fill appends the next n bytes of r, which must fit.
func (b *backlog) fill(r *virtq.Reader, n int) error {
	for n > 0 {
		at := (b.from + b.n) % len(b.buf)
		k := min(n, len(b.buf)-at)
		if err := r.ReadFull(b.buf[at : at+k]); err != nil {
			return err
		}
		b.n += k
		n -= k
	}
	return nil
}

// flush writes to fd as much as it takes and returns the number of bytes.
func (b *backlog) flush(fd int) (int, error) {
	done := 0
	for b.n > 0 {
		k := min(b.n, len(b.buf)-b.from)
		w, err := unix.Write(fd, b.buf[b.from:b.from+k])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return done, err
		}
		b.from = (b.from + w) % len(b.buf)
		b.n -= w
		done += w
	}
	return done, nil
}
