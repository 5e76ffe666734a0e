// Package arrival is how the process of a VM waits for memory and disk that are still on their way to the host. The
// host's node (sandbox/cluster) gets them, since that alone may read the store of objects, and the two talk over a Unix
// socket.
//
// A process that asks while there is no node waits for the next one: upgrades of the node's program stop no VM.
package arrival

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
)

const (
	maxLine  = 4 << 10 // bytes of a request or an answer
	maxConns = 512     // requests that a node has at once; more wait
	sayTime  = 10 * time.Second
	// retryAfter is how long a process waits that has found no node, or one that fails.
	retryAfter = 100 * time.Millisecond
)

// ErrLost means that the rest never comes: it is not in the store any more, or damaged there.
var ErrLost = errors.New("the rest of its memory or disk is lost")

// Request asks for a part of a memory file or layer of a snapshot, or, without File, for all of it.
type Request struct {
	Snapshot string `json:"snapshot"`
	File     string `json:"file,omitempty"`
	Off      int64  `json:"off,omitempty"`
	Len      int64  `json:"len,omitempty"` // bytes
}

type answer struct {
	Error string `json:"error,omitempty"`
	Lost  bool   `json:"lost,omitempty"`
}

// socket is that of the node of the host with the state directory dir.
func socket(dir string) string { return filepath.Join(dir, "cluster", "memory.sock") }

// Serve answers requests on the host with the state directory dir until ctx ends. answer returns when what is asked for
// is there, or an error, which is ErrLost if it makes no sense to ask again.
func Serve(ctx context.Context, dir string, do func(context.Context, Request) error) error {
	l, err := osfile.ListenUnix(socket(dir))
	if err != nil {
		return fmt.Errorf("listening for VMs that wait for memory and disk: %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	conns := make(chan struct{}, maxConns)
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			if c != nil {
				_ = c.Close()
			}
			return nil
		}
		if err != nil {
			// Out of descriptors, most likely.
			select {
			case <-time.After(retryAfter):
				continue
			case <-ctx.Done():
				return nil
			}
		}
		conns <- struct{}{}
		wg.Go(func() {
			defer func() { <-conns }()
			serve(ctx, c, do)
		})
	}
}

func serve(ctx context.Context, c net.Conn, do func(context.Context, Request) error) {
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) }) // not when the request is over
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	_ = c.SetDeadline(time.Now().Add(sayTime))
	var r Request
	if json.NewDecoder(io.LimitReader(c, maxLine)).Decode(&r) != nil || ctx.Err() != nil {
		return
	}
	_ = c.SetDeadline(time.Time{})
	left := make(chan struct{})
	go func() {
		defer close(left)
		var b [1]byte
		_, _ = c.Read(b[:]) // until the other end is closed, or the deadline below
		cancel()
	}()
	var a answer
	if err := do(ctx, r); err != nil {
		a = answer{Error: err.Error()[:min(len(err.Error()), maxLine/2)], Lost: errors.Is(err, ErrLost)}
	}
	_ = c.SetReadDeadline(time.Now())
	<-left
	_ = c.SetWriteDeadline(time.Now().Add(sayTime))
	_ = json.NewEncoder(c).Encode(a)
}

// Client waits for a snapshot.
type Client struct {
	Dir      string // the state directory of the host
	Snapshot string
}

// Ensure returns when bytes of a memory file or layer are there. The errors are ErrLost and the context's.
func (c Client) Ensure(ctx context.Context, file string, off, n int64) error {
	return c.ask(ctx, Request{c.Snapshot, file, off, n})
}

// Whole returns when the snapshot is whole, under its name. The errors are ErrLost and the context's.
func (c Client) Whole(ctx context.Context) error { return c.ask(ctx, Request{Snapshot: c.Snapshot}) }

func (c Client) ask(ctx context.Context, r Request) error {
	for {
		err := c.askOnce(ctx, r)
		if err == nil || errors.Is(err, ErrLost) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for memory or disk of snapshot %s, which is on its way to this host: %w: %w: see that drowse serve runs and reaches the store",
				c.Snapshot, context.Cause(ctx), err)
		case <-time.After(retryAfter):
		}
	}
}

var errNoNode = errors.New("this host has no node of the cluster")

func (c Client) askOnce(ctx context.Context, r Request) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket(c.Dir))
	if err != nil {
		if errors.Is(err, os.ErrNotExist) || ctx.Err() == nil {
			err = fmt.Errorf("%w (%w)", errNoNode, err)
		}
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return err
	}
	var a answer
	if err := json.NewDecoder(io.LimitReader(conn, maxLine)).Decode(&a); err != nil {
		return fmt.Errorf("%w: it has ended meanwhile (%w)", errNoNode, err)
	}
	switch {
	case a.Lost:
		return fmt.Errorf("%w: %s", ErrLost, a.Error)
	case a.Error != "":
		return errors.New(a.Error)
	}
	return nil
}
