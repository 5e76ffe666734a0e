package hosthooks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hookPath is the PATH of hooks. The environment of a VM's process comes from the process that started it, or from
// a pool.
const hookPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// outputDelay is how long the output of an ended program is read if its children still hold it open.
const outputDelay = time.Second

// environment returns the whole environment of a program.
func (d Dir) environment(c call) []string {
	return append([]string{"PATH=" + hookPath, "HOME=/", "LANG=C.UTF-8", "DROWSE_STATE=" + d.store}, c.env...)
}

// run runs a program. It kills its process group when the time is up. The program dies with the waiting thread.
func (d Dir) run(ctx context.Context, name string, c call) (problem, output string) {
	// Again: hooks before it may have taken time.
	st, err := d.check(name)
	if err == nil && st.Mode&0o111 == 0 {
		err = errNoHook
	}
	if err != nil {
		return err.Error(), ""
	}
	out := &tail{max: MaxOutput}
	cmd := exec.Command(d.program(name), c.word)
	cmd.Dir, cmd.Env, cmd.WaitDelay = "/", d.environment(c), outputDelay
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(c.input), out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		// The signal is sent when the thread ends that has started it (prctl(2), PR_SET_PDEATHSIG).
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		ended <- end(ctx, cmd)
	}()
	if err := <-started; err != nil {
		return "starting it: " + err.Error(), ""
	}
	select {
	case err = <-ended:
	case <-ctx.Done():
		t := time.NewTimer(killTime + outputDelay)
		defer t.Stop()
		select {
		case <-ended: //nolint:errcheck // its time was up
			// It counts as late even if it ended by itself in this moment.
			return context.Cause(ctx).Error() + ": killed", out.text()
		case <-t.C:
			return context.Cause(ctx).Error() + ": killed, and has not ended yet", ""
		}
	}
	var exit *exec.ExitError
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return "", ""
	case errors.As(err, &exit):
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return fmt.Sprintf("ended by signal %d", int(ws.Signal())), out.text()
		}
		return fmt.Sprintf("exit status %d", exit.ExitCode()), out.text()
	}
	return err.Error(), out.text()
}

// end waits for a program, and kills its process group when ctx ends.
func end(ctx context.Context, cmd *exec.Cmd) error {
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		// Without taking its status: so its number keeps naming this group until the last signal.
		for errors.Is(unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
		}
	}()
	select {
	case <-exited:
	case <-ctx.Done():
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) // it may just have ended
		<-exited
	}
	return cmd.Wait()
}

// tail keeps the end of what is written to it.
type tail struct {
	max  int
	kept []byte
}

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	n := len(p)
	if len(p) > t.max {
		p = p[len(p)-t.max:]
	}
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.max; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return n, nil
}

func (t *tail) text() string { return string(t.kept) }
