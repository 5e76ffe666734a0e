package spec

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/guest/report"
)

// SnapshotInfo describes a snapshot in the store.
type SnapshotInfo struct {
	ID      string    `json:"id"`
	VM      string    `json:"vm"` // the VM's name at that time
	Owner   string    `json:"vm_id,omitempty"`
	Kind    string    `json:"kind"` // "sleep", "named", "disk", "fork" or "abandoned"
	Note    string    `json:"note,omitempty"`
	Created time.Time `json:"created"`
	RAM     uint64    `json:"ram_bytes"` // 0 for a snapshot of a disk
	// Stored is what its files take on disk. Exclusive is the part of that which no other snapshot shares: the
	// bytes that its removal frees.
	Stored    int64 `json:"stored_bytes"`
	Exclusive int64 `json:"exclusive_bytes"`
	// Base is the snapshot that this one is a delta of, empty for a full one. Depth is the number of deltas
	// between it and a full one. The base may be removed: a snapshot has everything that it needs.
	Base  string `json:"base,omitempty"`
	Depth int    `json:"depth"`
	// Tags protect it from pruning: TagSnapshot.
	Tags []string `json:"tags,omitempty"`
	// Kept reports whether it has tags or was imported.
	Kept bool `json:"kept,omitempty"`
	// Problem is why it cannot be used; empty if no problem is known.
	Problem string `json:"problem,omitempty"`
}

// Freed is what a sweep deleted.
type Freed struct {
	Snapshots int `json:"snapshots"`
	Layers    int `json:"layers"`
	// CacheFiles counts deleted files with decompressed pages of removed snapshots.
	CacheFiles int   `json:"cache_files"`
	Bytes      int64 `json:"bytes"`
	// Problems are histories that a removal could not keep or a sweep could not delete. They do not block the
	// sweep.
	Problems []string `json:"problems,omitempty"`
}

// Add adds what something else has freed.
func (f *Freed) Add(more Freed) {
	f.Snapshots, f.Layers, f.CacheFiles, f.Bytes = f.Snapshots+more.Snapshots, f.Layers+more.Layers, f.CacheFiles+more.CacheFiles, f.Bytes+more.Bytes
	f.Problems = append(f.Problems, more.Problems...)
}

// Promoted is a part of a VM that was copied to the host.
type Promoted = report.Promoted

// Persisted says what a sleep did about data that does not persist.
type Persisted struct {
	Promoted []Promoted `json:"promoted,omitempty"`
	Dropped  []Dropped  `json:"dropped,omitempty"`
	// DiskBytes is how much data the writable disk has, if a limit is set.
	DiskBytes int64 `json:"disk_bytes,omitempty"`
	// Problems are failures that were ignored. Data whose promotion failed was not dropped.
	Problems []string `json:"problems,omitempty"`
}

// Dropped says what was removed from a directory, as the guest reports it.
type Dropped struct {
	Path    string `json:"path"`
	Entries uint64 `json:"entries"`
	// Bytes are the bytes on the guest's disk that no other name has.
	Bytes uint64 `json:"bytes"`
	// Kept counts entries that stay, because a promotion may not have copied them in this state. Mounts counts
	// entries that something is mounted on.
	Kept   uint64 `json:"kept,omitempty"`
	Mounts uint64 `json:"mounts,omitempty"`
}

// PolicyResult says what SetPolicy did.
type PolicyResult struct {
	Name string `json:"name"`
	// Live reports that the VM runs and that the new policy applies to its packets. Otherwise the policy applies
	// when the VM comes back.
	Live    bool         `json:"live"`
	Network *NetworkInfo `json:"network,omitempty"`
}

