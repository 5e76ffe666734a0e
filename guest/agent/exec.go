package agent

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Exec implements agentpb.AgentService.
func (s *Server) Exec(ctx context.Context, stream agentpb.Agent_ExecServer) (err error) {
	defer recovered(&err)
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	switch m := first.Msg.(type) {
	case *agentpb.ExecRequest_Start:
		if !m.Start.Changes {
			return s.Table.Run(ctx, stream, m.Start, nil)
		}
		r, err := s.recordDisk(ctx, m.Start)
		if err != nil {
			return err
		}
		defer r.close()
		return s.Table.Run(ctx, stream, m.Start, r.since)
	case *agentpb.ExecRequest_Attach:
		return s.Table.Attach(ctx, stream, m.Attach)
	}
	return status.Error(codes.InvalidArgument, "the first message must start a process or attach to one")
}
