package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// dirtier is a program in the guest that changes a byte in each of a given number of pages. A quarter of each page
// is random, so that a page compresses to about that.
const dirtier = `
import mmap, os
PAGE, MIB = 4096, 1 << 20
BLOCK = os.urandom(65536)
memory = []
def more():
    # Private and populated: with a guest's kernel that is interpreted, a shared page that
    # is made by a fault costs several times as much.
    part = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    for at in range(0, MIB, PAGE):
        # Within 64 KiB, which are compressed together, no two are alike.
        r = (len(memory) + at // PAGE) * 1024 % (len(BLOCK) - 1024)
        part[at : at + 1024] = BLOCK[r : r + 1024]
    memory.append(part)
def answer(mib):
    while len(memory) < int(mib):
        more()
    for part in memory[:int(mib)]:
        part[0:MIB:PAGE] = os.urandom(1) * (MIB // PAGE)
    return 'done'
` + answering

// Snapshots measures named snapshots of a running guest that has just changed some of its memory: how long the
// guest stands still (snapshot_pause), and how much is written (snapshot_bytes, in MiB). Each is a delta of the
// one before. Amounts are interleaved.
func Snapshots(ctx context.Context, e Env, o Options) ([]Row, error) {
	return ofSizes(o.MemoryMiB, func(mib int) (rows []Row, err error) {
		line := chain{store: e.Store}
		defer func() { err = errors.Join(err, line.end(context.WithoutCancel(ctx))) }()
		return e.written(ctx, o, mib, "snapshot_pause", "snapshot_bytes", line.next, func(s *series, res spec.SleepResult) {
			s.add(ns(res.Stages["pause"]))
			s.stagesOf(res.Stages, "save")
		})
	})
}

// stored records how much a snapshot wrote.
func (s *series) stored(res spec.SleepResult) {
	s.add(max(1, res.BytesStored))
	s.fault("pages_changed", int64(res.PagesChanged))
	s.fault("pages_free", int64(res.PagesFree))
}

// dirty makes the guest change memory, and returns when that is done.
func (e Env) dirty(ctx context.Context, name string, mib int) error {
	return e.tell(ctx, name, fmt.Sprint(mib))
}

// tell sends the program in the guest a request, and returns when that is done.
func (e Env) tell(ctx context.Context, name, what string) error {
	answer, err := e.ask(ctx, name, what)
	if err == nil && answer != "done" {
		err = fmt.Errorf("the program in the guest says %q", answer)
	}
	return err
}

// maxAnswer bounds an answer of the program in the guest.
const maxAnswer = 4096

// ask sends the program in the guest a request, and returns its line of answer.
func (e Env) ask(ctx context.Context, name, what string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	for {
		c, err := guest.UnixDialer(e.Store.State.VsockPath(name))(ctx, programPort)
		if err != nil {
			// It may not be listening yet.
			if wait.For(ctx, 100*time.Millisecond) != nil {
				return "", fmt.Errorf("reaching the program in the guest: %w", err)
			}
			continue
		}
		line, err := command(ctx, c, what)
		return line, errors.Join(err, c.Close())
	}
}

func command(ctx context.Context, c net.Conn, what string) (string, error) {
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return "", err
		}
	}
	// The deadline is far away: a cancelled context ends the wait at once.
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	if _, err := fmt.Fprint(c, what); err != nil {
		return "", fmt.Errorf("telling the program in the guest: %w", err)
	}
	line, err := bufio.NewReader(io.LimitReader(c, maxAnswer)).ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("the program in the guest says %q: %w", line, err)
	}
	return strings.TrimSuffix(line, "\n"), nil
}

// installer is a program in the guest that writes files and deletes most of them, like the installation of a
// package. A request says how much to write and how much of it to keep. Nothing compresses within 64 KiB.
const installer = `
import os, shutil
BLOCK = os.urandom(65536)
turn = 0
def write(name, mib):
    with open(name, 'wb') as f:
        for i in range(mib * 16):
            f.write(b'%16d' % (turn << 32 | i) + BLOCK[16:])
def answer(mib, left):
    global turn
    if int(mib):
        turn += 1
        os.makedirs('/root/cache')
        for i in range(int(mib) - int(left)):
            write('/root/cache/%d' % i, 1)
        write('/root/left-%d' % turn, int(left))
        shutil.rmtree('/root/cache')
        os.sync()
    return 'done'
` + answering

