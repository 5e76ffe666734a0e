package guest

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// Ports of the protocol. The guest's agent listens on AgentPort and ForwardPort, the host on the others.
const (
	AgentPort    = agentpb.AgentPort
	ForwardPort  = agentpb.ForwardPort
	SelfPort     = agentpb.SelfPort     // for ServeSelf
	ServicesPort = agentpb.ServicesPort // for ServeServices
	HooksPort    = agentpb.HooksPort    // for ServeHooks
	ReadyPort    = agentpb.ReadyPort    // for WaitReady
)

// Dialer opens a connection to a vsock port in the guest.
type Dialer func(ctx context.Context, port uint32) (net.Conn, error)

// maxHandshake bounds the line that answers CONNECT: "OK 4294967295\n".
const maxHandshake = 32

// UnixDialer dials a guest through the Unix socket of its vsock device. It sends "CONNECT <port>\n" and expects "OK
// <port>\n". If the socket closes instead, the guest is not up or does not listen, and the error is ErrUnavailable.
// Clients that use it record their actions in the audit trail beside the socket, if there is one: see package audit.
func UnixDialer(path string) Dialer { return unixDialer(path, "") }

// IdleDialer is UnixDialer for connections that do not count as use of the VM: they do not keep an idle VM from
// going to sleep.
func IdleDialer(path string) Dialer { return unixDialer(path, " idle") }

// RecordedDialer is dial for clients that record their actions in the audit trail beside path, as those of UnixDialer
// do, although dial itself may use no path. An empty path records nothing. The connections of dial must be of type
// *net.UnixConn. If dial fails before ctx ends, the error is ErrUnavailable.
func RecordedDialer(path string, dial Dialer) Dialer {
	trail := trailBeside(path)
	return func(ctx context.Context, port uint32) (net.Conn, error) {
		c, err := dial(ctx, port)
		if err != nil {
			return nil, unreachable(ctx, port, err)
		}
		u, ok := c.(*net.UnixConn)
		if !ok {
			c.Close()
			return nil, fmt.Errorf("guest: vsock port %d: connections of type %T are not recorded: use *net.UnixConn", port, c)
		}
		return &vsockConn{u, trail}, nil
	}
}

// trailBeside returns the audit trail of the VM with this vsock socket.
func trailBeside(path string) *audit.Trail {
	if path == "" {
		return nil
	}
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	return audit.Open(audit.Path(path))
}

func unixDialer(path, suffix string) Dialer {
	trail := trailBeside(path)
	return func(ctx context.Context, port uint32) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, fmt.Errorf("guest: %w: %w", ErrUnavailable, err)
		}
		if err := handshake(ctx, c, port, suffix); err != nil {
			c.Close()
			return nil, err
		}
		if u, ok := c.(*net.UnixConn); ok {
			return &vsockConn{u, trail}, nil
		}
		return c, nil
	}
}

// vsockConn is a connection with the audit trail for what is done over it.
type vsockConn struct {
	*net.UnixConn
	trail *audit.Trail
}

func handshake(ctx context.Context, c net.Conn, port uint32, suffix string) error {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.WriteString(c, "CONNECT "+strconv.FormatUint(uint64(port), 10)+suffix+"\n"); err != nil {
		return unreachable(ctx, port, err)
	}
	line, err := readLine(c, maxHandshake)
	if err != nil {
		return unreachable(ctx, port, err)
	}
	answer, ok := strings.CutPrefix(line, "OK ")
	if _, err := strconv.ParseUint(answer, 10, 32); !ok || err != nil {
		return fmt.Errorf("guest: %w: %q in answer to CONNECT", ErrProtocol, line)
	}
	if !stop() {
		return fmt.Errorf("guest: connect to vsock port %d: %w", port, ctx.Err())
	}
	return nil
}

func unreachable(ctx context.Context, port uint32, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("guest: connect to vsock port %d: %w", port, ctx.Err())
	}
	return fmt.Errorf("guest: vsock port %d: %w: %w", port, ErrUnavailable, err)
}

// readLine reads a line byte by byte: what follows the line belongs to the caller.
func readLine(r io.Reader, limit int) (string, error) {
	var b [1]byte
	var line []byte
	for len(line) < limit {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
	return "", fmt.Errorf("%w: a line of more than %d bytes", ErrProtocol, limit)
}

const readyTimeout = 5 * time.Second

// Ready is the agent's report that it serves.
type Ready = agentpb.Ready

// WaitReady waits on a listener at ReadyPort until the agent reports that it serves, and returns the report. It
// closes the listener only if ctx ends first. It ignores connections that send anything else.
func WaitReady(ctx context.Context, l net.Listener) (Ready, error) {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return Ready{}, fmt.Errorf("guest: wait for the agent: %w", err)
		}
		var line string
		if err = c.SetDeadline(time.Now().Add(readyTimeout)); err == nil {
			line, err = readLine(c, agentpb.MaxReadyLine)
		}
		c.Close()
		if err != nil {
			continue
		}
		if r, err := agentpb.ParseReady(line); err == nil {
			r.Version = printable(r.Version)
			return r, nil
		}
	}
}
