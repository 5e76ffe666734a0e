package proc

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Self is the agent's own program (proc(5)). It works also where no path reaches the program's file, and for a
// process with another user's rights.
const Self = "/proc/self/exe"

// login sets in m what it implies: the account's shell, or a program of the agent's. It returns the account with
// its settings from passwd(5) in dir, and the file to execute.
func login(dir string, m *agentpb.ExecStart, a account) (account, string, error) {
	if m.User == "" {
		// lookupAccount took root from no file; passwd may have other settings for it.
		switch r, err := lookupAccount(dir, root.name); {
		case err == nil:
			r.uid, r.gid, r.groups = a.uid, a.gid, a.groups
			a = r
		case !errors.Is(err, os.ErrNotExist):
			return a, "", status.Errorf(codes.InvalidArgument, "%v", err)
		}
	}
	if m.Cwd == "" && filepath.IsAbs(a.home) && len(a.home) <= agentpb.MaxPath && strings.IndexByte(a.home, 0) < 0 {
		var st unix.Stat_t
		if unix.Stat(a.home, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			m.Cwd = a.home
		}
	}
	switch m.Subsystem {
	case "":
	case agentpb.SubsystemSFTP, agentpb.SubsystemLayer:
		m.Argv = []string{"drowse-agent", m.Subsystem}
		return a, Self, nil
	default:
		return a, "", status.Errorf(codes.InvalidArgument, "no subsystem %q", m.Subsystem)
	}
	if a.shell == "" {
		a.shell = root.shell // passwd(5)
	}
	base := filepath.Base(a.shell)
	if len(m.Argv) == 0 {
		m.Argv = []string{"-" + base}
	} else {
		m.Argv = []string{base, "-c", m.Argv[0]}
	}
	return a, a.shell, nil
}
