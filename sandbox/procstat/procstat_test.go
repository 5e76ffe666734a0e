package procstat

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// work makes the test's program use processor time, hold memory, and wait for the end of its standard input.
const work = "work"

const (
	workTime   = 50 * time.Millisecond
	workMemory = 32 << 20
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == work {
		held := make([]byte, workMemory)
		for i := 0; i < len(held); i += 4096 {
			held[i] = 1
		}
		for used() < workTime {
		}
		os.Stdout.WriteString("done")
		os.Stdin.Read(make([]byte, 1))
		runtime.KeepAlive(held)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func used() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano())
}

func TestUse_of_a_process_has_that_of_its_children_also_of_ended_ones(t *testing.T) {
	before, err := Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	alone, err := one(os.Getpid())
	if err != nil || before.PIDs[0] != os.Getpid() || alone.Age <= 0 {
		t.Fatalf("got %+v and %+v, %v", before, alone, err)
	}
	cmd := exec.Command("/proc/self/exe", work)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	child, err := one(cmd.Process.Pid)
	if err != nil || child.User < workTime-tick || child.Resident < workMemory {
		t.Errorf("the child: %+v, %v", child, err)
	}
	with, err := Of(os.Getpid())
	if err != nil || with.PIDs[0] != os.Getpid() || !slices.Contains(with.PIDs, cmd.Process.Pid) {
		t.Fatalf("with a child: %+v, %v", with, err)
	}
	if with.User < before.User+child.User || with.Resident < workMemory {
		t.Errorf("with a child: %+v, before %+v", with, before)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	after, err := Of(os.Getpid())
	if err != nil || slices.Contains(after.PIDs, cmd.Process.Pid) || after.User < with.User {
		t.Errorf("after its end: %+v, with the child %+v, %v", after, with, err)
	}
	if _, err := Of(cmd.Process.Pid); !Ended(err) {
		t.Errorf("a process that has ended gives %v", err)
	}
}
