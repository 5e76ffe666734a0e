//go:build workloads

package jailproofs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/procstat"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var (
	floodRounds = flag.Int("flood-rounds", 2, "how often each flood comes and goes")
	floodExecs  = flag.Int("flood-execs", 5, "how many commands of the neighbour's are timed in each round with a flood, and as many without")
	floodKinds  = flag.String("flood-kinds", "", "the floods, separated by commas; empty is all")
	floodCPUs   = flag.Float64("flood-cpus", 0, "how many processors each sandbox may use: drowse limits --cpus; 0 is no limit")
)

// programEnv names the program whose serve is asked for its health.
const programEnv = "DROWSE_TEST_PROGRAM"

// Bounds of what is asked for. A machine whose CPU is emulated may miss those of time.
const (
	maxSlower   = 1.5
	maxHealth   = 100 * time.Millisecond
	maxKeeper   = 256 << 20 // bytes; of the process that a flood's messages reach last
	maxLogs     = 10 << 20  // console.log and vmm.log with their predecessors: docs/SPECIFICATION.md
	floodVCPUs  = 2
	floodMemory = 128
)

// flood is a program in a guest, as root, until it is killed. With output its output is read.
type flood struct {
	kind   string
	python string
	output bool
}

// atGateway is a UDP socket to a port of the host.
const atGateway = `
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((open('/etc/resolv.conf').read().split('nameserver')[1].split()[0], %d))
while True:
    try:
        s.send(%s)
    except OSError:
        pass
`

var floods = []flood{
	{kind: "processors", python: `
import os
while os.cpu_count() > 1 and not os.fork():
    os.sched_setaffinity(0, {1})
    break
while True:
    pass
`},
	{kind: "memory and balloon", python: `
while True:
    b = bytearray(32 << 20) # pages are touched, and reported free by the balloon
    del b
`},
	{kind: "disk", python: `
import os
block = os.urandom(1 << 20)
while True:
    f = os.open('/root/flood', os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(f, block):
            os.fdatasync(f)
    except OSError: # the disk is full
        pass
    os.close(f)
    os.unlink('/root/flood')
`},
	{kind: "packets", python: fmt.Sprintf(atGateway, 9, `b'x' * 1400`)},
	{kind: "names", python: fmt.Sprintf(atGateway, 53, `b'\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06denied\x07example\x00\x00\x01\x00\x01'`)},
	{kind: "serial port", python: `
f = open('/dev/ttyS0', 'wb', buffering=0)
while True:
    f.write(b'x' * 4095 + b'\n')
`},
	{kind: "vsock connections", python: `
import socket
port = 0
while True:
    port += 1
    s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    try:
        s.connect((2, 1020 + port % 16)) # some are served
    except OSError:
        pass
    s.close()
`},
	{kind: "output of a command", output: true, python: `
import os
while True:
    os.write(1, b'x' * 65536)
`},
}

// begin starts a flood in a VM. end returns when no process of it is left.
func (f flood) begin(t *testing.T, e *guesttest.Env, vm string) (end func()) {
	t.Helper()
	c, err := e.Store.Sandbox(vm).Agent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cmd := guest.Cmd{Argv: []string{"python3", "-S", "-E", "-c", "open('/run/flood', 'w').close()\n" + f.python}}
	var last strings.Builder
	cmd.Stderr = &last
	if f.output {
		cmd.Stdout = io.Discard
	}
	e.Sh(vm, "rm -f /run/flood")
	s, err := c.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patience); !e.Exists(vm, "/run/flood"); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the flood of %s does not begin", f.kind)
		}
	}
	return func() {
		t.Helper()
		select {
		case <-s.Done():
			st, err := s.Wait()
			t.Errorf("the flood of %s has ended: %+v, %v: %s", f.kind, st, err, last.String())
		default:
		}
		if err := s.Signal(int(unix.SIGKILL)); err != nil {
			t.Errorf("ending the flood of %s: %v", f.kind, err)
		}
		if _, err := s.Wait(); err != nil && !errors.As(err, new(*guest.ExitError)) {
			t.Errorf("the end of the flood of %s: %v", f.kind, err)
		}
		c.Close()
	}
}

// bounds are what a VM uses of its host, next to what it may use.
type bounds struct {
	memory, memoryMax, keeper int64 // bytes; the highest of all confined processes, and the keeper's
	killed                    int64 // processes that the kernel has killed for their memory
	disk, logs                int64
}

func (b bounds) String() string {
	return fmt.Sprintf("confined memory %d of %d MiB at most, keeper %d MiB at most, %d killed, store %d MiB, logs %d KiB",
		b.memory>>20, b.memoryMax>>20, b.keeper>>20, b.killed, b.disk>>20, b.logs>>10)
}

// boundsOf measures a running VM.
func boundsOf(t *testing.T, e *guesttest.Env, vm string) (b bounds) {
	t.Helper()
	r, err := e.Store.State.Get(vm)
	if err != nil {
		t.Fatal(err)
	}
	pids, err := procstat.PIDs(r.PID)
	if err != nil {
		t.Fatal(err)
	}
	number := func(path, field string) int64 {
		text, err := os.ReadFile(path)
		if err != nil {
			return 0 // that process has ended
		}
		_, rest, _ := strings.Cut("\n"+string(text), "\n"+field)
		n, _ := strconv.ParseInt(append(strings.Fields(rest), "")[0], 10, 64)
		return n
	}
	b.keeper = number(fmt.Sprintf("/proc/%d/status", r.PID), "VmHWM:") << 10
	for _, pid := range pids[1:] {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			continue
		}
		dir := filepath.Join("/sys/fs/cgroup", strings.TrimSpace(strings.TrimPrefix(string(text), "0::")))
		if peak := number(filepath.Join(dir, "memory.peak"), ""); peak > b.memory {
			b.memory, b.memoryMax = peak, number(filepath.Join(dir, "memory.max"), "")
		}
		b.killed += number(filepath.Join(dir, "memory.events"), "oom_kill ")
	}
	b.disk = diskUse(e.Store.State.Dir()) << 10
	for _, log := range []string{e.Store.State.ConsoleLog(vm), e.Store.State.ProcessLog(vm)} {
		all, _ := filepath.Glob(log + "*")
		for _, path := range all {
			if fi, err := os.Stat(path); err == nil {
				b.logs += fi.Size()
			}
		}
	}
	return b
}

