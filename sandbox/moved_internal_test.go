package sandbox

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

// A sleeping VM wakes with its image and the disk of its agent. Its record must find them where the store is now.
func TestAttack_state_directory_that_was_moved_has_its_boot_files(t *testing.T) {
	h := statetest.NewHost(t)
	s := &Host{State: h.Store}
	agent := filepath.Join(t.TempDir(), "agent")
	h.Write(agent, "a program")
	l := pool.Launcher{Agent: agent}
	now, err := s.With(l).resolve(t.Context(), Spec{Image: h.Image, Kernel: "built"})
	if err != nil {
		t.Fatal(err)
	}
	before := now // as older versions wrote it
	for _, p := range []*string{&before.Kernel, &before.SystemDisk, &before.Image} {
		if *p == "" || filepath.IsAbs(*p) {
			t.Errorf("a record has the path %q", *p)
		}
		*p = filepath.Join(h.Dir(), *p)
	}
	for name, b := range map[string]state.BootFiles{"now": now, "before": before} {
		r := h.Record(name)
		r.Boot = b
		lock, err := h.Create(r)
		if err != nil {
			t.Fatal(err)
		}
		lock.Release()
	}
	if text, err := os.ReadFile(h.RecordPath("now")); err != nil || strings.Contains(string(text), h.Dir()) {
		t.Errorf("the record has the directory of the store in it (%v):\n%s", err, text)
	}
	check := func(t *testing.T, dir string) {
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"now", "before"} {
			r, err := s.State.Get(name)
			if err != nil {
				t.Fatal(err)
			}
			p := process.Parts(s.State, r, disk.Stack{})
			for what, path := range map[string]string{"kernel": p.Kernel, "agent's disk": p.SystemDisk, "image": p.Image} {
				if _, err := os.Stat(path); err != nil || !strings.HasPrefix(path, s.State.Dir()+"/") {
					t.Errorf("the %s of the VM %q is %s (%v), not in %s", what, name, path, err, s.State.Dir())
				}
			}
			// A clone is made of its snapshot's record.
			if b, err := s.With(l).resolveAgain(t.Context(), *r); err != nil || b.SystemDisk != now.SystemDisk {
				t.Errorf("a clone of %q has the agent's disk %q (%v), want %q", name, b.SystemDisk, err, now.SystemDisk)
			}
			// The path of a user's own kernel stays as it is.
			if got := s.State.BootPath("/boot/vmlinux"); got != "/boot/vmlinux" {
				t.Errorf("the user's kernel is %q", got)
			}
		}
	}
	t.Run("where it was", func(t *testing.T) { check(t, h.Dir()) })
	t.Run("copied", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(h.Dir())); err != nil {
			t.Fatal(err)
		}
		check(t, dir)
	})
	t.Run("moved", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "moved")
		if err := os.Rename(h.Dir(), dir); err != nil {
			t.Fatal(err)
		}
		check(t, dir)
	})
}
