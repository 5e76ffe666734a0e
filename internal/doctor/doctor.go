package doctor

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// Options says what to look at.
type Options struct {
	// StateDir is the state directory; it need not exist.
	StateDir string
	// Agent is the path where the guest's agent should be, and VMM that of the program of a VM's process.
	Agent, VMM string
}

// Examine looks the host over. It fails only when ctx ends; whatever cannot be found
// out is in the report as such.
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

// host is where facts are read: what is below root are /proc, /sys and /dev.
type host struct{ root string }

func (h host) path(name string) string { return filepath.Join(h.root, name) }

// maxFact bounds the files of /proc and /sys that are read, in bytes.
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

// architecture is amd64 or nothing runs.
func (h host) architecture(g *group) {
	g.require("architecture", unless(runtime.GOARCH != "amd64", Missing), runtime.GOOS+"/"+runtime.GOARCH, "drowse runs on x86-64 only")
}
