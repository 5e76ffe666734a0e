package instance

import (
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

	"github.com/drowse-vm/drowse/internal/test/farfiles"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

// jailEnv makes TestJailed_process the process of TestAn_instance_needs_no_path. It names its root directory.
const jailEnv = "INSTANCE_TEST_JAIL"

// diskFork is a call of disk.Fork.
type diskFork struct {
	Top   string
	Lower disk.Stack
}

// A process that has lost its view of the file system boots a VM, puts it to sleep, wakes it and forks it. The guest
// has no agent: package sandbox has the same test with one.
func TestAn_instance_needs_no_path(t *testing.T) {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skip(err)
	}
	if os.Geteuid() != 0 {
		t.Skip("chroot needs root")
	}
	dir := t.TempDir()
	file := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	st, err := disk.Create(filepath.Join(dir, "disk"), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	share := []spec.Share{{Source: t.TempDir(), Path: "/mnt/a"}}
	p := Parts{
		Spec:   spec.VM{Name: "a", VCPUs: 1, MemoryMiB: 64, Shares: share},
		Kernel: file("kernel", guestProgram([]byte{0xeb, 0xfe})), // jmp $
		Image:  file("image", make([]byte, 4096)), Disk: st, VM: "0", PageCache: filepath.Join(dir, "pages"),
	}
	mine, theirs, err := farfiles.Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Close()
	var said strings.Builder
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestJailed_process$", "-test.v")
	cmd.Env = append(os.Environ(), jailEnv+"="+t.TempDir())
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []*os.File{theirs}, &said, &said
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	calls, serr := farfiles.Serve(mine, func(op string, in json.RawMessage) (any, error) {
		switch op {
		case "parts":
			return jailParts{p.Spec, p.Kernel, p.Image, p.PageCache, p.Disk}, nil
		case "fork":
			var f diskFork
			if err := json.Unmarshal(in, &f); err != nil {
				return nil, err
			}
			return disk.Fork(f.Top, f.Lower, 0)
		}
		return nil, fmt.Errorf("%s: %w", op, errors.ErrUnsupported)
	})
	if err := errors.Join(cmd.Wait(), serr); err != nil || calls["fork"] < 2 {
		t.Errorf("%v; it said:\n%s", err, said.String())
	}
	t.Logf("it has asked for %v", calls)
}

// jailParts are the Parts that travel.
type jailParts struct {
	Spec                     spec.VM
	Kernel, Image, PageCache string
	Disk                     disk.Stack
}

// TestJailed_process is no test, but the process of the one above.
func TestJailed_process(t *testing.T) {
	root := os.Getenv(jailEnv)
	if root == "" {
		t.Skip("it is part of another test")
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	files, err := farfiles.New(os.NewFile(3, "files"))
	must(err)
	var far jailParts
	must(files.Ask("parts", nil, &far))
	must(errors.Join(PrepareJail(), unix.Chroot(root), unix.Chdir("/")))
	if _, err := os.Stat("/proc"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("it still sees files: %v", err)
	}
	p := Parts{
		Files: files, Spec: far.Spec, Kernel: far.Kernel, Image: far.Image, PageCache: far.PageCache, Disk: far.Disk,
		VM: "0", Socket: "/boot",
	}
	dir := filepath.Dir(p.Kernel)
	capture := func(in *Instance, name string, live bool, forked func(*os.File, *Capture) error) *Capture {
		t.Helper()
		in.parts.Socket = "/nobody" // no agent is there, and nothing waits for one
		c, err := in.Capture(t.Context(), CaptureOptions{
			Dir: filepath.Join(dir, name), ID: spec.NewID(), Live: live, NewTop: filepath.Join(dir, name+"-top"),
			Labels: map[string]string{}, Names: func(st disk.Stack) []string { return st.Layers },
			Sealed: func(disk.Stack) error { return nil }, Fork: forked,
		})
		must(err)
		return c
	}
	above := func(name string, lower disk.Stack) (st disk.Stack) {
		t.Helper()
		must(files.Ask("fork", diskFork{filepath.Join(dir, name), lower}, &st))
		return st
	}

	in, err := begin(p)
	must(err)
	must(in.assemble(netOpen))
	must(in.machine.Boot(vmm.BootOptions{Kernel: p.Kernel, Open: p.openFile}))
	must(in.machine.Start())
	in.space.started()
	c := capture(in, "first", false, nil)
	must(in.Close())

	p.Disk, p.Socket = above("woken", c.Disk), "/wake"
	in, err = Restore(t.Context(), p, c.Dir, RestoreOptions{EntryOnly: true})
	must(err)
	var image *os.File
	c = capture(in, "second", true, func(f *os.File, _ *Capture) error {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		image = os.NewFile(uintptr(fd), "image")
		return err
	})
	p.RAM, p.Disk, p.Socket = image, above("forked", c.Disk), "/fork"
	other, err := RestoreFork(t.Context(), p, c.Dir, RestoreOptions{EntryOnly: true})
	must(err)
	capture(other, "third", false, nil)
	must(errors.Join(other.Close(), in.Close(), image.Close()))
}
