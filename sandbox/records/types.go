package records

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Status is what a sandbox is doing.
type Status string

// The values of Status.
const (
	// Creating: it is booting for the first time, or is a clone or fork that has yet to answer.
	Creating Status = "creating"
	// Running: its guest runs.
	Running Status = "running"
	// Waiting: it is on its way up again, by a wake or a boot.
	Waiting Status = "waiting"
	// Asleep: it has no process, and comes back as of its snapshot.
	Asleep Status = "asleep"
	// Stopped: its guest has ended by itself, or was shut down. It boots with its disk as it is.
	Stopped Status = "stopped"
	// Crashed: its process was killed. What it had in memory is lost, and it boots with its disk as it is.
	Crashed Status = "crashed"
	// Failed: what a crashed one that had never slept was called by earlier versions.
	Failed Status = "failed"
	// Expired: its time is over. It does not wake before it is extended.
	Expired Status = "expired"
)

// Statuses are all values of Status.
var Statuses = []Status{Creating, Running, Waiting, Asleep, Stopped, Crashed, Failed, Expired}

// Live says that a sandbox has a process, or is about to, so that its status may change without a change of its files.
func (s Status) Live() bool { return s == Creating || s == Running || s == Waiting }

// Sandbox is a row of a list. Its JSON is that of `drowse ls -o json`: fields are added, and never change their
// meaning.
type Sandbox struct {
	ID      string         `json:"id"`
	Name    string         `json:"name"`
	Class   lifetime.Class `json:"class"`
	Owner   string         `json:"owner,omitempty"`
	Purpose string         `json:"purpose,omitempty"`
	// Tags are those of the metadata and of the network policy, sorted, each once.
	Tags   []string `json:"tags"`
	Status Status   `json:"status"`
	// Problem is one line on why it has failed, or what of it is lost.
	Problem string `json:"problem,omitempty"`

	Image   string `json:"image"`
	ImageID string `json:"image_id,omitempty"`
	Kernel  string `json:"kernel,omitempty"` // its id
	VCPUs   int    `json:"vcpus"`
	Memory  int    `json:"memory_mib"`
	Disk    int    `json:"disk_mib"`
	Network string `json:"network"`
	// Policy is the SHA-256 of its network policy as JSON, empty if it has none of its own.
	Policy string `json:"policy_sha256,omitempty"`
	Hooks  string `json:"hooks,omitempty"`
	// IdleSeconds is after what time it sleeps by itself; 0 is never.
	IdleSeconds int `json:"idle_seconds,omitempty"`

	Created time.Time     `json:"created"`
	Expires time.Time     `json:"expires,omitzero"`
	Keep    lifetime.Keep `json:"keep,omitzero"`
	// NextWake is when it is woken by a timer.
	NextWake time.Time `json:"next_wake,omitzero"`
	// Persist says what of it does not persist over its sleeps.
	Persist lifetime.Persist `json:"persist,omitzero"`
	// Removed is when it was removed. Only a history has such ones.
	Removed time.Time `json:"removed,omitzero"`

	// Parent and ParentID are the VM that it is a fork of, ForkPoint the snapshot that it was made from, and Generation
	// how many forks lie between it and a VM that is none.
	Parent     string `json:"parent,omitempty"`
	ParentID   string `json:"parent_id,omitempty"`
	ForkPoint  string `json:"fork_point,omitempty"`
	Generation int    `json:"generation,omitempty"`
	// Snapshot is what it comes back from.
	Snapshot string `json:"snapshot,omitempty"`
}

// Sleep is a time for which a sandbox was awake, with its end.
type Sleep struct {
	Snapshot string `json:"snapshot"`
	// Awake is when it woke or booted, and Asleep when its sleep was committed.
	Awake  time.Time `json:"awake,omitzero"`
	Asleep time.Time `json:"asleep"`
	// Stored is what the snapshot takes on disk besides what it shares, and Raw the memory in it, in bytes.
	Stored int64  `json:"stored_bytes"`
	Raw    uint64 `json:"raw_bytes"`
	// CPUSeconds is processor time of the VM's process in that time, that of its vCPUs included.
	CPUSeconds float64 `json:"cpu_seconds"`
	// NetworkIn and NetworkOut are bytes that its policy let pass to the guest, and from it.
	NetworkIn  uint64 `json:"network_in_bytes"`
	NetworkOut uint64 `json:"network_out_bytes"`
}

// Run is a command that was run in a sandbox.
type Run struct {
	ID      string   `json:"id"`
	Command []string `json:"command"`
	User    string   `json:"user,omitempty"`
	// State is running, ended or unknown: package audit.
	State string    `json:"state"`
	Begun time.Time `json:"begun"`
	Ended time.Time `json:"ended,omitzero"`
	// Exit is nil where it is not known.
	Exit   *int `json:"exit,omitempty"`
	Signal int  `json:"signal,omitempty"`
	// CPUSeconds is the guest's word.
	CPUSeconds float64 `json:"cpu_seconds,omitempty"`
	In         int64   `json:"in_bytes"`
	Out        int64   `json:"out_bytes"`
	Error      string  `json:"error,omitempty"`
}

// Bounds of texts, in bytes, and of lists.
const (
	MaxOwner   = 128
	MaxPurpose = 1024
	MaxTag     = 64
	MaxTags    = 64
	maxName    = 64
	maxCommand = 4096 // all arguments of a run together
	maxArgs    = 256
	// MaxPage is the most rows of an answer, and DefaultPage how many there are if nothing is said.
	MaxPage     = 1000
	DefaultPage = 100
)

// ErrInvalid: what is asked for is out of bounds.
var ErrInvalid = errors.New("invalid record")

// CheckText refuses a text that is too long, or that a terminal or a log could take for something else.
func CheckText(what, text string, limit int) error {
	if len(text) > limit {
		return fmt.Errorf("%w: %s of %d bytes: use %d at most", ErrInvalid, what, len(text), limit)
	}
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("%w: %s %q: use printable characters in one line", ErrInvalid, what, text)
	}
	return nil
}

// CheckTags refuses tags that are too many, too long, empty or unprintable.
func CheckTags(tags []string) error {
	if len(tags) > MaxTags {
		return fmt.Errorf("%w: %d tags: use %d at most", ErrInvalid, len(tags), MaxTags)
	}
	for _, t := range tags {
		if t == "" || strings.ContainsAny(t, ", ") {
			return fmt.Errorf("%w: tag %q: use a word without spaces and commas, as team or team=web", ErrInvalid, t)
		}
		if err := CheckText("tag", t, MaxTag); err != nil {
			return err
		}
	}
	return nil
}

// cut keeps the first n bytes or a few less, without half of a character.
func cut(s string, n int) string {
	if len(s) > n {
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}

// Bounded is the run as an answer has it: its command and user are cut to 4 KiB, 256 arguments and MaxOwner bytes.
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
