// Package statetest has stores for tests: empty, with VMs that have no process, and with snapshots of them.
package statetest

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// TempStore returns an empty store.
func TempStore(t *testing.T) *state.Store {
	t.Helper()
	// The path must be short: it contains Unix sockets.
	dir, err := os.MkdirTemp("", "ds")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	s, err := state.OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// DialAs connects to a Unix socket as another user. It first opens the modes of the socket's file and of the
// folders above to that user. The kind is that of a socket, such as unix.SOCK_STREAM.
func DialAs(t *testing.T, uid, kind int, path string) *net.UnixConn {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("becoming another user needs root")
	}
	for p := path; p != filepath.Clean(os.TempDir()) && p != "/"; p = filepath.Dir(p) {
		if err := os.Chmod(p, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	fd, connected := -1, make(chan error)
	go func() {
		// The thread belongs to the other user from now on, and ends with this goroutine.
		runtime.LockOSThread()
		connected <- func() (err error) {
			if _, _, no := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); no != 0 {
				return no
			}
			if fd, err = unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			return unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}()
	}()
	err := <-connected
	f := os.NewFile(uintptr(fd), path)
	if err != nil {
		t.Fatal(errors.Join(err, f.Close()))
	}
	c, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.UnixConn)
}

// WithMetadata makes a VM without a process.
func WithMetadata(t *testing.T, s *state.Store, name string, phase state.Phase, l *spec.Metadata) *state.Record {
	t.Helper()
	r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: name}, Phase: phase}
	if err := r.SetMetadata(l); err != nil {
		t.Fatal(err)
	}
	lock, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	lock.Release()
	if l != nil && l.Asked != (spec.Asked{}) {
		// New VMs have no requests of their guest.
		if err := s.SetSelf(t.Context(), name, func(m *spec.Metadata) error { m.Asked = l.Asked; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// SnapshotOf makes a snapshot of a VM, without memory.
func SnapshotOf(t *testing.T, s *state.Store, r *state.Record, kind string, at time.Time) string {
	t.Helper()
	labels, err := s.Labels(r, kind)
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	_, err = snapshot.Create(t.Context(), s.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: r.Spec.Name, VCPUs: 1, Labels: labels, Memory: state.NoMemory{}, Created: at,
	})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// SleepingVM makes a sleeping VM with that many disk layers of its own. Each layer has a block with its number.
func SleepingVM(t *testing.T, s *state.Store, name string, layers int) *state.Record {
	t.Helper()
	r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: name}, Phase: state.Asleep}
	l, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	layer := func() string { return filepath.Join(s.LayerDir(), r.NewLayer()) }
	st, err := disk.Create(layer(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range layers {
		if _, err := d.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, disk.BlockSize), int64(i)*disk.BlockSize); err != nil {
			t.Fatal(err)
		}
		if i+1 < layers {
			if _, err := d.Seal(t.Context(), layer()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := d.CloseSealed(); err != nil {
		t.Fatal(err)
	}
	r.Disk = s.Relative(d.Stack())
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	return r
}

// DiskSnapshotOf makes a snapshot without memory that has the disk of a VM.
func DiskSnapshotOf(t *testing.T, s *state.Store, r *state.Record, kind string) string {
	t.Helper()
	labels, err := s.Labels(r, kind)
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	if _, err := snapshot.Create(t.Context(), s.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: r.Spec.Name, VCPUs: 1, Image: r.Boot.ImageID, Labels: labels, Memory: state.NoMemory{},
		Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: 64 << 20, Layers: r.Disk.Layers}},
	}); err != nil {
		t.Fatal(err)
	}
	return id
}

// WantLayers fails the test unless the layers exist, or with want false if one does.
func WantLayers(t *testing.T, s *state.Store, want bool, layers ...string) {
	t.Helper()
	for _, l := range layers {
		if _, err := os.Stat(filepath.Join(s.LayerDir(), l)); (err == nil) != want {
			t.Errorf("layer %s is there: %v, want %v", l, err == nil, want)
		}
	}
}

// Told returns the types of a store's events, and the last event.
func Told(t *testing.T, s *state.Store) (types []events.Type, last events.Event) {
	t.Helper()
	if _, err := s.Events().Read(t.Context(), events.ReadOptions{}, func(e events.Event) error {
		types, last = append(types, e.Type), e
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return types, last
}

// WantTold compares the events of a store, and returns the last one.
func WantTold(t *testing.T, s *state.Store, want ...events.Type) events.Event {
	t.Helper()
	types, last := Told(t, s)
	if !slices.Equal(types, want) {
		t.Fatalf("told %v, want %v", types, want)
	}
	return last
}

// Host is a store with an image, a kernel and the disk of an agent, like a store in use, but without a guest.
type Host struct {
	*state.Store
	t     *testing.T
	Image string
	facts string
}

// agentDisk is the name of the disk with the agent, as package sysdisk chooses it.
const agentDisk = "cache/sysdisk/0123456789abcdef0123456789abcdef.erofs"

// NewHost returns a Host.
func NewHost(t *testing.T) *Host {
	t.Helper()
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := &Host{Store: s, t: t}
	tree := t.TempDir()
	h.Write(filepath.Join(tree, "f"), "a file of the image")
	images, err := image.OpenStore(s.ImageDir())
	if err != nil {
		t.Fatal(err)
	}
	img, err := builder.Build(t.Context(), builder.Options{Store: images, From: "dir:" + tree})
	if err != nil {
		t.Fatal(err)
	}
	h.Image = img.ID
	PutKernel(t, s, "built-1", kernel.Built, "CONFIG_TUN=y\n")
	h.Write(filepath.Join(s.Dir(), agentDisk), "the agent")
	// As if a VM had run here.
	h.facts = "facts of this host"
	instance.NoteGoodFacts(h.facts)
	return h
}

// Write writes a file, and makes its directories.
func (h *Host) Write(path, text string) {
	h.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		h.t.Fatal(err)
	}
}

const testDiskSize = 64 << 20

// Layer makes a sealed layer over others, with a word in its first block.
func (h *Host) Layer(name, word string, below ...string) {
	h.t.Helper()
	path := filepath.Join(h.LayerDir(), name)
	var st disk.Stack
	for _, l := range below {
		st.Layers = append(st.Layers, filepath.Join(h.LayerDir(), l))
	}
	var err error
	if len(below) == 0 {
		st, err = disk.Create(path, testDiskSize)
	} else {
		st, err = disk.Fork(path, st, 0)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{})
	if err != nil {
		h.t.Fatal(err)
	}
	block := make([]byte, disk.BlockSize)
	copy(block, word)
	_, err = d.WriteAt(block, 0)
	if err := errors.Join(err, d.CloseSealed()); err != nil {
		h.t.Fatal(err)
	}
}

// Record returns the record of a plain VM.
func (h *Host) Record(name string, layers ...string) *state.Record {
	return &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Created: time.Now().UTC(), Phase: state.Asleep,
		Spec: spec.VM{Name: name, Image: "app", VCPUs: 1, MemoryMiB: 64, DiskMiB: testDiskSize >> 20, Hostname: name, Network: spec.NetworkNone},
		Boot: state.BootFiles{KernelID: "built-1", Kernel: "kernels/built-1/vmlinux", SystemDisk: agentDisk, ImageID: h.Image},
		Disk: disk.Stack{Layers: layers},
	}
}

// Snapshot writes a snapshot of a VM, as its process would. change, if not nil, changes its description first.
func (h *Host) Snapshot(r *state.Record, kind string, change func(*snapshot.Spec)) string {
	h.t.Helper()
	labels, err := h.Labels(r, kind)
	if err != nil {
		h.t.Fatal(err)
	}
	spec := snapshot.Spec{
		ID: spec.NewID(), Sandbox: r.Spec.Name, VCPUs: r.Spec.VCPUs, Image: r.Boot.ImageID, Kernel: r.Boot.KernelID,
		Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: testDiskSize, Layers: r.Disk.Layers}},
		Host:  map[string]string{instance.FactsKey: h.facts}, Labels: labels, Memory: state.NoMemory{},
	}
	if change != nil {
		change(&spec)
	}
	if _, err := snapshot.Create(h.t.Context(), h.SnapshotDir(spec.ID), spec); err != nil {
		h.t.Fatal(err)
	}
	return spec.ID
}

// Word returns the word at the beginning of a stack's first block.
func (h *Host) Word(layers ...string) string {
	h.t.Helper()
	st, err := h.Absolute(disk.Stack{Layers: layers})
	if err != nil {
		h.t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	if err != nil {
		h.t.Fatal(err)
	}
	defer d.Close()
	b := make([]byte, 16)
	if _, err := d.ReadAt(b, 0); err != nil {
		h.t.Fatal(err)
	}
	return strings.TrimRight(string(b), "\x00")
}

// PutKernel puts a kernel with a configuration into a store.
func PutKernel(t *testing.T, s *state.Store, id string, kind kernel.Kind, config string) {
	t.Helper()
	dir := filepath.Join(s.KernelDir(), "kernels", id)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	record, err := json.Marshal(map[string]any{
		"format_version": 1, "id": id, "kind": kind, "version": "6.1", "arch": "amd64", "image": "vmlinux", "image_size": 1,
		"config": "config", "created": time.Unix(1e9, 0),
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"kernel.json": string(record), "vmlinux": "x", "config": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
