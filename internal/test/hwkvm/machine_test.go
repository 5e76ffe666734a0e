package hwkvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

// helperEnv makes the test binary run one helper instead of tests, in a machine or as the runner of one.
const helperEnv = "DROWSE_HWKVM_TEST_HELPER"

var helpers = map[string]func() error{
	"binary": printBinary,
	"kvm":    useKVM,
	"runner": runForever,
	"qemu":   endAtOnce,
	"hang":   hang,
	"nudged": nudged,
}

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		if err := helpers[name](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// allBytes returns all byte values, ascending or descending, more than a frame or a pipe holds.
func allBytes(up bool) []byte {
	b := make([]byte, 300<<10)
	for i := range b {
		b[i] = byte(i)
		if !up {
			b[i] = ^b[i]
		}
	}
	return b
}

func printBinary() error {
	var wg sync.WaitGroup
	errs := make([]error, 2)
	wg.Go(func() { _, errs[0] = os.Stdout.Write(allBytes(true)) })
	wg.Go(func() { _, errs[1] = os.Stderr.Write(allBytes(false)) })
	wg.Wait()
	return errors.Join(errs...)
}

// Ioctls without an argument structure (Documentation/virt/kvm/api.rst, 4.1, 4.2, 4.7).
const (
	kvmGetAPIVersion = 0xae00
	kvmCreateVM      = 0xae01
	kvmCreateVCPU    = 0xae41
	kvmAPIVersion    = 12
)

func useKVM() error {
	dev, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/kvm: %w", err)
	}
	v, err := unix.IoctlRetInt(dev, kvmGetAPIVersion)
	if err != nil || v != kvmAPIVersion {
		return fmt.Errorf("KVM_GET_API_VERSION is %d: %w", v, err)
	}
	vm, err := unix.IoctlRetInt(dev, kvmCreateVM)
	if err != nil {
		return fmt.Errorf("KVM_CREATE_VM: %w", err)
	}
	if _, err := unix.IoctlRetInt(vm, kvmCreateVCPU); err != nil {
		return fmt.Errorf("KVM_CREATE_VCPU: %w", err)
	}
	modules, err := os.ReadFile("/proc/modules")
	if err != nil {
		return err
	}
	if !strings.Contains(string(modules), "kvm_amd ") {
		return errors.New("/proc/modules has no kvm_amd")
	}
	fmt.Println("kvm works")
	return nil
}

func runForever() error {
	im, err := Prepare(context.Background(), os.Getenv(CacheEnv))
	if err != nil {
		return err
	}
	_, err = im.Run(context.Background(), Config{Args: []string{"/bin/sleep", "1000"}, Dir: "/"})
	return err
}

// endAtOnce stands in for QEMU: the machine turns itself off in the instant when its command ends.
func endAtOnce() error {
	port := os.NewFile(portFD, "port")
	if _, err := wire.NewReader(port).Command(); err != nil {
		return err
	}
	w := wire.NewWriter(port)
	return errors.Join(w.Send(wire.Started, nil), w.Send(wire.Stdout, []byte("done")), w.SendJSON(wire.Exit, wire.Result{}))
}

// hang stands in for QEMU: the machine runs for a while and then stands still.
func hang() error {
	port := os.NewFile(portFD, "port")
	if _, err := wire.NewReader(port).Command(); err != nil {
		return err
	}
	w := wire.NewWriter(port)
	err := w.Send(wire.Started, nil)
	for range 10 {
		time.Sleep(hangSilence / 4)
		err = errors.Join(err, w.Send(wire.Alive, nil))
	}
	if err == nil {
		time.Sleep(time.Hour)
	}
	return err
}

// nudged stands in for QEMU: the machine continues only when it is interrupted.
func nudged() error {
	port := os.NewFile(portFD, "port")
	in, out := wire.NewReader(port), wire.NewWriter(port)
	if _, err := in.Command(); err != nil {
		return err
	}
	if err := out.Send(wire.Started, nil); err != nil {
		return err
	}
	for {
		switch t, _, err := in.Next(); {
		case err != nil:
			return err
		case t == wire.Nudge:
			return out.SendJSON(wire.Exit, wire.Result{Code: 7})
		}
	}
}

