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
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

const (
	qemuProgram = "qemu-system-x86_64"
	// This works on KVM with virtualisation hardware and on soft KVM, whose clock and interrupts need the old
	// devices. Without option ROMs qboot starts the kernel by its PVH entry (Xen, docs/misc/pvh.pandoc).
	qemuMachine = "microvm,accel=kvm,pic=on,pit=on,rtc=on,isa-serial=on,x-option-roms=off"
)

// qemuCPUs returns the models to try, in order: the host's, and the same without the MSR that soft KVM refuses
// (IA32_ARCH_CAPABILITIES, 0x10a). With that MSR QEMU 7.2 ends with a failed assertion.
func qemuCPUs() []string {
	all := []string{"host", "host,-arch-capabilities"}
	if vmm.SoftKVM() {
		all[0], all[1] = all[1], all[0]
	}
	return all
}

// qemu is a guest of QEMU that was migrated to a file.
type qemu struct {
	peerGuest
	cpu string
	// shared: the guest's RAM is a file of its own, which a resume maps and does not read (x-ignore-shared).
	shared bool
	// ahead: the process that resumes is started before the time begins. It implies shared.
	ahead bool
}

func (q *qemu) ram() string { return filepath.Join(q.dir, "ram") }

func (q *qemu) console() string { return filepath.Join(q.dir, "console") }

// newQEMU boots a guest and migrates it to a file.
func (e Env) newQEMU(ctx context.Context, mib, usedMiB int, how qemu) (peer, error) {
	// QEMU saves all pages that are not zeros. Without init_on_free these would include those of the unpacked
	// initramfs, which a user of QEMU would not have.
	g, err := e.newPeerGuest(ctx, "QEMU", qemuProgram, mib, usedMiB, " init_on_free=1 rdinit=/init -- --used "+strconv.Itoa(usedMiB))
	if errors.Is(err, exec.ErrNotFound) {
		err = fmt.Errorf("%w: install it (on Debian, the package qemu-system-x86)", err)
	}
	if err != nil {
		return nil, err
	}
	q := &how
	q.peerGuest = g
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

func (q *qemu) params() map[string]any {
	return q.with(map[string]any{"peer_machine": qemuMachine, "peer_cpu": q.cpu})
}

// stateMiB is the size of the file, and of the file of RAM without its holes. They hold little but pages that are not
// all zeros.
func (q *qemu) stateMiB() float64 {
	var st unix.Stat_t
	if err := unix.Stat(q.state(), &st); err != nil {
		return 0
	}
	size := st.Size
	if q.shared && unix.Stat(q.ram(), &st) == nil {
		const block = 512 // stat(2)
		size += st.Blocks * block
	}
	return float64(size) / mibBytes
}

// qemuRun is a process of QEMU. It counts as talking when it has connected to its first socket. conn is the
// guest's virtio-serial port.
type qemuRun struct {
	*peerProcess
	q   *qemu
	qmp *qmp
}

// start starts QEMU, for a state if state is not nil, and returns when QEMU talks. With shared RAM it then waits for
// incoming.
func (q *qemu) start(ctx context.Context, state *os.File) (_ *qemuRun, err error) {
	machine := qemuMachine
	if q.shared {
		machine += ",memory-backend=ram"
	}
	p, err := q.process(
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", machine, "-cpu", q.cpu, "-smp", strconv.Itoa(spec.DefaultVCPUs), "-m", strconv.Itoa(q.mib),
		"-chardev", "file,id=console,path="+q.console(), "-serial", "chardev:console")
	if err != nil {
		return nil, err
	}
	r := &qemuRun{peerProcess: p, q: q}
	// QEMU connects to sockets that exist before it starts. So there is no need to poll until it listens, and the
	// guest's port is connected from the beginning.
	var sockets []*net.UnixListener
	defer func() {
		for _, l := range sockets {
			l.Close()
		}
	}()
	for _, name := range []string{"qmp", "port"} {
		path := filepath.Join(r.dir, name)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listening for QEMU: %w", err), os.RemoveAll(r.dir))
		}
		sockets = append(sockets, l)
		r.cmd.Args = append(r.cmd.Args, "-chardev", "socket,id="+name+",path="+path)
	}
	r.cmd.Args = append(r.cmd.Args, "-mon", "chardev=qmp,mode=control", "-device", "virtio-serial-device", "-device", "virtserialport,chardev=port,name=drowse")
	if q.shared {
		// Who resumes gets pages of its own when it writes.
		share := "on"
		if state != nil {
			share = "off"
		}
		r.cmd.Args = append(r.cmd.Args, "-object", fmt.Sprintf("memory-backend-file,id=ram,size=%dM,mem-path=%s,share=%s", q.mib, q.ram(), share))
	}
	switch {
	case state != nil && q.shared:
		r.cmd.Args = append(r.cmd.Args, "-incoming", "defer")
	case state != nil:
		// Neither kernel nor initramfs: both are in the state.
		r.cmd.ExtraFiles = []*os.File{state}
		r.cmd.Args = append(r.cmd.Args, "-incoming", "fd:3")
	default:
		r.cmd.Args = append(r.cmd.Args, "-kernel", q.kernel, "-initrd", q.initrd, "-append", q.cmdline)
	}
	if err := r.peerProcess.start(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = closed(r, err)
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
	r.conn = conns[1]
	if r.qmp, err = newQMP(ctx, conns[0]); err != nil || !q.shared {
		return r, err
	}
	// It has to be set at both ends (docs/devel/migration.rst).
	ignore := []map[string]any{{"capability": "x-ignore-shared", "state": true}}
	return r, r.qmp.execute(ctx, "migrate-set-capabilities", map[string]any{"capabilities": ignore}, nil)
}

// incoming loads the state.
func (r *qemuRun) incoming(ctx context.Context, state *os.File) error {
	if err := r.qmp.execute(ctx, "getfd", map[string]any{"fdname": "state"}, nil, int(state.Fd())); err != nil {
		return err
	}
	return r.qmp.execute(ctx, "migrate-incoming", map[string]any{"uri": "fd:state"}, nil)
}

// accept waits for QEMU to connect, while it runs.
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

// explain also adds the guest's console.
func (r *qemuRun) explain(err error) error {
	err = r.peerProcess.explain(err)
	if text, rerr := os.ReadFile(r.q.console()); rerr == nil && len(text) > 0 {
		err = fmt.Errorf("%w: the guest's console ends with %q", err, text[max(0, len(text)-maxConsole):])
	}
	return err
}

// close kills QEMU and returns when it has ended.
func (r *qemuRun) close() error {
	return r.end(func() error {
		if r.qmp != nil {
			r.qmp.Close()
		}
		return nil
	})
}

// save boots the guest, and migrates it to the file while it runs, so that it continues by itself when it resumes.
func (q *qemu) save(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, peerBoot)
	defer cancel()
	r, err := q.start(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = closed(r, err) }()
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
	// As fast as possible: the guest should change nothing meanwhile.
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
		if err := wait.For(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("waiting for QEMU's migration to a file: %w", err)
		}
	}
}

// resume starts QEMU from the file. It sends the byte at once, which waits for the guest.
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
	if q.ahead {
		r.begin, r.process = time.Now(), 0
	}
	if q.shared {
		err = r.incoming(ctx, state)
	}
	if err == nil {
		err = r.ask(ctx, '!')
	}
	if err != nil {
		return 0, nil, closed(r, err)
	}
	now := time.Now()
	loaded := now
	if at := r.qmp.event("RESUME"); !at.IsZero() && at.Before(now) {
		loaded = at
	}
	return now.Sub(r.begin), r.stages(loaded, now), r.close()
}
