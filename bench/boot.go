package bench

import (
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/vmm"
)

// Boots measures the boot of a VM, from the moment when its process begins to make it until the agent in the guest
// has called. Each run boots a VM of its own from the kernel and the image, with a fresh disk, and removes it.
// Sizes and numbers of CPUs are interleaved. The page cache is as earlier boots left it.
//
// The stages prebuilt, devices, load and entry are the host's until the first KVM_RUN, as far as the machine times
// them. guest is the rest, until the agent's call: the kernel's start, the image's, and the agent's. run is the
// whole call of Host.Create. It begins with the choice of the files to boot and the start of the process, and ends
// when the call returns.
func Boots(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	type shape struct{ mib, vcpus int }
	var shapes []shape
	all := map[shape]*series{}
	for _, mib := range o.MemoryMiB {
		for _, n := range o.VCPUs {
			shapes, all[shape{mib, n}] = append(shapes, shape{mib, n}), newSeries(inMs)
		}
	}
	c := counting()
	defer c.close()
	for i := range o.Warmup + o.N {
		for k, s := range shapes {
			e.say("boot: run %d of %d, %d vCPUs", i, o.Warmup+o.N, s.vcpus)
			name := vmName(i, k)
			counts := c.begin(i >= o.Warmup)
			begin := time.Now()
			report, err := e.bootSpec(ctx, sandbox.Spec{Name: name, MemoryMiB: s.mib, VCPUs: s.vcpus})
			took := time.Since(begin)
			counts = c.since(counts)
			if err != nil {
				return nil, err
			}
			if err := e.remove(ctx, name); err != nil {
				return nil, err
			}
			all[s].counted(c, counts, true)
			if i < o.Warmup {
				continue
			}
			if err := all[s].boot(report, took); err != nil {
				return nil, err
			}
		}
	}
	for _, s := range shapes {
		rows = append(rows, all[s].row("boot", map[string]any{"memory_mib": s.mib, "vcpus": s.vcpus, "cache": cacheWarm}))
	}
	return rows, nil
}

// boot records the boot that the VM's process reports, and the duration of the whole call.
func (s *series) boot(report control.Report, call time.Duration) error {
	total, ok := report.Stages["boot"]
	if !ok || total <= 0 {
		return errors.New("the VM's process does not say how long the boot took")
	}
	s.add(ns(total))
	s.stage("run", int64(call))
	rest := total
	for _, stage := range []vmm.Stage{vmm.StagePrebuilt, vmm.StageDevices, vmm.StageLoad, vmm.StageEntry} {
		took := report.Stages[stage.String()]
		rest -= took
		s.stage(stage.String(), ns(took))
	}
	s.stage("guest", ns(max(0, rest)))
	return nil
}
