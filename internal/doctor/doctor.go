package doctor

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/drowse-vm/drowse/sandbox/jail/confine"
)

// Options says what to examine.
type Options struct {
	// StateDir is the state directory. It need not exist.
	StateDir string
	// Agent is the path where the guest's agent should be, and VMM the path of the program of a VM's process.
	Agent, VMM string
}

// Examine examines the host. It fails only when ctx ends. The report lists what could not be found out as unknown.
func Examine(ctx context.Context, o Options) (Report, error) {
	h := host{root: "/"}
	var r Report
	for _, subject := range []struct {
		name string
		look func(*group)
	}{
		{"kvm", func(g *group) { r.KVM = h.kvm(g) }},
		{"userfaultfd", h.userfaultfd},
		{"memory", h.memory},
		{"system", h.system},
		{"network", h.network},
		{"jail", func(g *group) { jail(g, confine.Probe()); networkProcess(ctx, g, o.VMM) }},
		{"state", func(g *group) { h.state(g, o.StateDir) }},
		{"tools", h.tools},
		{"stores", func(g *group) { stores(g, o) }},
	} {
		if err := ctx.Err(); err != nil {
			return Report{}, fmt.Errorf("examining the host: %w", err)
		}
		g := &group{name: subject.name}
		subject.look(g)
		r.Checks = append(r.Checks, g.checks...)
	}
	r.CanRun = canRun(r.Checks)
	return r, nil
}

// host is where to read facts: /proc, /sys and /dev are below root.
type host struct{ root string }

func (h host) path(name string) string { return filepath.Join(h.root, name) }

// maxFact bounds a file of /proc or /sys, in bytes.
const maxFact = 1 << 20

// read returns the content of a small file, or "" if it cannot be read.
func (h host) read(name string) string {
	f, err := os.Open(h.path(name))
	if err != nil {
		return ""
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, maxFact))
	return string(b)
}

// architecture checks for amd64, without which nothing runs.
func (h host) architecture(g *group) {
	g.require("architecture", unless(runtime.GOARCH != "amd64", Missing), runtime.GOOS+"/"+runtime.GOARCH, "drowse runs on x86-64 only")
}
