package spec

import (
	"errors"
	"fmt"
	"strings"

	"github.com/drowse-vm/drowse/guest/report"
)

// ErrHooks says that hooks in the guest stand against a sleep or a snapshot.
var ErrHooks = errors.New("hooks in the guest have refused")

// HooksError is an ErrHooks with what the hooks said.
type HooksError struct{ Failures []report.HookFailure }

// Error is one line.
func (e *HooksError) Error() string {
	var b strings.Builder
	for i, f := range e.Failures {
		if i == 3 {
			fmt.Fprintf(&b, "; and %d more", len(e.Failures)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(f.String())
	}
	return fmt.Sprintf("%v: %s: see to them in the guest, or use --hooks %s", ErrHooks, b.String(), HooksIgnore)
}

// Unwrap makes it an ErrHooks.
func (e *HooksError) Unwrap() error { return ErrHooks }

// ErrSecrets says that a VM cannot have a secret, or cannot be captured because of one.
var ErrSecrets = errors.New("secrets")

// ErrShare says that the directory of a share cannot be shared.
var ErrShare = errors.New("unusable share")

// What a caller may want to tell apart.
var (
	ErrNotFound   = errors.New("no such VM")
	ErrExists     = errors.New("a VM of that name exists")
	ErrNotRunning = errors.New("the VM is not running")
	ErrRunning    = errors.New("the VM is running")
	ErrCrashed    = errors.New("the VM's process was killed")
	ErrRecord     = errors.New("unreadable VM record")
	ErrServed     = errors.New("another process does that already")
)
