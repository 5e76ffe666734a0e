package sandbox

import "github.com/drowse-vm/drowse/sandbox/spec"

// Spec says what a VM is: see spec.VM.
type Spec = spec.VM

// ErrSpec says that a VM cannot be like that.
var ErrSpec = spec.ErrInvalid
