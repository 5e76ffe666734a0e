package agent

import (
	"context"
	"errors"
	"io"
	"sync"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// SecretsReady is what the process that serves secrets prints once it serves them.
const SecretsReady = "ready\n"

// secretServer is the process that serves secrets (package secretfs). It is a separate process, since the agent
// must not wait for files that it serves itself.
type secretServer struct {
	mu sync.Mutex
	p  *proc.Process // nil: none was started yet
}

// Secrets implements agentpb.AgentService.
func (s *Server) Secrets(ctx context.Context, _ *agentpb.SecretsRequest) (*agentpb.Empty, error) {
	s.secrets.mu.Lock()
	defer s.secrets.mu.Unlock()
	if p := s.secrets.p; p != nil {
		select {
		case <-p.Done(): // a guest process has unmounted the secrets or killed their server
		default:
			p.WriteInput(ctx, []byte{'\n'})
			return &agentpb.Empty{}, ctx.Err()
		}
	}
	p, err := s.Table.StartWith(&agentpb.ExecStart{Argv: []string{"drowse-agent", agentpb.SubsystemSecrets}}, proc.StartOptions{Path: proc.Self})
	if err != nil {
		return nil, err
	}
	said, err := p.AwaitOutput(ctx, SecretsReady, agentpb.MaxHookOutput)
	if errors.Is(err, io.EOF) {
		err = errNotServed
	}
	if err != nil {
		_ = s.Table.Signal(p, syscall.SIGKILL)
		return nil, status.Errorf(codes.FailedPrecondition, "serve secrets: %v: %s", err, said)
	}
	p.KeepNewest()
	s.secrets.p = p
	return &agentpb.Empty{}, nil
}

var errNotServed = errors.New("its server has ended")
