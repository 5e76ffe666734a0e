package agent

import (
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// SecretsReady is what the process that serves secrets prints when it does.
const SecretsReady = "ready\n"

// secretServer is the process that serves secrets: package secretfs. It is one of its own,
// since the agent must not wait for files that it serves itself.
type secretServer struct {
	mu sync.Mutex
	p  *process // nil: none was started yet
}

// Secrets implements agentpb.AgentService.
func (s *Server) Secrets(ctx context.Context, _ *agentpb.SecretsRequest) (*agentpb.Empty, error) {
	s.secrets.mu.Lock()
	defer s.secrets.mu.Unlock()
	if p := s.secrets.p; p != nil {
		select {
		case <-p.exited: // somebody has unmounted them, or killed it
		default:
			p.writeInput(ctx, []byte{'\n'})
			return &agentpb.Empty{}, ctx.Err()
		}
	}
	p, err := s.procs.startWith(&agentpb.ExecStart{Argv: []string{"drowse-agent", agentpb.SubsystemSecrets}}, startOptions{path: self})
	if err != nil {
		return nil, err
	}
	said, err := awaitReady(ctx, p)
	if err != nil {
		_ = s.procs.reaper.signal(p.pid, syscall.SIGKILL)
		return nil, status.Errorf(codes.FailedPrecondition, "serve secrets: %v: %s", err, said)
	}
	p.out.detach(kept)
	s.secrets.p = p
	return &agentpb.Empty{}, nil
}

// awaitReady waits until the process says that it is ready, and returns what else it has said.
func awaitReady(ctx context.Context, p *process) (said string, err error) {
	_, reader := p.out.attach(0)
	buf := make([]byte, agentpb.MaxHookOutput)
	n := 0
	for {
		k, _, _, ended := p.out.read(reader, buf[n:])
		n += k
		switch {
		case strings.HasPrefix(string(buf[:n]), SecretsReady):
			return "", nil
		case k > 0 && n < len(buf):
			continue
		case ended || n == len(buf):
			return strings.ToValidUTF8(strings.TrimSpace(string(buf[:n])), "?"), errNotServed
		}
		select {
		case <-p.out.readable:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

var errNotServed = errors.New("its server has ended")
