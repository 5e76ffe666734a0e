package sandbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/template"
	"github.com/drowse-vm/drowse/vmm"
)

// made makes a sandbox, and returns its record.
func made(t *testing.T, h *sandbox.Host, want sandbox.Spec, o sandbox.CreateOptions) *state.Record {
	t.Helper()
	want.Image = "test"
	b, err := h.Create(t.Context(), want, o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := h.State.Get(b.Name())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// makeWanted makes the templates that are wanted, and checks how many.
func makeWanted(t *testing.T, h *sandbox.Host, want int) {
	t.Helper()
	if list, err := h.MakeTemplates(t.Context()); err != nil || len(list) != want {
		t.Fatalf("%d templates made (%v), want %d", len(list), err, want)
	}
}

func TestCreate_boots_once_and_then_starts_from_the_template(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{}); r.Template != "" || r.Booted != "there was no template for it" {
		t.Errorf("the first is from template %q, or has booted because %q", r.Template, r.Booted)
	}
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{}); r.Booted != "its template was not made yet" {
		t.Errorf("the second has booted because %q", r.Booted)
	}
	makeWanted(t, h, 1)
	makeWanted(t, h, 0)
	r := made(t, h, sandbox.Spec{Name: "third"}, sandbox.CreateOptions{})
	if r.Template == "" || r.Booted != "" || r.Snapshot != "" || r.Parent != "" || r.Lineage != "" || r.Base != r.Template {
		t.Errorf("the third has the record %+v", r)
	}
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{Boot: true}); r.Template != "" || r.Booted != "a boot was asked for" {
		t.Errorf("with Boot it is from template %q, or has booted because %q", r.Template, r.Booted)
	}
	t.Setenv(control.NoTemplateEnv, "1")
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{}); r.Template != "" || r.Booted != "a boot was asked for" {
		t.Errorf("with %s it is from template %q, or has booted because %q", control.NoTemplateEnv, r.Template, r.Booted)
	}
	t.Setenv(control.NoTemplateEnv, "")
	if _, err := h.Sandbox("third").Wake(t.Context()); err != nil {
		t.Error(err)
	}
	if err := h.Sandbox("third").Kill(t.Context()); err != nil {
		t.Error(err)
	}
}

// What a guest does once, and the pages that a first command needs, are the template's.
func TestTemplate_is_of_a_VM_that_was_made_from_another_and_has_run_a_shell(t *testing.T) {
	runs := 0 // an image's shell may fail
	v := &sandboxtest.VMs{Commands: map[string]fakeguest.Command{"sh": func(context.Context, *fakeguest.Process) int { runs++; return 3 }}}
	h := v.Host(t)
	made(t, h, sandbox.Spec{}, sandbox.CreateOptions{})
	if runs != 0 {
		t.Errorf("a sandbox that has booted has run %d shells", runs)
	}
	makeWanted(t, h, 1)
	r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{})
	if runs != 2 {
		t.Errorf("for a template %d shells have run, want 2", runs)
	}
	m, err := h.State.Manifest(r.Template)
	if err != nil {
		t.Fatal(err)
	}
	var of state.Record
	if err := json.Unmarshal([]byte(m.Labels[state.LabelRecord]), &of); err != nil {
		t.Fatal(err)
	}
	if of.Base == "" || of.Booted != "" {
		t.Errorf("the template is of a VM with base %q that has booted because %q", of.Base, of.Booted)
	}
}

