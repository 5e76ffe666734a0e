// Package report has what is told of a guest in documents: in results, errors and the bodies of the HTTP API. It
// imports nothing, so that programs without a VM have it.
package report

import "fmt"

// HookEvent is what hooks are run for, and their first argument: packages guest and hosthooks have the events.
type HookEvent string

// HookFailure is one hook, in the guest or on the host, that did not do what it should. All of one in the guest is what
// the guest says, cut and made printable.
type HookFailure struct {
	// Name is its file's, or the one that its program has given it; "*" is all. Of a guest it has at most 255 bytes, and
	// more for what had to be quoted.
	Name    string    `json:"name"`
	Event   HookEvent `json:"event"`
	Problem string    `json:"problem"`          // at most 256 bytes of a guest, and 1 KiB of the host
	Output  string    `json:"output,omitempty"` // the end of what it printed, at most 1 KiB
}

// String is one line.
func (f HookFailure) String() string {
	s := fmt.Sprintf("hook %s, %s: %s", f.Name, f.Event, f.Problem)
	if f.Output != "" {
		s += ": " + f.Output
	}
	return s
}

// Promoted is a copy that was made.
type Promoted struct {
	Path string `json:"path"`
	// At is where the copy is, on the host.
	At      string `json:"at"`
	Entries int64  `json:"entries"`
	Bytes   int64  `json:"bytes"`
	// Skipped are the names of links out of the tree, which are left out, the first 100 of SkippedCount. Devices, pipes
	// and sockets are left out as well.
	Skipped      []string `json:"skipped,omitempty"`
	SkippedCount int64    `json:"skipped_count,omitempty"`
}

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
