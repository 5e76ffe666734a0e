package sshd

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/guest/internal/relay"
)

// Limits of one connection.
const (
	// MaxChannels bounds the sessions and forwarded connections at once. The server refuses more.
	MaxChannels = 128
	// MaxListeners bounds the listeners in the guest.
	MaxListeners = 32
	// MaxEnv and MaxEnvBytes bound the variables that a client sets for one session.
	MaxEnv      = 128
	MaxEnvBytes = 64 << 10
	// MaxCommand and MaxUser bound a command and a user's name, in bytes.
	MaxCommand = 128 << 10
	MaxUser    = 256
	// handshakeTime is how long a client may take to log in.
	handshakeTime = 2 * time.Minute
	// startTime is how long the guest may take to start a session or make a connection, including a wake.
	startTime = 5 * time.Minute
)

// Server serves connections of SSH clients. Its fields must not change once it serves.
type Server struct {
	// HostKey identifies the server to clients.
	HostKey ssh.Signer
	// Use calls f with a client of the guest. It wakes the guest if need be. It may call f again if f has failed for
	// want of a connection. Several calls may run at once.
	Use func(ctx context.Context, f func(*guest.Client) error) error
	// Env are variables, as KEY=VALUE, for all that is started. Variables from the client override them.
	Env []string
	// Version follows "SSH-2.0-" in the server's identification; "" is "drowse".
	Version string
}

// Serve serves one client until it leaves or ctx ends, and closes c. By then all that the client has started in the
// guest has ended.
func (s *Server) Serve(ctx context.Context, c net.Conn) error {
	ctx, cancel := context.WithCancel(audit.WithVia(ctx, "ssh"))
	defer cancel()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	defer c.Close()
	version := s.Version
	if version == "" {
		version = "drowse"
	}
	cfg := &ssh.ServerConfig{
		// The method "none", which every client tries first.
		NoClientAuth: true,
		NoClientAuthCallback: func(m ssh.ConnMetadata) (*ssh.Permissions, error) {
			if len(m.User()) > MaxUser {
				return nil, fmt.Errorf("a user's name of %d bytes, at most %d", len(m.User()), MaxUser)
			}
			return nil, nil
		},
		ServerVersion: "SSH-2.0-" + version,
	}
	cfg.AddHostKey(s.HostKey)
	// If the handshake finishes but late closes the connection all the same, what follows ends as well.
	late := time.AfterFunc(handshakeTime, func() { c.Close() })
	sc, channels, requests, err := ssh.NewServerConn(c, cfg)
	late.Stop()
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("ssh: %w", err)
	}
	conn := &conn{Server: s, ctx: ctx, ssh: sc, room: make(chan struct{}, MaxChannels), listeners: make(map[string]*guest.Listener)}
	// "" is root to the agent, which then does not read the guest's files.
	if conn.user = sc.User(); conn.user == "root" {
		conn.user = ""
	}
	conn.wg.Go(func() { conn.requests(requests) })
	for ch := range channels {
		select {
		case conn.room <- struct{}{}:
			conn.wg.Go(func() {
				defer func() { <-conn.room }()
				conn.channel(ch)
			})
		default:
			_ = ch.Reject(ssh.ResourceShortage, fmt.Sprintf("%d channels are open, the limit", MaxChannels))
		}
	}
	cancel()
	conn.closeListeners()
	conn.wg.Wait()
	return nil
}

// conn is one connection.
type conn struct {
	*Server
	ctx  context.Context // ends with the connection
	ssh  *ssh.ServerConn
	user string
	room chan struct{} // holds an element for each channel
	wg   sync.WaitGroup

	mu        sync.Mutex
	gone      bool
	listeners map[string]*guest.Listener // by network and the client's name of the address
}

