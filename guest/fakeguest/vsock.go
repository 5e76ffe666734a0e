package fakeguest

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
)

// Ports serves the vsock ports of a guest behind one Unix socket, like the vsock device of a VM: see
// guest.UnixDialer. Make it with Listen.
type Ports struct {
	l     net.Listener
	ports map[int]*port
	all   sync.WaitGroup

	mu     sync.Mutex // guards what follows
	closed bool
	conns  map[*conn]bool
	uses   uint64
}

// Listen serves ports on l until Close.
func Listen(l net.Listener, ports ...int) *Ports {
	p := &Ports{l: l, ports: map[int]*port{}, conns: map[*conn]bool{}}
	for _, n := range ports {
		p.ports[n] = &port{of: p, ch: make(chan net.Conn), done: make(chan struct{})}
	}
	p.all.Go(p.accept)
	return p
}

// Port returns the listener of a port.
func (p *Ports) Port(n int) net.Listener { return p.ports[n] }

// Uses returns how many connections are open, and how many there ever were. It does not count those that are not a
// use of the VM: see guest.IdleDialer.
func (p *Ports) Uses() (open, ever uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		if !c.idle {
			open++
		}
	}
	return open, p.uses
}

// Cut ends all connections at once, as the sleep of a VM does.
func (p *Ports) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Conn.Close()
	}
}

// Close ends the ports and all connections, and waits for them to finish.
func (p *Ports) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	err := p.l.Close()
	for _, port := range p.ports {
		port.Close()
	}
	p.Cut()
	p.all.Wait()
	return err
}

func (p *Ports) accept() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		p.all.Go(func() { p.connect(&conn{Conn: c, of: p}) })
	}
}

// connect passes a connection to the port that its client asks for.
func (p *Ports) connect(c *conn) {
	p.mu.Lock()
	p.conns[c] = true
	closed := p.closed
	p.mu.Unlock()
	var line []byte
	for b := make([]byte, 1); !closed && len(line) < 32; {
		if _, err := io.ReadFull(c, b); err != nil || b[0] == '\n' {
			break
		}
		line = append(line, b[0])
	}
	var n int
	_, err := fmt.Sscanf(string(line), "CONNECT %d", &n)
	port := p.ports[n]
	if err != nil || port == nil || closed {
		c.Close()
		return
	}
	p.mu.Lock()
	if c.idle = strings.HasSuffix(string(line), " idle"); !c.idle {
		p.uses++
	}
	p.mu.Unlock()
	_, _ = fmt.Fprintf(c, "OK %d\n", 5000) // if the client is gone, its port notices
	select {
	case port.ch <- c:
	case <-port.done:
		c.Close()
	}
}

// port is the net.Listener of one port.
type port struct {
	of   *Ports
	ch   chan net.Conn
	done chan struct{}
	once sync.Once
}

func (l *port) Accept() (net.Conn, error) {
	select {
	case c := <-l.ch:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *port) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *port) Addr() net.Addr { return l.of.l.Addr() }

// conn is a connection that Ports counts.
type conn struct {
	net.Conn
	of   *Ports
	idle bool // does not count as use of the VM
}

// Read returns io.EOF for every error: ttrpc keeps a connection whose error it does not know.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		err = io.EOF
	}
	return n, err
}

func (c *conn) Close() error {
	c.of.mu.Lock()
	delete(c.of.conns, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}
