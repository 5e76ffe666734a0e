package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/procstat"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// user is a program in the guest that has memory in use. A quarter of each page is random, so that a page
// compresses to about that. If told so, it keeps writing to the memory.
const user = `
import random, signal, sys
PAGE = 4096
pages = int(sys.argv[1]) * 256
memory = bytearray(pages * PAGE)
for at in range(0, pages * PAGE, PAGE):
    memory[at:at + PAGE // 4] = random.randbytes(PAGE // 4)
open('` + busyFile + `', 'w').close()
if pages == 0 or sys.argv[2] != 'busy':
    signal.pause()
while True:
    memory[random.randrange(pages) * PAGE] = random.randrange(256)
`

// Forks measures forks of a running guest: how long the guest stands still (fork_pause), and the time from the
// call until the agents of all children have answered (fork_ready). It removes the children after each fork.
func Forks(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	for _, mib := range o.MemoryMiB {
		for _, used := range o.UsedMiB {
			if used > mib/2 {
				continue
			}
			some, err := e.forks(ctx, o, mib, used)
			if err != nil {
				return nil, err
			}
			rows = append(rows, some...)
		}
	}
	return rows, nil
}

func (e Env) forks(ctx context.Context, o Options, mib, used int) (rows []Row, err error) {
	name := vmName(mib)
	c := counting()
	defer c.close()
	if err := e.boot(ctx, name, mib); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	mode := "idle"
	if o.Busy {
		mode = "busy"
	}
	e.say("filling %d MiB of the guest's memory", used)
	if err := e.startLive(ctx, name, "user.py", user, strconv.Itoa(used), mode); err != nil {
		return nil, err
	}
	pause, ready := newSeries(inMs), newSeries(inMs)
	for i := range o.Warmup + o.N {
		e.say("fork: %d MiB in use, run %d of %d", used, i, o.Warmup+o.N)
		counts := c.begin(i >= o.Warmup)
		res, err := e.Store.With(e.Launcher).Sandbox(name).Fork(ctx, sandbox.ForkOptions{Count: o.Count, Name: fmt.Sprintf("%s-f%d", name, i)})
		if err != nil {
			return nil, err
		}
		ready.counted(c, c.since(counts), true)
		if err := e.removeChildren(ctx, res); err != nil {
			return nil, err
		}
		if i < o.Warmup {
			continue
		}
		pause.add(ns(res.Stages["pause"]))
		ready.add(ns(res.Stages["ready"]))
		pause.touched(int64(res.Pages))
		ready.touched(int64(res.Pages))
		ready.stagesOf(res.Stages, "ahead", "pause", "fill", "save", "durable")
		if len(res.Children) == 1 {
			ready.stage("child", ns(res.Children[0].Stages["resume_ready"]))
		}
	}
	params := map[string]any{"memory_mib": mib, paramUsed: used, "count": o.Count, "busy": o.Busy, "vcpus": spec.DefaultVCPUs}
	return []Row{pause.row("fork_pause", params), ready.row("fork_ready", params)}, nil
}

func (e Env) removeChildren(ctx context.Context, res control.ForkResult) error {
	var errs []error
	for _, c := range res.Children {
		errs = append(errs, e.remove(ctx, c.Name))
	}
	return errors.Join(errs...)
}

// ForkDensity measures the memory of the forks of a guest with a live interpreter. fork_density is the private
// memory of a child's process in MiB. Its stages are the guest's part of that (guest), the process's proportional
// share of shared memory (pss), the same for all processes together (pss_total), and the memory that the children
// share (image). The children are idle: their agents have just answered.
func ForkDensity(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	name := vmName()
	if err := e.boot(ctx, name, o.mib()); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	if err := e.startLive(ctx, name, "quiet.py", quietProgram); err != nil {
		return nil, err
	}
	e.say("making %d children", o.Count)
	res, err := e.Store.With(e.Launcher).Sandbox(name).Fork(ctx, sandbox.ForkOptions{Count: o.Count, Name: name + "-f"})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.removeChildren(ctx, res)) }()
	s := newSeries(inMiB)
	total := int64(0)
	for _, child := range res.Children {
		r, err := e.Store.State.Get(child.Name)
		if err != nil {
			return nil, err
		}
		m, err := memoryOf(r.PID)
		if err != nil {
			return nil, err
		}
		total += m.pss
		s.add(max(m.private, 1))
		s.stage("guest", m.guest)
		s.stage("pss", m.pss)
	}
	row := s.row("fork_density", map[string]any{
		"forks": o.Count, "memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs,
		"pause_ms": res.Stages["pause"], "ready_ms": res.Stages["ready"],
	})
	row.Stages["pss_total"] = float64(total) / mibBytes
	row.Stages["image"] = float64(res.Pages) / 256
	return []Row{row}, nil
}

// memory is the memory of processes, in bytes.
type memory struct {
	private, pss int64
	// guest is the part of private between the first and the last mapping of the image. That is the guest's RAM,
	// except what lies outside them.
	guest int64
}

// memoryOf adds up the memory of a process and its children.
func memoryOf(pid int) (sum memory, err error) {
	pids, err := procstat.PIDs(pid)
	if err != nil {
		return sum, fmt.Errorf("asking for the memory of a process: %w", err)
	}
	for _, p := range pids {
		m, err := memoryOfOne(p)
		if p != pid && procstat.Ended(err) {
			continue
		}
		if err != nil {
			return sum, err
		}
		sum.private, sum.pss, sum.guest = sum.private+m.private, sum.pss+m.pss, sum.guest+m.guest
	}
	return sum, nil
}

// memoryOfOne reads smaps_rollup and smaps of a process (proc_pid_smaps(5)).
func memoryOfOne(pid int) (m memory, err error) {
	all, err := smaps(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return m, err
	}
	for _, v := range all {
		m.private, m.pss = m.private+v.private, m.pss+v.pss
	}
	if all, err = smaps(fmt.Sprintf("/proc/%d/smaps", pid)); err != nil {
		return m, err
	}
	inImage := int64(0)
	pending := int64(0) // between mappings of the image
	for _, v := range all {
		if v.image {
			inImage, pending = inImage+pending+v.private, 0
			m.guest = inImage
		} else if inImage > 0 {
			pending += v.private
		}
	}
	return m, nil
}

// mapping is a mapping of a process, with its private part.
type mapping struct {
	image        bool
	private, pss int64
}

// smaps reads a smaps or smaps_rollup file.
func smaps(path string) (out []mapping, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("asking for the memory of a process: %w", err)
	}
	defer file.Close()
	in := bufio.NewScanner(file)
	for in.Scan() {
		words := strings.Fields(in.Text())
		if len(words) == 0 {
			continue
		}
		field, isField := strings.CutSuffix(words[0], ":")
		if !isField {
			out = append(out, mapping{image: strings.Contains(in.Text(), "memfd:drowse-fork")})
			continue
		}
		if len(words) < 2 || len(out) == 0 {
			continue
		}
		n, err := strconv.ParseInt(words[1], 10, 64)
		if err != nil {
			continue // not an amount
		}
		switch v := &out[len(out)-1]; field {
		case "Private_Clean", "Private_Dirty":
			v.private += n << 10
		case "Pss":
			v.pss += n << 10
		}
	}
	if err := in.Err(); err != nil {
		return nil, fmt.Errorf("asking for the memory of a process: %w", err)
	}
	return out, nil
}
