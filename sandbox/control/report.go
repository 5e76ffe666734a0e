package control

import (
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// NoNetwork returns the error for a VM without a network.
func NoNetwork(name string) error {
	return fmt.Errorf("%w: %s has no network, and so no policy: VMs get one with --net %s", spec.ErrInvalid, name, spec.NetworkTAP)
}

// Report is what a VM's process reports of its start: one JSON object, when the guest is ready or has failed.
type Report struct {
	Name  string       `json:"name"`
	Error *ErrorReport `json:"error,omitempty"`
	// Begun is when the VM's process began to make the machine. The stages resume_entry, resume_ready and boot
	// count from it. It is by the host's clock; zero if not known.
	Begun  time.Time          `json:"begun,omitzero"`
	Stages map[string]float64 `json:"stages_ms,omitempty"`
	Faults uint64             `json:"faults"`
	// Pooled reports that the process came from a pool. Only the caller who started the VM gets it.
	Pooled bool `json:"pooled,omitempty"`
	// MiBTouched is how much RAM a restored guest has used so far.
	MiBTouched float64 `json:"mib_touched"`
	// FramesRead counts pieces of its snapshot that were read and decompressed for that. FramesCached counts
	// pieces from the store's cache of pages.
	FramesRead   uint64 `json:"frames_read"`
	FramesCached uint64 `json:"frames_cached"`
	// Hooks are hooks in the guest that failed after a wake or a restore.
	Hooks []guest.HookFailure `json:"hooks,omitempty"`
	// Network is nil if the VM has none.
	Network *spec.NetworkInfo `json:"network,omitempty"`
	// Awaited are the secrets that the VM waits for from its start on. Info has none.
	Awaited []spec.SecretFile `json:"awaited,omitempty"`
	// SecretsProblem is why secrets have no values after a wake or boot: programs that read them wait. Only the caller
	// who started the VM gets it.
	SecretsProblem string `json:"secrets_problem,omitempty"`
}

// Milliseconds returns d in milliseconds, with the microseconds as a fraction.
func Milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Take adds the numbers in the record of a sleep to its result.
func Take(r *spec.SleepResult, s state.SleepRecord) {
	r.BytesRaw, r.BytesStored, r.BytesShared = s.Raw, s.Stored, s.Shared
	r.Awake, r.Asleep, r.CPUSeconds, r.NetworkIn, r.NetworkOut = s.Awake, s.Asleep, s.CPUSeconds, s.NetworkIn, s.NetworkOut
}

// Info is what a running VM reports of itself.
type Info struct {
	Report
	PID int `json:"pid"`
	// Confined reports that the guest is in a confined process, a child of PID.
	Confined bool `json:"confined"`
	// SeccompLog reports that it is, and that its forbidden system calls are only logged: see SeccompEnv.
	SeccompLog bool `json:"seccomp_log,omitempty"`
	// Hung reports that the guest loops with interrupts off.
	Hung bool `json:"hung"`
	// Problem says more about that.
	Problem string `json:"problem,omitempty"`
	// NoSpace reports that a write of the guest waits for space on the host's file system. The VM is paused until
	// there is space. It can still be put to sleep.
	NoSpace bool `json:"no_space,omitempty"`
	// Falling reports that the VM is being put to sleep.
	Falling bool `json:"falling,omitempty"`
	// Cgroup has counters of the confined process.
	Cgroup Cgroup `json:"cgroup,omitzero"`
}

// Cgroup are counters of the cgroup of a VM's confined process: 0 without the controller.
type Cgroup struct {
	ThrottledMs float64 `json:"throttled_ms,omitempty"`
	Read        int64   `json:"read,omitempty"`
	Written     int64   `json:"written,omitempty"`
}

// TagsResult says what SetTags did.
type TagsResult struct {
	Name string `json:"name"`
	// Tags are all tags of the VM now.
	Tags []string `json:"tags"`
	// Live reports that the VM runs and that rules of other VMs already use the tags. Otherwise they apply when
	// the VM comes back.
	Live bool `json:"live"`
}

// NoNetworkTags returns the error for a VM whose tags would have no network to count in.
func NoNetworkTags(name string) error {
	return fmt.Errorf("%w: %s has no network in which tags would count: VMs get one with --net %s", spec.ErrInvalid, name, spec.NetworkTAP)
}

// TagsOf returns the tags of a record.
func TagsOf(r *state.Record, live bool) TagsResult {
	return TagsResult{Name: r.Spec.Name, Tags: append([]string{}, r.Spec.Tags...), Live: live}
}
