package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/network"
)

// withoutWall says what is weaker without a wall that is not required.
var withoutWall = map[string]string{
	"own user id":    "a guest that breaks out has the user id of its owner, in a user namespace",
	"Landlock":       "a second wall less against opening files; sandboxes with shares do not start",
	"cgroup: memory": "a guest that breaks out can use up the host's memory",
	"cgroup: pids":   "a guest that breaks out can use up the host's threads",
	"cgroup: cpu":    "processors cannot be limited or shared out by weight",
	"cgroup: io":     "disk I/O cannot be limited or shared out by weight",
	"cgroup: blkio":  "disk I/O cannot be limited or shared out by weight",
}

// seccompEnv is control.SeccompEnv.
const seccompEnv = "DROWSE_SECCOMP"

// jail checks what confines the processes of VMs.
func jail(g *group, walls confine.Support) {
	if how := os.Getenv(seccompEnv); how != "" {
		g.add("seccomp_filter", Degraded, seccompEnv+"="+how, "forbidden system calls are logged and done, so sandboxes are not confined, "+
			"and `drowse serve --require-jail` refuses to run: unset it")
	} else {
		g.add("seccomp_filter", OK, "kills the process", "")
	}
	names := strings.NewReplacer(": ", "_", " ", "_")
	for _, w := range walls {
		weaker := withoutWall[w.Name]
		if w.Required {
			weaker = "sandboxes run unconfined, or not at all with `drowse serve --require-jail`: a guest that breaks out " +
				"has all rights of its sandbox's process"
		}
		g.add(strings.ToLower(names.Replace(w.Name)), unless(!w.Present, Missing), oneLine(w.Detail), weaker)
	}
}

// networkProcess confines one, since it has a list of system calls of its own.
func networkProcess(ctx context.Context, g *group, vmm string) {
	const name = "network_process"
	err := network.Probe(ctx, vmm)
	switch {
	case err == nil:
		g.add(name, OK, "was confined, and has answered", "")
	case errors.Is(err, fs.ErrNotExist):
		g.add(name, Unknown, oneLine(err.Error()), "sandboxes do not start")
	default:
		g.add(name, Missing, oneLine(err.Error()), "without a required wall, the sandbox's own process reads DNS, names in TLS and "+
			"requests, or not at all with `drowse serve --require-jail`; else names are not found, and connections refused")
	}
}
