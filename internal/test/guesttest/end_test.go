package guesttest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) { Main(m) }

// roleEnv says what TestProcess is: a test that starts a process, or that process.
const roleEnv = "GUESTTEST_ROLE"

// TestProcess is no test, but two of the processes of the next one.
func TestProcess(t *testing.T) {
	switch os.Getenv(roleEnv) {
	case "test":
		cmd := exec.Command(os.Args[0], "-test.run=^TestProcess$")
		cmd.Env = append(os.Environ(), roleEnv+"=vmm")
		cmd.Stdout = os.Stdout
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // as sandbox starts the process of a VM
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
	case "vmm":
		fmt.Println(os.Getpid())
		time.Sleep(time.Hour)
	}
}

func TestProcesses_that_a_killed_test_has_started_end(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	cmd := exec.Command(os.Args[0], "-test.run=^TestProcess$")
	cmd.Env = append(os.Environ(), roleEnv+"=test")
	cmd.Stdout = write
	err = cmd.Start()
	write.Close()
	if err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(read)
	line, err := r.ReadString('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	// It has the other end of the pipe for as long as it runs.
	if err := read.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		t.Fatalf("process %d outlived its test: %v", pid, err)
	}
}
