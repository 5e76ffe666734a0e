package spec

import (
	"time"

	"github.com/drowse-vm/drowse/guest/report"
)

// SnapshotInfo describes a snapshot in the store.
type SnapshotInfo struct {
	ID      string    `json:"id"`
	VM      string    `json:"vm"` // the name that it had then
	Owner   string    `json:"vm_id,omitempty"`
	Kind    string    `json:"kind"` // "sleep", "named", "disk", "fork" or "abandoned"
	Note    string    `json:"note,omitempty"`
	Created time.Time `json:"created"`
	RAM     uint64    `json:"ram_bytes"` // 0 for one of a disk
	// Stored is what its files take on disk, and Exclusive what of that no other
	// snapshot has as well: what removing it frees.
	Stored    int64 `json:"stored_bytes"`
	Exclusive int64 `json:"exclusive_bytes"`
	// Base is the snapshot that it is a delta of, empty for a full one, and Depth
	// how many deltas lie between it and a full one. The base may be gone: a
	// snapshot has all that it needs.
	Base  string `json:"base,omitempty"`
	Depth int    `json:"depth"`
	// Tags keep it from being pruned: TagSnapshot.
	Tags []string `json:"tags,omitempty"`
	// Kept says that it has tags, or was imported.
	Kept bool `json:"kept,omitempty"`
	// Problem is why it cannot be used, empty if nothing is known.
	Problem string `json:"problem,omitempty"`
}

// Freed is what a sweep has deleted.
type Freed struct {
	Snapshots int `json:"snapshots"`
	Layers    int `json:"layers"`
	// CacheFiles had decompressed pages of snapshots that are gone.
	CacheFiles int   `json:"cache_files"`
	Bytes      int64 `json:"bytes"`
	// Problems are of histories, and in nobody's way: one that a removal could not keep, or a sweep could not delete.
	Problems []string `json:"problems,omitempty"`
}

// Promoted is a copy of a part of a VM on the host.
type Promoted = report.Promoted

// Persisted says what a sleep has done about what does not persist.
type Persisted struct {
	Promoted []Promoted `json:"promoted,omitempty"`
	Dropped  []Dropped  `json:"dropped,omitempty"`
	// DiskBytes is how much data the writable disk has, if that has a limit.
	DiskBytes int64 `json:"disk_bytes,omitempty"`
	// Problems are what has failed and was ignored. What was to be promoted and was not has not been dropped.
	Problems []string `json:"problems,omitempty"`
}

// Dropped says what has gone from a directory, by the guest's word.
type Dropped struct {
	Path    string `json:"path"`
	Entries uint64 `json:"entries"`
	// Bytes are those on the guest's disk that no other name has.
	Bytes uint64 `json:"bytes"`
	// Kept are entries that stay, since a promotion may not have them as they are, and Mounts those on which something
	// is mounted.
	Kept   uint64 `json:"kept,omitempty"`
	Mounts uint64 `json:"mounts,omitempty"`
}

// PolicyResult says what SetPolicy has done.
type PolicyResult struct {
	Name string `json:"name"`
	// Live says that the VM runs and packets are judged by the new policy; else it is
	// the one that the VM will be brought back with.
	Live    bool         `json:"live"`
	Network *NetworkInfo `json:"network,omitempty"`
}

// SleepResult says what a sleep has done.
type SleepResult struct {
	Name        string `json:"name"`
	Snapshot    string `json:"snapshot"`
	BytesRaw    uint64 `json:"bytes_raw"`
	BytesStored int64  `json:"bytes_stored"`
	// BytesShared are in files that the snapshot has in common with the one
	// before, and PagesChanged how many pages may differ from it.
	BytesShared  int64  `json:"bytes_shared"`
	PagesChanged uint64 `json:"pages_changed"`
	// PagesFree are those of them that the guest has no use for. They are not stored.
	PagesFree  uint64             `json:"pages_free"`
	Stages     map[string]float64 `json:"stages_ms"`
	Faults     uint64             `json:"faults"`
	MiBTouched float64            `json:"mib_touched"`
	// Awake is when the VM's process began, and Asleep when the sleep was committed; both are zero for what was no
	// sleep. The others are of the time between, as in SleepRecord.
	Awake      time.Time `json:"awake,omitzero"`
	Asleep     time.Time `json:"asleep,omitzero"`
	CPUSeconds float64   `json:"cpu_seconds,omitempty"`
	NetworkIn  uint64    `json:"network_in_bytes,omitempty"`
	NetworkOut uint64    `json:"network_out_bytes,omitempty"`
	// Hooks are those in the guest that have failed and were ignored, or failed
	// afterwards.
	Hooks []report.HookFailure `json:"hooks,omitempty"`
	// HostHooks are those on the host that have failed before a sleep and were ignored.
	HostHooks []report.HookFailure `json:"host_hooks,omitempty"`
	// Persist is what was done about what does not persist; nil if all does.
	Persist *Persisted `json:"persist,omitempty"`
	// Problem is what could not be done after a sleep. The VM sleeps all the same.
	Problem string `json:"problem,omitempty"`
}

// Note adds what has failed after the sleep.
func (r *SleepResult) Note(err error) {
	if err != nil {
		r.Problem = err.Error()
	}
}

// SleepOptions change a sleep. The zero value goes by the VM's Spec.
type SleepOptions struct {
	// Hooks is what holds instead of what the VM's Spec says.
	Hooks HookPolicy `json:"hooks,omitempty"`
}

// SnapshotOptions say what a snapshot of a running VM is like.
type SnapshotOptions struct {
	// Note is kept with it.
	Note string `json:"note,omitempty"`
	// Hooks is what holds instead of what the VM's Spec says.
	Hooks HookPolicy `json:"hooks,omitempty"`
	// DiskOnly takes the disk without memory and vCPUs: the guest's file system is
	// frozen for a moment, and the guest computes on meanwhile.
	DiskOnly bool `json:"disk_only,omitempty"`
}

// Stats are what a running VM uses, as its guest and its host count it.
type Stats struct {
	Name string    `json:"name"`
	Time time.Time `json:"time"`
	Host HostStats `json:"host"`
	// Guest is what the guest says; nil if it could not be asked, and Problem says why.
	Guest   *report.Stats `json:"guest,omitempty"`
	Problem string        `json:"problem,omitempty"`
}

// HostStats are of a VM's process, since it began: at the VM's last boot, wake or fork, or
// before that if it came from a Pool. Sizes are in bytes.
type HostStats struct {
	PID int `json:"pid"`
	// AwakeMs is how long the process has been there.
	AwakeMs float64 `json:"awake_ms"`
	// CPUUserMs and CPUSystemMs are its processor time, that of its vCPUs included, in steps of
	// 10: fields 14 and 15 of proc_pid_stat(5).
	CPUUserMs   float64 `json:"cpu_user_ms"`
	CPUSystemMs float64 `json:"cpu_system_ms"`
	// MemoryPrivate is RAM that is its own alone, the guest's included, MemoryShared what it
	// has in common with others, such as pages that forks share, and MemorySwapped what is
	// in the swap: proc_pid_smaps(5).
	MemoryPrivate uint64 `json:"memory_private"`
	MemoryShared  uint64 `json:"memory_shared"`
	MemorySwapped uint64 `json:"memory_swapped"`
	// Faults and MiBTouched are those of a VM that came back from a snapshot: how often its
	// guest had to wait for RAM, and how much of it has been loaded. 0 after a boot.
	Faults     uint64  `json:"faults"`
	MiBTouched float64 `json:"mib_touched"`
	// Hung says that the guest loops with interrupts off.
	Hung bool `json:"hung"`
}
