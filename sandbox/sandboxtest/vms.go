package sandboxtest

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Image is the name of the image that VMs are made from.
const Image = "test"

// VMs are virtual machines in memory: pool.Processes. The zero value is ready. The fields must not change once VMs
// exist. The methods may be called from any goroutine.
type VMs struct {
	// Commands are programs of all guests, in addition to fakeguest.Builtin.
	Commands map[string]fakeguest.Command
	// Fail, if not nil, is called before a VM does something: "boot", "restore", "fork" (the start of a child),
	// "capture" and "policy". The operation returns its error. It may be called from several goroutines.
	Fail func(op, name string) error
	// Flows, if not nil, returns the flows of a VM with a network.
	Flows func(name string) []netpolicy.FlowRecord

	// Pages are pages of noise in the memory of each snapshot. A VM that comes back from one has missed all of them in the
	// cache of decompressed pages. By default there are none.
	Pages int
	// Deltas has a snapshot build upon the one before, as that of a real guest does, whose Pages it has.
	Deltas bool

	// Dial, if not nil, connects to what listens in the guest of a VM, for sandbox.Sandbox.Dial. By default nothing
	// listens. A connection ends with the VM.
	Dial func(ctx context.Context, name, network, address string) (net.Conn, error)

	// Guests, if not nil, starts what answers for the guest of a VM instead of package fakeguest. from is the id of
	// the snapshot or fork that the guest is to be like, empty for a boot, and copy says that it becomes another VM.
	Guests func(name, from string, copy bool) (Guest, error)

	mu  sync.Mutex // guards all
	all []*proc    // by number
}

// Guest stands in for the guest of a VM: see VMs.Guests.
type Guest interface {
	// Dial connects to a port of the agent.
	Dial(port int) (net.Conn, error)
	// Capture keeps the guest as it is under an id. Unless live is set, it stands still from then on, and Close
	// follows.
	Capture(id string, live bool) error
	// Done is closed when the guest has ended by itself.
	Done() <-chan struct{}
	Close() error
}

// Open opens or makes the directory of a host with these VMs: see Launcher.
func (v *VMs) Open(dir string) (*sandbox.Host, error) {
	h, err := sandbox.Open(dir)
	if err != nil {
		return nil, err
	}
	l, err := v.Launcher(h)
	if err != nil {
		return nil, err
	}
	return h.With(l), nil
}

// Host is Open for a test, in a directory of the test. The directory's name is short: it contains Unix sockets.
func (v *VMs) Host(t testing.TB) *sandbox.Host {
	t.Helper()
	dir, err := os.MkdirTemp("", "vms")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		v.Close()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	h, err := v.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// Launcher returns a launcher for Host.With. It gives the host a kernel and an image called Image if missing.
func (v *VMs) Launcher(h *sandbox.Host) (pool.Launcher, error) {
	agent, err := furnish(h.State)
	if err != nil {
		return pool.Launcher{}, fmt.Errorf("preparing a host for VMs in memory: %w", err)
	}
	return pool.Launcher{Agent: agent, Processes: v}, nil
}

func (v *VMs) fail(op, name string) error {
	if v.Fail == nil {
		return nil
	}
	return v.Fail(op, name)
}

// furnish gives a host the files that VMs need, unless they exist. They cannot be booted.
func furnish(s *state.Store) (agent string, err error) {
	images, err := image.OpenStore(s.ImageDir())
	if err != nil {
		return "", err
	}
	if _, err := images.Find(Image); errors.Is(err, image.ErrNotFound) {
		ctx := context.Background()
		temp, err := images.NewTemp(ctx, "sandboxtest-")
		if err != nil {
			return "", err
		}
		defer temp.Remove()
		tree, img := fstree.New(), &image.Image{Spec: "sandboxtest"}
		if err := tree.SetFile("etc/hostname", "test\n"); err != nil {
			return "", err
		}
		if _, err := tree.Finish(); err != nil {
			return "", err
		}
		if err := images.Write(ctx, tree, img, filepath.Join(temp.Dir, "image"), func(string, int64, int64) {}); err != nil {
			return "", err
		}
		tag, err := image.NormalizeTag(Image)
		if err == nil {
			err = images.Publish(ctx, img, tag)
		}
		if err != nil {
			return "", err
		}
	} else if err != nil {
		return "", err
	}
	const id = "built-test"
	dir := filepath.Join(s.KernelDir(), "kernels", id)
	record, err := json.Marshal(map[string]any{
		"format_version": 1, "id": id, "kind": kernel.Built, "version": "6.1", "arch": "amd64", "image": "vmlinux", "image_size": 1,
		"config": "config", "created": time.Unix(1e9, 0),
	})
	if err != nil {
		return "", err
	}
	agent = filepath.Join(dir, "agent")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	// The record comes last: it makes the kernel exist.
	for _, f := range [][2]string{{"agent", elf.ELFMAG}, {"vmlinux", "x"}, {"config", config}, {"kernel.json", string(record)}} {
		path := filepath.Join(dir, f[0])
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.WriteFile(path, []byte(f[1]), 0o644); err != nil {
			return "", err
		}
	}
	return agent, nil
}

// config has the options that specs may require of a kernel.
const config = "CONFIG_TUN=y\nCONFIG_IPV6=y\nCONFIG_FUSE_FS=y\nCONFIG_VIRTIO_FS=y\n"

// noPID is above all process numbers of Linux (PID_MAX_LIMIT), so that no record names a process of the host.
const noPID = 1 << 22

// proc is the life of a VM.
type proc struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex // guards what follows
	vm     *vm        // nil until it has started
	killed bool
}

