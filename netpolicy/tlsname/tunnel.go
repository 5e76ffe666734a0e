package tlsname

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Tunnel passes on what comes between a client and a peer, in both directions, until both have ended or the context
// does, and closes both. Early is what was read of the client already. If name is not empty, the client has to begin
// with a ClientHello that asks for just that name, in the first and in the second one if there is any; the peer gets
// that, or nothing. A connection that is not to go on is reset, and so are both if either fails. With an error,
// reason says why it was refused; 0 is that it was not.
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

// awaitEnds waits for both directions. The first failure ends both, and is returned.
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
