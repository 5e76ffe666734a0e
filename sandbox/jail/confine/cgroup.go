package confine

import (
	"bufio"
	"cmp"
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
	IOWeight    uint64  // 1 to 1000; what does not say has 100
	IO          IOMax
	FileBytes   uint64 // length of a file that the child writes
	OpenFiles   uint64 // descriptors; set by Start only
	LockedBytes uint64 // memory that it may lock (mlock(2)); set by Start only, and 0 is the host's limit
}

// IOMax bounds what a child transfers from and to one block device, per second. Zero is no limit. In version 1 of
// cgroups it holds for reads, and for writes that bypass the page cache or are synced: the host's kernel writes the
// rest back on its own account.
type IOMax struct {
	Device                string // "major:minor": see DeviceOf
	ReadBytes, WriteBytes uint64
	ReadOps, WriteOps     uint64
}

// Stats are counters of a child. A field is zero if its controller is missing.
type Stats struct {
	MemoryBytes  int64
	Pids         int64
	CPU          time.Duration
	CPUThrottled time.Duration // how long CPUMax has held it up
	OutOfMemory  int64         // kills for lack of memory
	ReadBytes    int64         // from block devices
	WrittenBytes int64         // to block devices; in version 1 without what the host's kernel has written back
}

// ErrNoCgroup means that this host does not have the controller that a limit needs.
var ErrNoCgroup = errors.New("no cgroup controller for that limit")

type controller int

const (
	memory controller = iota
	pids
	cpu
	cpuacct // of version 1 only; in version 2, cpu counts
	blockIO // called io in version 2
	numControllers
)

var controllerNames = [numControllers]string{"memory", "pids", "cpu", "cpuacct", "blkio"}

// ioName is the name of blockIO in version 2.
const ioName = "io"

// cpuPeriod is the period of CPUMax in microseconds, which is the kernel's default.
const cpuPeriod = 100000

// hierarchies says where a child's cgroups go, for each controller: directories that exist, or "".
type hierarchies struct {
	parent [numControllers]string
	v2     [numControllers]bool
	own    string // one that this process is in
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
					h.parent[i], h.v2[i], h.own = dir, false, dir
				}
			}
		case "cgroup2":
			path, ok := own[""]
			if !ok {
				return
			}
			in := below(path)
			slice := below(serviceSlice)
			dir := below(parentOf(path, os.Geteuid() == 0 && writable(slice)))
			// The child comes from beside its cgroup: cgroups(7), "Delegation containment rules".
			if !writable(dir) || !writable(filepath.Join(dir, "cgroup.procs")) {
				return
			}
			have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
			if err != nil {
				return
			}
			for i, name := range controllerNames {
				if controller(i) == blockIO {
					name = ioName
				}
				if slices.Contains(strings.Fields(string(have)), name) {
					h.parent[i], h.v2[i], h.own = dir, true, in
				}
			}
			if h.v2[cpu] {
				h.parent[cpuacct], h.v2[cpuacct] = dir, true
			}
		}
	})
	return h, err
}

// serviceSlice is the cgroup of contrib/systemd/drowse.service.
const serviceSlice = "/drowse.slice"

// parentOf returns below which cgroup of version 2 a keeper in path makes others. slice reports that it may do so in
// the service's: for a keeper that root has started in a login, since systemd takes controllers away from the slice of
// a login when others need them no more, and with them the limits. Others stay where their keeper's limits are.
func parentOf(path string, slice bool) string {
	if slice && strings.HasPrefix(path, "/user.slice/") {
		return serviceSlice
	}
	return filepath.Dir(path) // of "/" it is "/"
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
	own string // one that this process is in, or ""
}

