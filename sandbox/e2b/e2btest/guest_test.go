package e2btest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agent"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// The guests of these tests are real: the agent as PID 1 of namespaces of its own, over an overlay of this machine's
// root. The VMs around them are those of package sandboxtest. Such guests survive a sleep with their processes; a
// fork of one has its files only.

const (
	envGuest = "DROWSE_TEST_GUEST" // directory of the guest that this process becomes
	envMount = "DROWSE_TEST_MOUNT" // set in a process with mounts of its own
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(envGuest); dir != "" {
		if err := beGuest(dir); err != nil {
			fmt.Fprintln(os.Stderr, "guest:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Geteuid() == 0 && os.Getenv(envMount) == "" {
		// What tests mount is gone with this process, however it ends.
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Env = append(os.Environ(), envMount+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Run(); cmd.ProcessState != nil {
			os.Exit(cmd.ProcessState.ExitCode())
		} else if err != nil {
			fmt.Fprintln(os.Stderr, "no mount namespace:", err)
		}
	}
	goleak.VerifyTestMain(m)
}

// guests are the guests of the VMs of a test.
type guests struct {
	dir string

	mu     sync.Mutex // guards parked
	parked map[string]*guestProcess
	all    []*guestProcess
}

// newGuests returns the guests of a test. It skips the test where namespaces are not to be had.
func newGuests(t testing.TB) *guests {
	t.Helper()
	if os.Getenv(envMount) == "" {
		t.Skip("the guests of this test need root and namespaces")
	}
	// Overlays want their changes on another file system than the root's.
	dir, err := os.MkdirTemp("", "e2bguests")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Skip("mounts cannot be made private: ", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4g"); err != nil {
		t.Skip("no tmpfs: ", err)
	}
	g := &guests{dir: dir, parked: map[string]*guestProcess{}}
	t.Cleanup(func() {
		g.mu.Lock()
		all := g.all
		g.mu.Unlock()
		for _, p := range all {
			p.kill()
		}
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = os.Remove(dir)
	})
	return g
}

// start implements sandboxtest.VMs.Guests.
func (g *guests) start(name, from string, clone bool) (sandboxtest.Guest, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.parked[from]; p != nil && !clone && from != "" {
		delete(g.parked, from)
		p.asleep = false
		return p, p.signal(unix.SIGCONT)
	}
	dir := filepath.Join(g.dir, name)
	for _, d := range []string{"upper", "work", "root"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	if from != "" {
		if out, err := exec.Command("cp", "-a", filepath.Join(g.dir, "of-"+from)+"/.", filepath.Join(dir, "upper")).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s: %w", out, err)
		}
	}
	p := &guestProcess{g: g, dir: dir, done: make(chan struct{})}
	_ = os.Remove(p.socket(agentpb.AgentPort))
	_ = os.Remove(p.socket(agentpb.ForwardPort))
	p.cmd = exec.Command("/proc/self/exe")
	p.cmd.Env = []string{envGuest + "=" + dir, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	p.cmd.Stdout, p.cmd.Stderr = os.Stdout, os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET, Setsid: true,
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	g.all = append(g.all, p)
	for {
		select {
		case <-p.done:
			return nil, errors.New("the guest has ended")
		case <-time.After(2 * time.Millisecond):
		}
		if c, err := p.Dial(agentpb.ForwardPort); err == nil {
			return p, c.Close()
		}
	}
}

// guestProcess is a guest, and the process that is its PID 1.
type guestProcess struct {
	g      *guests
	dir    string
	cmd    *exec.Cmd
	done   chan struct{}
	asleep bool // guarded by g.mu
}

func (p *guestProcess) socket(port int) string { return filepath.Join(p.dir, fmt.Sprint(port)) }

func (p *guestProcess) Dial(port int) (net.Conn, error) { return net.Dial("unix", p.socket(port)) }

func (p *guestProcess) Done() <-chan struct{} { return p.done }

func (p *guestProcess) Capture(id string, live bool) error {
	if err := p.signal(unix.SIGSTOP); err != nil {
		return err
	}
	// As a machine's memory and disk of one moment: what is in the host's page cache belongs to it.
	if out, err := exec.Command("cp", "-a", filepath.Join(p.dir, "upper"), filepath.Join(p.g.dir, "of-"+id)).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w", out, err)
	}
	if live {
		return p.signal(unix.SIGCONT)
	}
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	p.asleep = true
	p.g.parked[id] = p
	return nil
}

// signal signals all processes of the guest.
func (p *guestProcess) signal(sig syscall.Signal) error {
	want, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", p.cmd.Process.Pid))
	if err != nil {
		return err
	}
	all, err := filepath.Glob("/proc/[0-9]*/ns/pid")
	for _, f := range all {
		if ns, err := os.Readlink(f); err == nil && ns == want {
			var pid int
			if _, err := fmt.Sscanf(f, "/proc/%d/", &pid); err == nil {
				_ = unix.Kill(pid, sig)
			}
		}
	}
	return err
}

func (p *guestProcess) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

func (p *guestProcess) Close() error {
	p.g.mu.Lock()
	asleep := p.asleep
	p.g.mu.Unlock()
	if !asleep {
		p.kill()
	}
	return nil
}

// beGuest makes this process the agent of a guest.
func beGuest(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	listen := func(port int) (net.Listener, error) { return net.Listen("unix", filepath.Join(dir, fmt.Sprint(port))) }
	rpc, err := listen(agentpb.AgentPort)
	if err != nil {
		return err
	}
	forward, err := listen(agentpb.ForwardPort)
	if err != nil {
		return err
	}
	root := filepath.Join(dir, "root")
	options := fmt.Sprintf("lowerdir=/,upperdir=%s/upper,workdir=%s/work", dir, dir)
	if err := unix.Mount("overlay", root, "overlay", 0, options); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	if err := unix.Mount("/dev", root+"/dev", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("/dev: %w", err)
	}
	// Each start of it is a boot, as that of a machine's kernel.
	id, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	if err != nil {
		return err
	}
	boot := filepath.Join(dir, "boot_id")
	if err := os.WriteFile(boot, id, 0o444); err != nil {
		return err
	}
	booted, err := os.Open(boot)
	if err != nil {
		return err
	}
	defer booted.Close()
	if err := unix.Chroot(root); err != nil {
		return err
	}
	if err := errors.Join(os.Chdir("/"), unix.Mount("proc", "/proc", "proc", 0, ""), unix.Sethostname([]byte("guest"))); err != nil {
		return err
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", booted.Fd()), "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("its boot_id: %w", err)
	}
	lo, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := errors.Join(unix.IoctlIfreq(lo, unix.SIOCSIFFLAGS, ifr), unix.Close(lo)); err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if passwd, err := os.ReadFile("/etc/passwd"); err != nil {
		return err
	} else if !strings.Contains(string(passwd), "\nuser:") {
		passwd = append(passwd, "user:*:31000:31000::/home/user:/bin/bash\n"...)
		group, err := os.ReadFile("/etc/group")
		if err != nil {
			return err
		}
		if err := errors.Join(
			os.WriteFile("/etc/passwd", passwd, 0o644), os.WriteFile("/etc/group", append(group, "user:x:31000:\n"...), 0o644),
			os.MkdirAll("/home/user", 0o755), os.Chown("/home/user", 31000, 31000), os.Chmod("/tmp", 0o1777),
		); err != nil {
			return err
		}
	}
	server, err := agent.New(agent.Config{Version: "test", Init: true, Machine: machine{}, HookDir: "/etc/drowse/none"})
	if err != nil {
		return err
	}
	go func() { _ = server.ServeForward(context.Background(), forward) }()
	return server.Serve(context.Background(), rpc)
}

// machine is a machine whose power is that of the process.
type machine struct{}

func (machine) SetClock(int64, time.Time) error    { return nil }
func (machine) AddEntropy([]byte) error            { return nil }
func (machine) NewIdentity(string) (string, error) { return "", nil }
func (machine) Power(bool) error                   { os.Exit(0); return nil }
func (machine) Freeze() error                      { return nil }
func (machine) Thaw() error                        { return nil }
func (machine) Trim() error                        { return nil }
