package agent

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAgain_calls_that_were_interrupted_or_timed_out_are_made_again(t *testing.T) {
	wrapped := func(e error) error { return fmt.Errorf("tell the host: %w", e) }
	for _, c := range []struct {
		name  string
		gives []error // errors in turn; the last repeats
		tries int
		calls int
		want  error
	}{
		{"done at once", []error{nil}, 3, 1, nil},
		{"interrupted twice", []error{wrapped(unix.EINTR), unix.EINTR, nil}, 1, 3, nil},
		{"always interrupted", []error{unix.EINTR}, 1, maxInterrupted + 1, unix.EINTR},
		{"timed out once", []error{wrapped(unix.ETIMEDOUT), nil}, 3, 2, nil},
		{"always timed out", []error{unix.ETIMEDOUT}, 3, 3, unix.ETIMEDOUT},
		{"refused", []error{unix.EPERM}, 3, 1, unix.EPERM},
	} {
		calls := 0
		err := again(c.tries, func() error {
			calls++
			return c.gives[min(calls, len(c.gives))-1]
		})
		if !errors.Is(err, c.want) || calls != c.calls {
			t.Errorf("%s: %v after %d calls, want %v after %d", c.name, err, calls, c.want, c.calls)
		}
	}
}
