package agent

import (
	"context"
	"fmt"
	"net"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestProcesses_one_more_than_there_may_be_is_refused(t *testing.T) {
	procs := newTable(false)
	for i := range maxProcesses {
		if err := procs.reserve(&process{}, ""); err != nil {
			t.Fatalf("process %d: %v", i, err)
		}
	}
	for _, id := range []string{"", "one-more"} {
		if err := procs.reserve(&process{}, id); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("process %d, named %q: %v, want ResourceExhausted", maxProcesses, id, err)
		}
	}
}

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

func TestWatches_one_more_than_there_may_be_is_refused(t *testing.T) {
	all, dir := &watches{}, t.TempDir()
	defer all.close()
	start := func(i int) (*watch, error) {
		w, _, err := all.get(&agentpb.WatchStart{Id: fmt.Sprint("w", i), Paths: []string{dir}})
		return w, err
	}
	var last *watch
	var turn uint64
	for i := range maxWatches {
		w, err := start(i)
		if err != nil {
			t.Fatalf("watch %d: %v", i, err)
		}
		_, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		var ok bool
		if turn, ok = w.attach(cancel); !ok {
			t.Fatalf("watch %d has ended", i)
		}
		last = w
	}
	if _, err := start(maxWatches); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("watch %d: %v, want ResourceExhausted", maxWatches, err)
	}
	// One that nobody reads makes way.
	last.detach(turn)
	if _, err := start(maxWatches); err != nil {
		t.Errorf("when one has lost its connection: %v", err)
	}
}
