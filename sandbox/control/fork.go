package control

import "github.com/drowse-vm/drowse/sandbox/spec"

// ForkOrder asks a VM's process for the image of a fork: the id of the snapshot of the fork, and its note.
type ForkOrder struct {
	ID   string `json:"id"`
	Note string `json:"note"`
}

// ForkLine is one line of JSON in the answer of a VM's process to a ForkOrder. The first line comes when children
// can be made; the image is attached to its first byte (SCM_RIGHTS, unix(7)). The second comes when the snapshot
// is on disk or has failed. The caller may send ForkAbort in between.
type ForkLine struct {
	Error  *ErrorReport       `json:"error,omitempty"`
	Layers []string           `json:"layers,omitempty"`
	Pages  uint64             `json:"pages,omitempty"`
	Stages map[string]float64 `json:"stages_ms,omitempty"`
	Result *spec.SleepResult  `json:"result,omitempty"`
}

const (
	ForkAbort = "abort\n"
	// maxForkLine is the most bytes of such a line.
	maxForkLine = 1 << 20
)
