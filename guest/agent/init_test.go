package agent

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agent/machine"
	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// initEnv makes the test binary PID 1 of a namespace. Its value names the task.
const initEnv = "DROWSE_TEST_INIT"

func TestMain(m *testing.M) {
	if what := os.Getenv(initEnv); what != "" {
		os.Exit(asInit(what))
	}
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("os/signal.signal_recv"),
		goleak.IgnoreTopFunction("os/signal.loop"))
}

// inNamespace runs the test binary as PID 1 of namespaces of its own.
func inNamespace(t *testing.T, what string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can make a PID namespace")
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), initEnv+"="+what)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("as PID 1: %v\n%s", err, out)
	}
	return string(out)
}

func TestInit_reaps_orphans_and_still_knows_the_status_of_its_own(t *testing.T) {
	if out := inNamespace(t, "reap"); !strings.Contains(out, "statuses ok") || !strings.Contains(out, "zombies 0") {
		t.Errorf("got %q", out)
	}
}

func TestInit_stop_ends_processes_that_comply_and_those_that_do_not(t *testing.T) {
	out := inNamespace(t, "stop")
	for _, want := range []string{"complied", "children left: none", "power reboot=true"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %q", want, out)
		}
	}
}

func TestInit_a_new_identity_changes_hostname_and_boot_id_again_and_again(t *testing.T) {
	out := inNamespace(t, "identity")
	if !strings.Contains(out, "identity ok") {
		t.Errorf("got %q", out)
	}
}

func asInit(what string) int {
	fail := func(err error) int { fmt.Println(err); return 1 }
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fail(err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fail(err)
	}
	switch what {
	case "reap":
		return initReap(fail)
	case "stop":
		return initStop(fail)
	case "identity":
		return initIdentity(fail)
	}
	return 1
}

// initReap starts at the same time commands that leave orphans and commands whose statuses must be right.
func initReap(fail func(error) int) int {
	s, err := New(Config{Init: true, Machine: &machine.Kernel{}})
	if err != nil {
		return fail(err)
	}
	var all []*proc.Process
	for i := range 30 {
		p, err := s.Table.Start(&agentpb.ExecStart{
			Argv: []string{"/bin/sh", "-c", fmt.Sprintf("(sleep 0.05; exit 9) & (true) & exit %d", i)}, NoStdin: true,
		})
		if err != nil {
			return fail(err)
		}
		all = append(all, p)
	}
	for i, p := range all {
		<-p.Done()
		if int(p.Exit().Code) != i {
			fmt.Printf("process %d: %v\n", i, p.Exit())
			return 1
		}
	}
	fmt.Println("statuses ok")
	for range 100 {
		if zombies() == 0 && children() == 0 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	fmt.Println("zombies", zombies())
	return 0
}

// zombies counts the processes of /proc in state Z.
func zombies() int {
	n := 0
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range stats {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), ") Z ") {
			n++
		}
	}
	return n
}

// children counts the processes other than this one.
func children() int {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	return len(stats) - 1
}

// printMachine prints the calls that it gets.
type printMachine struct{ machine.Kernel }

func (m *printMachine) Power(reboot bool) error {
	left := "none"
	if n := children(); n > 0 {
		left = fmt.Sprint(n)
	}
	fmt.Printf("children left: %s\npower reboot=%v\n", left, reboot)
	return nil
}

