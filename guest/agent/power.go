package agent

import (
	"context"
	"os"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

const (
	defaultGrace = 2 * time.Second
	maxGrace     = 5 * time.Minute
	// answerTime lets the answer to a Shutdown reach the host.
	answerTime = 20 * time.Millisecond
)

// Shutdown implements agentpb.AgentService: it answers, then stops the machine.
func (s *Server) Shutdown(_ context.Context, m *agentpb.ShutdownRequest) (*agentpb.Empty, error) {
	grace := time.Duration(m.GraceNanos)
	if grace < 0 || grace > maxGrace {
		return nil, status.Errorf(codes.InvalidArgument, "grace of %v is out of range", grace)
	}
	time.AfterFunc(answerTime, func() { s.Stop(m.Reboot, grace) })
	return &agentpb.Empty{}, nil
}

// Stop ends all processes and stops the machine. As PID 1 it also ends those that the agent did not start. grace
// is how long processes have to comply with SIGTERM; 0 means 2 s. Stop returns only when the machine cannot be
// stopped, or when another Stop is under way.
func (s *Server) Stop(reboot bool, grace time.Duration) {
	s.stopping.Do(func() {
		if grace == 0 {
			grace = defaultGrace
		}
		s.Services.Retire(false)
		if s.cfg.Init {
			s.Table.EndMachine(grace)
		}
		if err := s.cfg.Machine.Power(reboot); err != nil {
			os.Stderr.WriteString("drowse-agent: cannot stop the machine: " + err.Error() + "\n")
		}
	})
}
