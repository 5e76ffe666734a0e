package sandbox

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/state"
)

// canceled returns when a process has ended whose report nobody reads any more. One that has made its VM one that runs
// before it noticed goes on: others may have been told, and use it. One that does not notice for a while has not, and
// is killed.
func (s *Store) canceled(proc vmProcess, name string) {
	for end := time.Now().Add(cancelTime); time.Now().Before(end); {
		if proc.wait(cancelPoll) {
			return
		}
		if r, err := s.Get(name); err == nil && r.Phase == state.Running {
			return
		}
	}
	proc.kill()
	proc.wait(0)
}

// How long a process has to notice, and how often it is looked.
// Variables, so that tests need not wait as long.
var (
	cancelTime = 5 * time.Second
	cancelPoll = 10 * time.Millisecond
)

// errCanceled says that the caller who ordered a VM to be started waits for it no more.
var errCanceled = errors.New("it was called off")

// hasReader says whether somebody has the other end of a pipe that is written to.
func hasReader(pipe *os.File) bool {
	fds := []unix.PollFd{{Fd: int32(pipe.Fd())}}
	for {
		_, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err != nil || fds[0].Revents&unix.POLLERR == 0
	}
}
