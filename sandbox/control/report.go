package control

import (
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// NoNetwork says that a VM has none.
func NoNetwork(name string) error {
	return fmt.Errorf("%w: %s has no network, and so no policy: VMs get one with --net %s", spec.ErrInvalid, name, spec.NetworkTAP)
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

// Take adds what the record of a sleep says to its result.
func Take(r *spec.SleepResult, s state.SleepRecord) {
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
