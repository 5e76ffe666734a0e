package e2b

import (
	"context"
	"errors"
	"net/http"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func notFound(id string) *answers.Error {
	if !idRE.MatchString(id) {
		id = "of that id" // not a client's text in an answer
	}
	return answers.Fail(http.StatusNotFound, "sandbox %s was not found", id)
}

// busy are the codes of errors that pass when the host has room again.
var busy = map[string]bool{
	"host-memory": true, "addresses-full": true, "network-full": true, "network-busy": true, "owner-limit": true,
	"guest-full": true, "busy": true,
}

// asAPI returns the answers.Error of any error. id is the sandbox's.
func asAPI(err error, id string) *answers.Error {
	var e *answers.Error
	code := string(fleet.CodeOf(err))
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, sandbox.ErrNotFound):
		return &answers.Error{Code: http.StatusNotFound, Message: notFound(id).Message, Cause: err}
	case errors.Is(err, image.ErrNotFound), code == "snapshot-not-found":
		return &answers.Error{Code: http.StatusNotFound, Message: "the template was not found", Cause: err}
	case errors.Is(err, sandbox.ErrSpec), errors.Is(err, netpolicy.ErrPolicy), errors.Is(err, spec.ErrMetadata):
		return &answers.Error{Code: http.StatusBadRequest, Message: err.Error(), Cause: err}
	case errors.Is(err, sandbox.ErrExists), errors.Is(err, sandbox.ErrRunning), errors.Is(err, sandbox.ErrNotRunning), errors.Is(err, spec.ErrExpired),
		errors.Is(err, guest.ErrUnavailable), errors.Is(err, guest.ErrConnectionLost):
		return &answers.Error{Code: http.StatusConflict, Message: "the sandbox is not in a state for this", Cause: err}
	case busy[code], errors.Is(err, state.ErrStoreBusy):
		return &answers.Error{Code: http.StatusTooManyRequests, Message: "the host has no room for it now", Kind: "sandbox_capacity_unavailable", Cause: err}
	case errors.Is(err, spec.ErrUnreachable), errors.Is(err, spec.ErrElsewhere):
		return &answers.Error{Code: http.StatusServiceUnavailable, Message: "the host of the sandbox does not answer: try again", Cause: err}
	case errors.Is(err, spec.ErrSnapshotInUse):
		return &answers.Error{Code: http.StatusConflict, Message: "a sandbox of the snapshot comes back from it: remove the sandbox first", Cause: err}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return &answers.Error{Code: http.StatusGatewayTimeout, Message: "it took too long", Cause: err}
	}
	return &answers.Error{Code: http.StatusInternalServerError, Message: "the host has failed: its log says why", Kind: "internal_server_error", Cause: err}
}
