package sandbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/farfiles"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// jailArg makes the test binary the process of TestA_VM_needs_no_path.
const jailArg = "jail"

// jailOrder is a VM to boot, and where it may put its files. The process sees nothing but the directory Root.
type jailOrder struct {
	Root, Dir                                     string
	Spec                                          spec.VM
	Kernel, Initramfs, SystemDisk, Cmdline, Image string
	Disk                                          disk.Stack
}

// diskFork is a call of disk.Fork.
type diskFork struct {
	Top   string
	Lower disk.Stack
}

// keptPages is a call of instance.KeepPages.
type keptPages struct {
	Cache, Snapshot string
	Missed          []uint64
}

// A process that has lost its view of the file system boots a VM, puts it to sleep, wakes it and forks it.
func TestA_VM_needs_no_path(t *testing.T) {
	e := booted.New(t)
	r, err := e.Store.State.Get("base")
	if err != nil {
		t.Fatal(err)
	}
	st, err := e.Store.State.SnapshotDisk(r.Snapshot)
	if err != nil {
		t.Fatal(err)
	}
	p := process.Parts(e.Store.State, r, st)
	o := jailOrder{Root: t.TempDir(), Dir: t.TempDir(), Spec: p.Spec,
		Kernel: p.Kernel, Initramfs: p.Initramfs, SystemDisk: p.SystemDisk, Cmdline: p.Cmdline, Image: p.Image}
	if o.Disk, err = disk.Fork(filepath.Join(o.Dir, "top"), st, 0); err != nil {
		t.Fatal(err)
	}
	share := t.TempDir()
	o.Spec.Shares = []spec.Share{{Source: share, Path: "/mnt/share", Writable: true}}

	mine, theirs, err := farfiles.Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Close()
	var said strings.Builder
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", jailArg)
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []*os.File{theirs}, &said, &said
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	calls, serr := farfiles.Serve(mine, func(op string, in json.RawMessage) (any, error) {
		switch op {
		case "order":
			return o, nil
		case "fork":
			var f diskFork
			if err := json.Unmarshal(in, &f); err != nil {
				return nil, err
			}
			return disk.Fork(f.Top, f.Lower, 0)
		case "keep":
			var k keptPages
			if err := json.Unmarshal(in, &k); err != nil {
				return nil, err
			}
			return nil, instance.KeepPages(t.Context(), k.Cache, k.Snapshot, k.Missed)
		}
		return nil, fmt.Errorf("%s: %w", op, errors.ErrUnsupported)
	})
	if err := errors.Join(cmd.Wait(), serr); err != nil {
		t.Errorf("%v; it said:\n%s", err, said.String())
	}
	t.Logf("it has asked for %v", calls)
	if text, err := os.ReadFile(filepath.Join(share, "note")); err != nil || string(text) != "here\n" {
		t.Errorf("the guest's file in the share has %q, %v", text, err)
	}
}

func jailProcess() int {
	files, err := farfiles.New(os.NewFile(3, "files"))
	if err == nil {
		err = jailed(context.Background(), files)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func jailed(ctx context.Context, files *farfiles.Files) (err error) {
	var o jailOrder
	if err := files.Ask("order", nil, &o); err != nil {
		return err
	}
	if err := errors.Join(instance.PrepareJail(), unix.Chroot(o.Root), unix.Chdir("/")); err != nil {
		return err
	}
	if _, err := os.Stat("/proc"); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("it still sees files: %v", err)
	}
	in := func(name string) string { return filepath.Join(o.Dir, name) }
	fork := func(name string, lower disk.Stack) (st disk.Stack, err error) {
		err = files.Ask("fork", diskFork{in(name), lower}, &st)
		return st, err
	}
	parts := instance.Parts{
		Spec: o.Spec, Files: files, Kernel: o.Kernel, Initramfs: o.Initramfs, SystemDisk: o.SystemDisk,
		Cmdline: o.Cmdline, Image: o.Image, Disk: o.Disk, Socket: "/vsock.sock", PageCache: in("pages"),
	}
	type forked = func(*os.File, *instance.Capture) error
	capture := func(vm *instance.Instance, name string, live bool, f forked) (*instance.Capture, error) {
		return vm.Capture(ctx, instance.CaptureOptions{
			Dir: in(name), ID: spec.NewID(), Live: live, NewTop: in(name + "-top"), Fork: f,
			Labels: map[string]string{}, Names: func(st disk.Stack) []string { return st.Layers }, Sealed: func(disk.Stack) error { return nil },
		})
	}

	vm, err := instance.Boot(ctx, parts)
	if err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	err = write(ctx, vm)
	var c *instance.Capture
	if err == nil {
		c, err = capture(vm, "first", false, nil)
	}
	if err := errors.Join(err, vm.Close()); err != nil {
		return fmt.Errorf("sleep: %w", err)
	}

	for i := range 2 {
		if parts.Disk, err = fork(fmt.Sprint("woken-", i), c.Disk); err != nil {
			return err
		}
		if vm, err = instance.Restore(ctx, parts, c.Dir, instance.RestoreOptions{Again: i > 0}); err != nil {
			return fmt.Errorf("wake %d: %w", i, err)
		}
		if i > 0 {
			break
		}
		err := files.Ask("keep", keptPages{parts.PageCache, c.Dir, vm.MissedPages()}, nil)
		if err := errors.Join(err, vm.Close()); err != nil {
			return err
		}
	}
	defer func() { err = errors.Join(err, vm.Close()) }()
	if f, _ := vm.Faults(); f.FramesCached.Load() == 0 {
		return errors.New("the second wake has found nothing in the cache")
	}

	var image *os.File
	live, err := capture(vm, "second", true, func(f *os.File, c *instance.Capture) error {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		image = os.NewFile(uintptr(fd), "image")
		return nil
	})
	if err != nil {
		return fmt.Errorf("fork: %w", err)
	}
	defer image.Close()
	child := parts
	child.RAM, child.Socket = image, "/fork.sock"
	if child.Disk, err = fork("forked", live.Disk); err != nil {
		return err
	}
	other, err := instance.RestoreFork(ctx, child, live.Dir, instance.RestoreOptions{NewIdentity: true})
	if err != nil {
		return fmt.Errorf("starting the fork: %w", err)
	}
	_, err = capture(other, "third", false, nil)
	return errors.Join(err, other.Close())
}

// write has the guest write to the share.
func write(ctx context.Context, vm *instance.Instance) error {
	c, err := vm.Agent(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	const script = "echo here >/mnt/share/note && read line </mnt/share/note"
	_, err = c.Exec(ctx, guest.Cmd{Argv: []string{"/bin/sh", "-c", script}})
	return err
}
