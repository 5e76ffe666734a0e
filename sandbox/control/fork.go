package control

import "github.com/drowse-vm/drowse/sandbox/spec"

// ForkOrder asks a VM's process for the image of a fork: the id of the snapshot of the fork, and its note.
type ForkOrder struct {
	ID   string `json:"id"`
	Note string `json:"note"`
}

// ForkLine is how a VM's process answers a ForkOrder: a line of JSON with the image attached to its
// first byte (SCM_RIGHTS, unix(7)) when children can be made of it, and one when the
// snapshot is on disk or cannot be. The caller may send forkAbort in between.
type ForkLine struct {
	Error  *ErrorReport       `json:"error,omitempty"`
	Layers []string           `json:"layers,omitempty"`
	Pages  uint64             `json:"pages,omitempty"`
	Stages map[string]float64 `json:"stages_ms,omitempty"`
	Result *spec.SleepResult  `json:"result,omitempty"`
}

const (
	ForkAbort = "abort\n"
	// maxForkLine bounds such a line, in bytes.
	maxForkLine = 1 << 20
)
