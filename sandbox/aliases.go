package sandbox

import (
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Spec says what a VM is: see spec.VM.
type Spec = spec.VM

// Errors that a caller may want to tell apart. ErrSpec means that a VM cannot be like that.
var (
	ErrSpec       = spec.ErrInvalid
	ErrNotFound   = spec.ErrNotFound
	ErrExists     = spec.ErrExists
	ErrNotRunning = spec.ErrNotRunning
	ErrRunning    = spec.ErrRunning
)

// Types that operations take and return: see package spec.
type (
	SleepOptions    = spec.SleepOptions
	SnapshotOptions = spec.SnapshotOptions
	Stats           = spec.Stats
)
