package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
)

// SnapshotOptions say how snapshot_pause and snapshot_bytes are measured.
type SnapshotOptions struct {
	// N is the number of snapshots for each row, after Warmup that do not count.
	N, Warmup int
	// MemoryMiB are the sizes of guest RAM, and DirtyMiB how much the guest changes
	// before each snapshot. What does not fit into half of RAM is left out.
	MemoryMiB, DirtyMiB []int
}

// dirtier is a program in the guest that changes a byte in each of as many pages as it is
// told. A quarter of each page is random, so that a page compresses to about that.
const dirtier = `
import os, socket, sys
PAGE = 4096
memory = bytearray()
server = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
server.bind((socket.VMADDR_CID_ANY, 5001))
server.listen(1)
while True:
    c, _ = server.accept()
    with c:
        pages = int(c.recv(32))
        while len(memory) < pages * PAGE:
            memory += os.urandom(PAGE // 4) + bytes(PAGE * 3 // 4)
        if pages:
            memory[: pages * PAGE : PAGE] = os.urandom(1) * pages
        c.send(b'done\n')
`

const dirtierPort = 5001

// Snapshots measures named snapshots of a running guest that has just changed some of its
// memory: how long it stands still (snapshot_pause), and how much is written
// (snapshot_bytes, in MiB). Each is a delta of the one before. Amounts are interleaved.
func Snapshots(ctx context.Context, e Env, o SnapshotOptions) (rows []Row, err error) {
	for _, mib := range o.MemoryMiB {
		some, err := e.snapshots(ctx, o, mib)
		if err != nil {
			return nil, err
		}
		rows = append(rows, some...)
	}
	return rows, nil
}

func (e Env) snapshots(ctx context.Context, o SnapshotOptions, mib int) (rows []Row, err error) {
	name := fmt.Sprintf("bench-%d-%d", os.Getpid(), mib)
	e.say("booting a guest of %d MiB", mib)
	if _, err := e.Store.Run(ctx, e.Launcher, sandbox.Spec{Name: name, Image: e.Image, Kernel: e.Kernel, MemoryMiB: mib}); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Store.Remove(context.WithoutCancel(ctx), name, true)) }()
	if err := e.startProgram(ctx, name, "dirtier.py", dirtier); err != nil {
		return nil, err
	}
	var amounts []int
	for _, d := range o.DirtyMiB {
		if d <= mib/2 {
			amounts = append(amounts, d)
		}
	}
	pause, stored := map[int]*series{}, map[int]*series{}
	for _, d := range amounts {
		pause[d], stored[d] = newSeries(), newSeries()
		e.say("filling %d MiB of the guest's memory", d)
		if err := e.dirty(ctx, name, d); err != nil {
			return nil, err
		}
	}
	// The base of the next must be there.
	last := ""
	defer func() {
		if last != "" {
			err = errors.Join(err, e.Store.RemoveSnapshot(context.WithoutCancel(ctx), last))
		}
	}()
	for i := -1; i < o.Warmup+o.N; i++ {
		e.say("snapshot: round %d of %d", i+1, o.Warmup+o.N)
		for _, d := range amounts {
			if err := e.dirty(ctx, name, d); err != nil {
				return nil, err
			}
			res, err := e.Store.Snapshot(ctx, name, "")
			if err != nil {
				return nil, err
			}
			before := last
			last = res.Snapshot
			if before != "" {
				if err := e.Store.RemoveSnapshot(ctx, before); err != nil {
					return nil, err
				}
			}
			// The first of all is no delta.
			if i < o.Warmup {
				continue
			}
			p, b := pause[d], stored[d]
			err = errors.Join(p.total.RecordValue(int64(res.Stages["pause"]*perMs)), b.total.RecordValue(max(1, res.BytesStored)),
				into(p.stages, "save", int64(res.Stages["save"]*perMs)), into(b.faults, "pages_changed", int64(res.PagesChanged)))
			if err != nil {
				return nil, err
			}
		}
	}
	for _, d := range amounts {
		params := map[string]any{"memory_mib": mib, "dirty_mib": d, "vcpus": sandbox.DefaultVCPUs}
		b := stored[d].row("snapshot_bytes", params)
		b.Unit, b.P50, b.P90, b.P99 = "MiB", b.P50*perMs/mibBytes, b.P90*perMs/mibBytes, b.P99*perMs/mibBytes
		rows = append(rows, pause[d].row("snapshot_pause", params), b)
	}
	return rows, nil
}

