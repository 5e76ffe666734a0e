package agent

import (
	"context"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest/agent/capture"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// lostPorts are ports that are taken away while the agent stands by.
type lostPorts struct {
	capture.IOPorts
	closed bool
}

func (*lostPorts) Open() error { return nil }

func (p *lostPorts) Close() { p.closed = true }

func (*lostPorts) Command(byte) {}

func TestPorts_that_are_taken_away_are_an_error_of_the_call(t *testing.T) {
	ports := &lostPorts{}
	s, err := New(Config{Machine: panicMachine{}, Ports: ports})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = safely(t.Context(), nil, nil, func(ctx context.Context, _ func(any) error) (any, error) {
		return s.Handover(ctx, &agentpb.HandoverRequest{})
	})
	if err == nil || !strings.Contains(err.Error(), "invalid memory address") {
		t.Errorf("got %v, want what the fault became", err)
	}
	if _, err := s.Resume(t.Context(), &agentpb.ResumeRequest{}); err != nil || !ports.closed {
		t.Error("the agent is still at its ports")
	}
}
