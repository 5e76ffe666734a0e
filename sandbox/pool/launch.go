package pool

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
)

// vmProcess is the process of a VM, or one that is to become it, as whoever starts the VM has it.
type vmProcess interface {
	// kill ends it, if it has not ended yet.
	kill()
	// wait returns when it has ended, or says false after a time; 0 waits for as long as it takes.
	wait(atMost time.Duration) bool
}

// child is a vmProcess that this process has started.
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

func (c *child) kill() { _ = c.proc.Kill() }

func (c *child) wait(atMost time.Duration) bool {
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

// foreign is a vmProcess that is a child of another one, by a pidfd (pidfd_open(2)).
type foreign struct{ pidfd *os.File }

func (f foreign) kill() { _ = unix.PidfdSendSignal(int(f.pidfd.Fd()), unix.SIGKILL, nil, 0) }

func (f foreign) wait(atMost time.Duration) bool {
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

// vmEnvironment is the environment of a VM's process: this one's without what says where traces of operations go, to
// whom and with which keys. Whoever asks for an operation makes its trace, and not the process of a guest.
func vmEnvironment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return strings.HasPrefix(name, "OTEL_") || name == "TRACEPARENT" || name == "TRACESTATE" || name == "BAGGAGE"
	})
}

// program is what a process that stands by is of, as far as it matters to a VM: a process
// of another version of drowse, or from elsewhere on the host, is not to become that of a VM.
type program struct {
	// Device, Inode, Size and Modified are the file's that is executed.
	Device   uint64 `json:"device"`
	Inode    uint64 `json:"inode"`
	Size     int64  `json:"size"`
	Modified int64  `json:"modified"`
	// Args are its first arguments.
	Args []string `json:"args"`
	// Environment is what the variables say that the process of a VM reads.
	Environment []string `json:"environment"`
	// Namespaces are those that it is in (namespaces(7)).
	Namespaces []string `json:"namespaces"`
}

func (p program) equal(q program) bool {
	return p.Device == q.Device && p.Inode == q.Inode && p.Size == q.Size && p.Modified == q.Modified &&
		slices.Equal(p.Args, q.Args) && slices.Equal(p.Environment, q.Environment) && slices.Equal(p.Namespaces, q.Namespaces)
}

// programOf says what a process is that this one starts by l now.
func programOf(l Launcher) (program, error) {
	if len(l.Command) == 0 {
		return program{}, fmt.Errorf("no program is configured for the process of a VM")
	}
	path, err := exec.LookPath(l.Command[0])
	if err != nil {
		return program{}, err
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return program{}, fmt.Errorf("%s: %w", path, err)
	}
	p := program{
		Device: st.Dev, Inode: st.Ino, Size: st.Size, Modified: st.Mtim.Nano(), Args: l.Command[1:],
	}
	for _, name := range []string{hostnet.RangeEnv, hostnet.Range6Env, instance.ProxyRootsEnv, instance.NoDirtyLogEnv, control.NoPageCacheEnv, control.GoMaxProcsEnv} {
		p.Environment = append(p.Environment, os.Getenv(name))
	}
	for _, kind := range []string{"mnt", "net", "pid", "user", "cgroup", "ipc", "uts"} {
		ns, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			return program{}, err
		}
		p.Namespaces = append(p.Namespaces, ns)
	}
	return p, nil
}
