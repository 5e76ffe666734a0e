package spec

import (
	"errors"
	"fmt"
	"strings"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/netpolicy"
)

// ErrHooks says that hooks in the guest stand against a sleep or a snapshot.
var ErrHooks = errors.New("hooks in the guest have refused")

// HooksError is an ErrHooks with what the hooks said.
type HooksError struct{ Failures []report.HookFailure }

// Error is one line.
func (e *HooksError) Error() string {
	return fmt.Sprintf("%v: %s: see to them in the guest, or use --hooks %s", ErrHooks, firstOf(e.Failures), HooksIgnore)
}

// Unwrap makes it an ErrHooks.
func (e *HooksError) Unwrap() error { return ErrHooks }

// ErrHostHooks says that hooks on the host stand against a sleep.
var ErrHostHooks = errors.New("hooks on the host have refused")

// HostHooksError is an ErrHostHooks with the hooks that have failed.
type HostHooksError struct{ Failures []report.HookFailure }

// Error is one line.
func (e *HostHooksError) Error() string {
	return fmt.Sprintf("%v: %s: see to them, or use --hooks %s", ErrHostHooks, firstOf(e.Failures), HooksIgnore)
}

// Unwrap makes it an ErrHostHooks.
func (e *HostHooksError) Unwrap() error { return ErrHostHooks }

// firstOf are the first failures, on one line.
func firstOf(failures []report.HookFailure) string {
	var all []string
	for i, f := range failures {
		if i == 3 {
			all = append(all, fmt.Sprintf("and %d more", len(failures)-i))
			break
		}
		all = append(all, f.String())
	}
	return strings.Join(all, "; ")
}

// ErrSecrets says that a VM cannot have a secret, or cannot be captured because of one.
var ErrSecrets = errors.New("secrets")

// ErrShare says that the directory of a share cannot be shared.
var ErrShare = errors.New("unusable share")

// Of snapshots.
var (
	// ErrSnapshotInUse says that a VM may still need the snapshot.
	ErrSnapshotInUse = errors.New("the snapshot is in use")
	// ErrForeignSnapshot says that a VM cannot be taken back to the snapshot of another one.
	ErrForeignSnapshot = errors.New("the snapshot is of another VM")
	// ErrDiskOnly says that a snapshot has no memory, so that nothing can be restored from it as it was.
	ErrDiskOnly = errors.New("the snapshot is of a disk only")
)

// Of what does not persist over a sleep: docs/guides/persistence.md and ADR 0049.
var (
	// ErrPromote says that a part of the guest could not be copied to the host.
	ErrPromote = errors.New("not all that is to be promoted could be")
	// ErrDrop says that a directory of the guest could not be emptied.
	ErrDrop = errors.New("not all that is to be dropped could be")
	// ErrPersistLimit says that a VM's disk has more data than may persist.
	ErrPersistLimit = errors.New("the disk has more data than may persist")
)

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

// ErrorCodes are the words by which the errors of this package are told apart where errors travel as text, the more
// specific first.
var ErrorCodes = []struct {
	Code string
	Err  error
}{
	{"exists", ErrExists},
	{"not-found", ErrNotFound},
	{"not-running", ErrNotRunning},
	{"running", ErrRunning},
	{"policy", netpolicy.ErrPolicy},
	{"invalid", ErrInvalid},
	{"metadata", ErrMetadata},
	{"expired", ErrExpired},
	{"foreign-snapshot", ErrForeignSnapshot},
	{"snapshot-in-use", ErrSnapshotInUse},
	{"record", ErrRecord},
	{"crashed", ErrCrashed},
	{"hooks", ErrHooks},
	{"host-hooks", ErrHostHooks},
	{"promote", ErrPromote},
	{"drop", ErrDrop},
	{"persist-limit", ErrPersistLimit},
	{"secrets", ErrSecrets},
	{"disk-only", ErrDiskOnly},
	{"share-unusable", ErrShare},
}
