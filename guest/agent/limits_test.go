package agent

import (
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
		if code := f.add(c); code != agentpb.CodeOK {
			t.Fatalf("connection %d: %v", i, code)
		}
	}
	more, other := net.Pipe()
	defer other.Close()
	if code := f.add(more); code != agentpb.CodeLimit {
		t.Errorf("connection %d: %v, want the limit", maxForwards, code)
	}
	f.remove(first)
	if code := f.add(more); code != agentpb.CodeOK {
		t.Errorf("after one has ended: %v", code)
	}
	for i := range maxDatagramForwards {
		if !f.takeDatagrams() {
			t.Fatalf("socket %d of UDP is refused", i)
		}
	}
	if f.takeDatagrams() {
		t.Errorf("there are more than %d sockets of UDP", maxDatagramForwards)
	}
	f.giveDatagrams()
	if !f.takeDatagrams() {
		t.Error("a socket of UDP that has ended leaves no room")
	}
	f.close()
}
