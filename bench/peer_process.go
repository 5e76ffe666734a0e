package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
	// peerBoot bounds the boot of a guest, and peerAnswer a resume.
	peerBoot   = 15 * time.Minute
	peerAnswer = 5 * time.Minute
	// maxConsole bounds what errors quote of a monitor's output and of its guest's console, in bytes.
	maxConsole = 2000
)

// peerGuest is a guest of another monitor, with its saved state.
type peerGuest struct {
	monitor string // the monitor's name
	dir     string
	path    string // of the program
	version string
	mib     int
	usedMiB int
	kernel  string
	initrd  string
	cmdline string
	runs    int
}

// newPeerGuest finds a monitor's program and what its guest boots: drowse's own kernel, with words added to its
// command line, and the program of Env.PeerGuest as its first process.
func (e Env) newPeerGuest(ctx context.Context, monitor, program string, mib, usedMiB int, words string) (g peerGuest, err error) {
	g = peerGuest{monitor: monitor, mib: mib, usedMiB: usedMiB}
	if g.path, err = exec.LookPath(program); err != nil {
		return g, err
	}
	if g.kernel, g.cmdline, err = e.peerKernel(); err != nil {
		return g, err
	}
	g.cmdline += words
	if g.dir, err = os.MkdirTemp("", "drowse-peer-"); err != nil {
		return g, fmt.Errorf("making a directory for %s: %w", monitor, err)
	}
	if g.initrd, err = e.peerInitramfs(ctx, g.dir); err != nil {
		err = errors.Join(err, g.close())
	}
	return g, err
}

// peerKernel returns the kernel of drowse's own guests, and its command line for this host.
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

// PeerReady is the byte that the program of Env.PeerGuest writes once its memory is filled.
const PeerReady = 'R'

// peerInitramfs makes an initramfs with the program of peers' guests as its first process.
func (e Env) peerInitramfs(ctx context.Context, dir string) (string, error) {
	if _, err := os.Stat(e.PeerGuest); err != nil {
		return "", fmt.Errorf("finding the program for guests of other monitors: %w: build it with `make build`, and put it beside drowse", err)
	}
	return initramfs.Ensure(ctx, dir, initramfs.Spec{Init: e.PeerGuest})
}

func (g *peerGuest) state() string { return filepath.Join(g.dir, "state") }

func (g *peerGuest) close() error { return os.RemoveAll(g.dir) }

// with returns the parameters that rows of all monitors have, and more.
func (g *peerGuest) with(more map[string]any) map[string]any {
	params := map[string]any{"peer_version": g.version, "vcpus": spec.DefaultVCPUs, "guest": "initramfs", paramUsed: g.usedMiB, "cache": cacheWarm}
	maps.Copy(params, more)
	return params
}

// peerProcess is a process of a monitor.
type peerProcess struct {
	monitor string
	dir     string // for its sockets
	cmd     *exec.Cmd
	begin   time.Time
	process time.Duration // until it talks
	conn    net.Conn      // to the guest's process

	ended   chan struct{}
	endOnce sync.Once

	mu   sync.Mutex
	said []byte // guarded by mu: the end of its output
}

// process returns the monitor's next process, with a directory, not yet started.
func (g *peerGuest) process(args ...string) (*peerProcess, error) {
	g.runs++
	r := &peerProcess{monitor: g.monitor, dir: filepath.Join(g.dir, strconv.Itoa(g.runs)), ended: make(chan struct{})}
	if err := os.Mkdir(r.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making a directory for %s: %w", g.monitor, err)
	}
	r.cmd = exec.Command(g.path, args...)
	r.cmd.Stdout, r.cmd.Stderr = r, r
	// A group of its own: only this process gets an interrupt at the terminal, and then ends the monitor.
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return r, nil
}

// Write keeps the end of the output.
func (r *peerProcess) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = append(r.said, p...)
	r.said = r.said[max(0, len(r.said)-maxConsole):]
	return len(p), nil
}

// start starts the process. After an error it has cleaned up.
func (r *peerProcess) start() error {
	r.begin = time.Now()
	if err := r.cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("starting %s: %w", r.monitor, err), os.RemoveAll(r.dir))
	}
	go func() {
		_ = r.cmd.Wait() // how it ended is in the ProcessState
		close(r.ended)
	}()
	return nil
}

// explain adds the process's output to an error, and how it ended, if it ended.
func (r *peerProcess) explain(err error) error {
	// It may be about to exit.
	select {
	case <-r.ended:
		err = fmt.Errorf("%w: %s has ended: %s", err, r.monitor, r.cmd.ProcessState)
	case <-time.After(time.Second):
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.said) > 0 {
		err = fmt.Errorf("%w: its words end with %q", err, r.said)
	}
	return err
}

// end kills the process, and returns when it and the rest have ended.
func (r *peerProcess) end(rest func() error) (err error) {
	r.endOnce.Do(func() {
		if kerr := r.cmd.Process.Kill(); kerr != nil && !errors.Is(kerr, os.ErrProcessDone) {
			err = fmt.Errorf("ending %s: %w", r.monitor, kerr)
		}
		<-r.ended
		if r.conn != nil {
			r.conn.Close()
		}
		err = errors.Join(err, rest(), os.RemoveAll(r.dir))
	})
	return err
}

// closed closes a run, after it has explained an error.
func closed(r interface {
	explain(error) error
	close() error
}, err error) error {
	if err != nil {
		err = r.explain(err)
	}
	return errors.Join(err, r.close())
}

// expect waits for a byte of the guest.
func (r *peerProcess) expect(ctx context.Context, want byte) error {
	defer context.AfterFunc(ctx, func() { _ = r.conn.SetDeadline(time.Unix(1, 0)) })()
	var b [1]byte
	if _, err := r.conn.Read(b[:]); err != nil {
		return fmt.Errorf("waiting for the guest: %w", errors.Join(err, ctx.Err()))
	}
	if b[0] != want {
		return fmt.Errorf("the guest says %q, not %q", b[0], want)
	}
	return nil
}

// ask sends a byte to the guest and waits for its echo.
func (r *peerProcess) ask(ctx context.Context, b byte) error {
	if _, err := r.conn.Write([]byte{b}); err != nil {
		return fmt.Errorf("sending a byte to the guest: %w", err)
	}
	return r.expect(ctx, b)
}

// stages returns the stages of a resume from the times when it was loaded and when it answered.
func (r *peerProcess) stages(loaded, answered time.Time) map[string]time.Duration {
	return map[string]time.Duration{"process": r.process, "load": loaded.Sub(r.begin) - r.process, "answer": answered.Sub(loaded)}
}
