package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/rootfs/initramfs"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

const (
	qemuProgram = "qemu-system-x86_64"
	// What works on KVM with virtualisation hardware and on soft KVM, whose clock and
	// interrupts need the old devices. Without option ROMs qboot starts the kernel by
	// its PVH entry (Xen, docs/misc/pvh.pandoc).
	qemuMachine = "microvm,accel=kvm,pic=on,pit=on,rtc=on,isa-serial=on,x-option-roms=off"

	// peerBoot bounds the boot of a guest, and peerAnswer a resume.
	peerBoot   = 15 * time.Minute
	peerAnswer = 5 * time.Minute
	// maxConsole bounds what is said of a guest's console.
	maxConsole = 2000
)

// qemuCPUs are the models to try, in order: that of the host, and the same without the
// MSR that soft KVM does not take (IA32_ARCH_CAPABILITIES, 0x10a), with which QEMU 7.2
// ends by an assertion.
func qemuCPUs() []string {
	all := []string{"host", "host,-arch-capabilities"}
	if vmm.SoftKVM() {
		all[0], all[1] = all[1], all[0]
	}
	return all
}

// qemu is a guest of QEMU whose state was migrated to a file.
type qemu struct {
	dir     string
	path    string // of the program
	cpu     string
	version string
	mib     int
	usedMiB int
	kernel  string
	initrd  string
	cmdline string
	runs    int
}

func (q *qemu) state() string   { return filepath.Join(q.dir, "state") }
func (q *qemu) console() string { return filepath.Join(q.dir, "console") }