func TestMachine_that_waits_for_an_interrupt_is_given_one(t *testing.T) {
	t.Setenv(helperEnv, "nudged")
	im := &Image{QEMU: self(t)}
	res, err := im.Run(t.Context(), Config{Args: []string{"true"}, Dir: "/", silence: 60 * wire.NudgeInterval})
	if err != nil || res.Status != 7 {
		t.Errorf("%+v, %v, want status 7", res, err)
	}
}

const hangSilence = 400 * time.Millisecond

func TestMachine_that_hangs_is_killed(t *testing.T) {
	t.Setenv(helperEnv, "hang")
	im := &Image{QEMU: self(t)}
	begin := time.Now()
	_, err := im.Run(t.Context(), Config{Args: []string{"true"}, Dir: "/", silence: hangSilence})
	if !errors.Is(err, ErrHung) {
		t.Errorf("got %v, want ErrHung", err)
	}
	if took := time.Since(begin); took < 3*hangSilence {
		t.Errorf("it was killed after %v, when it had just said that it runs", took)
	}
}

// To the runner, a machine hangs if it is silent longer than allowed. Here that is less than its usual silence.
func TestMachine_that_hangs_is_reported_with_where_its_processors_are(t *testing.T) {
	_, err := runIn(t, testImage(t), Config{Args: []string{"sleep", "1000"}, silence: wire.AliveInterval / 4})
	if !errors.Is(err, ErrHung) || strings.Count(err.Error(), "RIP=") != 2*DefaultCPUs {
		t.Errorf("got %v, want ErrHung and each processor twice", err)
	}
}

// writerFunc makes a writer from a function.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestResult_that_is_read_after_the_machine_has_gone_is_not_lost(t *testing.T) {
	t.Setenv(helperEnv, "qemu")
	im := &Image{QEMU: self(t)}
	cfg := Config{Args: []string{"true"}, Dir: "/"}
	var m *machine
	cfg.Stdout = writerFunc(func(p []byte) (int, error) {
		<-m.done
		return len(p), nil
	})
	if err := cfg.fill(); err != nil {
		t.Fatal(err)
	}
	m, err := im.start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	res, err := m.run(t.Context(), cfg)
	if err != nil || res.Status != 0 || res.Boot == 0 {
		t.Errorf("result %+v, error %v; want the status 0 that the machine sent", res, err)
	}
}

