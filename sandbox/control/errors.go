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

// ErrCanceled says that the caller who ordered a VM to be started waits for it no more.
var ErrCanceled = errors.New("it was called off")

// ErrorReport is an error on its way from a VM's process to whoever asked.
type ErrorReport struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	// Hooks are those in the guest that have refused, with code "hooks".
	Hooks []guest.HookFailure `json:"hooks,omitempty"`
	// HostHooks are those on the host that have refused, with code "host-hooks".
	HostHooks []guest.HookFailure `json:"host_hooks,omitempty"`
}

type errorCode = struct {
	Code string
	Err  error
}

// codes are the errors that keep their identity on that way, the more specific
// first.
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
	// What a guest says comes last: it is the cause of much else.
	{"guest-too-old", guest.ErrNoStats},
	{"guest-invalid", guest.ErrInvalid},
	{"guest-full", guest.ErrFull},
	{"guest-unavailable", guest.ErrUnavailable},
	{"guest-lost", guest.ErrConnectionLost},
	{"guest-protocol", guest.ErrProtocol},
	{"guest-limit", guest.ErrLimit},
	{"guest-unsafe", guest.ErrUnsafe},
	{"guest-failed", guest.ErrRemote},
	// So does what the host's disk says.
	{"no-space", unix.ENOSPC},
	{"no-space", unix.EDQUOT},
})

// ReportError is the report of an error.
func ReportError(err error) *ErrorReport {
	for _, c := range codes {
		if errors.Is(err, c.Err) {
			r := &ErrorReport{Code: c.Code, Message: err.Error()}
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
	return &ErrorReport{Code: "error", Message: err.Error()}
}

// Error makes it an error again, which wraps the one that it was.
func (e *ErrorReport) Error() string { return e.Message }

// ErrorCode is the word by which an error is known that a caller may want to tell apart; empty for others.
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

// PersistLimitError is an ErrPersistLimit with how much there is. The process of a VM tells others of the
// ErrPersistLimit alone.
type PersistLimitError struct {
	Bytes, Max int64
	Name       string
}

// Error is one line.
func (e *PersistLimitError) Error() string {
	return fmt.Sprintf("%v: %d bytes, and %d are allowed: remove files in it, or allow more: Fleet.Update of %q with Persist.MaxBytes",
		spec.ErrPersistLimit, e.Bytes, e.Max, e.Name)
}

// Unwrap makes it an ErrPersistLimit.
func (e *PersistLimitError) Unwrap() error { return spec.ErrPersistLimit }

// ErrStopped is why a VM ends whose process is told to.
var ErrStopped = errors.New("stopped from outside")

// ErrSelfLimit says that a guest has asked for as much as it may have.
var ErrSelfLimit = errors.New("the guest has asked for as many as it may have")
