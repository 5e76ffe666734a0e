package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestStats_text_of_proc_gives_numbers(t *testing.T) {
	for name, tt := range map[string]struct {
		parse func([]byte, *agentpb.StatsResponse)
		text  string
		want  *agentpb.StatsResponse
	}{
		"times of all CPUs": {
			parseStat,
			"cpu  100 5 30 4000 7 1 2 3 50 0\ncpu0 60 5 20 2000 7 1 2 3 50 0\ncpu1 40 0 10 2000 0 0 0 0 0 0\nintr 12 3 4\nctxt 7\nbtime 1\nprocesses 321\nprocs_running 1\n",
			&agentpb.StatsResponse{Cpu: &agentpb.CPUTimes{User: 1050e6, System: 300e6, Idle: 40e9, Iowait: 70e6, Irq: 30e6, Steal: 30e6}, Cpus: 2, Forks: 321},
		},
		"an old kernel's CPU has fewer times": {parseStat, "cpu 1 2\ncpu0 1 2\n", &agentpb.StatsResponse{Cpu: &agentpb.CPUTimes{User: 30e6}, Cpus: 1}},
		"load":                                {parseLoad, "0.20 12.08 1.00 2/80 11206\n", &agentpb.StatsResponse{Load1: 20, Load5: 1208, Load15: 100, TasksRunning: 2, Tasks: 80}},
		"no load":                             {parseLoad, "x\n", &agentpb.StatsResponse{}},
		"nonsense for load":                   {parseLoad, "a.bc -1.00 1 2 3", &agentpb.StatsResponse{}},
		"memory": {
			parseMemory, "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable: 20 kB\nBuffers: 1 kB\nCached: 2 kB\nSwapTotal: 3 kB\nSwapFree: 4 kB\nShmem: 5 kB\nSReclaimable: 6 kB\nHugePages_Total: 7\n",
			&agentpb.StatsResponse{Memory: &agentpb.MemoryUse{Total: 1000 << 10, Free: 10 << 10, Available: 20 << 10, Buffers: 1 << 10, Cached: 2 << 10, SwapTotal: 3 << 10, SwapFree: 4 << 10, Shared: 5 << 10, SlabReclaimable: 6 << 10}},
		},
		"pages": {parseVMStat, "nr_free_pages 1\npgmajfault 12\noom_kill 3\n", &agentpb.StatsResponse{OomKills: 3, MajorFaults: 12}},
		"interfaces": {
			parseInterfaces,
			"Inter-|   Receive |  Transmit\n face |bytes packets\n    lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\neth0:100 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\nbad: 1\n",
			&agentpb.StatsResponse{Interfaces: []*agentpb.Interface{
				{Name: "lo", ReceivedBytes: 1, ReceivedPackets: 2, ReceivedErrors: 3, ReceivedDropped: 4, SentBytes: 9, SentPackets: 10, SentErrors: 11, SentDropped: 12},
				{Name: "eth0", ReceivedBytes: 100, ReceivedPackets: 2, ReceivedErrors: 3, ReceivedDropped: 4, SentBytes: 9, SentPackets: 10, SentErrors: 11, SentDropped: 12},
			}},
		},
		"disks": {
			parseDisks, " 253 0 vda 10 1 20 3 40 5 60 7 0 8 9\n 7 0 loop0 1 1 1 1 1 1 1 1 0 1 1\n 1 0 ram0 1 1 1 1 1 1 1 1 0 1 1\n 253 1 vdb\n",
			&agentpb.StatsResponse{Disks: []*agentpb.BlockDevice{{Name: "vda", Reads: 10, ReadBytes: 20 * 512, Writes: 40, WrittenBytes: 60 * 512}}},
		},
		"mounts": {
			parseMounts,
			"overlay / overlay rw 0 0\nproc /proc proc rw 0 0\n/dev/vdb /image erofs ro 0 0\n/dev/vdd /srv/my\\040data\\134 ext4 rw 0 0\n/dev/vdd /again ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\nudev /dev devtmpfs rw 0 0\nshort\n",
			&agentpb.StatsResponse{FileSystems: []*agentpb.FileSystem{{Path: "/", Type: "overlay"}, {Path: "/srv/my data\\", Type: "ext4"}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := &agentpb.StatsResponse{}
			tt.parse([]byte(tt.text), got)
			if !proto.Equal(got, tt.want) {
				t.Errorf("got  %v\nwant %v", got, tt.want)
			}
		})
	}
}

func TestStats_file_without_end_is_cut_at_a_line(t *testing.T) {
	path := filepath.Join(t.TempDir(), "long")
	if err := os.WriteFile(path, []byte(strings.Repeat("0123456\n", 1<<20)+"end"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := readProc(path)
	if err != nil || len(got) == 0 || len(got) > maxProcFile || !strings.HasSuffix(string(got), "0123456\n") {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := readProc(path); err != nil || len(got) != 0 {
		t.Errorf("of a line without end: %d bytes, %v", len(got), err)
	}
	if _, err := readProc(path + "-"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("got %v", err)
	}
}

func TestStats_file_systems_that_do_not_answer_are_left_out(t *testing.T) {
	in := []*agentpb.FileSystem{{Path: "/gone"}, {Path: "/there"}}
	got := measured(in, func(path string, st *unix.Statfs_t) error {
		if path == "/gone" {
			return unix.ENOENT
		}
		*st = unix.Statfs_t{Bsize: 4096, Frsize: 1024, Blocks: 10, Bfree: 5, Bavail: 4, Files: 3, Ffree: 2}
		return nil
	})
	want := &agentpb.FileSystem{Path: "/there", Size: 10240, Free: 5120, Available: 4096, Inodes: 3, InodesFree: 2}
	if len(got) != 1 || !proto.Equal(got[0], want) {
		t.Errorf("got %v", got)
	}
}

func FuzzStats(f *testing.F) {
	for _, path := range []string{"/proc/stat", "/proc/loadavg", "/proc/net/dev", "/proc/self/mounts"} {
		if text, err := os.ReadFile(path); err == nil {
			f.Add(text)
		}
	}
	f.Add([]byte("253 0 vda 1 1 18446744073709551615 1 1 1 1 1 1\n/dev/x /a\\04 ext4\n/dev/y \\777\\040 ext4\ncpu 18446744073709551615 1\n:::\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		out := &agentpb.StatsResponse{}
		for _, parse := range []func([]byte, *agentpb.StatsResponse){parseStat, parseLoad, parseMemory, parseVMStat, parseInterfaces, parseDisks, parseMounts} {
			parse(text, out)
		}
		if len(out.Interfaces) > agentpb.MaxStatsItems || len(out.Disks) > agentpb.MaxStatsItems || len(out.FileSystems) > agentpb.MaxStatsItems {
			t.Errorf("%d interfaces, %d disks, %d file systems", len(out.Interfaces), len(out.Disks), len(out.FileSystems))
		}
		// protobuf cannot send texts that are not UTF-8.
		data, err := proto.Marshal(out)
		if err != nil || len(data) > agentpb.MaxMessage {
			t.Errorf("%d bytes, %v", len(data), err)
		}
	})
}
