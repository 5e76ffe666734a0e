package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
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
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return Stats{}, fmt.Errorf("%w: %s: its process has just ended", ErrNotRunning, name)
	}
	if err != nil {
		return Stats{}, fmt.Errorf("measuring the process of VM %s: %w", name, err)
	}
	out.Host.Faults, out.Host.MiBTouched, out.Host.Hung = info.Faults, info.MiBTouched, info.Hung
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

// processStats reads proc_pid_stat(5) and the sum of proc_pid_smaps(5).
func processStats(pid int) (spec.HostStats, error) {
	h := spec.HostStats{PID: pid}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return h, err
	}
	// The fields after the name, which is in parentheses and may contain parentheses.
	text := string(stat)
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const state, user, system, start = 3, 14, 15, 22 // numbers of fields
	if len(f) <= start-state {
		return h, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(f))
	}
	const tickMs = 10 // of USER_HZ
	ticks := func(field int) float64 {
		n, _ := strconv.ParseUint(f[field-state], 10, 64)
		return float64(n) * tickMs
	}
	h.CPUUserMs, h.CPUSystemMs = ticks(user), ticks(system)
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return h, err
	}
	h.AwakeMs = max(control.Milliseconds(time.Duration(up.Nano()))-ticks(start), 0)
	err = addMemory(&h, fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	return h, err
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