// Capacity says what a host has for its VMs, in bytes.
type Capacity struct {
	// MemoryTotal is the host's memory. MemoryAvailable is what programs can still have of it; absent if the kernel
	// does not say.
	MemoryTotal     int64 `json:"memory_total_bytes"`
	MemoryAvailable int64 `json:"memory_available_bytes,omitempty"`
	// AwakeMemory is the RAM of awake VMs, and AwakeMemoryMost what they may have together.
	AwakeMemory     int64 `json:"awake_memory_bytes"`
	AwakeMemoryMost int64 `json:"awake_memory_most_bytes"`
	// DiskTotal and DiskFree are of the file system with the host's files.
	DiskTotal int64 `json:"disk_total_bytes"`
	DiskFree  int64 `json:"disk_free_bytes"`
}

// SleepResult says what a sleep did.
type SleepResult struct {
	Name        string `json:"name"`
	Snapshot    string `json:"snapshot"`
	BytesRaw    uint64 `json:"bytes_raw"`
	BytesStored int64  `json:"bytes_stored"`
	// BytesShared are in files that the snapshot shares with the one before. PagesChanged is how many pages may
	// differ from it.
	BytesShared  int64  `json:"bytes_shared"`
	PagesChanged uint64 `json:"pages_changed"`
	// PagesFree are changed pages that the guest does not use. They are not stored.
	PagesFree  uint64             `json:"pages_free"`
	Stages     map[string]float64 `json:"stages_ms"`
	Faults     uint64             `json:"faults"`
	MiBTouched float64            `json:"mib_touched"`
	// Awake is when the VM's process began, and Asleep when the sleep was committed. Both are zero if there was no
	// sleep. The others are of the time between, as in SleepRecord.
	Awake      time.Time `json:"awake,omitzero"`
	Asleep     time.Time `json:"asleep,omitzero"`
	CPUSeconds float64   `json:"cpu_seconds,omitempty"`
	NetworkIn  uint64    `json:"network_in_bytes,omitempty"`
	NetworkOut uint64    `json:"network_out_bytes,omitempty"`
	// Hooks are hooks in the guest that failed and were ignored, or failed afterwards.
	Hooks []report.HookFailure `json:"hooks,omitempty"`
	// HostHooks are hooks on the host that failed before a sleep and were ignored.
	HostHooks []report.HookFailure `json:"host_hooks,omitempty"`
	// Persist is what the sleep did about data that does not persist; nil if all data persists.
	Persist *Persisted `json:"persist,omitempty"`
	// Problem is what failed after a sleep. The VM sleeps all the same.
	Problem string `json:"problem,omitempty"`
}

// Note adds a failure after the sleep.
func (r *SleepResult) Note(err error) {
	if err != nil {
		r.Problem = err.Error()
	}
}

// SleepOptions change a sleep. The zero value follows the VM's Spec.
type SleepOptions struct {
	// Hooks overrides the policy in the VM's Spec.
	Hooks HookPolicy `json:"hooks,omitempty"`
	// Durable also shares the sandbox with the hosts of this host's cluster, and waits until they can wake it. If that
	// fails it sleeps here alone.
	Durable bool `json:"durable,omitempty"`
}

// MigrateOptions say where a sandbox moves.
type MigrateOptions struct {
	// To is the name of a host of the cluster.
	To string `json:"to"`
	// Hooks overrides the policy in the VM's Spec for the sleep.
	Hooks HookPolicy `json:"hooks,omitempty"`
}

// MigrateResult says what a move to another host did.
type MigrateResult struct {
	Name string `json:"name"`
	From string `json:"from"`
	To   string `json:"to"`
	// Asleep reports that it slept before: then it sleeps in the cluster's store, and no host has it.
	Asleep bool `json:"asleep,omitempty"`
	// Snapshot is the one in which it went from host to host.
	Snapshot string `json:"snapshot"`
	// Stages are those before and after the guest was stopped: ahead (it runs); pause (until its process was gone),
	// publish (until other hosts could have it), wake (until it answered on its new host).
	Stages map[string]float64 `json:"stages_ms"`
	// Downtime is from the end of its hooks before the sleep until its agent answered, by the clock of the first host. A
	// program whose memory is still on its way may go on later.
	Downtime float64 `json:"downtime_ms"`
	// BytesAhead and BytesPause are what was put into the store while it ran, and while it did not.
	BytesAhead int64 `json:"bytes_ahead"`
	BytesPause int64 `json:"bytes_pause"`
	// Problem is what failed although it has moved.
	Problem string `json:"problem,omitempty"`
}

