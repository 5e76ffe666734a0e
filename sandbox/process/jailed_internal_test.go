package process

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/jail"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/procstat"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// What the test's program is started as.
const (
	asProcess = "process" // of a VM
	asKeeper  = "keeper"  // of a confined process that has no VM
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 2 && os.Args[1] == asProcess:
		if err := ServeProcess(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case len(os.Args) == 2 && os.Args[1] == asKeeper:
		j, err := jail.New(context.Background(), jail.Config{Program: []string{asProcess}, Output: os.Stderr})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(j.PID())
		select {}
	}
	goleak.VerifyTestMain(m)
}

func confinable(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skipf("a confined process of a VM has it open: %v", err)
	}
	if missing := confine.Probe().Missing(true); len(missing) > 0 {
		t.Skipf("this needs %s: %s", missing[0].Name, missing[0].Detail)
	}
}

func forgetConfined() {
	urgency.mu.Lock()
	defer urgency.mu.Unlock()
	urgency.confined = nil
}

// confinedChild starts a confined process without a VM.
func confinedChild(t *testing.T) *jail.Jail {
	t.Helper()
	confinable(t)
	j, lacks, err := newJail(t.Context(), jail.Config{Program: []string{asProcess}, Output: os.Stderr})
	if err != nil || lacks != "" {
		t.Fatal(lacks, err)
	}
	t.Cleanup(func() {
		forgetConfined()
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}

func TestPrioritize_lifts_all_threads_of_the_confined_process_and_calm_puts_them_back(t *testing.T) {
	j := confinedChild(t)
	all := func(want int) {
		t.Helper()
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", j.PID()))
		if err != nil || len(threads) < 2 {
			t.Fatalf("%d threads, %v", len(threads), err)
		}
		for _, th := range threads {
			tid, err := strconv.Atoi(th.Name())
			if err != nil {
				t.Fatal(err)
			}
			if got, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err == nil && 20-got != want {
				t.Errorf("thread %d of %d has priority %d, want %d", tid, len(threads), 20-got, want)
			}
		}
	}
	got, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	all(20 - got)
	calm := prioritize()
	all(urgentNice)
	calm()
	all(20 - got)
}

func TestConfined_process_that_starts_in_an_urgent_time_is_urgent_until_its_end(t *testing.T) {
	confinable(t)
	got, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	calm := prioritize()
	j := confinedChild(t)
	during, err := unix.Getpriority(unix.PRIO_PGRP, j.PID())
	calm()
	after, aerr := unix.Getpriority(unix.PRIO_PGRP, j.PID())
	if err := errors.Join(err, aerr); err != nil || after != got {
		t.Errorf("afterwards it has %d, and the keeper %d, %v", 20-after, 20-got, err)
	}
	if during != 20-urgentNice {
		t.Logf("the start took longer than %v: %d", maxUrgent, 20-during)
	}
}

func TestUse_of_a_VM_includes_its_confined_process(t *testing.T) {
	j := confinedChild(t)
	u, err := procstat.Of(os.Getpid())
	if err != nil || !slices.Contains(u.PIDs, j.PID()) {
		t.Errorf("the use of %v, without %d, %v", u.PIDs, j.PID(), err)
	}
}

func TestKilled_keeper_takes_its_confined_process_along_and_a_sweep_removes_the_rest(t *testing.T) {
	confinable(t)
	cmd := exec.Command("/proc/self/exe", asKeeper)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	pid, aerr := strconv.Atoi(strings.TrimSpace(line))
	var st unix.Stat_t
	serr := unix.Stat(fmt.Sprintf("/proc/%d/task", pid), &st)
	status, rerr := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	kerr := cmd.Process.Kill()
	_ = cmd.Wait()
	if err := errors.Join(err, aerr, serr, rerr, kerr); err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(status), "\nUid:")
	uid := strings.Fields(after)[0]
	lock := filepath.Join("/run/drowse/uids", uid) // it lists the cgroups
	cgroups, err := os.ReadFile(lock)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); unix.Kill(pid, 0) == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the confined process %d has outlived its keeper", pid)
		}
	}
	if err := confine.Sweep(); err != nil {
		t.Fatal(err)
	}
	for _, path := range append(strings.Fields(string(cgroups)), lock) {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left, %v", path, err)
		}
	}
}

