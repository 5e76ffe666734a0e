package fleet

import (
	"context"
	"errors"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// Code is what a caller may want to tell errors apart by. Codes are added, and never change their meaning.
type Code string

// The codes that a Fleet gives by itself. Others are those of sandbox.ErrorCode, such as "not-found", "exists", "running",
// "not-running", "expired", "label" and "invalid".
const (
	CodeCanceled  Code = "canceled"
	CodeTimeout   Code = "timeout"
	CodeNoRecords Code = "no-records" // there is no database, or it cannot be used now
	CodeOther     Code = "error"
)

// remedies say what to do about an error of a code.
var remedies = map[Code]string{
	"not-found":          "list what there is, with Fleet.List or `drowse ls`",
	"exists":             "choose another name, or use GetOrCreate",
	"running":            "put it to sleep or stop it first",
	"not-running":        "start it",
	"expired":            "extend it",
	"label":              "give it a label that is allowed",
	"invalid":            "ask for something that is possible",
	"hooks":              "see what its hooks say, or put it to sleep with other hook policy",
	"host-hooks":         "see what the hooks of the host say, or put it to sleep with other hook policy",
	"promote":            "see the cause, or put it to sleep with hook policy ignore: what is not promoted is not dropped then",
	"drop":               "see the cause, or put it to sleep with hook policy ignore",
	"persist-limit":      "remove files in it, or allow more",
	"no-space":           "free space, for one with `drowse prune`, and try again",
	"no-kvm":             "see `drowse doctor`",
	"no-permission":      "run as root",
	"host-memory":        "put others to sleep, or give it less memory",
	"snapshot-not-found": "list what there is, with `drowse snapshot ls`",
	"snapshot-in-use":    "let the sandbox sleep again, or remove it",
	"foreign-snapshot":   "make a sandbox of its own from it, with `drowse restore`",
	"corrupt":            "go back to an earlier snapshot, or boot it with its disk as it is",
	"record":             "restore its vm.json from a backup, or remove it with force",
	"volume-stale":       "boot it instead of waking it",
	"share-unusable":     "put the shared directory where it was, or name another one",
	"crashed":            "see its log, with `drowse logs --vmm`",
	CodeCanceled:         "try again: what had begun can be repeated",
	CodeTimeout:          "try again with more time: what had begun can be repeated",
	CodeNoRecords:        "see the cause; what runs and sleeps does not depend on it",
}

// Error is an error of a Fleet's. Its text is that of its cause.
type Error struct {
	// Op is what was being done: "create", "wake" and so on; Sandbox to which one, where that is known.
	Op, Sandbox string
	Code        Code
	// Remedy is what can be done about it; empty if nobody knows.
	Remedy string
	Err    error
}

// Error is the text of the cause, which says what was being done.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Fail makes an error of an operation that others do on the VMs of a Fleet; nil of nil, and what is an *Error already stays as it is.
func Fail(op, name string, err error) error { return fail(op, name, err) }

// fail makes an error of an operation.
func fail(op, name string, err error) error {
	if err == nil {
		return nil
	}
	var have *Error
	if errors.As(err, &have) {
		return err
	}
	code := CodeOf(err)
	return &Error{Op: op, Sandbox: name, Code: code, Remedy: remedies[code], Err: err}
}

// CodeOf is the code of any error.
func CodeOf(err error) Code {
	var have *Error
	switch {
	case errors.As(err, &have):
		return have.Code
	case errors.Is(err, records.ErrInvalid):
		return "invalid"
	case errors.Is(err, lifetime.ErrKeep):
		return "label"
	case errors.Is(err, records.ErrNotFound):
		return "not-found"
	}
	if code := sandbox.ErrorCode(err); code != "" {
		return Code(code)
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return CodeTimeout
	case errors.Is(err, context.Canceled):
		return CodeCanceled
	case errors.Is(err, errNoRecords), errors.Is(err, records.ErrNewer), errors.Is(err, records.ErrDamaged):
		return CodeNoRecords
	}
	return CodeOther
}
