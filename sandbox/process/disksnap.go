package process

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// diskSnapshot takes a snapshot of the disk.
func (p *process) diskSnapshot(ctx context.Context, note string, over spec.HookPolicy) (res spec.SleepResult, err error) {
	if err := p.whole(ctx); err != nil {
		return res, err
	}
	end, err := p.begin()
	if err != nil {
		return res, err
	}
	defer end()
	defer runsOn("taking a snapshot of the disk of "+p.r.Spec.Name, &err)
	defer p.shortenDisk()
	begin := time.Now()
	policy := p.r.Spec.Hooks.Effective(over)
	limits := instance.HookLimits(p.r.Spec.Hooks, policy)
	limits.Skip = policy == spec.HooksSkip
	id := spec.NewID()
	labels, err := p.store.Labels(p.r, state.KindDisk)
	if err != nil {
		return res, err
	}
	newTop, err := p.newLayer()
	if err != nil {
		return res, err
	}
	settle, err := p.beginCapture(ctx, true)
	if err != nil {
		return res, err
	}
	defer func() {
		if err != nil {
			settle("")
		} else {
			settle(p.store.SnapshotDir(id))
		}
	}()
	st, frozen, failures, err := p.in.SealFrozen(ctx, newTop, limits, p.sealed)
	res = spec.SleepResult{Name: p.r.Spec.Name, Snapshot: id, Hooks: failures, Stages: map[string]float64{"frozen": control.Milliseconds(frozen)}}
	if err != nil {
		p.tellRefusal(ctx, err)
		return res, err
	}
	if err := p.in.Disk().Flush(); err != nil {
		return res, fmt.Errorf("flushing the disk: %w", err)
	}
	facts, err := json.Marshal(p.in.Machine().Facts())
	if err != nil {
		return res, fmt.Errorf("describing the host: %w", err)
	}
	if note != "" {
		labels[state.LabelNote] = note
	}
	if err := p.in.Parts().LabelVolumes(labels); err != nil {
		return res, err
	}
	info, err := snapshot.Create(ctx, p.store.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: p.r.Spec.Name, VCPUs: p.r.Spec.VCPUs, Image: p.r.Boot.ImageID, Kernel: p.r.Boot.KernelID,
		Disks:  []snapshot.Disk{{Name: instance.DeviceDisk, Size: uint64(p.in.Disk().Size()), Layers: p.store.Relative(st).Layers}},
		Host:   map[string]string{instance.FactsKey: string(facts)},
		Labels: labels, Memory: state.NoMemory{},
	})
	if err != nil {
		return res, err
	}
	res.BytesStored = info.SizeBytes
	res.Stages["snapshot"] = control.Milliseconds(time.Since(begin))
	p.tell(ctx, events.Snapshotted, events.Details{Snapshot: id, Bytes: res.BytesStored, Milliseconds: res.Stages["frozen"]})
	p.tellHooks(ctx, res.Hooks)
	return res, nil
}
