package sandboxtest_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func create(t *testing.T, h *sandbox.Host, s sandbox.Spec) *sandbox.Sandbox {
	t.Helper()
	s.Image = sandboxtest.Image
	b, err := h.Create(t.Context(), s, sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func client(t *testing.T, b *sandbox.Sandbox) *guest.Client {
	t.Helper()
	c, err := b.Agent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func want(t *testing.T, h *sandbox.Host, name string, phase state.Phase) *state.Record {
	t.Helper()
	r, err := h.State.Get(name)
	if err != nil || r.Phase != phase {
		t.Fatalf("%s is %+v, %v; want %s", name, r, err, phase)
	}
	return r
}

func TestVMs_do_what_a_fleet_promises(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	fleettest.Conformance(t, fleettest.Subject{
		Fleet: fleettest.Of(h, fleet.Options{}), Spec: sandbox.Spec{Image: sandboxtest.Image},
		Make: func(t *testing.T, spec sandbox.Spec, m spec.Metadata) {
			if _, err := h.Create(t.Context(), spec, sandbox.CreateOptions{Metadata: &m}); err != nil {
				t.Fatal(err)
			}
		},
		Write: func(t *testing.T, name, word string) {
			if err := client(t, h.Sandbox(name)).WriteFile(t.Context(), "/run/word", strings.NewReader(word), guest.WriteOptions{}); err != nil {
				t.Fatal(err)
			}
		},
		Read: func(t *testing.T, name string) string {
			var out bytes.Buffer
			cmd := guest.Cmd{Argv: []string{"cat", "/run/word"}, IO: guest.IO{Stdout: &out}}
			if _, err := client(t, h.Sandbox(name)).Exec(t.Context(), cmd); err != nil {
				t.Fatal(err)
			}
			return out.String()
		},
		Kill: func(_ *testing.T, name string) { v.Kill(name) },
	})
}

func TestKilled_VM_boots_with_its_disk_and_without_its_memory(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	b := create(t, h, sandbox.Spec{Name: "a", Network: spec.NetworkTAP})
	for _, name := range []string{"/run/word", "/root/word"} {
		if err := v.Guest("a").WriteFile(name, []byte("word")); err != nil {
			t.Fatal(err)
		}
	}
	v.Kill("a")
	if r := want(t, h, "a", state.Crashed); !strings.Contains(r.Problem, "killed") {
		t.Errorf("its problem is %q", r.Problem)
	}
	if v.Guest("a") != nil {
		t.Error("it has a guest")
	}
	if _, err := b.BringUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := v.Guest("a").ReadFile("/root/word"); err != nil || string(got) != "word" {
		t.Errorf("its disk has %q, %v", got, err)
	}
	if _, err := v.Guest("a").ReadFile("/run/word"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its memory is there: %v", err)
	}
}

func TestVM_ends_as_it_is_told(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	for name, end := range map[string]func(*sandbox.Sandbox) error{
		"powered-off": func(b *sandbox.Sandbox) error { return b.Stop(t.Context()) },
		"host-error":  func(b *sandbox.Sandbox) error { return b.Kill(t.Context()) },
	} {
		b := create(t, h, sandbox.Spec{Name: name})
		if err := end(b); err != nil {
			t.Fatal(err)
		}
		if r := want(t, h, name, state.Stopped); r.Exit == nil || r.Exit.Reason != name {
			t.Errorf("its end is %+v, want %s", r.Exit, name)
		}
		if err := b.Delete(t.Context(), sandbox.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
}

func TestSnapshots_have_memory_and_disk_or_the_disk_alone(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	b := create(t, h, sandbox.Spec{Name: "a"})
	write := func(word string) {
		if err := errors.Join(v.Guest("a").WriteFile("/tmp/m", []byte(word)), v.Guest("a").WriteFile("/d", []byte(word))); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	whole, err := b.Snapshot(t.Context(), sandbox.SnapshotOptions{Note: "n"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Snapshot(t.Context(), sandbox.SnapshotOptions{DiskOnly: true}); err != nil {
		t.Fatal(err)
	}
	write("second")
	if _, err := h.Clone(t.Context(), whole.Snapshot, sandbox.CloneOptions{Name: "clone"}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/tmp/m", "/d"} {
		if got, err := v.Guest("clone").ReadFile(name); err != nil || string(got) != "first" {
			t.Errorf("%s of the clone is %q, %v", name, got, err)
		}
	}
	if got, err := v.Guest("clone").ReadFile("/etc/hostname"); err != nil || string(got) != "clone\n" {
		t.Errorf("the clone is called %q, %v", got, err)
	}
	all, err := h.State.Snapshots()
	if err != nil || len(all) != 2 {
		t.Errorf("the snapshots are %+v, %v", all, err)
	}
}

func TestOperations_that_fail_leave_the_VM_as_it_was(t *testing.T) {
	failing := ""
	broken := errors.New("broken by the test")
	v := &sandboxtest.VMs{Fail: func(op, _ string) error {
		if op == failing {
			return broken
		}
		return nil
	}}
	h := v.Host(t)
	b := create(t, h, sandbox.Spec{Name: "a", Network: spec.NetworkTAP})
	failing = "capture"
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err == nil || !strings.Contains(err.Error(), broken.Error()) {
		t.Errorf("the sleep: %v", err)
	}
	want(t, h, "a", state.Running)
	failing = "fork"
	_, ferr := b.Fork(t.Context(), sandbox.ForkOptions{Name: "child"})
	if ferr == nil || !strings.Contains(ferr.Error(), broken.Error()) {
		t.Errorf("the fork: %v", ferr)
	}
	if _, err := h.State.Get("child"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("the child: %v; the fork: %v", err, ferr)
	}
	failing = "restore"
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Wake(t.Context()); err == nil || !strings.Contains(err.Error(), broken.Error()) {
		t.Errorf("the wake: %v", err)
	}
	want(t, h, "a", state.Asleep)
	failing = "boot"
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "b", Image: sandboxtest.Image}, sandbox.CreateOptions{}); err == nil {
		t.Error("it has booted")
	}
	if _, err := h.State.Get("b"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("what did not boot: %v", err)
	}
}

func TestIdle_VM_goes_to_sleep_and_its_statistics_can_be_had_before(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	b := create(t, h, sandbox.Spec{Name: "a", Idle: spec.Idle{SleepSeconds: 1, CPUPercent: 100}})
	st, err := b.Stats(t.Context())
	if err != nil || st.Guest == nil || st.Guest.Memory.Total == 0 {
		t.Errorf("its statistics are %+v, %v", st, err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		r, err := h.State.Get("a")
		if err != nil {
			t.Fatal(err)
		}
		if r.Phase == state.Asleep {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("it is %s after a minute", r.Phase)
		}
	}
}

func TestVM_that_is_held_is_woken_stays_awake_and_sleeps_when_it_is_asked_to(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	b := create(t, h, sandbox.Spec{Name: "a", Idle: spec.Idle{SleepSeconds: 1, CPUPercent: 100}, Network: spec.NetworkTAP})
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	lock, err := b.WakeWithLock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	if lock.Network() == nil {
		t.Error("it says nothing of its network")
	}
	time.Sleep(1500 * time.Millisecond)
	want(t, h, "a", state.Running)
	go func() {
		<-lock.Done()
		lock.Release()
	}()
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	want(t, h, "a", state.Asleep)
}

func TestSecrets_of_the_guest_and_of_the_proxy_are_one_list(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	b := create(t, h, sandbox.Spec{Name: "a", Network: spec.NetworkTAP})
	secret := func(name string, proxy bool) spec.Secret {
		return spec.Secret{SecretFile: spec.SecretFile{Name: name, Proxy: proxy}, Value: []byte("long-enough")}
	}
	check := func(when string, want ...spec.SecretState) {
		t.Helper()
		if got, err := b.Secrets(t.Context()); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", when, got, err, want)
		}
	}
	if err := b.SetSecrets(t.Context(), secret("b", true), secret("c", false), secret("a", false)); err != nil {
		t.Fatal(err)
	}
	file := func(name string) spec.SecretFile { return spec.SecretFile{Name: name, Mode: spec.DefaultSecretMode} }
	hidden := spec.SecretFile{Name: "b", Proxy: true}
	all := []spec.SecretState{
		{SecretFile: file("a"), Present: true, Size: 11, Kept: true},
		{SecretFile: hidden, Present: true, Size: 11, Kept: true},
		{SecretFile: file("c"), Present: true, Size: 11, Kept: true},
	}
	check("after they were set", all...)
	var many []spec.Secret
	for i := range spec.MaxSecrets - 2 {
		many = append(many, secret(fmt.Sprintf("d%02d", i), i%2 == 0))
	}
	if err := b.SetSecrets(t.Context(), many...); !errors.Is(err, spec.ErrSecrets) {
		t.Errorf("one too many: %v, want spec.ErrSecrets", err)
	}
	check("after too many", all...)
	if err := b.SetSecrets(t.Context(), secret("a", true)); !errors.Is(err, spec.ErrSecrets) {
		t.Errorf("a secret of the guest's becomes the proxy's: %v, want spec.ErrSecrets", err)
	}
	if err := b.RemoveSecrets(t.Context(), "c"); err != nil {
		t.Error(err)
	}
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("after a wake", spec.SecretState{SecretFile: file("a"), Kept: true}, spec.SecretState{SecretFile: hidden, Kept: true})
	if err := b.RemoveSecrets(t.Context(), "a", "b"); err != nil {
		t.Error(err)
	}
	check("after all were removed")
}

func TestSecrets_policies_and_tags_are_those_of_the_record_and_of_the_process(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	b := create(t, h, sandbox.Spec{Name: "a", Network: spec.NetworkTAP})
	if err := b.SetSecrets(t.Context(), spec.Secret{SecretFile: spec.SecretFile{Name: "key"}, Value: []byte("value")}); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Secrets(t.Context()); err != nil || len(got) != 1 || !got[0].Present || got[0].Size != 5 {
		t.Errorf("its secrets are %+v, %v", got, err)
	}
	if res, err := b.SetTags(t.Context(), []string{"web"}, nil); err != nil || !res.Live || len(res.Tags) != 1 {
		t.Errorf("its tags are %+v, %v", res, err)
	}
	bad := &netpolicy.Policy{Rules: []netpolicy.Rule{{Direction: "sideways"}}}
	if _, err := b.SetPolicy(t.Context(), bad); !errors.Is(err, netpolicy.ErrPolicy) {
		t.Errorf("a policy that is none: %v", err)
	}
	if _, err := b.NetworkStats(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := b.SetService(t.Context(), spec.Service{Name: "web", Argv: []string{"web"}}); err != nil {
		t.Error(err)
	}
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if r := want(t, h, "a", state.Asleep); len(r.Secrets) != 1 || len(r.Spec.Tags) != 1 {
		t.Errorf("the record has secrets %+v and tags %q", r.Secrets, r.Spec.Tags)
	}
}

func TestHost_without_a_launcher_uses_VMs_that_another_one_has_started(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	create(t, h, sandbox.Spec{Name: "a"})
	other, err := sandbox.Open(h.State.Dir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Sandbox("a").Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Sandbox("a").Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := other.Sandbox("a").Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, h, "a", state.Stopped)
}

func TestFiles_and_trees_are_copied_both_ways(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	c := client(t, create(t, h, sandbox.Spec{Name: "a"}))
	src, dst := t.TempDir(), t.TempDir()
	big := bytes.Repeat([]byte("0123456789abcdef"), 200_000) // more than a window
	for name, data := range map[string][]byte{"big": big, "d/small": []byte("small")} {
		path := filepath.Join(src, "tree", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.CopyIn(t.Context(), filepath.Join(src, "tree"), "/home", guest.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"cat"}, IO: guest.IO{Stdin: bytes.NewReader(big), Stdout: &out}}); err != nil || !bytes.Equal(out.Bytes(), big) {
		t.Errorf("cat gives %d bytes, %v", out.Len(), err)
	}
	if err := errors.Join(c.Rename(t.Context(), "/home/tree", "/root/moved"), c.Mkdir(t.Context(), "/root/moved/empty", 0o700, false)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CopyOut(t.Context(), "/root/moved", dst, guest.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dst, "moved/big")); err != nil || !bytes.Equal(got, big) {
		t.Errorf("%d bytes came back, %v", len(got), err)
	}
	if fi, err := os.Stat(filepath.Join(dst, "moved/empty")); err != nil || !fi.IsDir() {
		t.Errorf("the empty directory: %v", err)
	}
	if err := c.Remove(t.Context(), "/root/moved", false); !errors.Is(err, guest.ErrRemote) {
		t.Errorf("removing what is not empty: %v", err)
	}
	if err := c.Remove(t.Context(), "/root/moved", true); err != nil {
		t.Error(err)
	}
	if _, err := c.Stat(t.Context(), "/root/moved"); !errors.Is(err, guest.ErrNotFound) {
		t.Errorf("what was removed: %v", err)
	}
	for name, tc := range map[string]struct {
		cmd  guest.Cmd
		code int
	}{
		"what is not there": {guest.Cmd{Argv: []string{"nothing"}}, 127},
		"what fails":        {guest.Cmd{Argv: []string{"/bin/false"}}, 1},
		"what takes long":   {guest.Cmd{Argv: []string{"sleep", "60"}, Timeout: 50 * time.Millisecond}, 137},
	} {
		var exit *guest.ExitError
		if _, err := c.Exec(t.Context(), tc.cmd); !errors.As(err, &exit) || exit.Code != tc.code {
			t.Errorf("%s: %v, want code %d", name, err, tc.code)
		}
	}
}

func TestFiles_of_a_VM_that_sleeps_wake_it(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	b := create(t, h, sandbox.Spec{Name: "a"})
	sleep := func() {
		t.Helper()
		if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	files := b.Files()
	sleep()
	if err := files.WriteFile(t.Context(), "/root/dir/word", strings.NewReader("word"), guest.WriteOptions{Parents: true}); err != nil {
		t.Fatal(err)
	}
	want(t, h, "a", state.Running)
	sleep()
	var out bytes.Buffer
	if n, err := files.ReadFile(t.Context(), "/root/dir/word", &out); err != nil || n != 4 || out.String() != "word" {
		t.Errorf("read %d bytes, %q, %v", n, &out, err)
	}
	if err := files.Rename(t.Context(), "/root/dir/word", "/root/dir/other"); err != nil {
		t.Error(err)
	}
	if list, err := files.ReadDir(t.Context(), "/root/dir"); err != nil || len(list) != 1 || list[0].Name != "other" {
		t.Errorf("there is %+v, %v", list, err)
	}
	if err := files.Remove(t.Context(), "/root/dir", true); err != nil {
		t.Error(err)
	}
	if _, err := files.Stat(t.Context(), "/root/dir"); !errors.Is(err, guest.ErrNotFound) {
		t.Errorf("of what was removed: %v, want ErrNotFound", err)
	}
}
