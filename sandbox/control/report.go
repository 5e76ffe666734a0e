package control

import (
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Promoted is a copy of a part of a VM on the host.
type Promoted = guest.Promoted

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

// NoNetwork says that a VM has none.
func NoNetwork(name string) error {
	return fmt.Errorf("%w: %s has no network, and so no policy: VMs get one with --net %s", spec.ErrInvalid, name, spec.NetworkTAP)
}

// PolicyResult says what SetPolicy has done.
type PolicyResult struct {
	Name string `json:"name"`
	// Live says that the VM runs and packets are judged by the new policy; else it is
	// the one that the VM will be brought back with.
	Live    bool              `json:"live"`
	Network *spec.NetworkInfo `json:"network,omitempty"`
}

// Report is what a VM's process says of its start: one JSON object, when the guest
// is ready or cannot be.
type Report struct {
	Name  string       `json:"name"`
	Error *ErrorReport `json:"error,omitempty"`
	// Begun is when the VM's process began to make the machine: resume_entry, resume_ready and boot of the stages are
	// counted from it. By the host's clock; zero where it is not known.
	Begun  time.Time          `json:"begun,omitzero"`
	Stages map[string]float64 `json:"stages_ms,omitempty"`
	Faults uint64             `json:"faults"`
	// Pooled says that the process had stood by in a pool. Only whoever has started the VM is told.
	Pooled bool `json:"pooled,omitempty"`
	// MiBTouched is how much RAM a restored guest has used so far.
	MiBTouched float64 `json:"mib_touched"`
	// FramesRead are pieces of its snapshot that were read and decompressed for that, and
	// FramesCached those that were in the store's cache of pages.
	FramesRead   uint64 `json:"frames_read"`
	FramesCached uint64 `json:"frames_cached"`
	// Hooks are those in the guest that failed after a wake or a restore.
	Hooks []guest.HookFailure `json:"hooks,omitempty"`
	// Network is nil without one.
	Network *spec.NetworkInfo `json:"network,omitempty"`
}

// Milliseconds has the microseconds as a fraction.
func Milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

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
	Hooks []guest.HookFailure `json:"hooks,omitempty"`
	// HostHooks are those on the host that have failed before a sleep and were ignored.
	HostHooks []state.HostHookFailure `json:"host_hooks,omitempty"`
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

// Take adds what the record of the sleep says.
func (r *SleepResult) Take(s state.SleepRecord) {
	r.BytesRaw, r.BytesStored, r.BytesShared = s.Raw, s.Stored, s.Shared
	r.Awake, r.Asleep, r.CPUSeconds, r.NetworkIn, r.NetworkOut = s.Awake, s.Asleep, s.CPUSeconds, s.NetworkIn, s.NetworkOut
}

// Info is what a running VM says of itself.
type Info struct {
	Report
	PID int `json:"pid"`
	// Hung says that the guest loops with interrupts off.
	Hung bool `json:"hung"`
	// Problem says more of that.
	Problem string `json:"problem,omitempty"`
	// NoSpace says that a write of the guest waits for space on the host's file system. The VM is paused until there is
	// some, but for what is done with it as a whole: it can be put to sleep.
	NoSpace bool `json:"no_space,omitempty"`
	// Falling says that it is being put to sleep.
	Falling bool `json:"falling,omitempty"`
}

// TagsResult says what SetTags has done.
type TagsResult struct {
	Name string `json:"name"`
	// Tags are all that the VM has now.
	Tags []string `json:"tags"`
	// Live says that the VM runs and that the rules of other VMs go by them; else they are those that the VM
	// will be brought back with.
	Live bool `json:"live"`
}

// NoNetworkTags says that a VM has no network in which tags would count.
func NoNetworkTags(name string) error {
	return fmt.Errorf("%w: %s has no network in which tags would count: VMs get one with --net %s", spec.ErrInvalid, name, spec.NetworkTAP)
}

// TagsOf are those of a record.
func TagsOf(r *state.Record, live bool) TagsResult {
	return TagsResult{Name: r.Spec.Name, Tags: append([]string{}, r.Spec.Tags...), Live: live}
}
