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
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Process is the process of a VM, or one that is to become it, as whoever starts or ends the VM has it.
type Process interface {
	// Kill ends it, if it has not ended yet.
	Kill() error
	// Wait returns when it has ended, or says false after a time; 0 waits for as long as it takes.
	Wait(atMost time.Duration) bool
	// Close gives back what this process has of it. Its own life does not end by that.
	Close() error
}

// Processes are where VMs have their processes, in the place of the host's: package sandboxtest has them in memory.
type Processes interface {
	// Start starts one with an order. files are its log, where its control.Report goes, and what belongs to the order;
	// they are the caller's.
	Start(s *state.Store, ord control.Order, files []*os.File) (Process, error)
	// Find is the one of that number, whether it has ended or not.
	Find(pid int) (Process, error)
}

// Find is the process of a VM by the number in its record, whether it has ended or not. Close it.
func (l Launcher) Find(pid int) (Process, error) {
	if l.Processes != nil {
		return l.Processes.Find(pid)
	}
	if pid == 0 { // the record has none
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

// child is a Process that this process has started.
type child struct {
	proc   *os.Process
	exited chan struct{} // closed when it has ended
}

// startChild starts a process in a session of its own: it outlives the terminal and whoever started it.
// ended, if not nil, is called when it has ended.
func startChild(cmd *exec.Cmd, ended func()) (*child, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{proc: cmd.Process, exited: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // so that it does not stay a zombie of a long-lived caller
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

// foreign is a Process that is a child of another one, by a pidfd (pidfd_open(2)).
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

// The process of a VM gets these variables of this one's environment: those that decide how its VM is, and others that
// it and the Go runtime read. Any more, such as keys for a cloud, would be within reach of a guest that breaks out.
var (
	vmVariables = []string{
		hostnet.RangeEnv, hostnet.Range6Env, instance.ProxyRootsEnv, instance.NoDirtyLogEnv, control.NoPageCacheEnv, control.GoMaxProcsEnv,
	}
	otherVariables = []string{"PATH", "TMPDIR", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "GODEBUG", "GOGC", "GOMEMLIMIT", "GOTRACEBACK"}
)

// vmEnvironment is the environment of a VM's process.
func vmEnvironment() []string {
	env := []string{} // not nil, which would be all of this process's
	for _, name := range slices.Concat(vmVariables, otherVariables) {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// program is what a process that stands by is of, as far as it matters to a VM: a process
// of another version of drowse, or from elsewhere on the host, is not to become that of a VM. It says which file is
// executed, with which first arguments and vmVariables, and in which namespaces (namespaces(7)).
type program string

// programOf says what a process is that this one starts by l now.
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
