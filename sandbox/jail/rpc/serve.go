package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// read receives until the connection ends, and then ends everything else.
func (c *Conn) read() {
	a := assembler{maxMessage: c.o.MaxMessage, maxFiles: c.o.MaxFiles}
	err := c.receive(&a)
	a.drop()

	c.out.Lock()
	if c.out.err == nil {
		c.out.err = err
	}
	err = c.out.err
	c.out.Unlock()

	c.mu.Lock()
	c.err = err
	c.mu.Unlock()
	close(c.done)
	c.cancel()
	c.socket.f.Close()
}

func (c *Conn) receive(a *assembler) error {
	packet := make([]byte, packetSize)
	oob := make([]byte, unix.CmsgSpace(c.o.MaxFiles*4))
	// A call is cancelled once, and a handler may bound how fast the peer calls. A peer that cancels what it has not
	// called would have this end work as fast as it likes.
	cancellations := c.o.MaxCalls
	for {
		n, fds, err := c.socket.receive(packet, oob)
		if err != nil {
			if errors.Is(err, io.EOF) {
				if a.begun != nil {
					return fmt.Errorf("%w in the middle of a message", ErrPeerClosed)
				}
				return ErrPeerClosed
			}
			return fmt.Errorf("receive from the peer: %w", err)
		}
		m, err := a.add(packet[:n], fds)
		if err != nil {
			return err
		}
		if m == nil {
			continue
		}
		switch m.kind {
		case kindCall, kindPost:
			cancellations++
			err = c.accept(m)
		case kindReply, kindError:
			err = c.settle(m.id, answer{m: m})
		case kindCancel:
			if cancellations--; cancellations < 0 {
				return broken("it has cancelled more calls than it has made")
			}
			c.mu.Lock()
			if s := c.serving[m.id]; s != nil { // or the answer is on its way
				s.cancel()
			}
			c.mu.Unlock()
		}
		if err != nil {
			return err
		}
	}
}

// accept has a call or post of the peer served.
func (c *Conn) accept(m *message) error {
	s, err := c.register(m)
	if err != nil {
		m.closeFiles()
		return err
	}
	if m.kind == kindPost {
		c.posts <- job{m, s}
		return nil
	}
	c.wg.Go(func() { c.serve(m, s) })
	return nil
}

func (c *Conn) register(m *message) (*served, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	count := &c.counts[m.kind-kindCall]
	switch {
	case c.serving[m.id] != nil:
		return nil, broken("two calls in progress have one id")
	case *count == c.o.MaxCalls:
		return nil, broken("more than %d calls are in progress", c.o.MaxCalls)
	}
	*count++
	s := &served{id: m.id, kind: m.kind}
	s.ctx, s.cancel = context.WithCancel(c.ctx)
	c.serving[m.id] = s
	return s, nil
}

// servePosts serves one post at a time, so that they keep their order.
func (c *Conn) servePosts() {
	for {
		select {
		case p := <-c.posts:
			c.serve(p.m, p.s)
		case <-c.done:
			return
		}
	}
}

func (c *Conn) serve(m *message, s *served) {
	var reply any
	var files []*os.File
	err := fmt.Errorf("call %s: this end serves no calls", m.method)
	if c.o.Handler != nil {
		reply, files, err = c.o.Handler(s.ctx, m.method, m.body, m.files)
	} else {
		m.closeFiles()
	}
	s.cancel()

	if err != nil || m.kind == kindPost {
		closeAll(files)
		reply, files = nil, nil
	}
	var back *message
	if err == nil || m.kind == kindPost {
		back, err = c.newMessage(kindReply, m.method, reply, files)
	}
	if err != nil {
		back = &message{kind: kindError, body: c.sentinels.encode(err)}
	}
	back.method, back.id, back.answered = "", s.id, s
	c.send(back)
}
