package limits

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Sandbox limits what one sandbox may use of the host. A field of 0 is no limit. All but DiskMiB are those of the
// cgroup of the VM's confined process, and need its controllers: see `drowse doctor`.
type Sandbox struct {
	// DiskMiB is the disk quota: what the sandbox may make the host store. See spec.VM.DiskQuotaMiB; the lower of the
	// two holds.
	DiskMiB int `json:"disk_mib,omitempty"`
	// CPUs is how many processors it may use: 0.01 to MaxCPUs. CPUWeight is its share of busy ones: 1 to
	// MaxCPUWeight; without a limit, 100.
	CPUs      float64 `json:"cpus,omitempty"`
	CPUWeight int     `json:"cpu_weight,omitempty"`
	// IOMiBPerSecond and IOPerSecond bound reads, and as much again of writes, of the block device of the state
	// directory. IOWeight is its share of a busy one: 1 to MaxIOWeight; without a limit, 100.
	IOMiBPerSecond int `json:"io_mib_per_second,omitempty"`
	IOPerSecond    int `json:"io_per_second,omitempty"`
	IOWeight       int `json:"io_weight,omitempty"`
}

// Bounds of Sandbox.
const (
	MinCPUs      = 0.01
	MaxCPUs      = 1024
	MaxCPUWeight = 10000
	MaxIOWeight  = 1000
)

func (s Sandbox) validate(whose string) error {
	if !(s.CPUs == 0 || s.CPUs >= MinCPUs && s.CPUs <= MaxCPUs) {
		return fmt.Errorf("%w: %g processors of %s: 0 (no limit), or %g to %d", ErrLimits, s.CPUs, whose, MinCPUs, MaxCPUs)
	}
	for what, n := range map[string]struct{ n, most int }{
		"disk_mib": {s.DiskMiB, MaxOwnerLimit}, "cpu_weight": {s.CPUWeight, MaxCPUWeight},
		"io_mib_per_second": {s.IOMiBPerSecond, MaxOwnerLimit}, "io_per_second": {s.IOPerSecond, MaxOwnerLimit},
		"io_weight": {s.IOWeight, MaxIOWeight},
	} {
		if n.n < 0 || n.n > n.most {
			return fmt.Errorf("%w: %s of %s is %d: 0 (no limit) to %d", ErrLimits, what, whose, n.n, n.most)
		}
	}
	return nil
}

// String returns the limits in one line.
func (s Sandbox) String() string {
	var all []string
	for _, f := range []struct {
		n    float64
		what string
	}{
		{float64(s.DiskMiB), "MiB of disk"}, {s.CPUs, "CPUs"}, {float64(s.CPUWeight), "CPU weight"},
		{float64(s.IOMiBPerSecond), "MiB/s"}, {float64(s.IOPerSecond), "I/O per second"}, {float64(s.IOWeight), "I/O weight"},
	} {
		if f.n > 0 {
			all = append(all, fmt.Sprintf("%g %s", f.n, f.what))
		}
	}
	return cmp.Or(strings.Join(all, ", "), "no limit")
}

// OfClass returns the limits of each sandbox of a class; "" is lifetime.Workspace.
func (l Limits) OfClass(class lifetime.Class) Sandbox {
	if s, named := l.Classes[cmp.Or(class, lifetime.Workspace)]; named {
		return s
	}
	return l.DefaultSandbox
}

// DiskQuota returns the disk quota of a VM of a class in bytes; 0 is none.
func (l Limits) DiskQuota(v spec.VM, class lifetime.Class) int64 {
	mib := l.OfClass(class).DiskMiB
	if mib == 0 || v.DiskQuotaMiB > 0 && v.DiskQuotaMiB < mib {
		mib = v.DiskQuotaMiB
	}
	return int64(mib) << 20
}

// FitDisk gives a new VM of a class in a store a disk that fits into its disk quota, or fails with spec.ErrQuota.
func FitDisk(dir string, v spec.VM, class lifetime.Class) (spec.VM, error) {
	all, err := Read(dir)
	if err != nil {
		return v, err
	}
	quota := int(all.DiskQuota(v, class) >> 20)
	if quota == v.DiskQuotaMiB {
		return v, nil // its spec has it, and will be checked
	}
	sized := v
	sized.MemoryMiB = cmp.Or(v.MemoryMiB, spec.DefaultMemoryMiB)
	most := sized.MaxDisk(quota)
	if v.DiskMiB > most || most < spec.MinDiskMiB {
		return v, fmt.Errorf("%w: each sandbox of its class may make the host store %d MiB: with %d MiB of memory its disk may have %d, and it has %d at least: ask for less, or raise the limit with Limits.Write",
			spec.ErrQuota, quota, sized.MemoryMiB, max(most, 0), max(v.DiskMiB, spec.MinDiskMiB))
	}
	v.DiskMiB = cmp.Or(v.DiskMiB, min(most, spec.DefaultDiskMiB))
	return v, nil
}
