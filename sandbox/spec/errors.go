package spec

import (
	"errors"
	"fmt"
	"strings"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/netpolicy"
)

// ErrHooks means that hooks in the guest refused a sleep or a snapshot.
var ErrHooks = errors.New("hooks in the guest have refused")

// HooksError is an ErrHooks with the failures of the hooks.
type HooksError struct{ Failures []report.HookFailure }

// Error returns one line.
func (e *HooksError) Error() string {
	return fmt.Sprintf("%v: %s: see to them in the guest, or use --hooks %s", ErrHooks, firstOf(e.Failures), HooksIgnore)
}

// Unwrap returns ErrHooks.
func (e *HooksError) Unwrap() error { return ErrHooks }

// ErrHostHooks means that hooks on the host refused a sleep.
var ErrHostHooks = errors.New("hooks on the host have refused")

// HostHooksError is an ErrHostHooks with the hooks that failed.
type HostHooksError struct{ Failures []report.HookFailure }

// Error returns one line.
func (e *HostHooksError) Error() string {
	return fmt.Sprintf("%v: %s: see to them, or use --hooks %s", ErrHostHooks, firstOf(e.Failures), HooksIgnore)
}

// Unwrap returns ErrHostHooks.
func (e *HostHooksError) Unwrap() error { return ErrHostHooks }

// firstOf returns the first failures in one line.
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

// ErrSecrets means that a VM cannot have a secret, or that a secret prevents its capture.
var ErrSecrets = errors.New("secrets")

// ErrShare means that the directory of a share cannot be shared.
var ErrShare = errors.New("unusable share")

// Errors of snapshots.
var (
	// ErrSnapshotInUse means that a VM may still need the snapshot.
	ErrSnapshotInUse = errors.New("the snapshot is in use")
	// ErrForeignSnapshot means that the snapshot belongs to another VM, so this VM cannot go back to it.
	ErrForeignSnapshot = errors.New("the snapshot is of another VM")
	// ErrDiskOnly means that the snapshot has no memory, so a running machine cannot be restored from it.
	ErrDiskOnly = errors.New("the snapshot is of a disk only")
)

// Errors of data that does not persist over a sleep: docs/guides/persistence.md and ADR 0049.
var (
	// ErrPromote means that a part of the guest could not be copied to the host.
	ErrPromote = errors.New("not all that is to be promoted could be")
	// ErrDrop means that a directory of the guest could not be emptied.
	ErrDrop = errors.New("not all that is to be dropped could be")
	// ErrPersistLimit means that a VM's disk has more data than may persist.
	ErrPersistLimit = errors.New("the disk has more data than may persist")
)

// ErrQuota means that the sandboxes of an owner use as much as they may: see package limits.
var ErrQuota = errors.New("the owner's limit is reached")

// Errors of sandboxes that hosts share: package cluster.
var (
	// ErrElsewhere means that another host has the sandbox, and lives.
	ErrElsewhere = errors.New("the sandbox is on another host")
	// ErrUnreachable means that another host has the sandbox, and does not answer now.
	ErrUnreachable = errors.New("the host that has the sandbox does not answer")
	// ErrUnclaimed means that a sandbox is shared with other hosts, and that this one may not run it.
	ErrUnclaimed = errors.New("the sandbox is shared with other hosts, and this one has no claim on it: run `drowse serve --cluster` here")
	// ErrTarget means that a sandbox cannot move to the host that was named. It stays where it is.
	ErrTarget = errors.New("it cannot move to that host")
	// ErrNoKey means that a sandbox sleeps in the store under a key that this host lacks.
	ErrNoKey = errors.New("this host has no key of the sandbox")
	// ErrArriving means that a sandbox's memory or disk is still on its way to this host: what needs all of it must wait.
	ErrArriving = errors.New("the sandbox's memory and disk are not all here yet")
)

// Errors that a caller may want to tell apart.
var (
	ErrNotFound   = errors.New("no such VM")
	ErrExists     = errors.New("a VM of that name exists")
	ErrNotRunning = errors.New("the VM is not running")
	ErrRunning    = errors.New("the VM is running")
	ErrCrashed    = errors.New("the VM's process was killed")
	ErrRecord     = errors.New("unreadable VM record")
	ErrServed     = errors.New("another process does that already")
)

// ErrorCodes are the codes of this package's errors where errors travel as text, the more specific ones first.
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
	{"owner-limit", ErrQuota},
	{"unreachable", ErrUnreachable},
	{"elsewhere", ErrElsewhere},
	{"unclaimed", ErrUnclaimed},
	{"no-key", ErrNoKey},
	{"arriving", ErrArriving},
	{"target", ErrTarget},
}
