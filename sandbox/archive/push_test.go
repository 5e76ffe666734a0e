package archive_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// newHost returns a host whose guests count in a file of their memory.
func newHost(t testing.TB) *sandbox.Host {
	t.Helper()
	vms := &sandboxtest.VMs{Commands: map[string]fakeguest.Command{
		"count": func(_ context.Context, p *fakeguest.Process) int {
			was, _ := p.Guest.ReadFile("/run/count") // missing at first
			if err := p.Guest.WriteFile("/run/count", append(was, 'x')); err != nil {
				return 1
			}
			fmt.Fprint(p.Stdout, len(was)+1)
			return 0
		},
	}}
	return vms.Host(t)
}

func count(t testing.TB, b *sandbox.Sandbox) string {
	t.Helper()
	c, err := b.Agent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var out strings.Builder
	if _, err := c.Exec(t.Context(), guest.Cmd{Argv: []string{"count"}, IO: guest.IO{Stdout: &out}}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// asleep makes a sandbox that has counted to two and sleeps, and returns its snapshot.
func asleep(t testing.TB, h *sandbox.Host) string {
	t.Helper()
	b, err := h.Create(t.Context(), sandbox.Spec{Name: "traveller", Image: sandboxtest.Image, Network: spec.NetworkTAP, Policy: &netpolicy.Policy{}}, sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	count(t, b)
	if n := count(t, b); n != "2" {
		t.Fatalf("counted to %s", n)
	}
	res, err := b.Sleep(t.Context(), sandbox.SleepOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return res.Snapshot
}

// takeFacts has this process's hosts take snapshots of VMs in memory for those of a machine like theirs.
func takeFacts(t *testing.T, h *sandbox.Host, id string) {
	t.Helper()
	m, err := h.State.Manifest(id)
	if err != nil {
		t.Fatal(err)
	}
	instance.NoteGoodFacts(m.Host[instance.FactsKey])
}

func newArchive(t *testing.T) (*archive.Archive, blob.Store) {
	t.Helper()
	s, err := blob.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return archive.Open(s), s
}

// loseImages takes a host's images away.
func loseImages(t *testing.T, h *sandbox.Host) {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(h.State.ImageDir(), "images", "*"))
	if err != nil || len(dirs) == 0 {
		t.Fatalf("%q, %v", dirs, err)
	}
	for _, d := range dirs {
		if err := os.RemoveAll(d); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSnapshot_goes_by_an_archive_to_a_host_without_its_image_and_runs_on_there(t *testing.T) {
	from, to := newHost(t), newHost(t)
	id := asleep(t, from)
	takeFacts(t, from, id)
	a, store := newArchive(t)
	var pushed, pulled atomic.Int64
	info, err := a.Push(t.Context(), from.State, id[:12], func(n int64) { pushed.Add(n) })
	if err != nil {
		t.Fatal(err)
	}
	if info.ID != id || info.Name != "traveller" || info.Stored == 0 || pushed.Load() < info.Size {
		t.Errorf("%+v, %d bytes were shown", info, pushed.Load())
	}
	if _, err := a.Push(t.Context(), from.State, id, nil); !errors.Is(err, archive.ErrExists) {
		t.Errorf("again: %v", err)
	}
	loseImages(t, to)
	res, err := a.Pull(t.Context(), to.State, id[:12], state.ImportOptions{}, func(n int64) { pulled.Add(n) })
	if err != nil {
		t.Fatal(err)
	}
	if res.ID != id || pulled.Load() < info.Size {
		t.Errorf("%+v, %d bytes were shown", res, pulled.Load())
	}
	if len(res.Dropped) == 0 {
		t.Error("all that a stranger says was taken")
	}
	b, err := to.Clone(t.Context(), res.ID, sandbox.CloneOptions{Name: "arrived"})
	if err != nil {
		t.Fatal(err)
	}
	if n := count(t, b); n != "3" {
		t.Errorf("it counts on to %s, want 3", n)
	}
	if _, err := a.Pull(t.Context(), to.State, id, state.ImportOptions{}, nil); !errors.Is(err, snapshot.ErrExists) {
		t.Errorf("pulled again: %v", err)
	}
	for _, kind := range []archive.Kind{archive.Snapshots, archive.Images} {
		list, err := a.List(t.Context(), kind)
		if err != nil || len(list) != 1 {
			t.Errorf("%s: %+v, %v", kind, list, err)
		}
		if err := a.Remove(t.Context(), kind, list[0].ID); err != nil {
			t.Error(err)
		}
	}
	if err := store.List(t.Context(), "", func(i blob.Info) error { return fmt.Errorf("%s is left", i.Key) }); err != nil {
		t.Error(err)
	}
}

// What does not come whole does not come.
func TestPull_of_a_damaged_archive_leaves_the_host_as_it_was(t *testing.T) {
	from := newHost(t)
	id := asleep(t, from)
	takeFacts(t, from, id)
	a, store := newArchive(t)
	if _, err := a.Push(t.Context(), from.State, id, nil); err != nil {
		t.Fatal(err)
	}
	var keys []string
	if err := store.List(t.Context(), "", func(i blob.Info) error { keys = append(keys, i.Key); return nil }); err != nil {
		t.Fatal(err)
	}
	to := newHost(t)
	loseImages(t, to)
	for _, key := range keys {
		body, v, err := store.Load(t.Context(), key, blob.MaxObject)
		if err != nil {
			t.Fatal(err)
		}
		bad := append([]byte{}, body...)
		bad[len(bad)*2/3] ^= 4
		if v, err = store.Swap(t.Context(), key, v, bad); err != nil {
			t.Fatal(err)
		}
		res, err := a.Pull(t.Context(), to.State, id, state.ImportOptions{}, nil)
		switch {
		case err == nil && key == string(archive.Snapshots)+"/"+id, err == nil && key[:7] == "images/":
			// Names and times in a manifest have no hash.
			if err := to.State.RemoveSnapshot(t.Context(), res.ID); err != nil {
				t.Fatal(err)
			}
		case err == nil:
			t.Errorf("%s: it was pulled", key)
		case to.State.IsThere(id):
			t.Errorf("%s: it is there in spite of %v", key, err)
		}
		if temps, err := filepath.Glob(filepath.Join(to.State.Dir(), "tmp", "*")); err != nil || len(temps) > 0 {
			t.Errorf("%s: %q are left, %v", key, temps, err)
		}
		if _, err := store.Swap(t.Context(), key, v, body); err != nil {
			t.Fatal(err)
		}
		loseSomeImages(t, to)
	}
	if _, err := a.Pull(t.Context(), to.State, id, state.ImportOptions{}, nil); err != nil {
		t.Error(err)
	}
}

// loseSomeImages takes away the images that a host has, if any.
func loseSomeImages(t *testing.T, h *sandbox.Host) {
	t.Helper()
	dir := filepath.Join(h.State.ImageDir(), "images")
	if err := os.RemoveAll(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
}

func TestPush_and_Pull_of_what_is_not_there(t *testing.T) {
	h := newHost(t)
	a, _ := newArchive(t)
	if _, err := a.Push(t.Context(), h.State, "0123456789ab", nil); err == nil {
		t.Error("a snapshot that is not there was pushed")
	}
	for _, id := range []string{"", "00", "00112233445566778899aabbccddeeff", "../x"} {
		if _, err := a.Pull(t.Context(), h.State, id, state.ImportOptions{}, nil); !errors.Is(err, archive.ErrNotFound) {
			t.Errorf("%q: %v", id, err)
		}
	}
	// An image that is not there any more is said by its name.
	id := asleep(t, h)
	loseImages(t, h)
	if _, err := a.Push(t.Context(), h.State, id, nil); !errors.Is(err, image.ErrNotFound) {
		t.Errorf("without its image: %v", err)
	}
}
