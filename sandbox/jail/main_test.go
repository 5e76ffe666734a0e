package jail

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	oneID   = "11111111111111111111111111111111"
	otherID = "22222222222222222222222222222222"
	fromID  = "33333333333333333333333333333333"
	newID   = "44444444444444444444444444444444"
)

// store is a state directory with a VM and its neighbour, both as a guest's owner has them.
type store struct {
	root string
	v    *VM

	from, final, temp         string // snapshots
	lower, old, top, topTemp  string // layers
	image, kernel, page       string
	otherLayer, otherSnapshot string
}

func (s *store) in(name string) string { return filepath.Join(s.root, name) }

func newStore(t testing.TB) *store {
	t.Helper()
	s := &store{root: t.TempDir()}
	put := func(name string) string {
		t.Helper()
		name = s.in(name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte("this is "+filepath.Base(name)), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	s.image, s.kernel, s.page = put("images/i/root.erofs"), put("kernels/k/vmlinux"), put("pages/own")
	s.lower, s.old, s.otherLayer = put("layers/"+oneID+"-0"), put("layers/"+oneID+"-1"), put("layers/"+otherID+"-0")
	s.from, s.otherSnapshot = s.in("snapshots/"+fromID), s.in("snapshots/"+otherID)
	for _, name := range []string{
		"snapshots/" + fromID + "/manifest", "snapshots/" + fromID + "/memory", "snapshots/" + fromID + "/memory-" + otherID,
		"snapshots/" + fromID + "/notes", "snapshots/" + otherID + "/manifest", "snapshots/" + otherID + "/memory",
		"snapshots/.drowse-snapshot-other/memory", "pages/other", "vms/one/vm.json", "vms/one/audit.jsonl", "vms/one/lock",
		"vms/other/vm.json", "hooks.d/hook", "events/lock", "import.lock",
	} {
		put(name)
	}
	s.final, s.temp = s.in("snapshots/"+newID), s.in("snapshots/.drowse-snapshot-new")
	s.top, s.topTemp = s.in("layers/"+oneID+"-2"), s.in("layers/."+oneID+"-2.tmp")

	s.v = newVM(&Jail{})
	s.v.parts = s.parts()
	s.v.grants = newGrants(s.v.parts, s.from)
	s.v.grants.read(s.page)
	s.v.stack = s.v.parts.Disk
	s.v.started.DiskSize = 1 << 20
	s.v.serving.Store(true)
	return s
}

func (s *store) parts() instance.Parts {
	return instance.Parts{
		Spec:  spec.VM{Name: "one", VCPUs: 2, MemoryMiB: 64, Network: spec.NetworkNone},
		Image: s.image, Kernel: s.kernel, Disk: disk.Stack{Layers: []string{s.lower, s.old}},
		Socket: s.in("vms/one/vsock.sock"),
	}
}

// options are those of a capture that makes s.final and s.top.
func (s *store) options() instance.CaptureOptions {
	return instance.CaptureOptions{
		Dir: s.final, ID: newID, NewTop: s.top, Image: "image", Kernel: "kernel", Labels: map[string]string{"a": "b"},
		Names:  func(st disk.Stack) []string { return st.Layers },
		Sealed: func(disk.Stack) error { return nil },
	}
}

// begin begins a capture as VM.Capture does.
func (s *store) begin(t testing.TB, o instance.CaptureOptions, diskOnly bool) *capture {
	t.Helper()
	c := newCapture(s.v, o)
	c.diskOnly = diskOnly
	if err := s.v.beginCapture(c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.v.endCapture(c) })
	return c
}

// ask is how a passedFS asks this store's keeper.
func (s *store) ask(o fileOrder) (fileInfo, []*os.File, error) {
	i, f, err := s.v.file(o)
	if f == nil {
		return i, nil, err
	}
	return i, []*os.File{f}, err
}

// must has the keeper do what it must do.
func (s *store) must(t testing.TB, o fileOrder) {
	t.Helper()
	_, files, err := s.ask(o)
	if err := closeAll(files); err != nil {
		t.Error(err)
	}
	if err != nil {
		t.Fatalf("%+v: %v", o, err)
	}
}

func openFDs(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// sameFDs fails if the test leaves descriptors open.
func sameFDs(t *testing.T) {
	t.Helper()
	r, w, err := os.Pipe() // the poller has a descriptor of its own
	if err != nil {
		t.Fatal(err)
	}
	_ = closeAll([]*os.File{r, w})
	before := openFDs(t)
	t.Cleanup(func() {
		until(t, "every descriptor is closed", func() bool { return openFDs(t) <= before })
	})
}

// until waits for a condition that comes by itself.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 20_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("%s: it does not come", what)
}
