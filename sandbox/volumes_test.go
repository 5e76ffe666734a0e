package sandbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestParseVolumeMount_reads_what_run_takes(t *testing.T) {
	for _, tt := range []struct {
		text string
		want spec.VolumeMount
		ok   bool
	}{
		{"v:/data", spec.VolumeMount{Name: "v", Path: "/data"}, true},
		{"v:/data:rw", spec.VolumeMount{Name: "v", Path: "/data"}, true},
		{"v:/data:ro", spec.VolumeMount{Name: "v", Path: "/data", ReadOnly: true}, true},
		{"v", spec.VolumeMount{}, false},
		{"v:/data:x", spec.VolumeMount{}, false},
		{"v:/data:ro:rw", spec.VolumeMount{}, false},
	} {
		got, err := spec.ParseVolumeMount(tt.text)
		if got != tt.want || tt.ok != (err == nil) || err != nil && !errors.Is(err, sandbox.ErrSpec) {
			t.Errorf("%q: %+v, %v", tt.text, got, err)
		}
	}
}

func TestRun_refuses_volumes_that_cannot_be(t *testing.T) {
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	many := make([]spec.VolumeMount, spec.MaxVolumes+1)
	for i := range many {
		many[i] = spec.VolumeMount{Name: fmt.Sprint("v", i), Path: fmt.Sprint("/v", i)}
	}
	for name, tt := range map[string]struct {
		mounts []spec.VolumeMount
		want   error
	}{
		"no such volume":     {[]spec.VolumeMount{{Name: "v", Path: "/data"}}, volume.ErrNotFound},
		"as many as may be":  {many[:spec.MaxVolumes], volume.ErrNotFound},
		"too many":           {many, sandbox.ErrSpec},
		"twice":              {[]spec.VolumeMount{{Name: "v", Path: "/a"}, {Name: "v", Path: "/b"}}, sandbox.ErrSpec},
		"one path for two":   {[]spec.VolumeMount{{Name: "v", Path: "/a"}, {Name: "w", Path: "/a"}}, sandbox.ErrSpec},
		"a name with a path": {[]spec.VolumeMount{{Name: "../v", Path: "/a"}}, sandbox.ErrSpec},
		"a relative path":    {[]spec.VolumeMount{{Name: "v", Path: "a"}}, sandbox.ErrSpec},
		"the root":           {[]spec.VolumeMount{{Name: "v", Path: "/"}}, sandbox.ErrSpec},
		"a way out":          {[]spec.VolumeMount{{Name: "v", Path: "/a/../etc"}}, sandbox.ErrSpec},
		"a system directory": {[]spec.VolumeMount{{Name: "v", Path: "/proc/x"}}, sandbox.ErrSpec},
		"a parameter":        {[]spec.VolumeMount{{Name: "v", Path: "/a init=/bin/sh"}}, sandbox.ErrSpec},
		"a long path":        {[]spec.VolumeMount{{Name: "v", Path: "/" + strings.Repeat("a", 100)}}, sandbox.ErrSpec},
	} {
		if _, err := s.With(pool.Launcher{}).Create(t.Context(), sandbox.Spec{Image: "none", Volumes: tt.mounts}, sandbox.CreateOptions{}); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

// appender appends a line to a file of the volume when asked.
const appender = `
import os
f = open('/data/lines', 'a')
n = 0
while True:
    open('/run/ask').read()
    n += 1
    f.write('line %d\n' % n)
    f.flush()
    os.fsync(f.fileno())
    with open('/run/answer', 'w') as a:
        a.write('%d\n' % n)
`

// Writing to dropCaches makes the guest drop cached copies of its files.
const dropCaches = "/proc/sys/vm/drop_caches"

func TestVolumes_live_beyond_VMs_and_never_meet_memory_of_another_time(t *testing.T) {
	guesttest.Long(t)
	t.Parallel()
	e := guesttest.New(t)
	ctx := t.Context()
	if _, err := e.Store.State.Volumes().Create(ctx, "v", 64<<20); err != nil {
		t.Fatal(err)
	}
	rw := []spec.VolumeMount{{Name: "v", Path: "/data"}}
	ro := []spec.VolumeMount{{Name: "v", Path: "/data", ReadOnly: true}}
	wantInUse := func(what string) {
		t.Helper()
		for _, mounts := range [][]spec.VolumeMount{rw, ro} {
			if _, err := e.Store.With(e.Launcher).Create(ctx, sandbox.Spec{Name: "x", Image: guesttest.ImageTag, Volumes: mounts}, sandbox.CreateOptions{}); !errors.Is(err, volume.ErrInUse) {
				t.Errorf("%s, another VM with it (read-only %v): %v, want ErrInUse", what, mounts[0].ReadOnly, err)
			}
		}
		if err := e.Store.State.RemoveVolume(ctx, "v"); !errors.Is(err, volume.ErrInUse) {
			t.Errorf("%s, removing it: %v, want ErrInUse", what, err)
		}
	}
	wantStale := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, volume.ErrStale) || !strings.Contains(err.Error(), "Sandbox.Start") {
			t.Errorf("%s: %v, want ErrStale with a remedy", what, err)
		}
	}
	restore := func(id, name string) error {
		_, err := e.Store.With(e.Launcher).Clone(ctx, id, sandbox.CloneOptions{Name: name})
		return err
	}

	e.Run(sandbox.Spec{Name: "a", Volumes: rw})
	e.Do("a", "mkfifo", "/run/ask", "/run/answer")
	e.WriteDurably("a", "first", "/data/first")
	if err := e.Agent("a").Mkdir(ctx, "/data/dir", 0, false); err != nil {
		t.Fatal(err)
	}
	p, err := e.Agent("a").Start(ctx, guest.Cmd{Argv: []string{"python3", "-S", "-E", "-c", appender}, Detach: true})
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	wantLine := func(n int) {
		t.Helper()
		if got := ask(e, "a"); got != fmt.Sprint(n) {
			t.Errorf("the appender says %q, want %d", got, n)
		}
	}
	wantLine(1)
	if _, err := e.Store.With(e.Launcher).Sandbox("a").Fork(ctx, sandbox.ForkOptions{Count: 1, Name: "f"}); !errors.Is(err, volume.ErrInUse) {
		t.Errorf("a fork of a VM that writes to a volume: %v, want ErrInUse", err)
	}
	if _, err := e.Store.State.Get("f"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("after a fork that was refused its child: %v, want ErrNotFound", err)
	}
	wantInUse("while it runs")
	named, err := e.Store.Sandbox("a").Snapshot(ctx, sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wantStale("a clone of a snapshot while it runs", restore(named.Snapshot, "x"))
	wantLine(2)

	slept := e.Sleep("a")
	wantInUse("while it sleeps")
	wantStale("a clone of a sleeping VM", restore(slept.Snapshot, "x"))
	wantStale("a clone of its older snapshot", restore(named.Snapshot, "x"))
	e.Wake("a")
	wantLine(3)
	// With an empty cache the guest reads what is on the host.
	e.Write("a", "3", dropCaches)
	if got := e.Read("a", "/data/first", "/data/lines"); got != "first\nline 1\nline 2\nline 3" {
		t.Errorf("after the wake the volume has %q", got)
	}
	e.Sleep("a")
	e.Wake("a")
	wantLine(4)

	r, err := e.Store.State.Get("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.WaitPhase("a", state.Crashed, time.Minute)
	_, err = e.Store.With(e.Launcher).Sandbox("a").Wake(ctx)
	wantStale("waking a VM that has written since", err)
	if r, err := e.Store.State.Get("a"); err != nil || r.Phase != state.Crashed {
		t.Errorf("the refused wake has made it %s (%v)", r.Phase, err)
	}
	if _, err := e.Store.With(e.Launcher).Create(ctx, sandbox.Spec{Name: "x", Image: guesttest.ImageTag, Volumes: ro}, sandbox.CreateOptions{}); !errors.Is(err, volume.ErrDirty) {
		t.Errorf("reading a volume whose journal is full: %v, want ErrDirty", err)
	}
	if err := e.Store.Sandbox("a").Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}

	e.Run(sandbox.Spec{Name: "b", Volumes: rw})
	if got := e.Read("b", "/data/first", "/data/lines"); got != "first\nline 1\nline 2\nline 3\nline 4" {
		t.Errorf("in another VM the volume has %q", got)
	}
	if got := e.Read("b", "/proc/mounts"); strings.Count(got, "/data ext4 rw") != 1 {
		t.Errorf("in another VM there is mounted\n%s", got)
	}
	allocated := func() int64 {
		t.Helper()
		n, err := e.Store.State.Volumes().Allocated("v")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	empty := allocated()
	e.Do("b", "dd", "if=/dev/zero", "of=/data/much", "bs=1M", "count=1", "conv=fsync", "status=none")
	if n := allocated(); n < empty+1<<20 {
		t.Errorf("1 MiB that the guest has synced: the volume takes %d bytes, and %d before", n, empty)
	}
	e.Remove("b", "/data/much")
	e.Do("b", "sync")
	e.Do("b", "fstrim", "/data")
	if n := allocated(); n > empty+1<<19 {
		t.Errorf("after fstrim the volume takes %d bytes, and %d before", n, empty)
	}
	stop, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if err := e.Store.Sandbox("b").Stop(stop); err != nil {
		t.Fatal(err)
	}
	if out := tool(t, "e2fsck", "-fn", filepath.Join(e.Store.State.Dir(), "volumes", "v", "data")); strings.Contains(out, "journal") {
		t.Errorf("after the shutdown e2fsck says:\n%s", out)
	}

	// Many VMs may read the volume, clones among them.
	e.Run(sandbox.Spec{Name: "c", Volumes: ro})
	if got := e.Read("c", "/data/first"); got != "first" {
		t.Errorf("read-only, the volume has %q", got)
	}
	if err := e.Agent("c").WriteFile(ctx, "/data/x", strings.NewReader("x"), guest.WriteOptions{}); err == nil || !strings.Contains(err.Error(), "read-only file system") {
		t.Errorf("writing to a volume that is read-only: %v", err)
	}
	slept = e.Sleep("c")
	if err := restore(slept.Snapshot, "d"); err != nil {
		t.Fatal(err)
	}
	e.Wake("c")
	for _, vm := range []string{"c", "d"} {
		e.Write(vm, "3", dropCaches)
		if got := e.Read(vm, "/data/first"); got != "first" {
			t.Errorf("%s reads %q", vm, got)
		}
	}
	if _, err := e.Store.With(e.Launcher).Sandbox("b").Start(ctx, sandbox.StartOptions{}); !errors.Is(err, volume.ErrInUse) {
		t.Errorf("writing while others read: %v, want ErrInUse", err)
	}
	for _, vm := range []string{"b", "c", "d"} {
		if err := e.Store.Sandbox(vm).Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}
	if err := e.Store.State.RemoveVolume(ctx, "v"); err != nil {
		t.Error(err)
	}
}

// zeros is the memory of a machine that has done nothing.
type zeros struct{}

func (zeros) Slots() []snapshot.Slot { return []snapshot.Slot{{Size: guestmem.PageSize}} }

func (zeros) NextData(page uint64) (first, end uint64, err error) {
	return page, page, nil
}

func (zeros) ReadPages(_ uint64, p []byte) error {
	clear(p)
	return nil
}

// A VM with stale memory can be booted, and one with good memory cannot. Memory is stale after a failed wake in
// which the guest wrote to its volume.
func TestSleeping_VM_whose_volume_has_moved_on_can_be_started(t *testing.T) {
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	v, err := s.State.Volumes().Create(t.Context(), "v", volume.MinSize)
	if err != nil {
		t.Fatal(err)
	}
	const snap, vm = "00000000000000000000000000000001", "00000000000000000000000000000002"
	_, err = snapshot.Create(t.Context(), s.State.SnapshotDir(snap), snapshot.Spec{ID: snap, VCPUs: 1, Memory: zeros{}, Labels: map[string]string{
		"drowse.kind":    "sleep",
		"drowse.volumes": fmt.Sprintf(`[{"name":"v","id":%q,"generation":0,"read_only":false}]`, v.ID),
	}})
	if err != nil {
		t.Fatal(err)
	}
	record, err := json.Marshal(state.Record{
		Version: 1, ID: vm, Phase: state.Asleep, Snapshot: snap,
		Spec: sandbox.Spec{Name: "a", Image: "none", Volumes: []spec.VolumeMount{{Name: "v", Path: "/data"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(s.State.ConsoleLog("a"))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vm.json"), record, 0o600); err != nil {
		t.Fatal(err)
	}
	// use attaches the volume and, with write, changes it as a guest does.
	use := func(write bool, settle bool) {
		t.Helper()
		a, err := s.State.Volumes().Attach("v", false, nil)
		if err != nil {
			t.Fatal(err)
		}
		if write {
			err = a.Discard(0, 4096)
		}
		if settle {
			err = errors.Join(err, a.Settle(volume.Settled{Snapshot: snap, VM: vm}))
		}
		if err := errors.Join(err, a.Close()); err != nil {
			t.Fatal(err)
		}
	}
	// No launcher has a program, so an allowed call fails with another error.
	ctx, none := t.Context(), pool.Launcher{}
	check := func(what string, stale bool) {
		t.Helper()
		_, werr := s.With(none).Sandbox("a").Wake(ctx)
		_, serr := s.With(none).Sandbox("a").Start(ctx, sandbox.StartOptions{})
		if stale != errors.Is(werr, volume.ErrStale) || stale == errors.Is(serr, sandbox.ErrNotRunning) {
			t.Errorf("%s: wake: %v; start: %v", what, werr, serr)
		}
	}
	use(false, true)
	if _, err := s.State.ResizeVolume(ctx, "v", 2*volume.MinSize); !errors.Is(err, volume.ErrInUse) {
		t.Errorf("resizing while a VM sleeps with it: %v, want ErrInUse", err)
	}
	check("as it slept", false)
	use(false, false)
	check("attached since", false)
	use(true, false)
	check("written since", true)
	if err := s.Sandbox("a").Delete(ctx, sandbox.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// No VM holds the volume any more. The discard above has erased its superblock.
	if _, err := s.State.ResizeVolume(ctx, "v", 2*volume.MinSize); !errors.Is(err, disk.ErrDamaged) {
		t.Errorf("resizing what has no file system any more: %v, want ErrDamaged", err)
	}
	if err := s.State.RemoveVolume(ctx, "v"); err != nil {
		t.Error(err)
	}
}
