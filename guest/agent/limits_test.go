package agent

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestForwards_one_more_than_there_may_be_is_refused(t *testing.T) {
	f := &forwards{}
	var first net.Conn
	for i := range maxForwards {
		c, other := net.Pipe()
		defer other.Close()
		if first == nil {
			first = c
		}
		if code := f.add(c, maxForwards); code != agentpb.CodeOK {
			t.Fatalf("connection %d: %v", i, code)
		}
	}
	more, other := net.Pipe()
	defer other.Close()
	if code := f.add(more, maxForwards); code != agentpb.CodeLimit {
		t.Errorf("connection %d: %v, want the limit", maxForwards, code)
	}
	_ = f.remove(first)
	if code := f.add(more, maxForwards); code != agentpb.CodeOK {
		t.Errorf("after one has ended: %v", code)
	}
	dialUDP := func() agentpb.ForwardCode {
		host, guest := net.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			f.dial(t.Context(), guest, agentpb.ForwardRequest{Network: agentpb.UDP}, "127.0.0.1:9")
		}()
		var b [agentpb.ForwardAnswerSize]byte
		var a agentpb.ForwardAnswer
		_, err := io.ReadFull(host, b[:])
		if err = errors.Join(err, a.Decode(&b)); err != nil {
			t.Fatal(err)
		}
		host.Close()
		<-done
		return a.Code
	}
	f.datagrams.Store(maxDatagramForwards)
	if code := dialUDP(); code != agentpb.CodeLimit {
		t.Errorf("socket %d of UDP: %v, want the limit", maxDatagramForwards, code)
	}
	f.datagrams.Store(maxDatagramForwards - 1)
	for range 2 { // the second round finds the room that the first has left
		if code := dialUDP(); code != agentpb.CodeOK {
			t.Errorf("a socket of UDP for which there is room: %v", code)
		}
	}
	f.close()
}
