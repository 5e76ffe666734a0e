package api

import (
	"net"
	"net/http"
	"net/netip"
	"sync"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// How many requests of a kind are answered at once; one caller has half of them at most. A caller is a token, all
// those of an owner, a user of the Unix socket, or an address if the path needs no token. Kinds do not share their
// room: waiting commands or slow sleeps block neither reads nor the stop of what is slow. /healthz and /readyz do not
// count.
const (
	MaxReads   = 128 // reads
	MaxChanges = 128 // changes
	MaxExecs   = 256 // commands in sandboxes, which may take an hour
	MaxOpen    = 64  // requests without a token
	// MaxStreams are answers that go on, such as events; MaxTransfers files and trees; MaxSockets WebSockets.
	MaxStreams   = 512
	MaxTransfers = 128
	MaxSockets   = 2048
)

// room bounds the requests of one kind.
type room struct {
	kind string
	most int

	mu sync.Mutex // guards what follows
	n  int
	of map[string]int // running requests by caller
}

func newRoom(kind string, most int) *room {
	return &room{kind: kind, most: most, of: map[string]int{}}
}

// enter lets a request of a caller in; leave ends it. It returns CodeTooMany if the caller has too many requests
// already, and CodeBusy if all callers together have.
func (r *room) enter(who string) (leave func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.of[who] >= r.most/2:
		return nil, own(wire.CodeTooMany, "wait until one of them has ended", "%d %s of this caller are under way", r.of[who], r.kind)
	case r.n >= r.most:
		return nil, own(wire.CodeBusy, "try again in a second", "%d %s are under way", r.n, r.kind)
	}
	r.n++
	r.of[who]++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.n--
		if r.of[who]--; r.of[who] == 0 {
			delete(r.of, who)
		}
	}, nil
}

// sourceOf returns the source of a request: an IPv4 address, or the /64 network of an IPv6 address, since one host
// has a whole network; else the address unchanged.
func sourceOf(address string) string {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return address
	}
	ip := at.Addr().Unmap()
	if ip.Is6() {
		if net, err := ip.WithZone("").Prefix(64); err == nil {
			return net.String()
		}
	}
	return ip.String()
}

// unread tells the client that the server will not read the body: the connection ends with the answer. Otherwise
// the answer would wait for a body that may never come.
func unread(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close")
	}
}

// limitedListener bounds the connections of a listener: all of them, and those of one address. At the bound it
// closes the connection that has been idle longest. So clients that hold idle connections cannot keep others out.
type limitedListener struct {
	net.Listener

	mu    sync.Mutex // guards what follows, and the requests and turn of its connections
	conns map[*limitedConn]struct{}
	turn  uint64 // counts events
}

// limitedConn is a connection of a limitedListener.
type limitedConn struct {
	net.Conn
	of       *limitedListener
	from     string
	requests int    // requests that are being answered
	turn     uint64 // when the last of them ended, or when it was accepted
}

func limitConns(l net.Listener) net.Listener {
	return &limitedListener{Listener: l, conns: map[*limitedConn]struct{}{}}
}

// Accept waits for a connection.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		lc := &limitedConn{Conn: c, of: l, from: sourceOf(c.RemoteAddr().String())}
		out, ok := l.add(lc)
		if out != nil {
			_ = out.Conn.Close() // its server notices that it has ended
		}
		if ok {
			return lc, nil
		}
		_ = c.Close() // it carries no request yet
	}
}

// add takes a connection, or returns false if there is no room. The caller must close out if it is not nil.
func (l *limitedListener) add(c *limitedConn) (out *limitedConn, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	same := 0
	for have := range l.conns {
		if have.from == c.from {
			same++
		}
	}
	_, unix := c.Conn.(*net.UnixConn) // its peers all have the same rights, and no address
	alone := same >= maxConnsOfOne && !unix
	if alone || len(l.conns) >= maxConns {
		for have := range l.conns {
			if have.requests == 0 && (!alone || have.from == c.from) && (out == nil || have.turn < out.turn) {
				out = have
			}
		}
		if out == nil {
			return nil, false
		}
		delete(l.conns, out)
	}
	l.turn++
	c.turn = l.turn
	l.conns[c] = struct{}{}
	return out, true
}

// answering counts a request of a connection until the returned function is called.
func (c *limitedConn) answering() func() {
	add := func(n int) {
		c.of.mu.Lock()
		defer c.of.mu.Unlock()
		c.requests += n
		c.of.turn++
		c.turn = c.of.turn
	}
	add(1)
	return func() { add(-1) }
}

// Close ends the connection.
func (c *limitedConn) Close() error {
	c.of.mu.Lock()
	delete(c.of.conns, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}
