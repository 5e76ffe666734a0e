package confine

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits bound what a child uses. Zero is no limit, and for OpenFiles 4096. FileBytes also bounds images of RAM
// (memfd_create); a write beyond it fails with EFBIG.
type Limits struct {
	MemoryBytes int64
	Pids        int64   // processes and threads
	CPUWeight   uint64  // 1 to 10000; what does not say has 100
	CPUMax      float64 // processors
	FileBytes   uint64  // length of a file that the child writes; set by Start only
	OpenFiles   uint64  // descriptors; set by Start only
}

// Stats are counters of a child. A field is zero if its controller is missing.
type Stats struct {
	MemoryBytes  int64
	Pids         int64
	CPU          time.Duration
	CPUThrottled time.Duration // how long CPUMax has held it up
	OutOfMemory  int64         // kills for lack of memory
}

// ErrNoCgroup means that this host does not have the controller that a limit needs.
var ErrNoCgroup = errors.New("no cgroup controller for that limit")

type controller int

const (
	memory controller = iota
	pids
	cpu
	cpuacct // of version 1 only; in version 2, cpu counts
	numControllers
)

var controllerNames = [numControllers]string{"memory", "pids", "cpu", "cpuacct"}

// cpuPeriod is the period of CPUMax in microseconds, which is the kernel's default.
const cpuPeriod = 100000

// hierarchies says where a child's cgroups go, for each controller: directories that exist, or "".
type hierarchies struct {
	parent [numControllers]string
	v2     [numControllers]bool
}

// findHierarchies finds the cgroups of this process, where it may make others. Children get cgroups below these, so
// that what limits a keeper limits its children. In version 2, where a cgroup with processes has no children with
// controllers, they are beside.
func findHierarchies() (h hierarchies, err error) {
	own := map[string]string{} // path of this process by controller; of version 2 by ""
	if err := lines("/proc/self/cgroup", func(line string) {
		if f := strings.SplitN(line, ":", 3); len(f) == 3 {
			for _, c := range strings.Split(f[1], ",") {
				own[c] = f[2]
			}
		}
	}); err != nil {
		return h, err
	}
	err = lines("/proc/self/mountinfo", func(line string) {
		before, after, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(g) < 3 {
			return
		}
		root, at := f[3], f[4]
		below := func(path string) string {
			rel, err := filepath.Rel(root, path)
			if err != nil || strings.HasPrefix(rel, "..") {
				return ""
			}
			return filepath.Join(at, rel)
		}
		switch g[0] {
		case "cgroup":
			for i, name := range controllerNames {
				path, ok := own[name]
				if dir := below(path); ok && slices.Contains(strings.Split(g[2], ","), name) && writable(dir) {
					h.parent[i], h.v2[i] = dir, false
				}
			}
		case "cgroup2":
			path, ok := own[""]
			if !ok {
				return
			}
			if path != "/" {
				path = filepath.Dir(path)
			}
			dir := below(path)
			// The child comes from beside its cgroup: cgroups(7), "Delegation containment rules".
			if !writable(dir) || !writable(filepath.Join(dir, "cgroup.procs")) {
				return
			}
			have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
			if err != nil {
				return
			}
			for i, name := range controllerNames {
				if slices.Contains(strings.Fields(string(have)), name) {
					h.parent[i], h.v2[i] = dir, true
				}
			}
			if h.v2[cpu] {
				h.parent[cpuacct], h.v2[cpuacct] = dir, true
			}
		}
	})
	return h, err
}

func writable(path string) bool { return path != "" && unix.Access(path, unix.W_OK) == nil }

func lines(path string, each func(string)) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		each(s.Text())
	}
	return s.Err()
}

// A cgroup is that of one child: a directory for each controller, several of which may be the same.
type cgroup struct {
	dir [numControllers]string
	v2  [numControllers]bool
}

// planCgroup names the cgroup of a child, without making it.
func planCgroup(name string) (*cgroup, error) {
	h, err := findHierarchies()
	if err != nil {
		return nil, fmt.Errorf("finding cgroups: %w", err)
	}
	g := &cgroup{v2: h.v2}
	for i, parent := range h.parent {
		if parent != "" {
			g.dir[i] = filepath.Join(parent, "drowse-"+name)
		}
	}
	return g, nil
}

// dirs returns the directories, each once.
func (g *cgroup) dirs() []string {
	all := slices.DeleteFunc(slices.Clone(g.dir[:]), func(d string) bool { return d == "" })
	slices.Sort(all)
	return slices.Compact(all)
}

func (g *cgroup) make() error {
	for i, name := range controllerNames {
		if g.dir[i] == "" || !g.v2[i] || controller(i) == cpuacct {
			continue
		}
		// An error means that systemd or another process decides. Then the controller may be on, or its files are missing.
		_ = put(filepath.Join(filepath.Dir(g.dir[i]), "cgroup.subtree_control"), "+"+name)
	}
	for _, dir := range g.dirs() {
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, fs.ErrExist) { // a killed keeper has left it, and its note is gone
			if err = removeCgroup(dir); err == nil {
				err = os.Mkdir(dir, 0o755)
			}
		}
		if err != nil {
			return fmt.Errorf("making a cgroup: %w", err)
		}
	}
	return nil
}

