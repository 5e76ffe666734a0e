package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

const (
	// maxProcFile bounds what is read of a file in /proc. A line cut at the limit is left out.
	maxProcFile = 256 << 10
	// tick is a USER_HZ tick, the unit of proc_stat(5), in nanoseconds.
	tick = 1_000_000_000 / 100
	// sectorSize is the unit of /proc/diskstats, whatever the disk's own sector size
	// (Documentation/admin-guide/iostats.rst).
	sectorSize = 512
)

// Stats implements agentpb.AgentService. It reads seven files of /proc and queries each file system once. It keeps
// nothing running between calls.
func (s *Server) Stats(context.Context, *agentpb.StatsRequest) (*agentpb.StatsResponse, error) {
	out := &agentpb.StatsResponse{Cpu: &agentpb.CPUTimes{}, Memory: &agentpb.MemoryUse{}}
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return nil, fmt.Errorf("read the uptime: %w", err)
	}
	out.UptimeNanos = up.Nano()
	for _, file := range []struct {
		path     string
		parse    func([]byte, *agentpb.StatsResponse)
		optional bool
	}{
		{"/proc/stat", parseStat, false},
		{"/proc/loadavg", parseLoad, false},
		{"/proc/meminfo", parseMemory, false},
		{"/proc/vmstat", parseVMStat, false},
		// Kernels may be built without these.
		{"/proc/net/dev", parseInterfaces, true},
		{"/proc/diskstats", parseDisks, true},
		{"/proc/self/mounts", parseMounts, false},
	} {
		text, err := readProc(file.path)
		if file.optional && errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file.path, err)
		}
		file.parse(text, out)
	}
	out.FileSystems = measured(out.FileSystems, unix.Statfs)
	return out, nil
}

// readProc reads a file of /proc to its end, or the whole lines within maxProcFile.
func readProc(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxProcFile))
	if len(text) == maxProcFile {
		text = text[:bytes.LastIndexByte(text, '\n')+1]
	}
	return text, err
}

// each calls f with the fields of each line, at most limit of them.
func each(text []byte, limit int, f func(fields []string)) {
	for line := range bytes.Lines(text) {
		fields := strings.Fields(string(line[:min(len(line), maxProcLine)]))
		if len(fields) > 0 {
			f(fields[:min(len(fields), limit)])
		}
	}
}

// maxProcLine is longer than the part of a line that is used: the line of interrupts in /proc/stat is long.
const maxProcLine = 8 << 10

