package api

import (
	"net"
	"net/http"
	"net/netip"
	"sync"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// How many requests of a kind are answered at once; one caller (a token, a user of the Unix socket, or for what asks
// for no token an address) has half of them at most. Kinds do not share their room: who waits for commands or for slow
// sleeps keeps nobody from looking, nor from stopping what is slow. /healthz and /readyz are not counted.
const (
	MaxReads   = 128 // what only reads
	MaxChanges = 128 // what changes something
	MaxExecs   = 256 // commands in sandboxes, which may take an hour
	MaxStreams = 64  // mounted handlers that go on for long
	MaxOpen    = 64  // what asks for no token
)

// room bounds requests of a kind.
type room struct {
	kind string
	most int

	mu sync.Mutex // guards what follows
	n  int
	of map[string]int // callers with requests under way
}

func newRoom(kind string, most int) *room {
	return &room{kind: kind, most: most, of: map[string]int{}}
}

// enter lets a request of a caller in; leave ends it. The error is CodeTooMany where the caller has too many already,
// and CodeBusy where all have.
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

// sourceOf is where a request comes from: an address of IPv4, or a network of IPv6 of the size that one host is given;
// else the address as it is.
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

// unread says that nobody reads the body of a request: its connection ends with the answer, which otherwise would wait
// for a body that may never come.
func unread(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close")
	}
}

// limitedListener bounds the connections of a listener: all of them, and those of one address. Where there are too
// many, the one that has been without a request for longest ends, so that those who hold connections and ask nothing
// keep nobody out.
type limitedListener struct {
	net.Listener

	mu    sync.Mutex // guards what follows, and the requests and turn of its connections
	conns map[*limitedConn]struct{}
	turn  uint64 // counts what happens
}

// limitedConn is a connection of a limitedListener.
type limitedConn struct {
	net.Conn
	of       *limitedListener
	from     string
	requests int    // that are being answered
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
			_ = out.Conn.Close() // its server sees that it has ended
		}
		if ok {
			return lc, nil
		}
		_ = c.Close() // nobody has asked for anything
	}
}

// add takes a connection up, or says that there is no room for it. out, if not nil, is to end for it.
func (l *limitedListener) add(c *limitedConn) (out *limitedConn, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	same := 0
	for have := range l.conns {
		if have.from == c.from {
			same++
		}
	}
	_, unix := c.Conn.(*net.UnixConn) // whose peers all have the same rights, and no address
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