func TestTemplate_has_nothing_of_those_who_asked_for_it(t *testing.T) {
	const secret = "callers-data"
	h := (&sandboxtest.VMs{}).Host(t)
	full := sandbox.Spec{
		Name: secret + "-name", DiskMiB: spec.MinDiskMiB, Hostname: secret + "-host", Network: spec.NetworkTAP, Tags: []string{secret + "-tag"},
		Policy:   &netpolicy.Policy{},
		Services: []spec.Service{{Name: "web", Argv: []string{"/bin/" + secret}, Env: []string{"KEY=" + secret}}},
		Idle:     spec.Idle{SleepSeconds: 77}, Hooks: spec.Hooks{Policy: spec.HooksIgnore}, Self: spec.Self{Allow: []string{"sleep"}},
	}
	made(t, h, full, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: secret + "-owner", Purpose: secret}})
	makeWanted(t, h, 1)
	list, _, err := h.State.Templates().List()
	if err != nil || len(list) != 1 || list[0].Spec.Hostname != template.Hostname {
		t.Fatalf("the templates are %+v (%v)", list, err)
	}
	m, err := h.State.Manifest(list[0].Snapshot)
	if err != nil {
		t.Fatal(err)
	}
	paths := []string{h.State.Templates().File(list[0].Key), h.State.SnapshotDir(list[0].Snapshot)}
	for _, l := range state.SnapshotStack(m).Layers {
		paths = append(paths, filepath.Join(h.State.LayerDir(), l))
	}
	for _, path := range paths {
		err := filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := os.ReadFile(path)
			if bytes.Contains(data, []byte(secret)) {
				t.Errorf("%s has data of a caller", path)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	for _, label := range m.Labels {
		if strings.Contains(label, secret) {
			t.Errorf("its snapshot says %q", label)
		}
	}
	// Another caller with the same key gets all that he asks for, and nothing of the first.
	other := sandbox.Spec{Name: "other", DiskMiB: spec.MinDiskMiB, Network: spec.NetworkTAP}
	r := made(t, h, other, sandbox.CreateOptions{})
	if r.Template != list[0].Snapshot || r.Spec.Hostname != "other" || r.Spec.Policy != nil || len(r.Spec.Services)+len(r.Spec.Tags)+len(r.Spec.Self.Allow) > 0 || r.Spec.Idle != (spec.Idle{}) {
		t.Errorf("the other's record is %+v", r)
	}
	if m, err := h.State.Metadata("other"); err != nil || m.Owner != "" {
		t.Errorf("the other's owner is %q (%v)", m.Owner, err)
	}
	// And so does the first one.
	full.Name, full.Hostname, full.Policy = "again", "", nil
	r = made(t, h, full, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: "me"}})
	if r.Template == "" || len(r.Spec.Services) != 1 || r.Spec.Idle.SleepSeconds != 77 || h.State.Owner("again") != "me" {
		t.Errorf("its record is %+v", r)
	}
	c, err := h.Sandbox("again").Agent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var name bytes.Buffer
	if _, err := c.ReadFile(t.Context(), "/etc/hostname", &name, 0, 100); err != nil || name.String() != "again\n" {
		t.Errorf("its host name is %q (%v)", name.String(), err)
	}
	// Nothing is left of the VMs that have booted for templates.
	if _, err := h.State.Get("template-" + list[0].Key[:8]); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("the VM of the template: %v", err)
	}
}

func TestCreate_boots_when_its_template_does_not_fit(t *testing.T) {
	v := &sandboxtest.VMs{}
	var fails atomic.Pointer[error]
	v.Fail = func(op, name string) error {
		if err := fails.Load(); err != nil && op == "restore" && !strings.HasPrefix(name, "template-") {
			return *err
		}
		return nil
	}
	h := v.Host(t)
	dir := t.TempDir()
	made(t, h, sandbox.Spec{}, sandbox.CreateOptions{})
	makeWanted(t, h, 1)
	kernels := filepath.Join(h.State.KernelDir(), "kernels", "built-test", "vmlinux")
	boots := func(what string, want sandbox.Spec, why string) {
		t.Helper()
		if r := made(t, h, want, sandbox.CreateOptions{}); r.Template != "" || !strings.Contains(r.Booted, why) {
			t.Errorf("%s: from template %q, or has booted because %q, want %q", what, r.Template, r.Booted, why)
		}
	}
	boots("another size", sandbox.Spec{MemoryMiB: 128}, "there was no template")
	boots("other parameters", sandbox.Spec{Cmdline: "debug"}, "there was no template")
	boots("a share", sandbox.Spec{Shares: []spec.Share{{Source: dir, Path: "/mnt"}}}, "shared directories")
	foreign := fmt.Errorf("%w: it lacks avx", vmm.ErrForeign)
	fails.Store(&foreign)
	boots("another CPU", sandbox.Spec{}, "it lacks avx")
	fails.Store(nil)
	boots("after that", sandbox.Spec{}, "not made yet")
	if list, err := h.MakeTemplates(t.Context()); err != nil || len(list) != 3 {
		t.Fatalf("%d templates (%v)", len(list), err)
	}
	full := error(syscall.ENOSPC)
	fails.Store(&full)
	boots("for a moment", sandbox.Spec{}, "no space left")
	fails.Store(nil)
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{}); r.Template == "" {
		t.Errorf("once there is space: it has booted because %q", r.Booted)
	}
	if err := os.Rename(kernels, kernels+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(kernels, []byte("y"), 0o644); err != nil {
		t.Fatal(err)
	}
	boots("another kernel", sandbox.Spec{}, "there was no template")
	// The others are of no use.
	gone, err := h.PruneTemplates(t.Context())
	if err != nil || len(gone) != 3 {
		t.Errorf("%d were removed (%v), want 3", len(gone), err)
	}
}