func TestVM_runs_unconfined_only_where_a_required_wall_is_missing(t *testing.T) {
	failed := errors.New("it did not start")
	walls := confine.Support{
		{Name: "seccomp", Present: true, Required: true},
		{Name: "Landlock", Detail: "too old"},
		{Name: "namespaces", Present: true, Required: true, Detail: "lacks net"},
	}
	if lacks, err := unconfinable(failed, walls, false); lacks != "" || !errors.Is(err, failed) ||
		!strings.Contains(err.Error(), control.NoJailEnv) {
		t.Errorf("with all that is required: %q, %v", lacks, err)
	}
	walls[2].Present = false
	if lacks, err := unconfinable(failed, walls, false); err != nil || lacks != "namespaces (lacks net)" {
		t.Errorf("without namespaces: %q, %v", lacks, err)
	}
	if lacks, err := unconfinable(failed, walls, true); lacks != "" || !errors.Is(err, failed) ||
		!strings.Contains(err.Error(), "lacks net") {
		t.Errorf("without namespaces, and required: %q, %v", lacks, err)
	}
}

func TestVM_that_cannot_be_confined_says_so_in_its_log(t *testing.T) {
	made := make(chan struct{})
	close(made)
	a := &jailAhead{made: made, lacks: "user id (run as root)"}
	m := jailedMachines{ahead: a}
	if m.likely() {
		t.Error("it is likely to be confined, it says")
	}
	var said bytes.Buffer
	j, err := a.take(t.Context(), spec.VM{}, confine.Limits{}, nil, slog.New(slog.NewTextHandler(&said, nil)))
	if j != nil || err != nil || !strings.Contains(said.String(), "run as root") ||
		!strings.Contains(said.String(), "level=WARN") {
		t.Errorf("%v, %v, %s", j, err, &said)
	}
}

func TestRequired_jail_wins_over_no_jail(t *testing.T) {
	t.Setenv(control.NoJailEnv, "1")
	if a, err := makeJail([]string{asProcess}, nil); a != nil || err != nil {
		t.Errorf("without a jail: %v, %v", a, err)
	}
	confinable(t)
	t.Setenv(control.RequireJailEnv, "1")
	a, err := makeJail([]string{asProcess}, nil)
	if a == nil || err != nil {
		t.Fatalf("no jail, %v", err)
	}
	defer forgetConfined()
	if ready, err := a.wait(); !ready || err != nil {
		t.Errorf("ready: %t, %v", ready, err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

func TestSeccomp_that_only_logs_is_said_everywhere_and_no_required_jail(t *testing.T) {
	t.Setenv(control.SeccompEnv, "kill")
	if _, err := makeJail([]string{asProcess}, nil); err == nil || !strings.Contains(err.Error(), control.SeccompEnv) {
		t.Errorf("another value: %v", err)
	}
	t.Setenv(control.SeccompEnv, control.SeccompLog)
	t.Setenv(control.RequireJailEnv, "1")
	if _, err := makeJail([]string{asProcess}, nil); err == nil || !strings.Contains(err.Error(), control.RequireJailEnv) {
		t.Errorf("with a required jail: %v", err)
	}
	if v := (jailedVM{logOnly: true}); v.Confined() || !v.SeccompLog() {
		t.Error("such a VM counts as confined")
	}
	confinable(t)
	t.Setenv(control.RequireJailEnv, "")
	a, err := makeJail([]string{asProcess}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer forgetConfined()
	defer a.Close()
	if (jailedMachines{ahead: a}).likely() {
		t.Error("it is likely to be confined, it says")
	}
	var said bytes.Buffer
	j, err := a.take(t.Context(), spec.VM{}, confine.Limits{}, nil, slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(said.String(), "not confined") || !strings.Contains(said.String(), "level=WARN") {
		t.Errorf("the log says %s", &said)
	}
}

func BenchmarkNewJail(b *testing.B) {
	if missing := confine.Probe().Missing(true); len(missing) > 0 {
		b.Skip(missing[0].Name)
	}
	for name, shape := range map[string]*spec.Shape{"bare": nil, "prebuilt": {MemoryMiB: 256, VCPUs: 1}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				j, err := jail.New(b.Context(), jail.Config{Program: []string{asProcess}, Shape: shape, Output: os.Stderr})
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := j.Close(); err != nil {
					b.Error(err)
				}
				b.StartTimer()
			}
		})
	}
}
