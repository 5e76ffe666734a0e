package confine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/wait"
)

// freezePoll is how often Freeze looks.
const freezePoll = time.Millisecond

// Freeze stops all threads of the child, and returns when none of them runs, or an error. One that waits in the kernel
// without an interruption, as for memory, stops when that wait ends, and before it runs in the child or its guest. Thaw
// lets them go on. One that is killed ends although it is frozen.
func (c *Process) Freeze(ctx context.Context) error {
	if err := c.signal(unix.SIGSTOP); err != nil {
		return err
	}
	for {
		still, err := stands(c.cmd.Process.Pid)
		if err != nil || still {
			return err
		}
		if wait.For(ctx, freezePoll) != nil {
			return fmt.Errorf("freezing a confined process: %w", context.Cause(ctx))
		}
	}
}

// Thaw is described at Freeze.
func (c *Process) Thaw() error { return c.signal(unix.SIGCONT) }

func (c *Process) signal(s unix.Signal) error {
	if err := c.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("sending %v to a confined process: %w", s, err)
	}
	return nil
}

// stands reports whether no thread of a process runs or is about to: proc_pid_stat(5) has the states.
func stands(pid int) (bool, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	threads, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return true, nil // it has ended
	}
	if err != nil {
		return false, fmt.Errorf("looking whether a confined process stands still: %w", err)
	}
	for _, t := range threads {
		text, err := os.ReadFile(dir + "/" + t.Name() + "/stat")
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("looking whether a confined process stands still: %w", err)
		}
		// Behind the name, in which there may be anything.
		state := text[min(len(text), bytes.LastIndexByte(text, ')')+1):]
		if state = bytes.TrimSpace(state); len(state) == 0 || !bytes.ContainsAny(state[:1], "TtDZX") {
			return false, nil
		}
	}
	return true, nil
}
