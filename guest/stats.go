package guest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// ErrNoStats: the agent is older than Stats.
var ErrNoStats = errors.New("the agent in the guest does not know this call: start the VM anew, with an agent of this version")

// Stats is what a guest's kernel has counted since its boot, as proc(5) tells it. All of it
// is what the guest says. Sizes are in bytes. A number that its kernel does not have is 0.
type Stats struct {
	UptimeMs float64  `json:"uptime_ms"` // CLOCK_BOOTTIME
	CPU      CPUTimes `json:"cpu"`       // of all CPUs together
	CPUs     int      `json:"cpus"`
	// Load1, Load5 and Load15 are averages over minutes of tasks that run or wait for a
	// disk.
	Load1  float64 `json:"load1"`
	Load5  float64 `json:"load5"`
	Load15 float64 `json:"load15"`
	// Tasks are threads, those of the kernel included. Forks counts all there ever were.
	Tasks        int    `json:"tasks"`
	TasksRunning int    `json:"tasks_running"`
	Forks        uint64 `json:"forks"`
	// OOMKills is how many tasks the kernel has killed for want of memory.
	OOMKills    uint64       `json:"oom_kills"`
	MajorFaults uint64       `json:"major_faults"` // pages that had to be read
	Memory      MemoryUse    `json:"memory"`
	FileSystems []FileSystem `json:"file_systems"` // the root, and those on disks; at most 64
	Interfaces  []Interface  `json:"interfaces"`   // at most 64
	Disks       []Disk       `json:"disks"`        // at most 64
}

// CPUTimes are in milliseconds, in steps of 10.
type CPUTimes struct {
	User   float64 `json:"user_ms"` // that of niced programs included
	System float64 `json:"system_ms"`
	Idle   float64 `json:"idle_ms"`
	IOWait float64 `json:"iowait_ms"`
	IRQ    float64 `json:"irq_ms"`
	Steal  float64 `json:"steal_ms"`
}

// MemoryUse is as proc_meminfo(5) has it.
type MemoryUse struct {
	Total           uint64 `json:"total"`
	Free            uint64 `json:"free"`
	Available       uint64 `json:"available"` // for new programs, without swapping
	Buffers         uint64 `json:"buffers"`
	Cached          uint64 `json:"cached"`
	Shared          uint64 `json:"shared"`
	SlabReclaimable uint64 `json:"slab_reclaimable"`
	SwapTotal       uint64 `json:"swap_total"`
	SwapFree        uint64 `json:"swap_free"`
}

// FileSystem is one that is mounted.
type FileSystem struct {
	Path       string `json:"path"`
	Type       string `json:"type"`
	Size       uint64 `json:"size"`
	Free       uint64 `json:"free"`      // for root
	Available  uint64 `json:"available"` // for others
	Inodes     uint64 `json:"inodes"`
	InodesFree uint64 `json:"inodes_free"`
}

// Interface is one of the network.
type Interface struct {
	Name            string `json:"name"`
	ReceivedBytes   uint64 `json:"received_bytes"`
	ReceivedPackets uint64 `json:"received_packets"`
	ReceivedErrors  uint64 `json:"received_errors"`
	ReceivedDropped uint64 `json:"received_dropped"`
	SentBytes       uint64 `json:"sent_bytes"`
	SentPackets     uint64 `json:"sent_packets"`
	SentErrors      uint64 `json:"sent_errors"`
	SentDropped     uint64 `json:"sent_dropped"`
}

// Disk is a block device.
type Disk struct {
	Name         string `json:"name"`
	Reads        uint64 `json:"reads"`
	ReadBytes    uint64 `json:"read_bytes"`
	Writes       uint64 `json:"writes"`
	WrittenBytes uint64 `json:"written_bytes"`
}

// Stats measures the guest once. The guest does nothing for it before or after.
func (c *Client) Stats(ctx context.Context) (Stats, error) {
	r, err := call(ctx, c, "stats", agentpb.AgentClient.Stats, &agentpb.StatsRequest{})
	if unknownCall(err) {
		return Stats{}, fmt.Errorf("guest: stats: %w", ErrNoStats)
	}
	if err != nil {
		return Stats{}, err
	}
	const hundredth = 100
	ms := func(ns uint64) float64 { return float64(ns) / float64(time.Millisecond) }
	cpu, m := r.GetCpu(), r.GetMemory()
	out := Stats{
		UptimeMs: ms(uint64(max(r.UptimeNanos, 0))), CPUs: int(r.Cpus),
		CPU:   CPUTimes{User: ms(cpu.GetUser()), System: ms(cpu.GetSystem()), Idle: ms(cpu.GetIdle()), IOWait: ms(cpu.GetIowait()), IRQ: ms(cpu.GetIrq()), Steal: ms(cpu.GetSteal())},
		Load1: float64(r.Load1) / hundredth, Load5: float64(r.Load5) / hundredth, Load15: float64(r.Load15) / hundredth,
		Tasks: int(r.Tasks), TasksRunning: int(r.TasksRunning), Forks: r.Forks, OOMKills: r.OomKills, MajorFaults: r.MajorFaults,
		Memory: MemoryUse{
			Total: m.GetTotal(), Free: m.GetFree(), Available: m.GetAvailable(), Buffers: m.GetBuffers(), Cached: m.GetCached(),
			Shared: m.GetShared(), SlabReclaimable: m.GetSlabReclaimable(), SwapTotal: m.GetSwapTotal(), SwapFree: m.GetSwapFree(),
		},
		FileSystems: []FileSystem{}, Interfaces: []Interface{}, Disks: []Disk{},
	}
	for _, f := range firstItems(r.FileSystems) {
		out.FileSystems = append(out.FileSystems, FileSystem{
			Path: shortened(f.GetPath(), agentpb.MaxStatsPath), Type: shortened(f.GetType(), agentpb.MaxStatsName),
			Size: f.GetSize(), Free: f.GetFree(), Available: f.GetAvailable(), Inodes: f.GetInodes(), InodesFree: f.GetInodesFree(),
		})
	}
	for _, i := range firstItems(r.Interfaces) {
		out.Interfaces = append(out.Interfaces, Interface{
			Name:          shortened(i.GetName(), agentpb.MaxStatsName),
			ReceivedBytes: i.GetReceivedBytes(), ReceivedPackets: i.GetReceivedPackets(), ReceivedErrors: i.GetReceivedErrors(), ReceivedDropped: i.GetReceivedDropped(),
			SentBytes: i.GetSentBytes(), SentPackets: i.GetSentPackets(), SentErrors: i.GetSentErrors(), SentDropped: i.GetSentDropped(),
		})
	}
	for _, d := range firstItems(r.Disks) {
		out.Disks = append(out.Disks, Disk{
			Name: shortened(d.GetName(), agentpb.MaxStatsName), Reads: d.GetReads(), ReadBytes: d.GetReadBytes(), Writes: d.GetWrites(), WrittenBytes: d.GetWrittenBytes(),
		})
	}
	return out, nil
}

// firstItems are those of a guest's list that may be there.
func firstItems[T any](in []T) []T { return in[:min(len(in), agentpb.MaxStatsItems)] }