// testImage prepares an image in the user's own cache folder, so that not every run fetches a kernel.
func testImage(t *testing.T) *Image {
	t.Helper()
	if testing.Short() {
		t.Skip("starts virtual machines: not in short mode")
	}
	if _, err := FindQEMU(); err != nil {
		t.Skip(err)
	}
	if os.Getpid() == 1 || onEmulatedKVM() {
		t.Skip("runs inside the machine already")
	}
	t.Parallel() // a machine mostly keeps one CPU busy
	im, err := Prepare(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	return im
}

func onEmulatedKVM() bool {
	b, err := os.ReadFile("/proc/cmdline")
	return err == nil && strings.Contains(string(b), "hwkvm.9p=")
}

type outcome struct {
	Result
	stdout, stderr bytes.Buffer
}

func runIn(t *testing.T, im *Image, cfg Config) (*outcome, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var o outcome
	cfg.Stdout, cfg.Stderr = &o.stdout, &o.stderr
	cfg.Env = append([]string{"PATH=/usr/bin:/bin", "HOME=/root"}, cfg.Env...)
	if cfg.MemoryMiB == 0 {
		cfg.MemoryMiB = 1024
	}
	if cfg.Dir == "" {
		cfg.Dir = "/"
	}
	var err error
	o.Result, err = im.Run(ctx, cfg)
	return &o, err
}

func self(t *testing.T) string {
	t.Helper()
	p, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestMachine_passes_on_status_streams_folder_and_input(t *testing.T) {
	im := testImage(t)
	dir := t.TempDir()
	cfg := Config{
		Args:  []string{"sh", "-c", `pwd; cat; echo "$X$TMPDIR" >&2; echo made > file; exit 3`},
		Env:   []string{"X=x", "TMPDIR=/nowhere"},
		Dir:   dir,
		Stdin: bytes.NewReader(allBytes(true)),
	}
	o, err := runIn(t, im, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if o.Status != 3 || o.Boot <= 0 || o.Total < o.Boot {
		t.Errorf("result is %+v, want status 3", o.Result)
	}
	if want := append([]byte(dir+"\n"), allBytes(true)...); !bytes.Equal(o.stdout.Bytes(), want) {
		t.Errorf("stdout has %d bytes, want %d: the folder and what was put in", o.stdout.Len(), len(want))
	}
	if got := o.stderr.String(); got != "x/run/hwkvm/tmp\n" {
		t.Errorf("stderr is %q", got)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(b) != "made\n" {
		t.Errorf("the file made inside is %q, error %v", b, err)
	}
}

func TestMachine_runs_true(t *testing.T) {
	o, err := runIn(t, testImage(t), Config{Args: []string{"true"}})
	if err != nil || o.Status != 0 || o.stdout.Len() != 0 || o.stderr.Len() != 0 {
		t.Errorf("result %+v, stdout %q, stderr %q, error %v", o.Result, o.stdout.Bytes(), o.stderr.Bytes(), err)
	}
}

func TestMachine_keeps_streams_apart_and_binary(t *testing.T) {
	o, err := runIn(t, testImage(t), Config{Args: []string{self(t)}, Env: []string{helperEnv + "=binary"}})
	if err != nil || o.Status != 0 {
		t.Fatalf("result %+v, error %v", o.Result, err)
	}
	if !bytes.Equal(o.stdout.Bytes(), allBytes(true)) || !bytes.Equal(o.stderr.Bytes(), allBytes(false)) {
		t.Errorf("stdout (%d bytes) or stderr (%d bytes) differs", o.stdout.Len(), o.stderr.Len())
	}
}

// slowWriter makes the machine's output wait until the socket and the rings behind it are full.
type slowWriter struct {
	delays int
	n      int
}

func (w *slowWriter) Write(p []byte) (int, error) {
	if w.delays > 0 {
		w.delays--
		time.Sleep(time.Second)
	}
	w.n += len(p)
	return len(p), nil
}

func TestMachine_whose_output_is_read_slowly_loses_none_of_it(t *testing.T) {
	const size = 600 << 10
	w := &slowWriter{delays: 3}
	o, err := testImage(t).Run(t.Context(), Config{Args: []string{"head", "-c", strconv.Itoa(size), "/dev/zero"}, Dir: "/", Env: os.Environ(), Stdout: w})
	if err != nil || o.Status != 0 || w.n != size {
		t.Errorf("result %+v, error %v, %d bytes of %d", o, err, w.n, size)
	}
}

func TestMachine_has_a_working_KVM(t *testing.T) {
	o, err := runIn(t, testImage(t), Config{Args: []string{self(t)}, Env: []string{helperEnv + "=kvm"}})
	if err != nil || o.Status != 0 || o.stdout.String() != "kvm works\n" {
		t.Errorf("result %+v, stdout %q, stderr %q, error %v", o.Result, o.stdout.Bytes(), o.stderr.Bytes(), err)
	}
}

func TestMachine_loads_modules_on_demand_and_has_its_file_systems(t *testing.T) {
	// /sbin/modprobe is the host's; the kernel asks init's loader when a file system of an unknown type is mounted.
	const script = `set -e
! grep -q overlay /proc/filesystems
cd /run && mkdir -p lower upper work all
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work all
test -c /dev/net/tun && test -d /sys/fs/bpf && test -f /sys/fs/cgroup/cgroup.controllers
grep -q ' /dev/shm tmpfs ' /proc/mounts
test "$(cat /sys/class/net/lo/operstate)" = unknown`
	o, err := runIn(t, testImage(t), Config{Args: []string{"sh", "-xc", script}})
	if err != nil || o.Status != 0 {
		t.Errorf("result %+v, error %v, trace:\n%s", o.Result, err, o.stderr.Bytes())
	}
}

func TestMachine_reports_a_signal_and_a_missing_program_and_a_missing_folder(t *testing.T) {
	im := testImage(t)
	o, err := runIn(t, im, Config{Args: []string{"sh", "-c", "kill -9 $$"}})
	if err != nil || o.Status != 137 {
		t.Errorf("killed: result %+v, error %v; want status 137", o.Result, err)
	}
	o, err = runIn(t, im, Config{Args: []string{"no-such-program"}})
	if err != nil || o.Status != 127 || o.Message == "" {
		t.Errorf("missing program: result %+v, error %v; want status 127 and a message", o.Result, err)
	}
	_, err = runIn(t, im, Config{Args: []string{"true"}, Dir: "/no/such/folder"})
	var broken *MachineError
	if !errors.As(err, &broken) || !strings.Contains(broken.Reason, "/no/such/folder") {
		t.Errorf("missing folder: error %v", err)
	}
}

func TestMachine_that_panics_is_reported_with_the_panic(t *testing.T) {
	_, err := runIn(t, testImage(t), Config{Args: []string{"sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"}})
	var broken *MachineError
	if !errors.As(err, &broken) || !strings.Contains(broken.Reason, "sysrq triggered crash") || !strings.Contains(broken.Console, "Call Trace") {
		t.Errorf("error is %v", err)
	}
}

func TestMachine_that_runs_out_of_memory_says_so(t *testing.T) {
	cfg := Config{Args: []string{"sh", "-c", "tail /dev/zero"}, MemoryMiB: MinMemoryMiB}
	o, err := runIn(t, testImage(t), cfg)
	if err != nil || o.Status != 137 || !strings.Contains(o.OutOfMemory, "tail") {
		t.Errorf("result %+v, error %v; want status 137 and the kernel's message", o.Result, err)
	}
}

func TestMachine_ends_with_the_context(t *testing.T) {
	im := testImage(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	start := time.Now()
	_, err := im.Run(ctx, Config{Args: []string{"sleep", "1000"}, Dir: "/"})
	if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > 30*time.Second {
		t.Errorf("error %v after %v", err, took)
	}
}

func TestMachine_passes_on_signals(t *testing.T) {
	im := testImage(t)
	signals := make(chan os.Signal, 1)
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	sent := make(chan error, 1)
	go func() {
		_, err := out.Read(make([]byte, 16)) // "ready"
		signals <- syscall.SIGTERM
		sent <- err
	}()
	res, err := im.Run(t.Context(), Config{
		Args: []string{"sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done"},
		Env:  []string{"PATH=/usr/bin:/bin"}, Dir: "/", Stdout: in, Signals: signals,
	})
	in.Close()
	if err != nil || res.Status != 7 {
		t.Errorf("result %+v, error %v; want the status 7 of the handler", res, err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

func TestSignal_while_the_machine_boots_ends_it(t *testing.T) {
	im := testImage(t)
	signals := make(chan os.Signal, 1)
	signals <- syscall.SIGINT
	res, err := im.Run(t.Context(), Config{Args: []string{"sleep", "1000"}, Dir: "/", Signals: signals})
	if err != nil || res.Status != 128+int(syscall.SIGINT) {
		t.Errorf("result %+v, error %v; want status 130", res, err)
	}
}

// childrenOf returns the child processes of a process.
func childrenOf(pid int) []int {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	var pids []int
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, s := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(s); err == nil {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

// running reports whether a process exists and is not a zombie (proc(5), field 3 of stat).
func running(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	i := bytes.LastIndexByte(b, ')')
	return i >= 0 && i+2 < len(b) && b[i+2] != 'Z' && b[i+2] != 'X'
}

func TestKilled_runner_leaves_no_QEMU(t *testing.T) {
	testImage(t) // so that the runner finds all that it needs
	cmd := exec.Command(self(t))
	cmd.Env = append(os.Environ(), helperEnv+"=runner")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var qemu int
	for deadline := time.Now().Add(30 * time.Second); qemu == 0 && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		for _, pid := range childrenOf(cmd.Process.Pid) {
			if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && strings.Contains(filepath.Base(exe), "qemu") {
				qemu = pid
			}
		}
	}
	time.Sleep(500 * time.Millisecond) // let QEMU boot a little
	if qemu == 0 || !running(qemu) {
		t.Fatalf("QEMU (process %d) is not running", qemu)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // "signal: killed"
	deadline := time.Now().Add(20 * time.Second)
	for running(qemu) {
		if time.Now().After(deadline) {
			t.Fatalf("QEMU (process %d) still runs", qemu)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
