package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// apiError is an error as clients of the control plane see it.
type apiError struct {
	Code    int    `json:"code"` // HTTP status
	Message string `json:"message"`
	// Kind is E2B's word for an error of the server.
	Kind string `json:"error_code,omitempty"`

	cause error
}

// Error implements error.
func (e *apiError) Error() string { return e.Message }

func (e *apiError) Unwrap() error { return e.cause }

func fail(code int, format string, args ...any) *apiError {
	return &apiError{Code: code, Message: fmt.Sprintf(format, args...)}
}

// refused is the error for a field that asks for what cannot be done.
func refused(field, why string) *apiError {
	return fail(http.StatusBadRequest, "%s is not supported: %s", field, why)
}

func notFound(id string) *apiError {
	if !idRE.MatchString(id) {
		id = "of that id" // not a client's text in an answer
	}
	return fail(http.StatusNotFound, "sandbox %s was not found", id)
}

// busy are the codes of errors that pass when the host has room again.
var busy = map[string]bool{
	"host-memory": true, "addresses-full": true, "network-full": true, "network-busy": true, "owner-limit": true,
	"guest-full": true, "busy": true,
}

// asAPI returns the apiError of any error. id is the sandbox's.
func asAPI(err error, id string) *apiError {
	var e *apiError
	code := string(fleet.CodeOf(err))
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, sandbox.ErrNotFound):
		return &apiError{Code: http.StatusNotFound, Message: notFound(id).Message, cause: err}
	case errors.Is(err, image.ErrNotFound), code == "snapshot-not-found":
		return &apiError{Code: http.StatusNotFound, Message: "the template was not found", cause: err}
	case errors.Is(err, sandbox.ErrSpec), errors.Is(err, netpolicy.ErrPolicy), errors.Is(err, spec.ErrMetadata):
		return &apiError{Code: http.StatusBadRequest, Message: err.Error(), cause: err}
	case errors.Is(err, sandbox.ErrExists), errors.Is(err, sandbox.ErrRunning), errors.Is(err, sandbox.ErrNotRunning), errors.Is(err, spec.ErrExpired),
		errors.Is(err, guest.ErrUnavailable), errors.Is(err, guest.ErrConnectionLost):
		return &apiError{Code: http.StatusConflict, Message: "the sandbox is not in a state for this", cause: err}
	case busy[code], errors.Is(err, state.ErrStoreBusy):
		return &apiError{Code: http.StatusTooManyRequests, Message: "the host has no room for it now", Kind: "sandbox_capacity_unavailable", cause: err}
	case errors.Is(err, spec.ErrUnreachable), errors.Is(err, spec.ErrElsewhere):
		return &apiError{Code: http.StatusServiceUnavailable, Message: "the host of the sandbox does not answer: try again", cause: err}
	case errors.Is(err, spec.ErrSnapshotInUse):
		return &apiError{Code: http.StatusConflict, Message: "a sandbox of the snapshot comes back from it: remove the sandbox first", cause: err}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return &apiError{Code: http.StatusGatewayTimeout, Message: "it took too long", cause: err}
	}
	return &apiError{Code: http.StatusInternalServerError, Message: "the host has failed: its log says why", Kind: "internal_server_error", cause: err}
}

// write answers with an error.
func (e *apiError) write(w http.ResponseWriter) {
	if e.Code == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", strconv.Itoa(retrySeconds))
	}
	writeJSON(w, e.Code, e)
}

// retrySeconds is after how many seconds a client may ask again.
const retrySeconds = 1

func writeJSON(w http.ResponseWriter, status int, body any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // an error means that the client has gone
}
