package agent

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
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

	maxHooks     = 64
	hookTimeout  = 10 * time.Second
	maxHookError = 256 // bytes
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

// Stop ends all processes and stops the machine; as PID 1 it ends those that
// the agent did not start as well. Grace, 2 s when it is 0, is how long
// processes have to comply with SIGTERM. Stop returns only when the machine
// cannot be stopped, or when another Stop is under way.
func (s *Server) Stop(reboot bool, grace time.Duration) {
	s.stopping.Do(func() {
		if grace == 0 {
			grace = defaultGrace
		}
		if s.cfg.Init {
			s.procs.reaper.endAll(grace)
		}
		if err := s.cfg.Machine.Power(reboot); err != nil {
			os.Stderr.WriteString("drowse-agent: cannot stop the machine: " + err.Error() + "\n")
		}
	})
}

// runHooks runs the executables of the hook directory one after the other, in
// the order of their names, and returns a line for each that failed.
func (s *Server) runHooks(ctx context.Context) []string {
	entries, err := os.ReadDir(s.cfg.HookDir)
	if err != nil {
		return nil // no hooks
	}
	var failed []string
	for i, e := range entries {
		if i == maxHooks {
			failed = append(failed, "more than 64 hooks: the rest was not run")
			break
		}
		if why := s.runHook(ctx, filepath.Join(s.cfg.HookDir, e.Name())); why != "" {
			failed = append(failed, e.Name()+": "+why)
		}
	}
	return failed
}

// runHook returns why the hook failed, or "". A file that is not executable is
// not a hook.
func (s *Server) runHook(ctx context.Context, path string) string {
	fi, err := os.Stat(path)
	if err != nil || !fi.Mode().IsRegular() || fi.Mode()&0o111 == 0 {
		return ""
	}
	p, err := s.procs.start(&agentpb.ExecStart{Argv: []string{path}, NoStdin: true, TimeoutNanos: int64(hookTimeout)})
	if err != nil {
		return cut(err.Error())
	}
	p.out.detach(kept)
	select {
	case <-p.exited:
	case <-ctx.Done():
		_ = s.procs.reaper.signal(p.pid, syscall.SIGKILL)
		<-p.exited
	}
	if p.exit.Code == 0 {
		return ""
	}
	var buf [maxHookError]byte
	_, reader := p.out.attach(0)
	n, _, _, _ := p.out.read(reader, buf[:])
	return cut("exit status " + strconv.Itoa(int(p.exit.Code)) + ": " + string(buf[:n]))
}

func cut(s string) string {
	if len(s) > maxHookError {
		return s[:maxHookError]
	}
	return s
}
