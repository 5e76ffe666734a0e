package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest/forward"
)

// forward listens here, and connects in the VM through the server.
func (r *farHost) forward(ctx context.Context, name string, o forwardOptions) error {
	var all []serving
	for i := range o.specs {
		at, to := &o.specs[i].Listen, o.specs[i].Dial
		if at.Network != "tcp" || to.Network != "tcp" {
			return usageError{fmt.Errorf("%s: the HTTP API carries TCP only: use ports, or use it on that host", o.specs[i])}
		}
		if host, _, err := net.SplitHostPort(to.Address); err != nil || !isLoopback(host) {
			return usageError{fmt.Errorf("%s: the HTTP API reaches ports of 127.0.0.1 in a VM only: leave out the address, or use it on that host", o.specs[i])}
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", at.Address)
		if err != nil {
			return err
		}
		defer l.Close()
		at.Address = l.Addr().String()
		all = append(all, func(ctx context.Context) error {
			defer context.AfterFunc(ctx, func() { l.Close() })()
			return r.serveForward(ctx, name, l, to, o.conns)
		})
	}
	return r.a.carry(ctx, o.specs, all)
}

// serveForward carries connections until ctx ends, at most so many at once.
func (r *farHost) serveForward(ctx context.Context, name string, l net.Listener, to forward.Address, conns int) error {
	var carried sync.WaitGroup
	defer carried.Wait()
	room := make(chan struct{}, conns)
	for {
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		c, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil { // such as too many open files
			<-room
			r.a.forwardFailed(err)
			select {
			case <-time.After(time.Second):
				continue
			case <-ctx.Done():
				return nil
			}
		}
		carried.Go(func() {
			defer func() { <-room }()
			defer c.Close()
			_, port, _ := net.SplitHostPort(to.Address)
			far, err := r.Sandbox(name).Dial(ctx, "tcp", net.JoinHostPort("127.0.0.1", port))
			if err != nil {
				if ctx.Err() == nil {
					r.a.forwardFailed(err)
				}
				return
			}
			join(ctx, c, far)
		})
	}
}

// join copies between two connections until both directions have ended, or one has failed, or ctx ends.
func join(ctx context.Context, a, b net.Conn) {
	defer context.AfterFunc(ctx, func() { a.Close(); b.Close() })()
	defer a.Close()
	defer b.Close()
	one := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		half, ok := to.(interface{ CloseWrite() error })
		if err == nil && ok {
			err = half.CloseWrite()
		} else if !ok {
			err = errors.ErrUnsupported
		}
		if err != nil { // the other direction has no use
			a.Close()
			b.Close()
		}
	}
	var back sync.WaitGroup
	back.Go(func() { one(a, b) })
	one(b, a)
	back.Wait()
}
