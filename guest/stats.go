package guest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/report"
)

// ErrNoStats: the agent is too old for Stats.
var ErrNoStats = errors.New("the agent in the guest does not know this call: start the VM anew, with an agent of this version")

// Counters of a guest's kernel.
type (
	Stats      = report.Stats
	CPUTimes   = report.CPUTimes
	MemoryUse  = report.MemoryUse
	FileSystem = report.FileSystem
	Interface  = report.Interface
	Disk       = report.Disk
)

// Stats measures the guest once. The guest does no work for it before or after.
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

// firstItems returns as many items of a guest's list as the protocol allows.
func firstItems[T any](in []T) []T { return in[:min(len(in), agentpb.MaxStatsItems)] }
