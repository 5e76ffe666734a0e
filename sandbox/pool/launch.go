package pool

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Process is the process of a VM, or one that will become it, for the code that starts or ends the VM.
type Process interface {
	// Kill ends the process. It returns no error if it has ended already.
	Kill() error
	// Wait returns true when the process has ended, or false after atMost; 0 waits without a limit.
	Wait(atMost time.Duration) bool
	// Close releases what this process holds of it. It does not end the process.
	Close() error
}

// Processes replaces the host's processes for VMs: package sandboxtest has them in memory.
type Processes interface {
	// Start starts a process with an order. files are its log, the pipe for its control.Report, and the order's
	// own files. The caller keeps them.
	Start(s *state.Store, ord control.Order, files []*os.File) (Process, error)
	// Find returns the process with that number, whether it has ended or not.
	Find(pid int) (Process, error)
}

// Find returns the process of a VM by the number in its record, even if it has ended. The caller must close it.
func (l Launcher) Find(pid int) (Process, error) {
	if l.Processes != nil {
		return l.Processes.Find(pid)
	}
	if pid == 0 { // the record names no process
		return gone{}, nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return gone{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("finding process %d: %w", pid, err)
	}
	return foreign{os.NewFile(uintptr(fd), "pidfd")}, nil
}

// gone is a Process that has ended.
type gone struct{}

func (gone) Kill() error             { return nil }
func (gone) Wait(time.Duration) bool { return true }
func (gone) Close() error            { return nil }

// child is a Process that this process started.
type child struct {
	proc   *os.Process
	exited chan struct{} // closed when it has ended
}

// startChild starts a process in its own session: it outlives the terminal and its parent. ended, if not nil, is
// called when the process has ended.
func startChild(cmd *exec.Cmd, ended func()) (*child, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{proc: cmd.Process, exited: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // or it would stay a zombie of a long-lived caller
		close(c.exited)
		if ended != nil {
			ended()
		}
	}()
	return c, nil
}

// Kill implements Process.
func (c *child) Kill() error {
	if err := c.proc.Kill(); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// Close implements Process.
func (c *child) Close() error { return nil }

// Wait implements Process.
func (c *child) Wait(atMost time.Duration) bool {
	if atMost == 0 {
		<-c.exited
		return true
	}
	limit := time.NewTimer(atMost)
	defer limit.Stop()
	select {
	case <-c.exited:
		return true
	case <-limit.C:
		return false
	}
}

// foreign is a Process that is a child of another process. It uses a pidfd (pidfd_open(2)).
type foreign struct{ pidfd *os.File }

// Kill implements Process.
func (f foreign) Kill() error {
	if err := unix.PidfdSendSignal(int(f.pidfd.Fd()), unix.SIGKILL, nil, 0); !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// Close implements Process.
func (f foreign) Close() error { return f.pidfd.Close() }

// Wait implements Process.
func (f foreign) Wait(atMost time.Duration) bool {
	until := time.Now().Add(atMost)
	for {
		ms := -1
		if atMost > 0 {
			ms = max(0, int(time.Until(until).Milliseconds()))
		}
		switch n, err := unix.Poll([]unix.PollFd{{Fd: int32(f.pidfd.Fd()), Events: unix.POLLIN}}, ms); {
		case err == unix.EINTR:
		case err != nil || n > 0:
			return true
		default:
			return false
		}
	}
}

// The process of a VM gets these variables of this process's environment: those that shape its VM, and others that
// it and the Go runtime read. More, such as keys for a cloud, would be in reach of a guest that breaks out.
var (
	vmVariables = []string{
		hostnet.RangeEnv, hostnet.Range6Env, hostnet.HelperEnv, proxy.RootsEnv, instance.NoDirtyLogEnv, control.NoPageCacheEnv, control.GoMaxProcsEnv, control.NoJailEnv,
		control.RequireJailEnv, control.SeccompEnv,
	}
	otherVariables = []string{"PATH", "TMPDIR", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "GODEBUG", "GOGC", "GOMEMLIMIT", "GOTRACEBACK"}
)

// vmEnvironment returns the environment of a VM's process.
func vmEnvironment() []string {
	env := []string{} // nil would pass on this process's whole environment
	for _, name := range slices.Concat(vmVariables, otherVariables) {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// program identifies a waiting process as far as it matters to a VM. A process of another version of drowse, or
// from elsewhere on the host, must not become that of a VM. It names the executed file, its first arguments, the
// vmVariables, and the namespaces (namespaces(7)).
type program string

// programOf identifies the process that l would start now.
func programOf(l Launcher) (program, error) {
	if len(l.Command) == 0 {
		return "", fmt.Errorf("no program is configured for the process of a VM")
	}
	path, err := exec.LookPath(l.Command[0])
	if err != nil {
		return "", err
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	p := fmt.Sprintf("%d %d %d %d %q", st.Dev, st.Ino, st.Size, st.Mtim.Nano(), l.Command[1:])
	for _, name := range vmVariables {
		p += fmt.Sprintf(" %q", os.Getenv(name))
	}
	for _, kind := range []string{"mnt", "net", "pid", "user", "cgroup", "ipc", "uts"} {
		ns, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			return "", err
		}
		p += " " + ns
	}
	return program(p), nil
}
