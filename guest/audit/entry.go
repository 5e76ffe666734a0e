package audit

import "time"

// Bounds of a trail on disk: the size of a file in bytes, and the number of older files beside the current one.
const (
	MaxFile   = 16 << 20
	KeptFiles = 3
)

// Status says what is known about an action.
type Status string

// The values of Status.
const (
	// Running: it has not ended, and the process that began it still runs.
	Running Status = "running"
	Ended   Status = "ended"
	// Unknown: the process that began it is gone and did not record how it ended.
	Unknown Status = "unknown"
	// Damaged: a line cannot be read. The entry has no other field.
	Damaged Status = "damaged"
)

// Entry is one action of a trail.
type Entry struct {
	ID     string `json:"id,omitempty"`
	Status Status `json:"status"`
	// Begin and End are by the host's clock; zero if unknown.
	Begin time.Time `json:"begin,omitzero"`
	End   time.Time `json:"end,omitzero"`
	// Elapsed is in milliseconds, by the monotonic clock.
	Elapsed float64 `json:"elapsed_ms,omitempty"`
	Action
	// By is the process that asked for the action.
	By      *Process `json:"by,omitempty"`
	Outcome *Outcome `json:"outcome,omitempty"`
}

// Process is the process that asked for an action, as it and the kernel of its host describe it: the user of package
// guest.
type Process struct {
	PID int `json:"pid"`
	// UID and GID are the effective ids.
	UID int `json:"uid"`
	GID int `json:"gid"`
	// LoginUID is the user who logged in to the session, regardless of su or sudo since; nil if the host does not
	// record it (proc_pid_loginuid(5)).
	LoginUID *uint32 `json:"login_uid,omitempty"`
	// Comm is the name of the program, at most 15 bytes.
	Comm string `json:"comm"`
	// PPID and Parent are the id and name of the parent process.
	PPID   int    `json:"ppid"`
	Parent string `json:"parent,omitempty"`
	// Start is when the process started, in clock ticks since the host's boot, and Boot the id of that boot. They
	// tell the process apart from others with the same PID.
	Start uint64 `json:"start"`
	Boot  string `json:"boot"`
}

// Trailer describes a trail.
type Trailer struct {
	Head
	// First is the number of the oldest file that is left. Older files, and what they recorded, are gone.
	First int `json:"first_part"`
}