// channel serves a channel that the client opens.
func (c *conn) channel(ch ssh.NewChannel) {
	switch ch.ChannelType() {
	case "session":
		c.session(ch)
	case "direct-tcpip": // RFC 4254, section 7.2
		var m struct {
			Host     string
			Port     uint32
			FromHost string
			FromPort uint32
		}
		if ssh.Unmarshal(ch.ExtraData(), &m) != nil || m.Port > 65535 {
			_ = ch.Reject(ssh.ConnectionFailed, "the request is malformed")
			return
		}
		c.direct(ch, "tcp", net.JoinHostPort(m.Host, strconv.Itoa(int(m.Port))))
	case "direct-streamlocal@openssh.com": // PROTOCOL of OpenSSH, section 2.4
		var m struct {
			Path      string
			Reserved  string
			Reserved2 uint32
		}
		if ssh.Unmarshal(ch.ExtraData(), &m) != nil {
			_ = ch.Reject(ssh.ConnectionFailed, "the request is malformed")
			return
		}
		c.direct(ch, "unix", m.Path)
	default:
		_ = ch.Reject(ssh.UnknownChannelType, "unknown type of channel")
	}
}

// direct connects a channel to a socket that the guest can reach.
func (c *conn) direct(ch ssh.NewChannel, network, address string) {
	var to *guest.Conn
	ctx, cancel := context.WithTimeout(c.ctx, startTime)
	defer cancel()
	err := c.Use(ctx, func(g *guest.Client) error {
		var err error
		to, err = g.Dial(ctx, network, address)
		return err
	})
	if err != nil {
		_ = ch.Reject(ssh.ConnectionFailed, err.Error())
		return
	}
	channel, requests, err := ch.Accept()
	if err != nil {
		_ = to.Abort()
		return
	}
	c.join(to, channel, requests)
}

// join carries bytes between a channel and a socket in the guest.
func (c *conn) join(to *guest.Conn, ch ssh.Channel, requests <-chan *ssh.Request) {
	c.wg.Go(func() { ssh.DiscardRequests(requests) })
	defer context.AfterFunc(c.ctx, func() { _ = to.Abort() })()
	_, _, _ = relay.Join(to, endpoint{ch}) // both peers see how the connection ended
}

// endpoint is a channel as the endpoint of a forwarded connection. Channels have no reset.
type endpoint struct{ ssh.Channel }

// Reset implements relay.Endpoint.
func (e endpoint) Reset() error { return e.Close() }

// requests serves the client's requests about the connection as a whole.
func (c *conn) requests(requests <-chan *ssh.Request) {
	for r := range requests {
		ok, payload := c.request(r)
		if r.WantReply {
			_ = r.Reply(ok, payload)
		}
	}
}

func (c *conn) request(r *ssh.Request) (ok bool, payload []byte) {
	switch r.Type {
	case "tcpip-forward", "cancel-tcpip-forward": // RFC 4254, section 7.1
		var m struct {
			Host string
			Port uint32
		}
		if ssh.Unmarshal(r.Payload, &m) != nil || m.Port > 65535 {
			return false, nil
		}
		if r.Type != "tcpip-forward" {
			return c.unlisten("tcp", net.JoinHostPort(m.Host, strconv.Itoa(int(m.Port)))), nil
		}
		port, err := c.listenTCP(m.Host, int(m.Port))
		if err != nil {
			return false, nil
		}
		if m.Port == 0 {
			payload = ssh.Marshal(struct{ Port uint32 }{uint32(port)})
		}
		return true, payload
	case "streamlocal-forward@openssh.com", "cancel-streamlocal-forward@openssh.com": // PROTOCOL, section 2.4
		var m struct{ Path string }
		if ssh.Unmarshal(r.Payload, &m) != nil {
			return false, nil
		}
		if r.Type != "streamlocal-forward@openssh.com" {
			return c.unlisten("unix", m.Path), nil
		}
		return c.listenUnix(m.Path) == nil, nil
	}
	// Others, such as keepalives, need only an answer.
	return false, nil
}

