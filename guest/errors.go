package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/internal/flow"
	"github.com/drowse-vm/drowse/guest/internal/treetar"
)

// Errors that callers can tell apart with errors.Is.
var (
	// ErrNotFound: the agent does not know the process. For a missing file the error is also fs.ErrNotExist.
	ErrNotFound = errors.New("not found in the guest")
	// ErrNotRunning: the process has ended.
	ErrNotRunning = errors.New("not running any more")
	// ErrTakenOver: another connection attached to the process.
	ErrTakenOver = errors.New("another connection attached to the process")
	// ErrConnectionLost: the connection to the guest ended before the call did.
	// A detached process runs on and can be attached to again.
	ErrConnectionLost = errors.New("the connection to the guest was lost")
	// ErrUnavailable: the agent could not be reached.
	ErrUnavailable = errors.New("the agent in the guest cannot be reached")
	// ErrProtocol: the guest broke the rules of the protocol.
	ErrProtocol = flow.ErrProtocol
	// ErrLimit: what the guest sent exceeds a limit of the call.
	ErrLimit = treetar.ErrLimit
	// ErrUnsafe: the guest named a file outside the requested tree.
	ErrUnsafe = treetar.ErrUnsafe
	// ErrInvalid: the agent rejects the request, such as a command for a user that the guest does not have.
	ErrInvalid = errors.New("the agent in the guest does not take what it is asked for")
	// ErrFull: the agent has reached its limit on concurrent work.
	ErrFull = errors.New("the agent in the guest has no room for more")
	// ErrRemote: the agent answered with an error of any kind.
	ErrRemote = errors.New("the agent in the guest has failed")
)

// RemoteError is an error that the agent answered with. It matches ErrRemote, ErrInvalid, ErrFull, ErrNotFound,
// ErrNotRunning, ErrTakenOver, ErrUnavailable, fs.ErrNotExist, fs.ErrExist and fs.ErrPermission.
type RemoteError struct {
	Op      string // the call
	Code    codes.Code
	Message string // the agent's words, cut to 4 KiB; quote them before printing
}

// Error implements error.
func (e *RemoteError) Error() string {
	return fmt.Sprintf("guest: %s: %s", e.Op, printable(e.Message))
}

// Is implements errors.Is.
func (e *RemoteError) Is(target error) bool {
	switch target {
	case ErrRemote:
		return true
	case ErrInvalid:
		return e.Code == codes.InvalidArgument
	case ErrFull:
		return e.Code == codes.ResourceExhausted
	case ErrNotFound, fs.ErrNotExist:
		return e.Code == codes.NotFound
	case ErrNotRunning:
		return e.Code == codes.FailedPrecondition && (e.Op == opKill || e.Op == opAttach)
	case ErrTakenOver:
		return e.Code == codes.Aborted
	case ErrUnavailable:
		return e.Code == codes.Unavailable
	case fs.ErrExist:
		return e.Code == codes.AlreadyExists
	case fs.ErrPermission:
		return e.Code == codes.PermissionDenied
	}
	return false
}

const maxErrorText = 4 << 10 // bytes

// printable makes a guest's text safe for a terminal or a log line: no control characters, no forged line.
func printable(s string) string {
	if len(s) > maxErrorText {
		s = s[:maxErrorText] + "..."
	}
	q := strconv.Quote(s)
	return q[1 : len(q)-1]
}

// ExitError is a command that ended other than with exit code 0.
type ExitError struct{ ExitStatus }

// Error implements error.
func (e *ExitError) Error() string { return "guest: the command ended with " + e.ExitStatus.String() }

// fail turns an error of a call into one of this package's.
func fail(op string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ttrpc.ErrClosed), errors.Is(err, ttrpc.ErrStreamClosed):
		return fmt.Errorf("guest: %s: %w", op, ErrConnectionLost)
	case errors.Is(err, ttrpc.ErrProtocol), errors.Is(err, ttrpc.ErrStreamFull):
		return fmt.Errorf("guest: %s: %w: %w", op, ErrProtocol, err)
	}
	var socket *net.OpError
	if errors.As(err, &socket) && socket.Net == "unix" { // the socket of the VM's vsock device
		return fmt.Errorf("guest: %s: %w: %w", op, ErrConnectionLost, err)
	}
	if st, ok := status.FromError(err); ok {
		msg := st.Message()
		if len(msg) > maxErrorText {
			msg = msg[:maxErrorText]
		}
		return &RemoteError{Op: op, Code: st.Code(), Message: msg}
	}
	return fmt.Errorf("guest: %s: %w", op, err)
}