// newQEMU boots a guest and migrates it to a file. The guest has drowse's own kernel and
// command line, and the program of Env.PeerGuest as its first process.
func (e Env) newQEMU(ctx context.Context, mib, usedMiB int) (_ *qemu, err error) {
	q := &qemu{mib: mib, usedMiB: usedMiB}
	if q.path, err = exec.LookPath(qemuProgram); err != nil {
		return nil, fmt.Errorf("%w: install it (on Debian, the package qemu-system-x86)", err)
	}
	if q.kernel, q.cmdline, err = e.peerKernel(); err != nil {
		return nil, err
	}
	// QEMU saves all pages that are not zeros. Without init_on_free those of the unpacked
	// initramfs would be among them, which no user of QEMU would have there.
	q.cmdline += " init_on_free=1 rdinit=/init -- --used " + strconv.Itoa(usedMiB)
	if q.dir, err = os.MkdirTemp("", "drowse-peer-"); err != nil {
		return nil, fmt.Errorf("making a directory for QEMU: %w", err)
	}
	if q.initrd, err = e.peerInitramfs(ctx, q.dir); err != nil {
		return nil, errors.Join(err, q.close())
	}
	var tried []error
	for _, q.cpu = range qemuCPUs() {
		err := q.save(ctx)
		if err == nil {
			return q, nil
		}
		tried = append(tried, fmt.Errorf("with -machine %s -cpu %s: %w", qemuMachine, q.cpu, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errors.Join(tried...), q.close())
}

// peerKernel is the kernel of drowse's own guests, and what its command line has on this host.
func (e Env) peerKernel() (image, params string, err error) {
	host := kernel.Hardware
	if vmm.SoftKVM() {
		host = kernel.Soft
	}
	image = e.Kernel
	if !strings.Contains(e.Kernel, "/") {
		name := e.Kernel
		if name == "" {
			name = string(kernel.Built)
		}
		k, err := kernel.Find(e.Store.State.KernelDir(), name)
		if err != nil {
			return "", "", err
		}
		if k.Kind != kernel.Built {
			return "", "", fmt.Errorf("kernel %s needs modules: other monitors are measured with built kernels", k.ID)
		}
		image = k.Image
	}
	params, err = kernel.DefaultParams(kernel.Built, host)
	return image, params, err
}

// PeerReady is what the program of Env.PeerGuest writes once, when its memory is filled.
const PeerReady = 'R'

// peerInitramfs has the program of peers' guests as its first.
func (e Env) peerInitramfs(ctx context.Context, dir string) (string, error) {
	if _, err := os.Stat(e.PeerGuest); err != nil {
		return "", fmt.Errorf("finding the program for guests of other monitors: %w: build it with `make build`, and put it beside drowse", err)
	}
	return initramfs.Ensure(ctx, dir, initramfs.Spec{Init: e.PeerGuest})
}

func (q *qemu) close() error { return os.RemoveAll(q.dir) }

func (q *qemu) params() map[string]any {
	return map[string]any{
		"peer_version": q.version, "peer_machine": qemuMachine, "peer_cpu": q.cpu, "vcpus": spec.DefaultVCPUs,
		"guest": "initramfs", paramUsed: q.usedMiB, "cache": "warm",
	}
}

// stateMiB is the size of the file. It has little but pages that are not all zeros.
func (q *qemu) stateMiB() float64 {
	info, err := os.Stat(q.state())
	if err != nil {
		return 0
	}
	return float64(info.Size()) / mibBytes
}

// qemuRun is a process of QEMU.
type qemuRun struct {
	q       *qemu
	dir     string // for its sockets
	begin   time.Time
	process time.Duration // until it connects to its first socket
	port    *net.UnixConn // the guest's virtio-serial port
	qmp     *qmp

	mu      sync.Mutex
	stderr  []byte // guarded by mu
	cmd     *exec.Cmd
	ended   chan struct{}
	endOnce sync.Once
}

// Write keeps the beginning of what QEMU says.
func (r *qemuRun) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stderr = append(r.stderr, p[:min(len(p), max(0, maxConsole-len(r.stderr)))]...)
	return len(p), nil
}

// start starts QEMU, from a state if it is not nil, and returns when it talks.
func (q *qemu) start(ctx context.Context, state *os.File) (_ *qemuRun, err error) {
	q.runs++
	r := &qemuRun{q: q, dir: filepath.Join(q.dir, strconv.Itoa(q.runs)), ended: make(chan struct{})}
	if err := os.Mkdir(r.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making a directory for QEMU: %w", err)
	}
	// QEMU connects to sockets that are there before it: nobody has to look whether it
	// listens yet, and the guest's port is connected from the beginning.
	var sockets []*net.UnixListener
	defer func() {
		for _, l := range sockets {
			l.Close()
		}
	}()
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", qemuMachine, "-cpu", q.cpu, "-smp", strconv.Itoa(spec.DefaultVCPUs), "-m", strconv.Itoa(q.mib),
		"-chardev", "file,id=console,path=" + q.console(), "-serial", "chardev:console",
	}
	for _, name := range []string{"qmp", "port"} {
		path := filepath.Join(r.dir, name)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listening for QEMU: %w", err), os.RemoveAll(r.dir))
		}
		sockets = append(sockets, l)
		args = append(args, "-chardev", "socket,id="+name+",path="+path)
	}
	args = append(args, "-mon", "chardev=qmp,mode=control", "-device", "virtio-serial-device", "-device", "virtserialport,chardev=port,name=drowse")
	r.cmd = exec.Command(q.path, args...)
	if state != nil {
		// Neither kernel nor initramfs: both are in the state.
		r.cmd.ExtraFiles = []*os.File{state}
		r.cmd.Args = append(r.cmd.Args, "-incoming", "fd:3")
	} else {
		r.cmd.Args = append(r.cmd.Args, "-kernel", q.kernel, "-initrd", q.initrd, "-append", q.cmdline)
	}
	r.cmd.Stderr = r
	// A group of its own: an interrupt at the terminal is for this process, which then
	// ends QEMU.
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r.begin = time.Now()
	if err := r.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("starting QEMU: %w", err), os.RemoveAll(r.dir))
	}
	go func() {
		_ = r.cmd.Wait() // how it ended is in the ProcessState
		close(r.ended)
	}()
	defer func() {
		if err != nil {
			err = errors.Join(r.explain(err), r.close())
		}
	}()
	conns := make([]*net.UnixConn, len(sockets))
	for i, l := range sockets {
		if conns[i], err = r.accept(ctx, l); err != nil {
			for _, c := range conns[:i] {
				c.Close()
			}
			return nil, err
		}
		if i == 0 {
			r.process = time.Since(r.begin)
		}
	}
	r.port = conns[1]
	r.qmp, err = newQMP(ctx, conns[0])
	return r, err
}

// accept waits for QEMU to connect, as long as it is there.
func (r *qemuRun) accept(ctx context.Context, l *net.UnixListener) (*net.UnixConn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-r.ended:
		case <-ctx.Done():
		}
		_ = l.SetDeadline(time.Unix(1, 0))
	}()
	c, err := l.AcceptUnix()
	if err != nil {
		return nil, fmt.Errorf("waiting for QEMU to connect: %w", err)
	}
	return c, nil
}

