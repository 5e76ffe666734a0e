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

// Dialer opens a connection to a vsock port of the guest.
type Dialer func(ctx context.Context, port uint32) (net.Conn, error)

// maxHandshake bounds the line that answers CONNECT: "OK 4294967295\n".
const maxHandshake = 32

// UnixDialer dials a guest by the Unix socket that stands for its vsock
// device: it sends "CONNECT <port>\n" and expects "OK <port>\n". The guest is
// not up, or does not listen, when the socket closes instead; the error is
// ErrUnavailable then. Clients that dial so record what they do in the audit trail
// beside the socket, if there is one: see package audit.
func UnixDialer(path string) Dialer { return unixDialer(path, "") }

// IdleDialer is UnixDialer for connections that are no use of the VM: they do not keep it from going
// to sleep when nobody uses it.
func IdleDialer(path string) Dialer { return unixDialer(path, " idle") }

func unixDialer(path, suffix string) Dialer {
	beside := path
	if abs, err := filepath.Abs(path); err == nil {
		beside = abs
	}
	trail := audit.Open(audit.Path(beside))
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

// vsockConn is a connection that knows where it is recorded what is done by it.
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

// readLine reads a line byte by byte, since what follows it is not ours.
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

// ReadyPath is where the host listens for the agent's report, given the path
// of the Unix socket that stands for the vsock device.
func ReadyPath(path string) string {
	return path + "_" + strconv.Itoa(agentpb.ReadyPort)
}

const readyTimeout = 5 * time.Second

// Ready is what the agent reports when it serves.
type Ready = agentpb.Ready

// WaitReady waits on a listener at ReadyPath for the agent to report that it
// serves, and returns the report. It does not close the listener, except when
// ctx ends first. Whatever else connects is ignored.
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