// serve starts drowse serve for a store, and returns the socket at which it answers.
func serve(t *testing.T, e *guesttest.Env) (socket string) {
	t.Helper()
	program := os.Getenv(programEnv)
	if program == "" {
		t.Skipf("$%s names no drowse program: use `make jail-floods`", programEnv)
	}
	socket = filepath.Join(e.Store.State.Dir(), "api.sock")
	cmd := exec.Command(program, "--state", e.Store.State.Dir(), "serve", "--pool", "0")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("drowse serve: %v", err)
		}
	})
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		_, err := asked(t.Context(), socket)
		if err == nil {
			return socket
		}
		if time.Now().After(end) {
			t.Fatalf("drowse serve does not answer: %v", err)
		}
	}
}

// asked returns how long the answer to /healthz has taken, on a connection of its own.
func asked(ctx context.Context, socket string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	begin := time.Now()
	c := client.Unix(socket)
	defer c.Close()
	resp, err := c.Do(ctx, http.MethodGet, "/healthz", nil)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET /healthz: %s", resp.Status)
	}
	return time.Since(begin), err
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// One guest floods its host in all ways, one after the other. Its neighbour and drowse serve are timed with the flood
// and without, in turn.
func TestFloods_of_a_guest_leave_its_neighbour_and_its_host_within_bounds(t *testing.T) {
	onlyEmulated(t)
	e := guesttest.New(t)
	if *floodCPUs > 0 {
		if err := (limits.Limits{
			MemoryOvercommit: limits.Default.MemoryOvercommit, WakeReservePercent: limits.Default.WakeReservePercent, MemoryWaitSeconds: limits.Default.MemoryWaitSeconds,
			DefaultSandbox: limits.Sandbox{CPUs: *floodCPUs},
		}).Write(e.Store.State.Dir()); err != nil {
			t.Fatal(err)
		}
	}
	want := sandbox.Spec{Name: "flood", VCPUs: floodVCPUs, MemoryMiB: floodMemory, Network: spec.NetworkTAP, Policy: mustPolicy(t)}
	want.DiskQuotaMiB = want.MinDiskQuota() + 192
	e.Run(want)
	e.Run(sandbox.Spec{Name: "neighbour", MemoryMiB: floodMemory, Network: spec.NetworkTAP, Policy: mustPolicy(t)})
	health := serve(t, e)
	before := boundsOf(t, e, "flood")
	t.Logf("before: %v; the disk quota is %d MiB", before, want.DiskQuotaMiB)

	c := e.Agent("neighbour")
	// timed returns how long commands of the neighbour's and answers of drowse serve take, one of each in turn.
	timed := func() (execs, answers []time.Duration) {
		t.Helper()
		for range *floodExecs {
			begin := time.Now()
			if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"/bin/true"}}); err != nil {
				t.Fatal(err)
			}
			execs = append(execs, time.Since(begin))
			took, err := asked(t.Context(), health)
			if err != nil {
				t.Fatal(err)
			}
			answers = append(answers, took)
		}
		return execs, answers
	}
	timed()
	for _, f := range floods {
		if *floodKinds != "" && !slices.Contains(strings.Split(*floodKinds, ","), f.kind) {
			continue
		}
		var quiet, loud, health, quietHealth []time.Duration
		for range *floodRounds {
			execs, answers := timed()
			quiet, quietHealth = append(quiet, execs...), append(quietHealth, answers...)
			end := f.begin(t, e, "flood")
			execs, answers = timed()
			loud, health = append(loud, execs...), append(health, answers...)
			end()
		}
		now := boundsOf(t, e, "flood")
		ratio := float64(median(loud)) / float64(median(quiet))
		t.Logf("%s: a neighbour's command takes %v, and %v without: %.2f times; /healthz %v, and %v without, at most %v; %v",
			f.kind, median(loud).Round(time.Millisecond), median(quiet).Round(time.Millisecond), ratio,
			median(health).Round(time.Millisecond), median(quietHealth).Round(time.Millisecond), slices.Max(health).Round(time.Millisecond), now)
		if ratio > maxSlower {
			t.Logf("MISSED: %s slows the neighbour's command more than %.1f times", f.kind, maxSlower)
		}
		if m := median(health); m > maxHealth {
			t.Logf("MISSED: with %s /healthz takes more than %v", f.kind, maxHealth)
		}
		if now.memory > now.memoryMax || now.keeper > maxKeeper || now.killed > 0 || now.logs > maxLogs || now.disk-before.disk > int64(want.DiskQuotaMiB)<<20 {
			t.Errorf("%s: beyond a bound: %v", f.kind, now)
		}
	}
	// What has flooded goes on.
	if got := e.Sh("flood", "echo well"); got != "well" {
		t.Errorf("after all floods the guest says %q", got)
	}
	e.Sleep("flood")
	e.Wake("flood")
}
