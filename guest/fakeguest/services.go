package fakeguest

import (
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// A service of a guest in memory runs nothing: it is ready once it is started, and logs its command.
type service struct {
	state *agentpb.ServiceState
	log   []byte
}

// SetService implements agentpb.AgentService.
func (a agent) SetService(_ context.Context, m *agentpb.SetServiceRequest) (*agentpb.ServiceState, error) {
	a.g.mu.Lock()
	defer a.g.mu.Unlock()
	if a.g.services == nil {
		a.g.services = map[string]*service{}
	}
	s := a.g.services[m.Service.Name]
	if s == nil {
		s = &service{state: &agentpb.ServiceState{Name: m.Service.Name, State: "stopped"}}
		a.g.services[m.Service.Name] = s
	}
	if m.Start && (m.Restart || s.state.State != "running") {
		now := time.Now().UnixNano()
		s.state.State, s.state.Pid, s.state.StartedNanos, s.state.Ready, s.state.ReadyNanos = "running", 77, now, true, now
		s.log = append(s.log, strings.Join(m.Service.Argv, " ")+"\n"...)
	}
	return s.state, nil
}

func (a agent) service(name string) (*service, error) {
	if s := a.g.services[name]; s != nil {
		return s, nil
	}
	return nil, status.Errorf(codes.NotFound, "no service %q", name)
}

// StopService implements agentpb.AgentService.
func (a agent) StopService(_ context.Context, m *agentpb.StopServiceRequest) (*agentpb.ServiceState, error) {
	a.g.mu.Lock()
	defer a.g.mu.Unlock()
	s, err := a.service(m.Name)
	if err != nil {
		return nil, err
	}
	s.state.State, s.state.Pid, s.state.Ready, s.state.ReadyNanos = "stopped", 0, false, 0
	if m.Forget {
		delete(a.g.services, m.Name)
	}
	return s.state, nil
}

// ListServices implements agentpb.AgentService.
func (a agent) ListServices(context.Context, *agentpb.ListServicesRequest) (*agentpb.ListServicesResponse, error) {
	a.g.mu.Lock()
	defer a.g.mu.Unlock()
	out := &agentpb.ListServicesResponse{}
	for _, s := range a.g.services {
		out.Services = append(out.Services, s.state)
	}
	slices.SortFunc(out.Services, func(x, y *agentpb.ServiceState) int { return strings.Compare(x.Name, y.Name) })
	return out, nil
}

// WaitService implements agentpb.AgentService.
func (a agent) WaitService(_ context.Context, m *agentpb.WaitServiceRequest) (*agentpb.ServiceState, error) {
	a.g.mu.Lock()
	defer a.g.mu.Unlock()
	s, err := a.service(m.Name)
	if err != nil {
		return nil, err
	}
	return s.state, nil
}

// ServiceLog implements agentpb.AgentService. It waits a moment at most.
func (a agent) ServiceLog(ctx context.Context, m *agentpb.ServiceLogRequest) (*agentpb.ServiceLogResponse, error) {
	for range 2 {
		a.g.mu.Lock()
		s, err := a.service(m.Name)
		if err != nil {
			a.g.mu.Unlock()
			return nil, err
		}
		end := uint64(len(s.log))
		at := min(m.Offset, end)
		out := &agentpb.ServiceLogResponse{Offset: at, Data: slices.Clone(s.log[at:]), End: end}
		a.g.mu.Unlock()
		if len(out.Data) > 0 || !m.Wait {
			return out, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return &agentpb.ServiceLogResponse{Offset: m.Offset, End: m.Offset}, nil
}

// Changes implements agentpb.AgentService: all files but those in memory are new.
func (a agent) Changes(_ context.Context, m *agentpb.ChangesRequest) (*agentpb.DiskChanges, error) {
	files, out := a.g.Files(), &agentpb.DiskChanges{}
	for _, name := range slices.Sorted(keys(files)) {
		if f := files[name]; !f.Mode.IsDir() && "/"+name > string(m.After) {
			out.Changes = append(out.Changes, &agentpb.DiskChange{Op: 1, Path: []byte("/" + name), Mode: 0o100000 | uint32(f.Mode.Perm()), Size: int64(len(f.Data))})
		}
		if len(out.Changes) == 512 {
			out.Until = out.Changes[511].Path
			break
		}
	}
	return out, nil
}
