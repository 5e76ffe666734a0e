package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// ErrForkEnded means that the parent's process ended without a report on the snapshot.
var ErrForkEnded = errors.New("the parent's process ended before the snapshot of the fork was on disk")

// ForkConn is the caller's end of a fork's connection.
type ForkConn struct {
	conn  *net.UnixConn
	resp  *http.Response
	in    *bufio.Reader
	First ForkLine
	Image *os.File
}

// rights reads from a socket and keeps the first descriptor that it receives.
type rights struct {
	conn *net.UnixConn
	file *os.File
}

func (r *rights) Read(p []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := r.conn.ReadMsgUnix(p, oob)
	if err != nil {
		return max(n, 0), err
	}
	if n == 0 {
		err = io.EOF
	}
	msgs, perr := unix.ParseSocketControlMessage(oob[:oobn])
	if perr != nil {
		return n, errors.Join(err, perr)
	}
	for i := range msgs {
		fds, perr := unix.ParseUnixRights(&msgs[i])
		if perr != nil {
			continue
		}
		for _, fd := range fds {
			if r.file != nil {
				unix.Close(fd)
				continue
			}
			r.file = os.NewFile(uintptr(fd), "fork")
		}
	}
	return n, err
}

// DialFork asks the process of a running VM for the image of a fork.
func DialFork(ctx context.Context, s *state.Store, name, id, note string) (c *ForkConn, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", s.ControlSocket(name))
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("asking the process of VM %s: %w", name, ctx.Err())
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: its process does not answer: %w", spec.ErrNotRunning, name, err)
	}
	c = &ForkConn{conn: conn.(*net.UnixConn)}
	defer func() {
		if err != nil {
			c.Close()
			c = nil
		}
	}()
	stop := context.AfterFunc(ctx, func() { c.conn.Close() })
	defer stop()
	order, err := json.Marshal(ForkOrder{id, note})
	if err == nil {
		_, err = fmt.Fprintf(c.conn, "POST %sfork HTTP/1.1\r\nHost: vm\r\nContent-Length: %d\r\n\r\n%s", Orders, len(order), order)
	}
	if err != nil {
		return c, fmt.Errorf("asking the process of VM %s: %w", name, errors.Join(ctx.Err(), err))
	}
	r := &rights{conn: c.conn}
	in := bufio.NewReader(r)
	resp, err := http.ReadResponse(in, nil) //nolint:bodyclose // close does
	if err == nil {
		c.resp = resp
		if resp.StatusCode != http.StatusOK {
			err = unexpected(resp, Orders+"fork")
		}
	}
	if err == nil {
		c.in = bufio.NewReader(io.LimitReader(resp.Body, 2*maxForkLine))
		c.First, err = c.line()
	}
	c.Image = r.file
	switch {
	case ctx.Err() != nil:
		return c, fmt.Errorf("asking the process of VM %s: %w", name, ctx.Err())
	case err != nil:
		return c, fmt.Errorf("asking the process of VM %s: %w", name, err)
	case c.First.Error != nil:
		return c, c.First.Error
	case c.Image == nil:
		return c, fmt.Errorf("asking the process of VM %s: it has sent no image", name)
	}
	return c, nil
}

func (c *ForkConn) line() (l ForkLine, err error) {
	text, err := c.in.ReadBytes('\n')
	if err != nil {
		return l, fmt.Errorf("%w: %w", ErrForkEnded, err)
	}
	return l, json.Unmarshal(text, &l)
}

// Wait returns when the snapshot is on disk or has failed.
func (c *ForkConn) Wait(ctx context.Context) (spec.SleepResult, error) {
	stop := context.AfterFunc(ctx, func() { c.Abort() })
	defer stop()
	l, err := c.line()
	switch {
	case err != nil:
		return spec.SleepResult{}, err
	case l.Error != nil:
		return spec.SleepResult{}, errors.Join(l.Error, ctx.Err())
	case l.Result == nil:
		return spec.SleepResult{}, fmt.Errorf("%w: it has sent no result", ErrForkEnded)
	}
	return *l.Result, nil
}

// Abort tells the process that the caller does not need the snapshot.
func (c *ForkConn) Abort() { _, _ = io.WriteString(c.conn, ForkAbort) }

// Close releases what this process holds of the fork.
func (c *ForkConn) Close() {
	c.conn.Close()
	if c.resp != nil {
		c.resp.Body.Close()
	}
	if c.Image != nil {
		c.Image.Close()
	}
}

// SendLine sends a line, with f, unless nil, attached to its first byte.
func SendLine(c *net.UnixConn, l ForkLine, f *os.File) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	text = append(text, '\n')
	var oob []byte
	if f != nil {
		oob = unix.UnixRights(int(f.Fd()))
	}
	n, _, err := c.WriteMsgUnix(text, oob, nil)
	if err == nil && n < len(text) {
		_, err = c.Write(text[n:])
	}
	return err
}