// Deltas measures how much of a running guest's memory a snapshot writes, in MiB: if the guest has been idle since
// the last one (work is idle), and if it has written files and deleted most of them (work is install).
func Deltas(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	name := vmName()
	if err := e.started(ctx, name, o.mib(), "installer.py", installer); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	line := chain{store: e.Store}
	defer func() { err = errors.Join(err, line.end(context.WithoutCancel(ctx))) }()
	works := []struct {
		name          string
		written, left int
		settle        time.Duration
	}{
		{"idle", 0, 0, o.Idle},
		{"install", o.WrittenMiB, o.LeftMiB, o.Settle},
	}
	all := []*series{newSeries(inMiB), newSeries(inMiB)}
	for i := range o.N {
		for k, w := range works {
			e.say("delta_bytes: %s, %d of %d", w.name, i+1, o.N)
			// The request to the guest is not part of its idle time.
			if err := e.tell(ctx, name, "0 0"); err != nil {
				return nil, err
			}
			if _, err := line.next(ctx, name); err != nil {
				return nil, err
			}
			if w.written > 0 {
				if err := e.tell(ctx, name, fmt.Sprintf("%d %d", w.written, w.left)); err != nil {
					return nil, err
				}
			}
			if err := wait.For(ctx, w.settle); err != nil {
				return nil, err
			}
			res, err := line.next(ctx, name)
			if err != nil {
				return nil, err
			}
			all[k].stored(res)
		}
	}
	for k, w := range works {
		params := map[string]any{"memory_mib": o.mib(), "work": w.name, "written_mib": w.written, "left_mib": w.left, "seconds": w.settle.Seconds()}
		rows = append(rows, all[k].row("delta_bytes", params))
	}
	return rows, nil
}

// chain takes named snapshots of a VM, each a delta of the last one, and keeps only the last.
type chain struct {
	store *sandbox.Host
	last  string
}

func (c *chain) next(ctx context.Context, vm string) (spec.SleepResult, error) {
	res, err := c.store.Sandbox(vm).Snapshot(ctx, sandbox.SnapshotOptions{})
	if err != nil {
		return res, err
	}
	// A delta's base must exist while the delta is written, and no longer.
	before := c.last
	c.last = res.Snapshot
	if before != "" {
		err = c.store.State.RemoveSnapshot(ctx, before)
	}
	return res, err
}

func (c *chain) end(ctx context.Context) error {
	if c.last == "" {
		return nil
	}
	return c.store.State.RemoveSnapshot(ctx, c.last)
}

// chainOf makes a chain of snapshots of a VM to the given depth, and keeps the last one.
func (e Env) chainOf(ctx context.Context, name string, depth int) (id string, err error) {
	line := chain{store: e.Store}
	// A snapshot without its base is a full one.
	if _, err := line.next(ctx, name); err != nil {
		return "", err
	}
	if err := line.end(ctx); err != nil {
		return "", err
	}
	line.last = ""
	for d := 0; d <= depth; d++ {
		if d%50 == 0 {
			e.say("restore_depth: snapshot %d of %d", d, depth)
		}
		if _, err := line.next(ctx, name); err != nil {
			return "", errors.Join(err, line.end(context.WithoutCancel(ctx)))
		}
	}
	return line.last, nil
}

// RestoreDepth measures the time from the call that restores a VM to an agent that answers, with clock and random
// numbers renewed, for snapshots at the ends of chains of deltas. The guest idles between two snapshots. Each
// depth has a chain of its own, of the same guest. Depths are interleaved.
func RestoreDepth(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	name := vmName()
	if err := e.boot(ctx, name, o.mib()); err != nil {
		return nil, err
	}
	keep := map[int]string{}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		err = errors.Join(err, e.Store.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true}))
		for _, id := range keep {
			err = errors.Join(err, e.Store.State.RemoveSnapshot(ctx, id))
		}
	}()
	e.say("restore_depth: the guest settles for %v", o.Settle)
	if err := wait.For(ctx, o.Settle); err != nil {
		return nil, err
	}
	// The deepest first: it takes minutes, and the compared snapshots should be of the same age. On hosts that
	// cannot hold back the guest's clock over a sleep, a longer sleep leaves the guest more to catch up.
	for _, d := range slices.Backward(slices.Sorted(slices.Values(o.Depths))) {
		if keep[d], err = e.chainOf(ctx, name, d); err != nil {
			delete(keep, d)
			return nil, err
		}
	}
	if err := e.Store.Sandbox(name).Kill(ctx); err != nil {
		return nil, err
	}
	vms := make([]*sleeper, len(o.Depths))
	record, err := e.Store.State.Get(name)
	if err != nil {
		return nil, err
	}
	for i, d := range o.Depths {
		info, err := e.Store.State.InspectSnapshot(keep[d])
		if err != nil {
			return nil, err
		}
		if info.Depth != d {
			return nil, fmt.Errorf("snapshot %s is at depth %d, not %d", keep[d], info.Depth, d)
		}
		st, err := e.Store.State.SnapshotDisk(keep[d])
		if err != nil {
			return nil, err
		}
		vms[i] = &sleeper{record: record, parts: process.Parts(e.Store.State, record, st), snap: e.Store.State.SnapshotDir(keep[d])}
	}
	r := resumes{name: "restore_depth", n: o.N, warmup: o.Warmup}
	if err := r.inTurn(ctx, e, vms, make([][]*beside, len(vms))); err != nil {
		return nil, err
	}
	for i, d := range o.Depths {
		rows = append(rows, vms[i].of(variant{cache: cacheWarm}).row("restore_depth", map[string]any{"depth": d, "memory_mib": o.mib(), "cache": "warm", "pool": false}))
	}
	return rows, nil
}
