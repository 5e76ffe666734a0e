package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

// A vCPU that has worked for profileEvery since the last look is looked at. leastShare is the part of the whole, 1/100,
// that a place needs for a row.
const (
	profileEvery = time.Millisecond
	leastShare   = 100
)

// profiledCommand does nothing, so that all is overhead.
const profiledCommand = "/bin/true"

// place is where a guest's processor was.
type place struct{ by, name string }

// Values of place.by.
const (
	byAll      = "all"
	byEntry    = "entry"    // the outermost function: a system call, a thread of the kernel, an interrupt; or "program"
	byFunction = "function" // the innermost: of the kernel, or "program"
)

const inProgram = "program"

// GuestProfile says what a guest's processor does for a command: guest_profile is its time for one /bin/true, in all
// and by place. The processor is looked at after each millisecond of its time, which slows it down. The innermost
// function is certain. The entry is a guess from the words of the kernel's stack, some of which are old.
func GuestProfile(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	dir, err := runsDir()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	v, err := e.sleeperWith(ctx, o.mib(), 0, func(context.Context, string) error { return nil })
	if v != nil {
		defer func() { err = errors.Join(err, e.remove(ctx, v.record.Spec.Name)) }()
	}
	if err != nil {
		return nil, err
	}
	p := &profile{symbolize: v.parts.Symbolize}
	if err := v.restore(ctx, dir, variant{cache: cacheWarm}, false, instance.RestoreOptions{}, func(ctx context.Context, in *instance.Instance) (time.Time, map[string]time.Duration, error) {
		err := p.commands(ctx, in, o)
		return time.Now(), nil, err
	}); err != nil {
		return nil, err
	}
	return p.rows(map[string]any{"command": profiledCommand, "memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs}), nil
}

// profile is where the processor was, by command.
type profile struct {
	symbolize vmm.Symbolizer
	looks     []map[place]time.Duration
}

// commands runs the command again and again, and looks at the first vCPU meanwhile.
func (p *profile) commands(ctx context.Context, in *instance.Instance, o Options) error {
	c, err := in.Agent(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	m := in.Machine()
	for i := range o.Warmup + o.N {
		stop := make(chan struct{})
		spent := map[place]time.Duration{}
		var watcher sync.WaitGroup
		watcher.Go(func() { p.watch(m, stop, spent) })
		status, err := c.Exec(ctx, guest.Cmd{Argv: []string{profiledCommand}, NoStdin: true})
		close(stop)
		watcher.Wait()
		if err == nil && status.Code != 0 {
			err = fmt.Errorf("%s has ended with %v", profiledCommand, status)
		}
		if err != nil {
			return err
		}
		if i >= o.Warmup {
			p.looks = append(p.looks, spent)
		}
	}
	return nil
}

// watch adds up where the first vCPU is, until stop is closed.
func (p *profile) watch(m *vmm.Machine, stop <-chan struct{}, spent map[place]time.Duration) {
	tick := time.NewTicker(profileEvery)
	defer tick.Stop()
	last := m.VCPUTime(0)
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		now := m.VCPUTime(0)
		if now-last < profileEvery {
			continue
		}
		s, ok := m.Sample(0)
		if !ok {
			continue
		}
		spent[place{byAll, ""}] += now - last
		spent[place{byEntry, p.entry(s)}] += now - last
		spent[place{byFunction, p.function(s.RIP)}] += now - last
		last = now
	}
}

// function names the kernel's function at an address.
func (p *profile) function(addr uint64) string {
	if name, _, ok := p.symbolize(addr); ok {
		return name
	}
	if addr>>63 == 0 {
		return inProgram
	}
	return "unknown"
}

// entries are prefixes of the functions by which a processor enters the kernel, or a thread of the kernel begins. An
// earlier one counts before later ones: an interrupt of a system call is the call's.
var entries = [][]string{
	{"__x64_sys_", "__do_sys_", "ksys_"},
	{"worker_thread", "rcu_gp_kthread", "run_ksoftirqd"},
	{"asm_sysvec_", "asm_common_interrupt", "do_idle", "kthread"},
	{"asm_exc_", "exc_page_fault", "kvm_soft_page_fault"}, // the last is from rootfs/kernel/patches
	{"do_syscall_64", "entry_SYSCALL_64"},
}

// entry names the outermost function of a look.
func (p *profile) entry(s vmm.Sample) string {
	inner := p.function(s.RIP)
	if inner == inProgram {
		return inProgram
	}
	names := make([]string, 0, len(s.Stack)+1)
	for _, addr := range s.Stack {
		names = append(names, p.function(addr))
	}
	slices.Reverse(names)
	names = append(names, inner)
	for _, prefixes := range entries {
		for _, name := range names {
			if slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
				return name
			}
		}
	}
	return "unknown"
}

// rows returns a row for the whole, and for each place that has a share of it worth telling, the largest first.
func (p *profile) rows(params map[string]any) (rows []Row) {
	total := map[place]time.Duration{}
	for _, one := range p.looks {
		for at, d := range one {
			total[at] += d
		}
	}
	all := total[place{byAll, ""}]
	if all == 0 {
		return []Row{{Name: "guest_profile", Params: params, Unit: inMs.name, Skipped: "the guest's processor was never seen at work: use more --runs"}}
	}
	places := slices.SortedFunc(maps.Keys(total), func(a, b place) int {
		if a.by != b.by {
			return strings.Compare(a.by, b.by)
		}
		if d := total[b] - total[a]; d != 0 {
			return int(min(max(d, -1), 1))
		}
		return strings.Compare(a.name, b.name)
	})
	for _, at := range places {
		if total[at] < all/leastShare {
			continue
		}
		s := newSeries(inMs)
		for _, one := range p.looks {
			s.add(int64(one[at]))
		}
		of := maps.Clone(params)
		of["by"] = at.by
		if at.name != "" {
			of["in"] = at.name
		}
		rows = append(rows, s.row("guest_profile", of))
	}
	return rows
}