const mibBytes = 1 << 20

// dirty lets the guest change memory, and returns when that is done.
func (e Env) dirty(ctx context.Context, name string, mib int) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	const pagesPerMiB = 256
	for {
		c, err := guest.UnixDialer(e.Store.VsockPath(name))(ctx, dirtierPort)
		if err != nil {
			// It may not be listening yet.
			select {
			case <-ctx.Done():
				return fmt.Errorf("reaching the program in the guest: %w", err)
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		return errors.Join(command(ctx, c, fmt.Sprint(mib*pagesPerMiB)), c.Close())
	}
}

func command(ctx context.Context, c net.Conn, what string) error {
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprint(c, what); err != nil {
		return fmt.Errorf("telling the program in the guest: %w", err)
	}
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "done\n" {
		return fmt.Errorf("the program in the guest says %q: %w", line, errors.Join(err))
	}
	return nil
}

// DepthOptions say how restore_depth is measured.
type DepthOptions struct {
	// N is the number of restores of each depth, after Warmup that do not count.
	N, Warmup int
	// Depths are the lengths of the chains to compare: 0 is a full snapshot.
	Depths    []int
	MemoryMiB int
}

// RestoreDepth measures the time from the call that restores a VM to an agent that
// answers, clock and random numbers renewed, for the snapshots of one chain of deltas.
// The guest does what an idle one does between two of them. Depths are interleaved.
func RestoreDepth(ctx context.Context, e Env, o DepthOptions) (rows []Row, err error) {
	name := fmt.Sprintf("bench-%d", os.Getpid())
	e.say("booting a guest of %d MiB", o.MemoryMiB)
	if _, err := e.Store.Run(ctx, e.Launcher, sandbox.Spec{Name: name, Image: e.Image, Kernel: e.Kernel, MemoryMiB: o.MemoryMiB}); err != nil {
		return nil, err
	}
	keep := map[int]string{}
	last := ""
	defer func() {
		ctx := context.WithoutCancel(ctx)
		err = errors.Join(err, e.Store.Remove(ctx, name, true))
		for _, id := range keep {
			err = errors.Join(err, e.Store.RemoveSnapshot(ctx, id))
		}
	}()
	deepest := 0
	for _, d := range o.Depths {
		deepest = max(deepest, d)
		keep[d] = ""
	}
	for d := 0; d <= deepest; d++ {
		if d%50 == 0 {
			e.say("restore_depth: snapshot %d of %d", d, deepest)
		}
		res, err := e.Store.Snapshot(ctx, name, "")
		if err != nil {
			return nil, err
		}
		_, kept := keep[d]
		if kept {
			keep[d] = res.Snapshot
		}
		if last != "" {
			if err := e.Store.RemoveSnapshot(ctx, last); err != nil {
				return nil, err
			}
		}
		last = res.Snapshot
		if kept {
			last = ""
		}
	}
	if err := e.Store.Stop(ctx, name, true); err != nil {
		return nil, err
	}
	all := map[int]*series{}
	vms := map[int]*sleeper{}
	r, err := e.Store.Get(name)
	if err != nil {
		return nil, err
	}
	for _, d := range o.Depths {
		info, err := e.Store.InspectSnapshot(keep[d])
		if err != nil {
			return nil, err
		}
		if info.Depth != d {
			return nil, fmt.Errorf("snapshot %s is at depth %d, not %d", keep[d], info.Depth, d)
		}
		st, err := e.Store.SnapshotDisk(keep[d])
		if err != nil {
			return nil, err
		}
		all[d] = newSeries()
		vms[d] = &sleeper{record: r, parts: e.Store.Parts(r, st), snap: e.Store.SnapshotDir(keep[d]), series: all[d]}
	}
	dir, err := os.MkdirTemp("", "drowse-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a directory for the runs: %w", err)
	}
	defer os.RemoveAll(dir)
	for i := range o.Warmup + o.N {
		e.say("restore_depth: run %d of %d", i, o.Warmup+o.N)
		for _, d := range o.Depths {
			if err := vms[d].restore(ctx, dir, i >= o.Warmup, sandbox.RestoreOptions{}); err != nil {
				return nil, err
			}
		}
	}
	for _, d := range o.Depths {
		rows = append(rows, all[d].row("restore_depth", map[string]any{"depth": d, "memory_mib": o.MemoryMiB, "cache": "warm", "pool": false}))
	}
	return rows, nil
}
