package tlsname

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Tunnel passes on what a client and a peer send each other, until both directions or the context have ended, and
// closes both. early was already read from the client. If name is not empty, the client must begin with a
// ClientHello that asks for exactly that name, and so must a second one; the peer gets that, or nothing. Tunnel
// resets both connections if it refuses the client or if either fails. With an error, reason says why the client
// was refused; 0 means that it was not.
func Tunnel(ctx context.Context, client, peer *net.TCPConn, early []byte, name string, hello time.Duration) (reason netpolicy.Reason, err error) {
	unfinished(client)
	unfinished(peer)
	stop := context.AfterFunc(ctx, func() {
		reset(client)
		reset(peer)
	})
	if name == "" {
		err = exchange(client, peer, early)
	} else {
		reason, err = New(Config{HelloTimeout: hello}).tunnel(client, peer, early, name)
	}
	if !stop() {
		return 0, context.Cause(ctx)
	}
	if err != nil {
		reset(client)
		reset(peer)
		return reason, err
	}
	finish(client)
	finish(peer)
	return 0, nil
}

func (s *Server) tunnel(client, peer *net.TCPConn, early []byte, name string) (netpolicy.Reason, error) {
	buf, asked, n, reason, err := s.hello(client, early)
	if err != nil {
		return reason, err
	}
	if asked != name {
		return netpolicy.ReasonTLSName, fmt.Errorf("%w: the server name is %q, and not %q", errRefused, asked, name)
	}
	return s.relay(&connection{guest: client, peer: peer}, name, buf, n)
}

// exchange copies both directions. The first failure ends both.
func exchange(client, peer *net.TCPConn, early []byte) error {
	if len(early) > 0 {
		if _, err := peer.Write(early); err != nil {
			return err
		}
	}
	ends := make(chan error, 2)
	go func() { ends <- pass(client, peer) }()
	go func() { ends <- pass(peer, client) }()
	return awaitEnds(ends, client, peer)
}

// awaitEnds waits for both directions. The first failure ends both, and awaitEnds returns it.
func awaitEnds(ends <-chan error, client, peer *net.TCPConn) (err error) {
	for range 2 {
		if failed := <-ends; failed != nil && err == nil {
			err = failed
			reset(client)
			reset(peer)
		}
	}
	return err
}
