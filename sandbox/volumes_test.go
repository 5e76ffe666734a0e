// This file has its name so that its test, which takes longest, is among the first: tests begin in the order of their
// files, and one that is left over at the end has one of the machine's processors to itself.

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

// appender appends lines to a file of the volume when it is told to.
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

func TestVolumesLiveBeyondVMsAndNeverMeetMemoryOfAnotherTime(t *testing.T) {
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
	e.Sh("a", "mkfifo /run/ask /run/answer; echo first > /data/first; mkdir /data/dir; sync")
	p, err := e.Agent("a").Start(ctx, guest.Cmd{Argv: []string{"python3", "-S", "-E", "-c", appender}, Detach: true})
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	wantLine := func(n int) {
		t.Helper()
		if got := e.Sh("a", ask); got != fmt.Sprint(n) {
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
	// Nothing in the guest's cache: what it reads now is what is on the host.
	if got := e.Sh("a", "sync; echo 3 > /proc/sys/vm/drop_caches; cat /data/first /data/lines"); got != "first\nline 1\nline 2\nline 3" {
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
	if got := e.Sh("b", "cat /data/first; tail -n 1 /data/lines; grep -c '/data ext4 rw' /proc/mounts"); got != "first\nline 4\n1" {
		t.Errorf("in another VM the volume has %q", got)
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
	// Of a program's making: random numbers are the kernel's, which may be interpreted.
	e.Sh("b", "yes | head -c 4194304 > /data/much; sync /data/much")
	if n := allocated(); n < empty+4<<20 {
		t.Errorf("4 MiB that the guest has synced: the volume takes %d bytes, and %d before", n, empty)
	}
	e.Sh("b", "rm /data/much; sync; fstrim /data")
	if n := allocated(); n > empty+1<<20 {
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

	// Many may read it, and clones may.
	e.Run(sandbox.Spec{Name: "c", Volumes: ro})
	if got := e.Sh("c", "cat /data/first; touch /data/x 2>&1 | grep -c 'Read-only'"); got != "first\n1" {
		t.Errorf("read-only, the volume has %q", got)
	}
	slept = e.Sleep("c")
	if err := restore(slept.Snapshot, "d"); err != nil {
		t.Fatal(err)
	}
	e.Wake("c")
	for _, vm := range []string{"c", "d"} {
		if got := e.Sh(vm, "echo 3 > /proc/sys/vm/drop_caches; cat /data/first"); got != "first" {
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

// zeros is the RAM of a machine that has done nothing.
type zeros struct{}

func (zeros) Slots() []snapshot.Slot { return []snapshot.Slot{{Size: guestmem.PageSize}} }

func (zeros) NextData(page uint64) (first, end uint64, err error) {
	return page, page, nil
}

func (zeros) ReadPages(_ uint64, p []byte) error {
	clear(p)
	return nil
}

// A VM whose memory has become useless, as after a wake that failed when the guest had
// written already, can be booted, and one whose memory is good cannot.
func TestSleepingVMWhoseVolumeHasMovedOnCanBeStarted(t *testing.T) {
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
	// write changes the volume as a guest does, or only attaches it.
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
	// Without a program for its process, whatever is allowed fails with another error.
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
	// Nobody keeps it any more. What was discarded above is its superblock.
	if _, err := s.State.ResizeVolume(ctx, "v", 2*volume.MinSize); !errors.Is(err, disk.ErrDamaged) {
		t.Errorf("resizing what has no file system any more: %v, want ErrDamaged", err)
	}
	if err := s.State.RemoveVolume(ctx, "v"); err != nil {
		t.Error(err)
	}
}