// explain adds what QEMU and the console of its guest say, if that is why.
func (r *qemuRun) explain(err error) error {
	// It may be about to end.
	select {
	case <-r.ended:
		err = fmt.Errorf("%w: QEMU has ended: %s", err, r.cmd.ProcessState)
	case <-time.After(time.Second):
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.stderr) > 0 {
		err = fmt.Errorf("%w: it says %q", err, r.stderr)
	}
	if text, rerr := os.ReadFile(r.q.console()); rerr == nil && len(text) > 0 {
		err = fmt.Errorf("%w: the guest's console ends with %q", err, text[max(0, len(text)-maxConsole):])
	}
	return err
}

// close kills QEMU and returns when it is gone.
func (r *qemuRun) close() (err error) {
	r.endOnce.Do(func() {
		if kerr := r.cmd.Process.Kill(); kerr != nil && !errors.Is(kerr, os.ErrProcessDone) {
			err = fmt.Errorf("ending QEMU: %w", kerr)
		}
		<-r.ended
		if r.qmp != nil {
			r.qmp.Close()
		}
		if r.port != nil {
			r.port.Close()
		}
		err = errors.Join(err, os.RemoveAll(r.dir))
	})
	return err
}

// expect waits for a byte of the guest.
func (r *qemuRun) expect(ctx context.Context, want byte) error {
	defer context.AfterFunc(ctx, func() { _ = r.port.SetReadDeadline(time.Unix(1, 0)) })()
	var b [1]byte
	if _, err := r.port.Read(b[:]); err != nil {
		return fmt.Errorf("waiting for the guest: %w", errors.Join(err, ctx.Err()))
	}
	if b[0] != want {
		return fmt.Errorf("the guest says %q, not %q", b[0], want)
	}
	return nil
}

// ask sends a byte to the guest and wants it back.
func (r *qemuRun) ask(ctx context.Context, b byte) error {
	if _, err := r.port.Write([]byte{b}); err != nil {
		return fmt.Errorf("sending a byte to the guest: %w", err)
	}
	return r.expect(ctx, b)
}

// save boots the guest, and migrates it to the file while it runs, so that it goes on by
// itself when it comes back.
func (q *qemu) save(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, peerBoot)
	defer cancel()
	r, err := q.start(ctx, nil)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = r.explain(err)
		}
		err = errors.Join(err, r.close())
	}()
	q.version = r.qmp.version
	if err := r.expect(ctx, PeerReady); err != nil {
		return err
	}
	if err := r.ask(ctx, '?'); err != nil {
		return err
	}
	f, err := os.OpenFile(q.state(), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	// As fast as it goes: the guest is to change nothing meanwhile.
	limits := map[string]any{"max-bandwidth": int64(1) << 40, "downtime-limit": 600_000}
	if err := r.qmp.execute(ctx, "migrate-set-parameters", limits, nil); err != nil {
		return err
	}
	if err := r.qmp.execute(ctx, "getfd", map[string]any{"fdname": "state"}, nil, int(f.Fd())); err != nil {
		return err
	}
	if err := r.qmp.execute(ctx, "migrate", map[string]any{"uri": "fd:state"}, nil); err != nil {
		return err
	}
	for {
		var m struct {
			Status string
			Desc   string `json:"error-desc"`
		}
		if err := r.qmp.execute(ctx, "query-migrate", nil, &m); err != nil {
			return err
		}
		switch m.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("QEMU's migration to a file has %s: %.500q", m.Status, m.Desc)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for QEMU's migration to a file: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// resume starts QEMU from the file. The byte is sent at once, and waits for the guest.
func (q *qemu) resume(ctx context.Context) (total time.Duration, stages map[string]time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, peerAnswer)
	defer cancel()
	state, err := os.Open(q.state())
	if err != nil {
		return 0, nil, err
	}
	defer state.Close()
	r, err := q.start(ctx, state)
	if err != nil {
		return 0, nil, err
	}
	if err := r.ask(ctx, '!'); err != nil {
		return 0, nil, errors.Join(r.explain(err), r.close())
	}
	now := time.Now()
	total = now.Sub(r.begin)
	loaded := now
	if at := r.qmp.event("RESUME"); !at.IsZero() && at.Before(now) {
		loaded = at
	}
	stages = map[string]time.Duration{"process": r.process, "load": loaded.Sub(r.begin) - r.process, "answer": now.Sub(loaded)}
	return total, stages, r.close()
}
