package records

import (
	"errors"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Status is the state of a sandbox.
type Status string

// The values of Status.
const (
	// Creating: it boots for the first time, or is a clone or fork that has not answered yet.
	Creating Status = "creating"
	// Running: its guest runs.
	Running Status = "running"
	// Waiting: it comes up again, by a wake or a boot.
	Waiting Status = "waiting"
	// Asleep: it has no process, and comes back from its snapshot.
	Asleep Status = "asleep"
	// Stopped: its guest ended by itself or was shut down. It boots with its disk unchanged.
	Stopped Status = "stopped"
	// Crashed: its process was killed. Its memory is lost, and it boots with its disk unchanged.
	Crashed Status = "crashed"
	// Failed: earlier versions used it for a crashed sandbox that had never slept.
	Failed Status = "failed"
	// Expired: it has expired. It does not wake until it is extended.
	Expired Status = "expired"
)

// Statuses are all values of Status.
var Statuses = []Status{Creating, Running, Waiting, Asleep, Stopped, Crashed, Failed, Expired}

// Live reports whether a sandbox has or will have a process, so its status may change without its files.
func (s Status) Live() bool { return s == Creating || s == Running || s == Waiting }

// Sandbox is a row of a list. Its JSON is that of `drowse ls -o json`: fields may be added, and their meaning
// never changes.
type Sandbox struct {
	ID      string         `json:"id"`
	Name    string         `json:"name"`
	Class   lifetime.Class `json:"class"`
	Owner   string         `json:"owner,omitempty"`
	Purpose string         `json:"purpose,omitempty"`
	// Tags are the tags of the metadata and of the network policy, sorted and unique.
	Tags   []string `json:"tags"`
	Status Status   `json:"status"`
	// Host is which host of a cluster has it. It is empty if none has, as it sleeps in the cluster's store, and if it is
	// not shared.
	Host string `json:"host,omitempty"`
	// Confined reports that its guest runs in a confined process.
	Confined bool `json:"confined,omitempty"`
	// Problem is one line on why it failed, or which part of it is lost.
	Problem string `json:"problem,omitempty"`
	// Exit is how its guest has ended, if it is stopped.
	Exit string `json:"exit,omitempty"`

	Image   string `json:"image"`
	ImageID string `json:"image_id,omitempty"`
	Kernel  string `json:"kernel,omitempty"` // its id
	VCPUs   int    `json:"vcpus"`
	Memory  int    `json:"memory_mib"`
	Disk    int    `json:"disk_mib"`
	Network string `json:"network"`
	// Policy is the SHA-256 of its network policy as JSON; empty if it has no policy of its own.
	Policy string `json:"policy_sha256,omitempty"`
	Hooks  string `json:"hooks,omitempty"`
	// IdleSeconds is after how long it sleeps by itself; 0 is never.
	IdleSeconds int `json:"idle_seconds,omitempty"`

	Created time.Time     `json:"created"`
	Expires time.Time     `json:"expires,omitzero"`
	Keep    lifetime.Keep `json:"keep,omitzero"`
	// NextWake is when a timer wakes it next.
	NextWake time.Time `json:"next_wake,omitzero"`
	// Persist says what does not persist over its sleeps.
	Persist lifetime.Persist `json:"persist,omitzero"`
	// Removed is when it was removed. Only histories contain removed sandboxes.
	Removed time.Time `json:"removed,omitzero"`

	// Parent and ParentID are the VM that it was forked from. ForkPoint is the snapshot that it was made from.
	// Generation is how many forks lie between it and a VM that is not a fork.
	Parent     string `json:"parent,omitempty"`
	ParentID   string `json:"parent_id,omitempty"`
	ForkPoint  string `json:"fork_point,omitempty"`
	Generation int    `json:"generation,omitempty"`
	// Snapshot is the snapshot that it comes back from.
	Snapshot string `json:"snapshot,omitempty"`
}

// Sleep is a time that a sandbox was awake, with the sleep at its end.
type Sleep struct {
	Snapshot string `json:"snapshot"`
	// Awake is when it woke or booted, and Asleep when its sleep was committed.
	Awake  time.Time `json:"awake,omitzero"`
	Asleep time.Time `json:"asleep"`
	// Stored is what the snapshot takes on disk beyond shared data, and Raw the memory in it, in bytes.
	Stored int64  `json:"stored_bytes"`
	Raw    uint64 `json:"raw_bytes"`
	// CPUSeconds is the processor time of the VM's process in that time, with that of its vCPUs.
	CPUSeconds float64 `json:"cpu_seconds"`
	// NetworkIn and NetworkOut are the bytes that its policy let pass to and from the guest.
	NetworkIn  uint64 `json:"network_in_bytes"`
	NetworkOut uint64 `json:"network_out_bytes"`
}

// Run is a command that ran in a sandbox.
type Run struct {
	ID      string   `json:"id"`
	Command []string `json:"command"`
	User    string   `json:"user,omitempty"`
	// State is running, ended or unknown: package audit.
	State string    `json:"state"`
	Begun time.Time `json:"begun"`
	Ended time.Time `json:"ended,omitzero"`
	// Exit is nil if not known.
	Exit   *int `json:"exit,omitempty"`
	Signal int  `json:"signal,omitempty"`
	// CPUSeconds is as the guest reports it.
	CPUSeconds float64 `json:"cpu_seconds,omitempty"`
	In         int64   `json:"in_bytes"`
	Out        int64   `json:"out_bytes"`
	Error      string  `json:"error,omitempty"`
}

// Bounds of texts, in bytes, and of lists.
const (
	MaxOwner   = 128
	MaxTags    = 64
	maxName    = 64
	maxCommand = 4096 // all arguments of a run together
	maxArgs    = 256
	// MaxPage is the most rows of an answer, and DefaultPage the default.
	MaxPage     = 1000
	DefaultPage = 100
)

// ErrInvalid means that a request is out of bounds.
var ErrInvalid = errors.New("invalid record")

// cut keeps the first n bytes, or a few less so that no character is split.
func cut(s string, n int) string {
	if len(s) > n {
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}

// Bounded returns the run with its command and user cut to 4 KiB, 256 arguments and MaxOwner bytes, for an answer.
func (r Run) Bounded() Run {
	room := maxCommand
	argv := []string{}
	for _, a := range r.Command[:min(len(r.Command), maxArgs)] {
		if room <= 0 {
			break
		}
		a = cut(a, room)
		room -= len(a) + 1
		argv = append(argv, a)
	}
	r.Command, r.User = argv, cut(r.User, MaxOwner)
	return r
}