// MaxNote bounds the note of a snapshot, in bytes.
const MaxNote = 64 << 10

// CheckNote returns ErrInvalid for a note that a snapshot cannot have: one with characters that cannot be printed.
func CheckNote(note string) error {
	if len(note) > MaxNote || strings.ContainsFunc(note, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) {
		return InField("note", fmt.Errorf("%w: the note of a snapshot: use at most %d bytes of printable characters", ErrInvalid, MaxNote))
	}
	return nil
}

// SnapshotOptions describe a snapshot of a running VM.
type SnapshotOptions struct {
	// Note is stored with the snapshot.
	Note string `json:"note,omitempty"`
	// Hooks overrides the policy in the VM's Spec.
	Hooks HookPolicy `json:"hooks,omitempty"`
	// DiskOnly captures the disk without memory and vCPUs: the guest's file system is frozen for a moment, and the
	// guest continues to compute.
	DiskOnly bool `json:"disk_only,omitempty"`
}

// Stats are what a running VM uses, as its guest and its host count it.
type Stats struct {
	Name string    `json:"name"`
	Time time.Time `json:"time"`
	Host HostStats `json:"host"`
	// Guest is the guest's own count; nil if the guest did not answer, and then Problem says why.
	Guest   *report.Stats `json:"guest,omitempty"`
	Problem string        `json:"problem,omitempty"`
}

// HostStats are those of a VM's process and of its children, of which one holds the guest if it is confined. They
// count since the process began: at the VM's last boot, wake or fork, or earlier if it came from a Pool. Sizes are in
// bytes.
type HostStats struct {
	PID int `json:"pid"`
	// Confined reports that the guest is in a confined process.
	Confined bool `json:"confined"`
	// AwakeMs is the age of the process.
	AwakeMs float64 `json:"awake_ms"`
	// CPUUserMs and CPUSystemMs are their processor time, with that of the vCPUs, in steps of 10: proc_pid_stat(5).
	CPUUserMs   float64 `json:"cpu_user_ms"`
	CPUSystemMs float64 `json:"cpu_system_ms"`
	// MemoryPrivate is RAM that one process has alone, with the guest's. MemoryShared is RAM that processes share, such
	// as pages of forks, for each process. MemorySwapped is in the swap: proc_pid_smaps(5).
	MemoryPrivate uint64 `json:"memory_private"`
	MemoryShared  uint64 `json:"memory_shared"`
	MemorySwapped uint64 `json:"memory_swapped"`
	// CPUThrottledMs is how long its limit of processors has held the guest up. DiskRead and DiskWritten are bytes from
	// and to the host's block devices. They are counters of the confined process's cgroup: 0 without one.
	CPUThrottledMs float64 `json:"cpu_throttled_ms"`
	DiskRead       int64   `json:"disk_read"`
	DiskWritten    int64   `json:"disk_written"`
	// DiskUsed is what the VM has made the host store, in bytes, as its disk quota counts; DiskQuota is that, 0 for none.
	DiskUsed  int64 `json:"disk_used"`
	DiskQuota int64 `json:"disk_quota"`
	// Faults and MiBTouched belong to a VM that came back from a snapshot: how often its guest waited for RAM, and
	// how much RAM was loaded. 0 after a boot.
	Faults     uint64  `json:"faults"`
	MiBTouched float64 `json:"mib_touched"`
	// Hung reports that the guest loops with interrupts off.
	Hung bool `json:"hung"`
}
