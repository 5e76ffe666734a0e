package control

// How a VM's process answers POST /fork: a line of JSON with the image attached to its
// first byte (SCM_RIGHTS, unix(7)) when children can be made of it, and one when the
// snapshot is on disk or cannot be. The caller may send forkAbort in between.
type ForkLine struct {
	Error  *ErrorReport       `json:"error,omitempty"`
	Layers []string           `json:"layers,omitempty"`
	Pages  uint64             `json:"pages,omitempty"`
	Stages map[string]float64 `json:"stages_ms,omitempty"`
	Result *SleepResult       `json:"result,omitempty"`
}

const (
	ForkAbort = "abort\n"
	// maxForkLine bounds such a line, in bytes.
	maxForkLine = 1 << 20
)
