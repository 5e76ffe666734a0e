package confine

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// Counts of what the tests tried, for the last line of make test-jail.
var tried, refused, permitted, gained atomic.Int64

// roles are what the test's program does when it is started with the argument confined and a role.
var roles = map[string]func(args []string){}

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "confined" {
		roles[os.Args[2]](os.Args[3:])
		os.Exit(0)
	}
	dir, err := os.MkdirTemp("", "confine")
	if err != nil {
		panic(err)
	}
	idDir = dir
	firstID += NumIDs * (1 + os.Getpid()%1000) // not those of VMs, nor of another run of the tests
	if asUser() {
		limitedRound()
	}
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.RemoveAll(dir)
	if n := tried.Load(); n > 0 {
		fmt.Printf("tried %d, refused %d, allowed by the list %d, gained %d\n", n, refused.Load(), permitted.Load(), gained.Load())
	}
	os.Exit(code)
}

// confinable skips a test where nothing can be confined.
func confinable(t *testing.T) {
	t.Helper()
	if missing := Probe().Missing(true); len(missing) > 0 {
		t.Skipf("this needs %s: %s", missing[0].Name, missing[0].Detail)
	}
}

func self(role string, args ...string) []string {
	return append([]string{"/proc/self/exe", "confined", role}, args...)
}

// start starts a child whose output is read by the function that start returns, which waits for its end.
func start(t *testing.T, p Profile) (*Process, func() (string, error)) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Output = w
	if p.Name == "" {
		p.Name = t.Name()
	}
	c, err := Start(t.Context(), p)
	w.Close()
	if err != nil {
		r.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c, func() (string, error) {
		out, err := io.ReadAll(r)
		if err != nil {
			t.Error(err)
		}
		return string(out), c.Wait()
	}
}

// confined enters and locks as a child does.
func confined() {
	if err := Lock(entered()); err != nil {
		fatal(err)
	}
}

func entered() LockOptions {
	o, err := Enter()
	if err != nil {
		fatal(err)
	}
	return o
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(3)
}

// refusedBySignal reports whether a process was killed for a system call.
func refusedBySignal(err error) bool {
	exit, ok := err.(*exec.ExitError)
	if !ok {
		return false
	}
	ws := exit.Sys().(syscall.WaitStatus)
	return ws.Signaled() && ws.Signal() == unix.SIGSYS
}

// run runs the test's program in a role without Start.
func run(role string, args ...string) (string, error) {
	cmd := exec.Command("/proc/self/exe", append([]string{"confined", role}, args...)...)
	cmd.Env = []string{"GODEBUG=" + goDebug}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return strings.TrimSpace(out.String()), err
}