// number parses an unsigned number; anything else is 0.
func number(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// at returns field i as a number, 0 if it is missing.
func at(fields []string, i int) uint64 {
	if i >= len(fields) {
		return 0
	}
	return number(fields[i])
}

// parseStat reads proc_stat(5).
func parseStat(text []byte, out *agentpb.StatsResponse) {
	const fieldsOfCPU = 11
	each(text, fieldsOfCPU, func(f []string) {
		switch cpu, ok := strings.CutPrefix(f[0], "cpu"); {
		case ok && cpu == "":
			// user nice system idle iowait irq softirq steal, then the times of guests, which user and nice
			// already include.
			out.Cpu = &agentpb.CPUTimes{
				User: (at(f, 1) + at(f, 2)) * tick, System: at(f, 3) * tick, Idle: at(f, 4) * tick,
				Iowait: at(f, 5) * tick, Irq: (at(f, 6) + at(f, 7)) * tick, Steal: at(f, 8) * tick,
			}
		case ok:
			out.Cpus++
		case f[0] == "processes":
			out.Forks = at(f, 1)
		}
	})
}

// parseLoad reads proc_loadavg(5): "0.20 0.18 0.12 1/80 11206".
func parseLoad(text []byte, out *agentpb.StatsResponse) {
	f := strings.Fields(string(text[:min(len(text), maxProcLine)]))
	if len(f) < 4 {
		return
	}
	out.Load1, out.Load5, out.Load15 = hundredths(f[0]), hundredths(f[1]), hundredths(f[2])
	if running, all, ok := strings.Cut(f[3], "/"); ok {
		out.TasksRunning, out.Tasks = uint32(number(running)), uint32(number(all))
	}
}

// hundredths reads a number with two decimals.
func hundredths(s string) uint32 {
	whole, rest, ok := strings.Cut(s, ".")
	if !ok || len(rest) != 2 {
		return 0
	}
	n, err := strconv.ParseUint(whole+rest, 10, 32)
	if err != nil {
		return 0
	}
	return uint32(n)
}

// parseMemory reads proc_meminfo(5), in KiB.
func parseMemory(text []byte, out *agentpb.StatsResponse) {
	m := &agentpb.MemoryUse{}
	const kib = 1 << 10
	keyed(text, kib, map[string]*uint64{
		"MemTotal:": &m.Total, "MemFree:": &m.Free, "MemAvailable:": &m.Available, "Buffers:": &m.Buffers, "Cached:": &m.Cached,
		"Shmem:": &m.Shared, "SReclaimable:": &m.SlabReclaimable, "SwapTotal:": &m.SwapTotal, "SwapFree:": &m.SwapFree,
	})
	out.Memory = m
}

// parseVMStat reads proc_vmstat(5). oom_kill exists since Linux 4.13.
func parseVMStat(text []byte, out *agentpb.StatsResponse) {
	keyed(text, 1, map[string]*uint64{"oom_kill": &out.OomKills, "pgmajfault": &out.MajorFaults})
}

// keyed reads lines of a key and a number, in some unit.
func keyed(text []byte, unit uint64, to map[string]*uint64) {
	each(text, 2, func(f []string) {
		if p := to[f[0]]; p != nil {
			*p = at(f, 1) * unit
		}
	})
}

// parseInterfaces reads proc_pid_net(5), dev: a name, a colon, 8 numbers received and 8 sent.
func parseInterfaces(text []byte, out *agentpb.StatsResponse) {
	for line := range bytes.Lines(text) {
		line := string(line[:min(len(line), maxProcLine)])
		colon := strings.LastIndexByte(line, ':')
		if colon < 0 || len(out.Interfaces) == agentpb.MaxStatsItems {
			continue
		}
		f := strings.Fields(line[colon+1:])
		const received, sent, fields = 0, 8, 16
		if len(f) < fields {
			continue
		}
		out.Interfaces = append(out.Interfaces, &agentpb.Interface{
			Name:          text32(strings.TrimSpace(line[:colon])),
			ReceivedBytes: at(f, received), ReceivedPackets: at(f, received+1), ReceivedErrors: at(f, received+2), ReceivedDropped: at(f, received+3),
			SentBytes: at(f, sent), SentPackets: at(f, sent+1), SentErrors: at(f, sent+2), SentDropped: at(f, sent+3),
		})
	}
}

// parseDisks reads /proc/diskstats: Documentation/admin-guide/iostats.rst.
func parseDisks(text []byte, out *agentpb.StatsResponse) {
	const name, reads, readSectors, writes, writtenSectors = 2, 3, 5, 7, 9
	each(text, writtenSectors+1, func(f []string) {
		if len(f) <= writtenSectors || len(out.Disks) == agentpb.MaxStatsItems ||
			strings.HasPrefix(f[name], "loop") || strings.HasPrefix(f[name], "ram") {
			return
		}
		out.Disks = append(out.Disks, &agentpb.BlockDevice{
			Name: text32(f[name]), Reads: at(f, reads), ReadBytes: at(f, readSectors) * sectorSize,
			Writes: at(f, writes), WrittenBytes: at(f, writtenSectors) * sectorSize,
		})
	})
}

// parseMounts finds in proc_pid_mounts(5) the file systems whose use is reported: the root, and those on writable
// disks.
func parseMounts(text []byte, out *agentpb.StatsResponse) {
	seen := map[string]bool{}
	each(text, 3, func(f []string) {
		if len(f) < 3 || len(out.FileSystems) == agentpb.MaxStatsItems {
			return
		}
		source, path, kind := f[0], unescape(f[1]), f[2]
		key := source
		switch {
		case path == "/":
			key = "/"
		case !strings.HasPrefix(source, "/dev/"), kind == "erofs", kind == "squashfs", kind == "iso9660", kind == "devtmpfs":
			return
		}
		if seen[key] || len(path) > agentpb.MaxStatsPath {
			return // mounted in several places
		}
		seen[key] = true
		out.FileSystems = append(out.FileSystems, &agentpb.FileSystem{Path: strings.ToValidUTF8(path, "\uFFFD"), Type: text32(kind)})
	})
}

// unescape undoes the escapes of proc_pid_mounts(5), and of mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`).Replace

// text32 returns a name as it may be sent: valid UTF-8 and at most MaxStatsName bytes.
func text32(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), agentpb.MaxStatsName)], "")
}

// measured returns the file systems whose size statfs tells, with their sizes.
func measured(in []*agentpb.FileSystem, statfs func(string, *unix.Statfs_t) error) []*agentpb.FileSystem {
	out := in[:0]
	for _, fs := range in {
		var st unix.Statfs_t
		if statfs(fs.Path, &st) != nil {
			continue // unmounted since, or hidden
		}
		block := uint64(max(st.Frsize, 0))
		if block == 0 {
			block = uint64(max(st.Bsize, 0))
		}
		fs.Size, fs.Free, fs.Available = st.Blocks*block, st.Bfree*block, st.Bavail*block
		fs.Inodes, fs.InodesFree = st.Files, st.Ffree
		out = append(out, fs)
	}
	return out
}
