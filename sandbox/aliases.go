package sandbox

import (
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Spec says what a VM is: see spec.VM.
type Spec = spec.VM

// What a caller may want to tell apart. ErrSpec says that a VM cannot be like that.
var (
	ErrSpec       = spec.ErrInvalid
	ErrNotFound   = spec.ErrNotFound
	ErrExists     = spec.ErrExists
	ErrNotRunning = spec.ErrNotRunning
	ErrRunning    = spec.ErrRunning
)

// What operations take and tell: see package spec.
type (
	SleepOptions    = spec.SleepOptions
	SnapshotOptions = spec.SnapshotOptions
	Stats           = spec.Stats
)