// add moves a process into the cgroup.
func (g *cgroup) add(pid int) error {
	for _, dir := range g.dirs() {
		if err := put(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("moving a process to its cgroup: %w", err)
		}
	}
	return nil
}

func put(file, text string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// limit sets limits. old are those before: what was never limited and is not now does not need a controller.
func (g *cgroup) limit(l, old Limits) error {
	orMax := func(n int64, none string) string {
		if n <= 0 {
			return none
		}
		return strconv.FormatInt(n, 10)
	}
	set := func(c controller, changed bool, file1, text1, file2, text2 string) error {
		if !changed {
			return nil
		}
		if g.dir[c] == "" {
			return fmt.Errorf("%w: mount the controller %s, or set no limit", ErrNoCgroup, controllerNames[c])
		}
		file, text := file1, text1
		if g.v2[c] {
			file, text = file2, text2
		}
		err := put(filepath.Join(g.dir[c], file), text)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w: %w: have the controller %s enabled (systemd: Delegate=yes), or set no limit",
				ErrNoCgroup, err, controllerNames[c])
		}
		return err
	}
	weight, quota := l.CPUWeight, int64(l.CPUMax*cpuPeriod)
	if weight == 0 {
		weight = 100
	}
	quota1, quota2 := "-1", "max"
	if quota > 0 {
		quota = max(quota, 1000) // the kernel's minimum
		quota1, quota2 = strconv.FormatInt(quota, 10), fmt.Sprintf("%d %d", quota, cpuPeriod)
	}
	return errors.Join(
		set(memory, l.MemoryBytes != old.MemoryBytes, "memory.limit_in_bytes", orMax(l.MemoryBytes, "-1"),
			"memory.max", orMax(l.MemoryBytes, "max")),
		set(pids, l.Pids != old.Pids, "pids.max", orMax(l.Pids, "max"), "pids.max", orMax(l.Pids, "max")),
		// In version 1, 1024 is usual.
		set(cpu, l.CPUWeight != old.CPUWeight, "cpu.shares", strconv.FormatUint(max(2, weight*1024/100), 10),
			"cpu.weight", strconv.FormatUint(weight, 10)),
		set(cpu, l.CPUMax != old.CPUMax, "cpu.cfs_quota_us", quota1, "cpu.max", quota2),
	)
}

func (g *cgroup) stats() (s Stats, err error) {
	// number reads a file that is a number, or the number behind key.
	number := func(c controller, file1, key1, file2, key2 string) int64 {
		file, key := file1, key1
		if g.v2[c] {
			file, key = file2, key2
		}
		if g.dir[c] == "" || file == "" {
			return 0
		}
		var n int64
		rerr := lines(filepath.Join(g.dir[c], file), func(line string) {
			f := strings.Fields(line)
			if len(f) == 0 || key != "" && (len(f) < 2 || f[0] != key) {
				return
			}
			n, _ = strconv.ParseInt(f[len(f)-1], 10, 64)
		})
		if rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		return n
	}
	s.MemoryBytes = number(memory, "memory.usage_in_bytes", "", "memory.current", "")
	s.OutOfMemory = number(memory, "memory.oom_control", "oom_kill", "memory.events", "oom_kill")
	s.Pids = number(pids, "pids.current", "", "pids.current", "")
	if g.v2[cpu] {
		s.CPU = time.Duration(number(cpu, "", "", "cpu.stat", "usage_usec")) * time.Microsecond
		s.CPUThrottled = time.Duration(number(cpu, "", "", "cpu.stat", "throttled_usec")) * time.Microsecond
	} else {
		s.CPU = time.Duration(number(cpuacct, "cpuacct.usage", "", "", ""))
		s.CPUThrottled = time.Duration(number(cpu, "cpu.stat", "throttled_time", "", ""))
	}
	if err != nil {
		err = fmt.Errorf("reading the counters of a cgroup: %w", err)
	}
	return s, err
}

func (g *cgroup) remove() error {
	var errs []error
	for _, dir := range g.dirs() {
		errs = append(errs, removeCgroup(dir))
	}
	return errors.Join(errs...)
}

// A cgroup can be removed when its last process has been reaped, which is soon after its death.
const (
	removeTries = 400
	removePause = 5 * time.Millisecond
)

// removeCgroup kills the processes of a cgroup and removes it. It may be gone already.
func removeCgroup(dir string) error {
	var err error
	for range removeTries {
		if err = os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			break
		}
		if put(filepath.Join(dir, "cgroup.kill"), "1") != nil { // Linux 5.14, version 2
			_ = lines(filepath.Join(dir, "cgroup.procs"), func(line string) {
				if pid, err := strconv.Atoi(line); err == nil && pid > 0 {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
			})
		}
		time.Sleep(removePause)
	}
	return fmt.Errorf("removing the cgroup of a confined process: %w", err)
}
