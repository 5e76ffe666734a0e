package fakeguest

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/relay"
)

// serveForward serves guest.Client.Dial until l is closed, and returns when all its connections have ended.
func (g *Guest) serveForward(l net.Listener) {
	var all sync.WaitGroup
	defer all.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		all.Go(func() {
			defer c.Close()
			g.forward(c)
		})
	}
}

// forward serves one connection of the forward port.
func (g *Guest) forward(c net.Conn) {
	var head [agentpb.ForwardRequestSize]byte
	var m agentpb.ForwardRequest
	if _, err := io.ReadFull(c, head[:]); err != nil || m.Decode(&head) != nil {
		return
	}
	address := make([]byte, m.Length)
	if _, err := io.ReadFull(c, address); err != nil {
		return
	}
	answer := func(code agentpb.ForwardCode, text string) bool {
		var b [agentpb.ForwardAnswerSize]byte
		(&agentpb.ForwardAnswer{Code: code, Length: len(text)}).Encode(&b)
		_, err := c.Write(append(b[:], text...))
		return err == nil
	}
	if m.Op != agentpb.OpDial || m.Network == agentpb.UDP {
		answer(agentpb.CodeFailed, "a guest in memory only dials")
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), max(time.Duration(m.TimeoutMs)*time.Millisecond, time.Second))
	defer cancel()
	to, err := net.Conn(nil), error(syscall.ECONNREFUSED)
	if g.Dial != nil {
		to, err = g.Dial(ctx, m.Network.String(), string(address))
	}
	if err != nil {
		code := agentpb.CodeFailed
		for _, f := range agentpb.ForwardErrors {
			if errors.Is(err, f.Err) {
				code = f.Code
			}
		}
		answer(code, err.Error())
		return
	}
	if answer(agentpb.CodeOK, to.LocalAddr().String()) {
		_, _, _ = relay.Join(relay.NewStream(c), relay.Socket(to)) // either end may break it
	} else {
		to.Close()
	}
}
