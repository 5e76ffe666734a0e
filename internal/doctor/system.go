package doctor

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot/pager"
)

// uffdFeatures are the UFFD_FEATURE_ bits of linux/userfaultfd.h, by number.
var uffdFeatures = []string{
	"WP", "EVENT_FORK", "EVENT_REMAP", "EVENT_REMOVE", "MISSING_HUGETLBFS", "MISSING_SHMEM", "EVENT_UNMAP", "SIGBUS",
	"THREAD_ID", "MINOR_HUGETLBFS", "MINOR_SHMEM", "EXACT_ADDRESS", "WP_HUGETLBFS_SHMEM", "WP_UNPOPULATED", "POISON",
	"WP_ASYNC", "MOVE",
}

func (h host) userfaultfd(g *group) {
	const cannotWake = "VMs cannot be confined or woken here"
	have, err := pager.Features()
	switch {
	case errors.Is(err, pager.ErrNotPermitted), errors.Is(err, pager.ErrNotSupported):
		g.add("userfaultfd", Missing, oneLine(err.Error()), cannotWake)
		return
	case err != nil:
		g.add("userfaultfd", Unknown, oneLine(err.Error()), cannotWake+" unless this was chance")
		return
	}
	way := "by userfaultfd(2)"
	if f, err := os.OpenFile(h.path("dev/userfaultfd"), os.O_RDWR, 0); err == nil {
		f.Close()
		way = "by /dev/userfaultfd"
	}
	g.add("userfaultfd", OK, "allowed "+way+", with the faults of KVM", "")
	var there, lacking []string
	for i, name := range uffdFeatures {
		if have&(1<<i) != 0 {
			there = append(there, name)
		} else {
			lacking = append(lacking, name)
		}
	}
	detail := fmt.Sprintf("%d: %s", bits.OnesCount64(have), strings.Join(there, " "))
	if len(lacking) > 0 {
		detail += "; not there: " + strings.Join(lacking, " ")
	}
	g.add("userfaultfd_features", unless(len(lacking) > 0, Degraded), detail, "none: lazy restore takes missing-page faults of anonymous memory, which need no feature")
}

// meminfo returns the fields of /proc/meminfo in bytes. Counts stay as they are.
func (h host) meminfo() map[string]uint64 {
	out := map[string]uint64{}
	for line := range strings.Lines(h.read("proc/meminfo")) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, err := strconv.ParseUint(f[1], 10, 64)
		if err != nil {
			continue
		}
		if len(f) > 2 && f[2] == "kB" {
			n <<= 10
		}
		out[strings.TrimSuffix(f[0], ":")] = n
	}
	return out
}

// lowMemory is hardly enough for one VM of the default size.
const lowMemory = 768 << 20

func (h host) memory(g *group) {
	m := h.meminfo()
	if free, ok := m["MemAvailable"]; ok {
		g.add("memory", unless(free < lowMemory, Degraded), bytesText(free)+" available of "+bytesText(m["MemTotal"]), "a VM may be killed for want of memory: put others to sleep")
	} else {
		g.add("memory", Unknown, "/proc/meminfo cannot be read", "mount /proc")
	}
	switch strings.TrimSpace(h.read("proc/sys/vm/overcommit_memory")) {
	case "2":
		g.add("overcommit", Degraded, "vm.overcommit_memory=2", "all of a guest's RAM must be free when it starts: set it to 0 or 1")
	case "":
		g.add("overcommit", Unknown, "vm.overcommit_memory cannot be read", "")
	default:
		g.add("overcommit", OK, "guest RAM is committed as it is used", "")
	}
	if m["SwapTotal"] == 0 {
		g.add("swap", OK, "none: memory of guests stays in RAM until they sleep", "")
	} else {
		g.add("swap", OK, bytesText(m["SwapFree"])+" free of "+bytesText(m["SwapTotal"])+": guest memory can be swapped out, which slows guests down and keeps their secrets on disk", "")
	}
	g.add("hugepages", OK, fmt.Sprintf("%d reserved, %d free: guest RAM does not need them", m["HugePages_Total"], m["HugePages_Free"]), "")
	thp := selected(h.read("sys/kernel/mm/transparent_hugepage/enabled"))
	switch thp {
	case "":
		g.add("transparent_hugepages", Unknown, "this kernel does not show them", "guest RAM may be in small pages, with more page faults")
	case "never", "madvise":
		g.add("transparent_hugepages", Degraded, thp+": guest RAM does not ask for them",
			"guest RAM is in small pages, with more page faults and TLB misses: echo always > /sys/kernel/mm/transparent_hugepage/enabled")
	default:
		g.add("transparent_hugepages", OK, thp, "")
	}
	if _, err := os.Stat(h.path("proc/self/pagemap")); err != nil {
		g.add("pagemap", Missing, oneLine(err.Error()), "VMs cannot be put to sleep: mount /proc")
	} else {
		g.add("pagemap", OK, "/proc/self/pagemap is there: untouched pages of guests are not read when they sleep", "")
	}
}

// selected returns the word in [brackets] from a file of sysfs.
func selected(text string) string {
	_, rest, ok := strings.Cut(text, "[")
	if !ok {
		return ""
	}
	word, _, _ := strings.Cut(rest, "]")
	return word
}

func (h host) system(g *group) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		g.add("kernel", Unknown, oneLine(err.Error()), "")
	} else {
		release := unix.ByteSliceToString(u.Release[:])
		major, minor := version(release)
		g.add("kernel", unless(major > 0 && (major < 5 || major == 5 && minor < 10), Degraded), release, "drowse is tested with Linux 6.1 and later")
	}
	g.add("cpus", OK, fmt.Sprintf("%d for this process", runtime.NumCPU()), "")
	if os.Geteuid() == 0 {
		g.add("root", OK, "this process is root", "")
	} else {
		g.add("root", Degraded, fmt.Sprintf("user id %d", os.Geteuid()),
			"images from Debian packages, shares and --install-deps need root, networks root or `drowse net helper`; VMs need only access to /dev/kvm and userfaultfd")
	}
	h.cgroup(g)
	h.clock(g)
}

// version reads the first two numbers of a kernel's release; 0, 0 if there are none.
func version(release string) (major, minor int) {
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return 0, 0
	}
	return major, minor
}

// mounts returns the mount points of a type of file system.
func (h host) mounts(fstype string) []string {
	var out []string
	for line := range strings.Lines(h.read("proc/self/mounts")) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == fstype {
			out = append(out, f[1])
		}
	}
	return out
}

func (h host) cgroup(g *group) {
	v1, v2 := h.mounts("cgroup"), h.mounts("cgroup2")
	var found []string
	if len(v1) > 0 {
		found = append(found, fmt.Sprintf("version 1, %d hierarchies", len(v1)))
	}
	if len(v2) > 0 {
		found = append(found, "version 2 at "+v2[0])
	}
	if found == nil {
		g.add("cgroup", Missing, "no cgroup file system is mounted", "VMs run without limits on their memory and CPU time but those of the guest")
		return
	}
	g.add("cgroup", OK, strings.Join(found, ", and "), "")
}

func (h host) clock(g *group) {
	source := strings.TrimSpace(h.read("sys/devices/system/clocksource/clocksource0/current_clocksource"))
	if source == "" {
		g.add("clock", Unknown, "this kernel does not show its clock source", "")
		return
	}
	g.add("clock", unless(source != "tsc" && source != "kvm-clock", Degraded), "clock source "+source,
		"guests cannot read their time from the TSC without an exit: clock reads are slow, and times of stages are coarse")
}
