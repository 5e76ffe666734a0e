package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// quietProgram is a live interpreter that has loaded something and then waits.
const quietProgram = `
import json, random, signal, socket
table = {str(n): random.random() for n in range(20000)}
open('` + busyFile + `', 'w').close()
signal.pause()
`

// Density measures the cost of idle VMs: clones of one snapshot, each with a live python3 that waits.
// density_asleep is the memory in MiB of processes that hold files of a sleeping VM open. Its stages are the
// number of such processes of all VMs (processes) and the disk space of each VM (disk, MiB). density_awake is the
// private memory in MiB of a woken VM's process. Its stages are the process's proportional share of shared memory
// (pss) and that of all processes together (pss_total). density_cpu is the processor time of the process, guest
// included, in percent of a CPU, with the sum of all (total) as a stage.
func Density(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	before, err := allocated(e.Store.State.Dir())
	if err != nil {
		return nil, err
	}
	names, remove, err := e.flock(ctx, o.Asleep, o.mib(), func(ctx context.Context, name string) error {
		return e.startLive(ctx, name, "quiet.py", quietProgram)
	})
	defer func() { err = errors.Join(err, remove()) }()
	if err != nil {
		return nil, err
	}
	after, err := allocated(e.Store.State.Dir())
	if err != nil {
		return nil, err
	}
	params := map[string]any{"memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs, "vms": o.Asleep}
	asleep := newSeries(inMiB)
	processes := 0
	for _, name := range names {
		pids, err := holders(filepath.Dir(e.Store.State.VsockPath(name)))
		if err != nil {
			return nil, err
		}
		total := int64(0)
		for _, pid := range pids {
			m, err := memoryOfOne(pid)
			if err != nil {
				return nil, err
			}
			processes++
			total += m.pss
		}
		asleep.add(total)
	}
	row := asleep.row("density_asleep", params)
	row.Stages = map[string]float64{"processes": float64(processes), "disk": float64(after-before) / mibBytes / float64(len(names))}
	rows = append(rows, row)
	more, err := e.idle(ctx, names[:o.Awake], o)
	return append(rows, more...), err
}

// idle wakes VMs and measures them while they idle.
func (e Env) idle(ctx context.Context, names []string, o Options) ([]Row, error) {
	e.say("waking %d VMs", len(names))
	if _, err := e.wakeAtOnce(ctx, names, nil); err != nil {
		return nil, err
	}
	e.say("leaving them alone for %v, and counting for %v", o.Settle, o.Idle)
	if err := wait.For(ctx, o.Settle); err != nil {
		return nil, err
	}
	pids := make([]int, len(names))
	used := make([]time.Duration, len(names))
	for i, name := range names {
		r, err := e.Store.State.Get(name)
		if err != nil {
			return nil, err
		}
		pids[i] = r.PID
		if used[i], err = cpuTime(r.PID); err != nil {
			return nil, fmt.Errorf("VM %s, which was awake: %w", name, err)
		}
	}
	start := time.Now()
	if err := wait.For(ctx, o.Idle); err != nil {
		return nil, err
	}
	took := time.Since(start)
	awake, cpu := newSeries(inMiB), newSeries(inPercent)
	var pss int64
	var busy time.Duration
	for i, pid := range pids {
		now, err := cpuTime(pid)
		if err != nil {
			return nil, fmt.Errorf("VM %s, which was awake: %w", names[i], err)
		}
		busy += now - used[i]
		m, err := memoryOf(pid)
		if err != nil {
			return nil, err
		}
		pss += m.pss
		cpu.add(int64((now - used[i]) * thousandths * 100 / took))
		awake.add(m.private)
		awake.stage("pss", m.pss)
	}
	params := map[string]any{"memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs, "vms": len(names), "settle_s": o.Settle.Seconds(), "idle_s": o.Idle.Seconds()}
	memory := awake.row("density_awake", params)
	memory.Stages["pss_total"] = float64(pss) / mibBytes
	load := cpu.row("density_cpu", params)
	load.Stages = map[string]float64{"total": float64(busy) / float64(took) * 100}
	return []Row{memory, load}, nil
}

// allocated returns the disk space of all files of a tree in bytes. A file with several names counts once.
func allocated(dir string) (total int64, err error) {
	type inode struct{ dev, ino uint64 }
	seen := map[inode]bool{}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || seen[inode{st.Dev, st.Ino}] {
			return nil
		}
		seen[inode{st.Dev, st.Ino}] = true
		const block = 512 // of st_blocks, stat(2)
		total += st.Blocks * block
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("measuring what %s takes on disk: %w", dir, err)
	}
	return total, nil
}

// holders returns the processes that have a file below a directory open.
func holders(dir string) (pids []int, err error) {
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		// A process or descriptor that is gone has nothing open.
		to, err := os.Readlink(link)
		if err != nil || to != dir && !strings.HasPrefix(to, dir+"/") {
			continue
		}
		var pid, fd int
		if _, err := fmt.Sscanf(link, "/proc/%d/fd/%d", &pid, &fd); err != nil {
			return nil, fmt.Errorf("looking who has %s open: %w", dir, err)
		}
		if !slices.Contains(pids, pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