// planCgroup names the cgroup of a child, without making it.
func planCgroup(name string) (*cgroup, error) {
	h, err := findHierarchies()
	if err != nil {
		return nil, fmt.Errorf("finding cgroups: %w", err)
	}
	g := &cgroup{v2: h.v2, own: h.own}
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
		if controller(i) == blockIO {
			name = ioName
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

// moveNothing moves this process to the cgroup that it is in. The first move of a process takes the kernel 10 ms, in
// which it waits for all processors (percpu_down_write of cgroup_threadgroup_rwsem); another one just after it takes
// 0.05 ms. The keeper begins with the first while the child's namespaces are made. An error loses only that time.
func (g *cgroup) moveNothing() {
	if g.own != "" {
		_ = put(filepath.Join(g.own, "cgroup.procs"), "0")
	}
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
			return fmt.Errorf("%w: this process may make no cgroups with the controller %s: mount it, run as a unit of systemd with "+
				"Delegate=yes (`systemd-run --user --scope -p Delegate=yes`), or set no limit", ErrNoCgroup, controllerNames[c])
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
		g.limitIO(l, old, set),
	)
}

// urgentShare is what nice -10 is worth among processes (sched(7)).
const urgentShare = 9

// maxWeight is the largest cpu.weight.
const maxWeight = 10000

// urge sets a larger weight than the usual one, and share the usual one, which is 100 if 0. A host without the
// controller has no shares.
func (g *cgroup) urge(weight uint64) { g.share(min(cmp.Or(weight, 100)*urgentShare, maxWeight)) }

func (g *cgroup) share(weight uint64) {
	if g.dir[cpu] == "" {
		return
	}
	file, n := "cpu.shares", max(2, cmp.Or(weight, 100)*1024/100)
	if g.v2[cpu] {
		file, n = "cpu.weight", cmp.Or(weight, 100)
	}
	_ = put(filepath.Join(g.dir[cpu], file), strconv.FormatUint(n, 10)) // the file is missing if systemd decides so
}

// limitIO sets the limits of block devices.
func (g *cgroup) limitIO(l, old Limits, set func(c controller, changed bool, file1, text1, file2, text2 string) error) error {
	weight := cmp.Or(l.IOWeight, 100)
	file2 := "io.weight"
	if g.dir[blockIO] != "" && unix.Access(filepath.Join(g.dir[blockIO], file2), unix.F_OK) != nil {
		file2 = "io.bfq.weight" // without iocost, BFQ does it
	}
	text := strconv.FormatUint(weight, 10)
	errs := []error{set(blockIO, weight != cmp.Or(old.IOWeight, 100), "blkio.bfq.weight", text, file2, "default "+text)}
	was := old.IO
	if was.Device != l.IO.Device { // the files keep a line for each device
		if was.Device != "" {
			errs = append(errs, g.limitDevice(IOMax{Device: was.Device}, was, set))
		}
		was = IOMax{}
	}
	if l.IO.Device != "" {
		errs = append(errs, g.limitDevice(l.IO, was, set))
	}
	return errors.Join(errs...)
}

// limitDevice sets the limits of one block device. old are those before.
func (g *cgroup) limitDevice(m, old IOMax, set func(c controller, changed bool, file1, text1, file2, text2 string) error) error {
	var errs []error
	for _, f := range []struct {
		n, old     uint64
		file1, key string
	}{
		{m.ReadBytes, old.ReadBytes, "read_bps", "rbps"}, {m.WriteBytes, old.WriteBytes, "write_bps", "wbps"},
		{m.ReadOps, old.ReadOps, "read_iops", "riops"}, {m.WriteOps, old.WriteOps, "write_iops", "wiops"},
	} {
		most := "max"
		if f.n > 0 {
			most = strconv.FormatUint(f.n, 10)
		}
		errs = append(errs, set(blockIO, f.n != f.old, "blkio.throttle."+f.file1+"_device",
			m.Device+" "+strconv.FormatUint(f.n, 10), "io.max", m.Device+" "+f.key+"="+most))
	}
	return errors.Join(errs...)
}

// ErrNoDevice means that a file system does not lie on one block device.
var ErrNoDevice = errors.New("the file system has no block device of its own")

// DeviceOf returns the block device that has a file, as IOMax wants it: the whole disk of a partition. It fails with
// ErrNoDevice for file systems such as overlay, tmpfs and Btrfs.
func DeviceOf(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", &os.PathError{Op: "stat", Path: path, Err: err}
	}
	dev := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	sys := "/sys/dev/block/" + dev
	if _, err := os.Stat(sys); unix.Major(st.Dev) == 0 || err != nil {
		return "", fmt.Errorf("%s: %w", path, ErrNoDevice)
	}
	if _, err := os.Stat(sys + "/partition"); err != nil {
		return dev, nil
	}
	// The directory of a partition is in that of its disk. The kernel limits disks alone.
	disk, err := filepath.EvalSymlinks(sys)
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(filepath.Dir(disk), "dev"))
	return strings.TrimSpace(string(text)), err
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
	if dir := g.dir[blockIO]; dir != "" {
		file := "blkio.throttle.io_service_bytes_recursive"
		if g.v2[blockIO] {
			file = "io.stat"
		}
		if rerr := lines(filepath.Join(dir, file), s.addIO); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	if err != nil {
		err = fmt.Errorf("reading the counters of a cgroup: %w", err)
	}
	return s, err
}

// addIO adds a line of blkio.throttle.io_service_bytes ("8:0 Read 4096"), or of io.stat ("8:0 rbytes=4096 wbytes=0").
func (s *Stats) addIO(line string) {
	f := strings.Fields(line)
	if len(f) == 3 && (f[1] == "Read" || f[1] == "Write") {
		f = []string{f[0], map[string]string{"Read": "rbytes=", "Write": "wbytes="}[f[1]] + f[2]}
	}
	for _, word := range f {
		key, value, _ := strings.Cut(word, "=")
		n, _ := strconv.ParseInt(value, 10, 64)
		switch key {
		case "rbytes":
			s.ReadBytes += n
		case "wbytes":
			s.WrittenBytes += n
		}
	}
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
