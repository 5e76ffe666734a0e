package sandbox_test

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// setPersist sets which files of a VM do not persist.
func setPersist(e *guesttest.Env, vm string, p lifetime.Persist) {
	e.T.Helper()
	if _, err := e.Store.State.SetMetadata(e.T.Context(), vm, func(l *spec.Metadata, _ error) error {
		l.Persist = p
		return nil
	}); err != nil {
		e.T.Fatal(err)
	}
}

// filesBelow returns the files below a directory of the host.
func filesBelow(t testing.TB, dir string) []string {
	t.Helper()
	out := []string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, strings.TrimPrefix(p, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// persistence is the part of TestHooks_in_a_guest that is about lifetime.Persist.
type persistence struct {
	e    *guesttest.Env
	host string
}

func newPersistence(e *guesttest.Env) *persistence { return &persistence{e, e.T.TempDir()} }

// begin sets what a VM without hooks promotes and drops before its next sleep.
func (p *persistence) begin(name string) {
	setPersist(p.e, name, lifetime.Persist{
		Drop:    []string{"/root/cache", "/root/out", "/root/none"},
		Promote: []lifetime.Promotion{{Path: "/root/out", To: p.host}, {Path: "/root/log", To: p.host}, {Path: "/root/none", To: "/none"}},
	})
	c := p.e.Agent(name)
	defer c.Close()
	// These calls start no process in the guest, each of which would take long.
	for file, text := range map[string]string{"cache/d/f": "c", "kept": "keep", "out/report": "result\n", "log": "line\n"} {
		if err := c.WriteFile(p.e.T.Context(), "/root/"+file, strings.NewReader(text), guest.WriteOptions{Parents: true}); err != nil {
			p.e.T.Fatal(err)
		}
	}
	if err := c.Symlink(p.e.T.Context(), "/root", "/root/cache/l"); err != nil {
		p.e.T.Fatal(err)
	}
}

// slept checks the result of that sleep.
func (p *persistence) slept(res spec.SleepResult) {
	t := p.e.T
	t.Helper()
	did := res.Persist
	if did == nil || len(did.Promoted) != 2 || len(did.Problems) != 0 || len(did.Dropped) != 2 ||
		did.Dropped[0].Entries != 3 || did.Dropped[1].Entries != 1 || did.Dropped[1].Kept != 0 {
		t.Fatalf("the sleep says %+v", did)
	}
	for at, want := range map[string]string{did.Promoted[0].At + "/report": "result\n", did.Promoted[1].At: "line\n"} {
		if b, err := os.ReadFile(at); err != nil || string(b) != want {
			t.Errorf("%s has %q, %v", at, b, err)
		}
	}
	if files := filesBelow(t, p.host); len(files) != 2 {
		t.Errorf("promoted are %q", files)
	}
}

// woken checks what is left after the wake, and promotes while the VM runs.
func (p *persistence) woken(name string) {
	t := p.e.T
	t.Helper()
	c := p.e.Agent(name)
	defer c.Close()
	for _, dir := range []string{"cache", "out"} {
		if list, err := c.ReadDir(t.Context(), "/root/"+dir); err != nil || len(list) != 0 {
			t.Errorf("in /root/%s are %v, %v", dir, list, err)
		}
	}
	for _, file := range []string{"kept", "log"} {
		if _, err := c.Lstat(t.Context(), "/root/"+file); err != nil {
			t.Error(err)
		}
	}
	if err := c.WriteFile(t.Context(), "/root/out/more", strings.NewReader("more\n"), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	copies, err := p.e.Store.Sandbox(name).Promote(t.Context())
	if err != nil || len(copies) != 2 {
		t.Fatalf("promoted %+v, %v", copies, err)
	}
	if b, err := os.ReadFile(copies[0].At + "/more"); err != nil || string(b) != "more\n" {
		t.Errorf("the copy has %q, %v", b, err)
	}
}

// nowhere returns a promotion to a directory that does not exist.
func (p *persistence) nowhere() lifetime.Persist {
	return lifetime.Persist{
		Drop:     []string{"/root/cache", "/root/out"},
		Promote:  []lifetime.Promotion{{Path: "/root/out", To: p.host + "/none"}},
		MaxBytes: 1 << 30,
	}
}

// refused has a sleep fail after the hooks 10-a and 20-b ran: the guest continues and has lost nothing.
func (p *persistence) refused(name string) {
	t := p.e.T
	t.Helper()
	before := filesBelow(t, p.host)
	setPersist(p.e, name, p.nowhere())
	_, err := p.e.Store.Sandbox(name).Sleep(t.Context(), sandbox.SleepOptions{})
	if !errors.Is(err, spec.ErrPromote) || !strings.Contains(err.Error(), p.host+"/none") {
		t.Errorf("without a directory to promote to: %v, want ErrPromote", err)
	}
	wantNotes(p.e, name, "10-a sleep", "20-b sleep", "20-b wake sleep", "10-a wake sleep")
	if got := filesBelow(t, p.host); !slices.Equal(got, before) {
		t.Errorf("on the host are %q, were %q", got, before)
	}
	if r, err := p.e.Store.State.Get(name); err != nil || r.Phase != state.Running {
		t.Fatalf("after the refusal: %v, %v", r.Phase, err)
	}
	setPersist(p.e, name, lifetime.Persist{})
}

// ignored checks a sleep for which that failure was ignored.
func (p *persistence) ignored(res spec.SleepResult) {
	p.e.T.Helper()
	if did := res.Persist; did == nil || len(did.Problems) != 1 || len(did.Promoted) != 0 || did.DiskBytes <= 0 || len(did.Dropped) != 1 || did.Dropped[0].Path != "/root/cache" {
		p.e.T.Errorf("ignoring that it cannot be promoted: %+v", did)
	}
}

// told checks the events of a VM whose processes have all ended.
func (p *persistence) told(name string, want map[events.Type]int) {
	t := p.e.T
	t.Helper()
	got := map[events.Type]int{}
	filter := events.Filter{Sandbox: name, Types: []string{string(events.Promoted), string(events.PersistFailed)}}
	if _, err := p.e.Store.State.Events().Read(t.Context(), events.ReadOptions{Filter: filter}, func(ev events.Event) error {
		got[ev.Type]++
		return nil
	}); err != nil || !maps.Equal(got, want) {
		t.Errorf("of %s are told %v, want %v: %v", name, got, want, err)
	}
}