func TestTemplates_that_fail_leave_nothing_and_no_creation_fails(t *testing.T) {
	v := &sandboxtest.VMs{}
	var captures atomic.Int32
	v.Fail = func(op, name string) error {
		if op == "capture" && captures.Add(1) > 1 && captures.Load() < 4 {
			return syscall.ENOSPC
		}
		return nil
	}
	h := v.Host(t)
	h.State.Grace = 0
	made(t, h, sandbox.Spec{}, sandbox.CreateOptions{})
	if _, err := h.MakeTemplates(t.Context()); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("with a full disk: %v", err)
	}
	if _, err := h.State.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	if snaps, err := os.ReadDir(filepath.Join(h.State.Dir(), "snapshots")); err != nil || len(snaps) != 0 {
		t.Errorf("it has left %d snapshots (%v)", len(snaps), err)
	}
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{}); !strings.Contains(r.Booted, "no space left") {
		t.Errorf("it has booted because %q", r.Booted)
	}
	makeWanted(t, h, 0) // not before RetryAfter
	captures.Store(4)
	// What a killed maker has left does not stand in the way.
	list, _, err := h.State.Templates().List()
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	left := "template-" + list[0].Key[:8]
	made(t, h, sandbox.Spec{Name: left}, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: spec.TemplateOwner}})
	ready, err := h.MakeTemplates(t.Context(), sandbox.Spec{Image: "test"})
	if err != nil || len(ready) != 1 || !ready[0].Ready() {
		t.Fatalf("%+v (%v)", ready, err)
	}
	if _, err := h.State.Get(left); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("what the killed maker has left: %v", err)
	}
	if _, err := h.MakeTemplates(t.Context(), sandbox.Spec{Image: "test", Shares: []spec.Share{{Source: t.TempDir(), Path: "/mnt"}}}); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("with a share: %v", err)
	}
}

func TestTemplate_stays_until_it_is_removed_and_its_VMs_stay_after_that(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	h.State.Grace = 0
	list, err := h.MakeTemplates(t.Context(), sandbox.Spec{Image: "test"})
	if err != nil {
		t.Fatal(err)
	}
	made(t, h, sandbox.Spec{Name: "a"}, sandbox.CreateOptions{})
	if _, err := h.State.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	if err := h.State.RemoveSnapshot(t.Context(), list[0].Snapshot); !errors.Is(err, spec.ErrSnapshotInUse) {
		t.Errorf("the removal of its snapshot: %v", err)
	}
	if !h.State.IsThere(list[0].Snapshot) {
		t.Fatal("the template is gone")
	}
	if err := h.State.RemoveTemplates(t.Context(), list...); err != nil {
		t.Fatal(err)
	}
	a := h.Sandbox("a")
	if _, err := a.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := h.State.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	if h.State.IsThere(list[0].Snapshot) {
		t.Error("the template is still there, and nothing builds on it")
	}
	// A boot has the disk that the VM had.
	if err := a.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Start(t.Context(), sandbox.StartOptions{}); err != nil {
		t.Error(err)
	}
}

func TestTemplate_is_made_once_by_several_makers_and_counts_for_nobody(t *testing.T) {
	v := &sandboxtest.VMs{}
	var boots atomic.Int32
	v.Fail = func(op, name string) error {
		if op == "boot" && strings.HasPrefix(name, "template-") {
			boots.Add(1)
		}
		return nil
	}
	h := v.Host(t)
	l := limits.Default
	l.DefaultOwner = limits.Owner{Sandboxes: 1, Awake: 1, AwakeMiB: 256}
	if err := l.Write(h.State.Dir()); err != nil {
		t.Fatal(err)
	}
	made(t, h, sandbox.Spec{Name: "a"}, sandbox.CreateOptions{})
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if _, err := h.MakeTemplates(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if n := boots.Load(); n != 1 {
		t.Errorf("%d boots, want 1", n)
	}
	if err := h.Sandbox("a").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if r := made(t, h, sandbox.Spec{Name: "b"}, sandbox.CreateOptions{}); r.Template == "" {
		t.Errorf("it has booted because %q", r.Booted)
	}
	if _, err := h.Create(t.Context(), sandbox.Spec{Image: "test"}, sandbox.CreateOptions{}); !errors.Is(err, spec.ErrQuota) {
		t.Errorf("one too many: %v", err)
	}
}

func TestCreate_of_200_by_8_clients_from_one_template(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	if _, err := h.MakeTemplates(t.Context(), sandbox.Spec{Image: "test"}); err != nil {
		t.Fatal(err)
	}
	const clients, each = 8, 25
	var mu sync.Mutex
	seen := map[string]int{}
	var all sync.WaitGroup
	for c := range clients {
		all.Go(func() {
			for i := range each {
				name := fmt.Sprintf("c%d-%d", c, i)
				if _, err := h.Create(t.Context(), sandbox.Spec{Name: name, Image: "test"}, sandbox.CreateOptions{}); err != nil {
					t.Error(err)
					return
				}
				r, err := h.State.Get(name)
				if err != nil || r.Template == "" {
					t.Errorf("%s has booted because %q (%v)", name, r.Booted, err)
					return
				}
				mu.Lock()
				for _, id := range append([]string{r.ID, r.MemoryOf(), r.Spec.Hostname}, r.Disk.Layers[len(r.Disk.Layers)-1]) {
					seen[id]++
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if len(seen) != clients*each*3 { // a VM's memory begins with itself
		t.Errorf("%d ids, host names and layers, want %d", len(seen), clients*each*3)
	}
}
