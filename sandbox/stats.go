package sandbox

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/procstat"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// statsTime is how long a guest may take to answer for Stats.
const statsTime = 30 * time.Second

// Stats measures a running VM once. It does not wake a VM that sleeps, but returns ErrNotRunning. A guest that
// does not answer within 30 s, or whose agent has no Stats, is not an error.
func (b *Sandbox) Stats(ctx context.Context) (Stats, error) {
	s, name := b.host, b.name
	info, err := b.Info(ctx)
	if err != nil {
		return Stats{}, err
	}
	out := Stats{Name: name, Time: time.Now().UTC()}
	out.Host, err = processStats(info.PID)
	if procstat.Ended(err) {
		return Stats{}, fmt.Errorf("%w: %s: its process has just ended", ErrNotRunning, name)
	}
	if err != nil {
		return Stats{}, fmt.Errorf("measuring the process of VM %s: %w", name, err)
	}
	out.Host.Faults, out.Host.MiBTouched, out.Host.Hung = info.Faults, info.MiBTouched, info.Hung
	out.Host.Confined = info.Confined
	out.Host.CPUThrottledMs, out.Host.DiskRead, out.Host.DiskWritten = info.Cgroup.ThrottledMs, info.Cgroup.Read, info.Cgroup.Written
	if r, err := s.State.Load(name); err == nil {
		// A figure that is missing does not keep the others back.
		all, _ := limits.Read(s.State.Dir())
		m, _ := s.State.Metadata(name)
		used, _ := s.State.DiskUse(ctx, r)
		out.Host.DiskQuota, out.Host.DiskUsed = all.DiskQuota(r.Spec, m.EffectiveClass()), used.Bytes
	}
	if info.Hung {
		out.Problem = "the guest hangs: " + info.Problem
		return out, nil
	}
	g, err := s.guestStats(ctx, name)
	if ctx.Err() != nil {
		return Stats{}, ctx.Err()
	}
	if err != nil {
		out.Problem = err.Error()
		return out, nil
	}
	out.Guest = &g
	return out, nil
}

func (s *Host) guestStats(ctx context.Context, name string) (guest.Stats, error) {
	ctx, cancel := context.WithTimeout(ctx, statsTime)
	defer cancel()
	c, err := guest.Dial(ctx, guest.UnixDialer(s.State.VsockPath(name)))
	if err != nil {
		return guest.Stats{}, err
	}
	defer c.Close()
	return c.Stats(ctx)
}

// processStats adds up proc_pid_stat(5) and proc_pid_smaps(5) of a VM's processes.
func processStats(pid int) (spec.HostStats, error) {
	h := spec.HostStats{PID: pid}
	u, err := procstat.Of(pid)
	if err != nil {
		return h, err
	}
	h.CPUUserMs, h.CPUSystemMs = control.Milliseconds(u.User), control.Milliseconds(u.System)
	h.AwakeMs = control.Milliseconds(u.Age)
	for _, p := range u.PIDs {
		err := addMemory(&h, fmt.Sprintf("/proc/%d/smaps_rollup", p))
		if err != nil && (p == pid || !procstat.Ended(err)) {
			return h, err
		}
	}
	return h, nil
}

// addMemory sums up the lines "Private_Dirty:  12 kB".
func addMemory(h *spec.HostStats, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ":")
		n, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(value, "kB")), 10, 53)
		if err != nil {
			continue // the first line
		}
		switch n <<= 10; key {
		case "Private_Clean", "Private_Dirty", "Private_Hugetlb":
			h.MemoryPrivate += n
		case "Shared_Clean", "Shared_Dirty", "Shared_Hugetlb":
			h.MemoryShared += n
		case "Swap":
			h.MemorySwapped += n
		}
	}
	return lines.Err()
}