// bindHost returns the address in the guest for a client's bind address: RFC 4254, section 7.1.
func bindHost(host string) string {
	switch host {
	case "", "*":
		return "0.0.0.0"
	case "localhost":
		return "127.0.0.1"
	}
	return host
}

var errListeners = fmt.Errorf("ssh: %d listeners, the limit", MaxListeners)

func (c *conn) listen(network, address string) (l *guest.Listener, err error) {
	c.mu.Lock()
	full := len(c.listeners) >= MaxListeners
	c.mu.Unlock()
	if full {
		return nil, errListeners
	}
	ctx, cancel := context.WithTimeout(c.ctx, startTime)
	defer cancel()
	err = c.Use(ctx, func(g *guest.Client) error {
		var err error
		l, err = g.Listen(ctx, network, address)
		return err
	})
	return l, err
}

// keep registers a listener under the client's name for it, and serves it.
func (c *conn) keep(network, name string, l *guest.Listener, open func(from net.Addr) (ssh.Channel, <-chan *ssh.Request, error)) error {
	key := network + " " + name
	c.mu.Lock()
	refused := c.gone || c.listeners[key] != nil
	if !refused {
		c.listeners[key] = l
	}
	c.mu.Unlock()
	if refused {
		l.Close()
		return net.ErrClosed
	}
	c.wg.Go(func() {
		c.serveListener(l, open)
		l.Close()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.listeners[key] == l {
			delete(c.listeners, key)
		}
	})
	return nil
}

func (c *conn) serveListener(l *guest.Listener, open func(from net.Addr) (ssh.Channel, <-chan *ssh.Request, error)) {
	for {
		to, err := l.AcceptGuest()
		if err != nil {
			return
		}
		select {
		case c.room <- struct{}{}:
		default:
			_ = to.Abort()
			continue
		}
		c.wg.Go(func() {
			defer func() { <-c.room }()
			ch, requests, err := open(to.RemoteAddr())
			if err != nil {
				_ = to.Abort()
				return
			}
			c.join(to, ch, requests)
		})
	}
}

func (c *conn) listenTCP(host string, port int) (int, error) {
	l, err := c.listen("tcp", net.JoinHostPort(bindHost(host), strconv.Itoa(port)))
	if err != nil {
		return 0, err
	}
	_, got := hostPort(l.Addr())
	if port == 0 {
		port = int(got)
	}
	return port, c.keep("tcp", net.JoinHostPort(host, strconv.Itoa(port)), l, func(from net.Addr) (ssh.Channel, <-chan *ssh.Request, error) {
		fromHost, fromPort := hostPort(from)
		return c.ssh.OpenChannel("forwarded-tcpip", ssh.Marshal(struct {
			Host     string
			Port     uint32
			FromHost string
			FromPort uint32
		}{host, uint32(port), fromHost, fromPort}))
	})
}

func (c *conn) listenUnix(path string) error {
	l, err := c.listen("unix", path)
	if err != nil {
		return err
	}
	return c.keep("unix", path, l, func(net.Addr) (ssh.Channel, <-chan *ssh.Request, error) {
		return c.ssh.OpenChannel("forwarded-streamlocal@openssh.com", ssh.Marshal(struct{ Path, Reserved string }{path, ""}))
	})
}

// hostPort splits an address that the guest reports.
func hostPort(a net.Addr) (string, uint32) {
	host, port, err := net.SplitHostPort(a.String())
	n, nerr := strconv.ParseUint(port, 10, 16)
	if err != nil || nerr != nil {
		return "", 0
	}
	return host, uint32(n)
}

// unlisten ends a listener. When it returns, no client can connect there.
func (c *conn) unlisten(network, name string) bool {
	key := network + " " + name
	c.mu.Lock()
	l := c.listeners[key]
	delete(c.listeners, key)
	c.mu.Unlock()
	if l == nil {
		return false
	}
	l.Close()
	return true
}

func (c *conn) closeListeners() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	for _, l := range c.listeners {
		// Each may wait for the guest.
		c.wg.Go(func() { l.Close() })
	}
}