func initStop(fail func(error) int) int {
	s, err := New(Config{Init: true, Machine: &printMachine{}})
	if err != nil {
		return fail(err)
	}
	for _, script := range []string{
		"trap 'echo complied >/tmp/drowse-complied; exit' TERM; echo up; while :; do sleep 0.01; done",
		"trap '' TERM; echo up; while :; do sleep 0.01; done",
		"kill -STOP $$",
	} {
		p, err := s.Table.Start(&agentpb.ExecStart{Argv: []string{"/bin/sh", "-c", script}, NoStdin: true, Detach: true})
		if err != nil {
			return fail(err)
		}
		if strings.Contains(script, "up") {
			if _, err := p.AwaitOutput(context.Background(), "up", 16); err != nil { // the program has set its trap
				return fail(err)
			}
		}
	}
	time.Sleep(50 * time.Millisecond)
	s.Stop(true, 300*time.Millisecond)
	b, _ := os.ReadFile("/tmp/drowse-complied")
	os.Remove("/tmp/drowse-complied")
	fmt.Print(string(b))
	return 0
}

func initIdentity(fail func(error) int) int {
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return fail(err)
	}
	if err := unix.Mount("tmpfs", "/etc", "tmpfs", 0, ""); err != nil {
		return fail(err)
	}
	const bootIDPath, machineIDPath = "/proc/sys/kernel/random/boot_id", "/etc/machine-id"
	if err := os.WriteFile(machineIDPath, []byte("old\n"), 0o444); err != nil {
		return fail(err)
	}
	k := &machine.Kernel{}
	seen := map[string]bool{}
	for i := range 3 {
		name := fmt.Sprintf("clone%d", i)
		id, err := k.NewIdentity(name)
		if err != nil {
			return fail(err)
		}
		boot, _ := os.ReadFile(bootIDPath)
		machine, _ := os.ReadFile(machineIDPath)
		host, _ := os.Hostname()
		if string(boot) != id+"\n" || host != name || len(machine) != 33 || seen[id] || seen[string(machine)] {
			return fail(fmt.Errorf("boot id %q, want %q; hostname %q; machine id %q", boot, id, host, machine))
		}
		seen[id], seen[string(machine)] = true, true
	}
	if err := k.AddEntropy(make([]byte, 32)); err != nil { // any bytes are harmless
		return fail(err)
	}
	if err := k.AddEntropy(make([]byte, 31)); err == nil {
		return fail(fmt.Errorf("31 bytes of entropy were taken"))
	}
	if err := k.SetClock(-1, time.Now()); err == nil {
		return fail(fmt.Errorf("a time before 1970 was taken"))
	}
	fmt.Println("identity ok")
	return 0
}

func TestServer_a_panic_in_a_method_is_an_error_and_the_agent_lives(t *testing.T) {
	s, err := New(Config{Machine: panicMachine{}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = safely(t.Context(), nil, nil, func(ctx context.Context, _ func(any) error) (any, error) {
		return s.Resume(ctx, &agentpb.ResumeRequest{WallNanos: 1})
	})
	if err == nil || !strings.Contains(err.Error(), "the agent failed") {
		t.Errorf("got %v", err)
	}
}

type panicMachine struct{ machine.Kernel }

func (panicMachine) SetClock(int64, time.Time) error { panic("no clock") }

func (panicMachine) AddEntropy([]byte) error { return nil }

func (panicMachine) NewIdentity(string) (string, error) { return "", nil }

func (panicMachine) Freeze() error { return nil }

func (panicMachine) Thaw() error { return nil }

func (panicMachine) Trim() error { return nil }

func (panicMachine) Power(bool) error { return nil }

func TestVsock_listener_turns_local_processes_away(t *testing.T) {
	const port = 51024
	l, err := ListenVsock(port)
	if err != nil {
		t.Skipf("this host has no vsock: %v", err)
	}
	got := make(chan net.Conn, 1)
	go func() {
		if c, err := l.Accept(); err == nil {
			got <- c
		}
		close(got)
	}()
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_LOCAL, Port: port})
	if err == nil {
		var b [1]byte
		if n, err := unix.Read(fd, b[:]); n > 0 {
			t.Errorf("served: %d, %v", n, err)
		}
	} else {
		t.Logf("this host has no vsock loopback: %v", err)
	}
	l.Close()
	if c := <-got; c != nil {
		t.Error("a connection from this machine was accepted")
	}
}