// Start implements pool.Processes.
func (v *VMs) Start(s *state.Store, ord control.Order, files []*os.File) (pool.Process, error) {
	files, err := dup(files)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &proc{name: ord.Name, cancel: cancel, done: make(chan struct{})}
	v.mu.Lock()
	pid := noPID + len(v.all)
	v.all = append(v.all, p)
	v.mu.Unlock()
	go func() {
		defer close(p.done)
		defer cancel()
		v.serve(ctx, p, s, pid, ord, files)
	}()
	return p, nil
}

// serve does what the process of a VM does with its order: process.ServeProcess.
func (v *VMs) serve(ctx context.Context, p *proc, s *state.Store, pid int, ord control.Order, files []*os.File) {
	log := slog.New(slog.NewTextHandler(files[0], nil)).With("vm", ord.Name)
	defer control.CloseAll(files) // those that are closed already stay closed
	report := files[1]
	o := process.ServeOptions{
		Snapshot: ord.Snapshot, NewIdentity: ord.NewIdentity, Template: ord.Template, Cause: ord.Cause, Log: log, Machines: machines{v, p}, PID: pid,
		Wanted: func() bool { return control.HasReader(report) },
	}
	switch {
	case ord.Fork:
		o.Fork = files[2]
	case ord.WakeLock:
		o.WakeLock = files[2]
	}
	var once sync.Once
	o.Report = func(r control.Report) {
		once.Do(func() {
			if err := json.NewEncoder(report).Encode(r); err != nil {
				log.Warn("nobody reads the report", "error", err)
			}
			report.Close()
		})
	}
	err := process.Serve(ctx, s, ord.Name, o)
	if errors.Is(err, errKilled) {
		err = p.vm.Close() // as the kernel releases what a killed process had
	}
	if err != nil {
		log.Error("the VM has ended", "error", err)
	}
}

// dup duplicates files, since their owner closes them.
func dup(files []*os.File) (out []*os.File, err error) {
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			control.CloseAll(out)
			return nil, fmt.Errorf("copying %s: %w", f.Name(), err)
		}
		out = append(out, os.NewFile(uintptr(fd), f.Name()))
	}
	return out, nil
}

// Find implements pool.Processes.
func (v *VMs) Find(pid int) (pool.Process, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if n := pid - noPID; n >= 0 && n < len(v.all) {
		return v.all[n], nil
	}
	gone := &proc{cancel: func() {}, done: make(chan struct{})}
	close(gone.done)
	return gone, nil
}

// Kill ends the process of the VM of that name, if it has one, like SIGKILL: it saves and reports nothing.
func (v *VMs) Kill(name string) {
	v.each(func(p *proc) bool { return p.name == name })
}

// Close kills all VMs, and returns when they have ended.
func (v *VMs) Close() { v.each(func(*proc) bool { return true }) }

func (v *VMs) each(which func(*proc) bool) {
	v.mu.Lock()
	all := slices.Clone(v.all)
	v.mu.Unlock()
	for _, p := range all {
		if which(p) {
			_ = p.Kill()
			p.Wait(0)
		}
	}
}

// Guest returns the guest of the VM of that name; nil if the VM does not run.
func (v *VMs) Guest(name string) *fakeguest.Guest {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, p := range slices.Backward(v.all) {
		p.mu.Lock()
		vm := p.vm
		p.mu.Unlock()
		if p.name != name || vm == nil {
			continue
		}
		select {
		case <-vm.ended:
		default:
			return vm.guest
		}
	}
	return nil
}

// Kill implements pool.Process.
func (p *proc) Kill() error {
	p.mu.Lock()
	p.killed = true
	vm := p.vm
	p.mu.Unlock()
	if vm != nil {
		vm.kill()
	}
	p.cancel()
	return nil
}

// Wait implements pool.Process.
func (p *proc) Wait(atMost time.Duration) bool {
	var limit <-chan time.Time
	if atMost > 0 {
		limit = time.After(atMost)
	}
	select {
	case <-p.done:
		return true
	case <-limit:
		return false
	}
}

// Close implements pool.Process.
func (p *proc) Close() error { return nil }
