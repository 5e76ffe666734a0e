package process

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Each snapshot of a running VM leaves a layer of its disk, and each restore opens all layers. When there are more than
// maxStack, squash joins squashSpan neighbours into one for the VM's record; snapshots keep the old ones. It picks the
// neighbours with the least data, so that each byte is copied about log(number of snapshots) times, and not each time.
var (
	maxStack   = 32
	squashSpan = 16
)

// shortenDisk keeps the stack of the VM's disk short, in the background. One run at a time suffices: the next
// snapshot calls it again.
func (p *process) shortenDisk() {
	if !p.shortening.CompareAndSwap(false, true) {
		return
	}
	p.background.Go(func() {
		defer p.shortening.Store(false)
		for {
			again, err := p.squash(p.lasting)
			if err != nil && p.lasting.Err() == nil {
				p.log.Warn("the layers of the disk could not be joined: restoring the VM takes longer", "error", err)
			}
			if err != nil || !again {
				return
			}
		}
	})
}

// squash joins several layers into one, if there are too many. It reports whether there may still be too many.
func (p *process) squash(ctx context.Context) (again bool, err error) {
	if err := p.whole(ctx); err != nil {
		return false, err
	}
	layers, path, err := p.chooseLayers()
	if err != nil || len(layers) == 0 {
		return false, err
	}
	if err := disk.Squash(ctx, layers, path); err != nil {
		return false, err
	}
	p.op.Lock()
	defer p.op.Unlock()
	if p.alive() != nil {
		// No record names the file yet.
		return false, os.Remove(path)
	}
	if err := p.in.Disk().Substitute(layers, path); err != nil {
		return false, errors.Join(err, os.Remove(path))
	}
	p.settleSquash()
	st := p.in.Disk().Stack()
	p.r.Disk = p.store.Relative(st)
	if err := p.store.Save(p.r); err != nil {
		return false, fmt.Errorf("noting the new layers: %w", err)
	}
	p.log.Info("joined layers of the disk", "joined", len(layers), "left", len(st.Layers))
	return true, nil
}

// chooseLayers returns the layers to join, and the path of the joined one.
func (p *process) chooseLayers() (layers []string, path string, err error) {
	p.op.Lock()
	defer p.op.Unlock()
	if p.alive() != nil {
		return nil, "", nil
	}
	all := p.in.Disk().Stack().Layers
	if p.quota.joining && !p.quota.joined {
		p.quota.joined = true
		use, err := p.store.DiskUse(p.lasting, p.r)
		if err == nil {
			layers, _, err = p.looseRun(use.Loose)
		}
		if err != nil || len(layers) == 0 {
			return nil, "", err
		}
		if path, err = p.newLayer(); err != nil {
			return nil, "", err
		}
		return layers, path, p.store.Save(p.r)
	}
	if len(all) <= maxStack {
		return nil, "", nil
	}
	// Neither the first, which other VMs share, nor the top.
	some := all[1 : len(all)-1]
	sizes := make([]int64, len(some))
	for i, l := range some {
		sizes[i], _ = state.DiskUsage(l)
	}
	first := state.Lightest(sizes, squashSpan)
	if !p.maySquash(sizes[first : first+squashSpan]) {
		return nil, "", nil
	}
	if path, err = p.newLayer(); err != nil {
		return nil, "", err
	}
	// A name is used once, even if this process ends before its file is whole.
	return some[first : first+squashSpan], path, p.store.Save(p.r)
}

// SetStack is for tests: disks get at most layers layers, and span of them become one.
func SetStack(layers, span int) { maxStack, squashSpan = layers, span }
