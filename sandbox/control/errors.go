package control

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// ErrCanceled means that the caller who ordered the start of a VM no longer waits for it.
var ErrCanceled = errors.New("it was called off")

// ErrorReport is an error on its way from a VM's process to the caller.
type ErrorReport struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	// Field is the one that has caused it: see spec.FieldOf.
	Field string `json:"field,omitempty"`
	// Hooks are the hooks in the guest that refused, with code "hooks".
	Hooks []guest.HookFailure `json:"hooks,omitempty"`
	// HostHooks are the hooks on the host that refused, with code "host-hooks".
	HostHooks []guest.HookFailure `json:"host_hooks,omitempty"`
}

type errorCode = struct {
	Code string
	Err  error
}

// codes are the errors that keep their identity on the way, the more specific ones first.
var codes = slices.Concat([]errorCode{
	{"no-kvm", kvm.ErrNoKVM},
	{"no-permission", kvm.ErrNoPermission},
	{"host-memory", vmm.ErrHostMemory},
	{"not-a-kernel", boot.ErrNotKernel},
	{"no-room", boot.ErrNoRoom},
	{"no-space", snapshot.ErrNoSpace},
	{"corrupt", snapshot.ErrCorrupt},
	{"incomplete", snapshot.ErrIncomplete},
	{"snapshot-not-found", snapshot.ErrNotFound},
	{"snapshot-exists", snapshot.ErrExists},
	{"version", snapshot.ErrVersion},
	{"foreign", vmm.ErrForeign},
	{"disk-in-use", disk.ErrInUse},
}, spec.ErrorCodes, []errorCode{
	{"policy-kernel", link.ErrKernel},
	{"address-range", hostnet.ErrRange},
	{"addresses-full", hostnet.ErrFull},
	{"import", state.ErrImport},
	{"volume-not-found", volume.ErrNotFound},
	{"volume-in-use", volume.ErrInUse},
	{"volume-stale", volume.ErrStale},
	{"volume-dirty", volume.ErrDirty},
	{"not-frozen", guest.ErrFrozenTooLong},
	{"ended", vmm.ErrEnded},
	{"stopped", ErrStopped},
	{"image-not-found", image.ErrNotFound},
	{"image-ambiguous", image.ErrAmbiguous},
	{"image-truncated", image.ErrTruncated},
	{"image-corrupt", image.ErrCorrupt},
	{"kernel-not-found", kernel.ErrNotFound},
	{"kernel-feature", kernel.ErrFeature},
	{"kernel-damaged", kernel.ErrDamaged},
	{"volume-read-only", volume.ErrReadOnly},
	{"volume-record", volume.ErrRecord},
	{"volume-sync", volume.ErrSyncFailed},
	{"snapshot-foreign", snapshot.ErrForeign},
	{"disk-no-space", disk.ErrNoSpace},
	{"disk-corrupt", disk.ErrCorrupt},
	{"disk-truncated", disk.ErrTruncated},
	{"disk-version", disk.ErrVersion},
	{"disk-parent", disk.ErrMissingParent},
	{"disk-io", disk.ErrIO},
	{"disk-sync", disk.ErrSyncFailed},
	{"network-busy", link.ErrBusy},
	{"network-full", link.ErrSlots},
	{"network-pins", link.ErrRoot},
	{"network-nat", hostnet.ErrNAT},
	{"not-recorded", guest.ErrNotRecorded},
	// The guest's errors come last: they cause many of the others.
	{"guest-too-old", guest.ErrNoStats},
	{"guest-invalid", guest.ErrInvalid},
	{"guest-full", guest.ErrFull},
	{"guest-unavailable", guest.ErrUnavailable},
	{"guest-lost", guest.ErrConnectionLost},
	{"guest-protocol", guest.ErrProtocol},
	{"guest-limit", guest.ErrLimit},
	{"guest-unsafe", guest.ErrUnsafe},
	{"guest-failed", guest.ErrRemote},
	// So do the errors of the host's disk.
	{"no-space", unix.ENOSPC},
	{"no-space", unix.EDQUOT},
})

// Sentinels returns the errors that keep their identity on the way, by their codes.
func Sentinels() map[string]error {
	out := make(map[string]error, len(codes))
	for _, c := range codes {
		if _, there := out[c.Code]; !there {
			out[c.Code] = c.Err
		}
	}
	return out
}

// ReportError returns the report of an error.
func ReportError(err error) *ErrorReport {
	field := spec.FieldOf(err)
	for _, c := range codes {
		if errors.Is(err, c.Err) {
			r := &ErrorReport{Code: c.Code, Message: err.Error(), Field: field}
			var h *spec.HooksError
			if errors.As(err, &h) {
				r.Hooks = h.Failures
			}
			var hh *spec.HostHooksError
			if errors.As(err, &hh) {
				r.HostHooks = hh.Failures
			}
			return r
		}
	}
	return &ErrorReport{Code: "error", Message: err.Error(), Field: field}
}

// Error makes the report an error again, which wraps the original one.
func (e *ErrorReport) Error() string { return e.Message }

// FieldName returns Field: see spec.FieldOf.
func (e *ErrorReport) FieldName() string { return e.Field }

// ErrorCode returns the code of an error that a caller may want to tell apart; empty for other errors.
func ErrorCode(err error) string {
	if err == nil {
		return ""
	}
	if r := ReportError(err); r.Code != "error" {
		return r.Code
	}
	return ""
}

// Unwrap returns the sentinel that the code stands for.
func (e *ErrorReport) Unwrap() error {
	for _, c := range codes {
		if c.Code == e.Code {
			return c.Err
		}
	}
	return nil
}

// PersistLimitError is an ErrPersistLimit with the amount of data. Only the ErrPersistLimit leaves the VM's
// process.
type PersistLimitError struct {
	Bytes, Max int64
	Name       string
}

// Error returns one line.
func (e *PersistLimitError) Error() string {
	return fmt.Sprintf("%v: %d bytes, and %d are allowed: remove files in it, or allow more: Fleet.Update of %q with Persist.MaxBytes",
		spec.ErrPersistLimit, e.Bytes, e.Max, e.Name)
}

// Unwrap returns ErrPersistLimit.
func (e *PersistLimitError) Unwrap() error { return spec.ErrPersistLimit }

// ErrStopped is the error of a VM whose process was told to stop.
var ErrStopped = errors.New("stopped from outside")

// ErrSelfLimit means that a guest has asked for as much as it may have.
var ErrSelfLimit = errors.New("the guest has asked for as many as it may have")
