package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// asks sends a host what a move would, and returns the code of its refusal.
func (d *door) asks(to string, what map[string]any) string {
	d.t.Helper()
	body, err := json.Marshal(what)
	must(d.t, err)
	text, err := d.peers.Ask(d.t.Context(), to, "migrate", body, 1<<20)
	must(d.t, err)
	var said struct{ Error *struct{ Code string } }
	must(d.t, json.Unmarshal(text, &said))
	if said.Error == nil {
		return ""
	}
	return said.Error.Code
}

// A host may have others wake what is shared, and nothing else there.
func TestAttack_host_has_another_one_wake_and_publish_what_is_not_shared(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	b.create("private")
	_, err := b.Sandbox("private").Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	r, err := b.State.Get("private")
	must(t, err)
	for _, id := range []string{"", r.ID} {
		if code := a.asks("b", map[string]any{"op": "wake", "name": "private", "id": id}); code != "exists" {
			t.Errorf("with the id %q it was told %q", id, code)
		}
	}
	b.vms.Fail = func(op, _ string) error {
		if op == "restore" {
			return errors.New("it does not come up")
		}
		return nil
	}
	a.asks("b", map[string]any{"op": "wake", "name": "private", "id": r.ID})
	if b.phase("private") != state.Asleep || objects(t, store, "families/") != 0 {
		t.Errorf("it is %q, and %d are shared", b.phase("private"), objects(t, store, "families/"))
	}
}

// What a host that has been taken over asks others for is refused, and leaves nothing there.
func TestAttack_host_asks_another_one_for_nonsense(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	a.create("box")
	a.sleep("box")
	r, err := a.State.Get("box")
	must(t, err)
	m, err := a.State.Manifest(r.Snapshot)
	must(t, err)
	head := strings.Repeat("0", 32)
	type object = map[string]any
	ahead := func(objects ...object) map[string]any {
		return map[string]any{"op": "ahead", "name": "box", "head": head, "manifest": m, "objects": objects}
	}
	other := *m
	other.Image = "../../" + m.Image
	for what, ask := range map[string]map[string]any{
		"nothing":                 {},
		"an unknown step":         {"op": "delete", "name": "box"},
		"a name that is a path":   {"op": "wake", "name": "../box"},
		"a name that nobody has":  {"op": "wake", "name": "none"},
		"no manifest":             {"op": "ahead", "name": "box"},
		"an empty manifest":       {"op": "ahead", "name": "box", "manifest": map[string]any{}},
		"an image that is a path": {"op": "ahead", "name": "box", "manifest": other},
		"a key that is a path":    ahead(object{"key": "../../x", "size": 1}),
		"a key of a record":       ahead(object{"key": "families/box", "size": 1}),
		"a key of another head":   ahead(object{"key": "data/heads-" + strings.Repeat("1", 32) + "-X/1/0", "size": 1}),
		"a key with dots":         ahead(object{"key": "data/heads-" + head + "-X/../../../x", "size": 1}),
		"no size":                 ahead(object{"key": "data/heads-" + head + "-X/1/0", "size": 0}),
		"a negative size":         ahead(object{"key": "data/heads-" + head + "-X/1/0", "size": -1}),
		"a huge size":             ahead(object{"key": "data/heads-" + head + "-X/1/0", "size": 1 << 40}),
		"what is not there":       ahead(object{"key": "data/heads-" + head + "-X/1/0", "size": 64 << 20}),
	} {
		if code := a.asks("b", ask); code == "" {
			t.Errorf("%s was done", what)
		}
	}
	near, err := filepath.Glob(filepath.Join(b.State.Dir(), "cluster", "near", "[^.]*"))
	if must(t, err); len(near) > 0 || b.phase("box") != "" {
		t.Errorf("%q stay there, and it is %q", near, b.phase("box"))
	}
	a.counts("box", "1")
}

// A head whose document is of another snapshot than what it has is damaged, and leaves nothing.
func TestAttack_head_has_another_snapshot_than_it_says(t *testing.T) {
	bare, err := blob.OpenDir(t.TempDir())
	must(t, err)
	a, b := newHost(t, "a", bare, cluster.Options{}), newHost(t, "b", bare, cluster.Options{})
	a.create("box")
	a.sleep("box")
	r, err := a.State.Get("box")
	must(t, err)
	m, err := a.State.Manifest(r.Snapshot)
	must(t, err)
	var head string
	must(t, bare.List(t.Context(), "heads/", func(i blob.Info) error { head = strings.TrimPrefix(i.Key, "heads/"); return nil }))
	must(t, bare.Delete(t.Context(), "heads/"+head))
	lie := r.Portable()
	lie.Snapshot = spec.NewID()
	doc, err := json.Marshal(map[string]any{"version": 1, "record": lie, "metadata": spec.Metadata{}})
	must(t, err)
	pushHead(t, archive.Open(bare), a.State, archive.Info{ID: head, Name: "box", Image: m.Image}, r.Snapshot, doc)
	_, err = b.count("box")
	want(t, "using it", err, archive.ErrCorrupt)
	for _, dir := range []string{"arriving", "snapshots"} {
		if entries, err := os.ReadDir(filepath.Join(b.State.Dir(), dir)); err == nil && len(entries) > 0 {
			t.Errorf("%s has %v", dir, entries)
		}
	}
}

// A sandbox that has got the name of the one that was to move is not taken for it.
func TestAttack_target_wakes_another_sandbox_of_the_name(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	a.create("box")
	a.sleep("box")
	if code := a.asks("b", map[string]any{"op": "wake", "name": "box", "id": strings.Repeat("0", 32)}); code != "exists" {
		t.Errorf("it was told %q", code)
	}
	if b.phase("box") == state.Running {
		t.Error("it was woken")
	}
	a.counts("box", "1") // nobody holds it
}

// pushHead puts a head that no node puts.
func pushHead(t *testing.T, a *archive.Archive, s *state.Store, i archive.Info, snap string, doc []byte) {
	t.Helper()
	up, err := a.Ahead(i.ID)
	must(t, err)
	_, _, _, err = up.PushHead(t.Context(), s, i, snap, doc)
	must(t, err)
}

// hookStore calls a function once, before an object is put whose key begins with a prefix.
type hookStore struct {
	blob.Store
	prefix string
	do     atomic.Pointer[func()]
}

func (s *hookStore) call(key string) {
	if strings.HasPrefix(key, s.prefix) {
		if do := s.do.Swap(nil); do != nil {
			(*do)()
		}
	}
}

func (s *hookStore) once(do func()) { s.do.Store(&do) }

// Swap implements blob.Store.
func (s *hookStore) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	s.call(key)
	return s.Store.Swap(ctx, key, old, body)
}

func (s *hookStore) Put(ctx context.Context, key string, body []byte) error {
	s.call(key)
	return s.Store.Put(ctx, key, body)
}

// SealFor implements blob.Sealer.
func (s *hookStore) SealFor(owner string) blob.Store {
	return &sealedHook{blob.SealFor(s.Store, owner), s}
}

// Seal implements blob.Sealer.
func (s *hookStore) Seal() blob.Seal { return blob.SealOf(s.Store) }

// LoadOf implements blob.Sealer.
func (s *hookStore) LoadOf(ctx context.Context, key string, limit int64) ([]byte, blob.Version, blob.Seal, error) {
	return blob.LoadOf(ctx, s.Store, key, limit)
}

type sealedHook struct {
	blob.Store
	hook *hookStore
}

func (s *sealedHook) Put(ctx context.Context, key string, body []byte) error {
	s.hook.call(key)
	return s.Store.Put(ctx, key, body)
}

// What was sealed ahead for one owner is not for another, to whom the sandbox was given meanwhile.
func TestAttack_sandbox_gets_another_owner_while_it_moves(t *testing.T) {
	bare, err := blob.OpenDir(t.TempDir())
	must(t, err)
	hostKey, alice, bob := strings.Repeat("5e", 32), strings.Repeat("a1", 32)+" alice", strings.Repeat("b2", 32)+" bob"
	hook := &hookStore{Store: sealedBy(t, bare, hostKey, alice, bob), prefix: "data/heads-"}
	a, b := newDoor(t, "a", hook, cluster.Options{}), newDoor(t, "b", sealedBy(t, bare, hostKey, alice, bob), cluster.Options{})
	a.own("box", "alice")
	a.counts("box", "1")
	hook.once(func() {
		_, err := a.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Owner = "bob"; return nil })
		must(t, err)
	})
	a.moves("box", "b")
	b.counts("box", "2")
	hers := sealedBy(t, bare, hostKey, alice)
	eventually(t, "nothing of it can be read with the key of the owner before", func() bool {
		none, n := true, 0
		must(t, bare.List(t.Context(), "", func(i blob.Info) error {
			if strings.Contains(i.Key, "heads") {
				_, _, err := hers.Load(t.Context(), i.Key, blob.MaxObject)
				none, n = none && errors.Is(err, blob.ErrNoKey), n+1
			}
			return nil
		}))
		return none && n > 0
	})
}

// The one that moves is the one that was to: not another that has got its name meanwhile.
func TestAttack_sandbox_is_replaced_while_it_moves(t *testing.T) {
	hook := &hookStore{Store: dir(t), prefix: "data/heads-"}
	a, b := newDoor(t, "a", hook, cluster.Options{}), newDoor(t, "b", hook, cluster.Options{})
	a.create("box")
	hook.once(func() {
		must(t, a.Sandbox("box").Delete(t.Context(), sandbox.DeleteOptions{Force: true}))
		a.create("box")
	})
	_, err := a.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"})
	t.Log(err)
	if err == nil || a.phase("box") != state.Running || b.phase("box") != "" {
		t.Errorf("%v; on a it is %q, on b %q", err, a.phase("box"), b.phase("box"))
	}
	eventually(t, "nothing that was sent ahead is left", func() bool { return objects(t, hook, "data/heads-")+objects(t, hook, "heads/") == 0 })
}

// What was sent ahead of a move that fails is what the next sleep builds upon, and is gone after it.
func TestAttack_move_that_fails_has_the_next_sleep_write_all_memory(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	a.create("box")
	a.counts("box", "1")
	b.passed["migrate"] = refusing{t, b.passed["migrate"], "ahead", &control.ErrorReport{Code: "foreign", Message: "this CPU lacks features"}}
	ahead := func() (ids []string) {
		snaps, err := a.State.Snapshots()
		must(t, err)
		for _, s := range snaps {
			if s.Kind == state.KindNamed {
				ids = append(ids, s.ID)
			}
		}
		return ids
	}
	for range 2 {
		if _, err := a.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"}); err == nil {
			t.Error("it has moved")
		}
	}
	a.stop() // the next node keeps the last, too
	a.join()
	eventually(t, "the last one is left", func() bool { return len(ahead()) == 1 })
	res, err := a.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	eventually(t, "what it has built upon is gone", func() bool { return len(ahead()) == 0 })
	must(t, a.State.VerifySnapshot(t.Context(), res.Snapshot))
	a.counts("box", "2")
	if notes, err := os.ReadDir(filepath.Join(a.State.Dir(), "cluster", "ahead")); err != nil || len(notes) > 0 {
		t.Errorf("%d notes are left, %v", len(notes), err)
	}
}

// Whatever operators do to a sandbox that moves, in whichever step, it runs on one host at most, has what it had, and
// leaves nothing behind.
func TestAttack_operators_act_at_once(t *testing.T) {
	for what, do := range map[string]func(a, b, c *door) error{
		"sleep": func(a, _, _ *door) error {
			_, err := a.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
			return err
		},
		"wake":       func(a, _, _ *door) error { _, err := a.Sandbox("box").Wake(t.Context()); return err },
		"wake there": func(_, b, _ *door) error { _, err := b.Sandbox("box").Wake(t.Context()); return err },
		"delete": func(a, _, _ *door) error {
			return a.Sandbox("box").Delete(t.Context(), sandbox.DeleteOptions{Force: true})
		},
		"delete there": func(_, b, _ *door) error {
			return b.Sandbox("box").Delete(t.Context(), sandbox.DeleteOptions{Force: true})
		},
		"kill": func(a, _, _ *door) error { return a.Sandbox("box").Kill(t.Context()) },
		"fork": func(a, _, _ *door) error {
			_, err := a.Sandbox("box").Fork(t.Context(), sandbox.ForkOptions{Name: "child"})
			return err
		},
		"export": func(a, _, _ *door) error {
			r, err := a.State.Get("box")
			if err == nil {
				err = a.State.ExportSnapshot(t.Context(), r.Snapshot, io.Discard)
			}
			return err
		},
		"another move": func(a, _, _ *door) error {
			_, err := a.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "c"})
			return err
		},
		"a move back": func(_, b, _ *door) error {
			_, err := b.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "a"})
			return err
		},
		"publish": func(a, _, _ *door) error { return a.node.Publish(t.Context(), "box") },
		"a sweep": func(a, _, _ *door) error { _, err := a.State.Sweep(t.Context()); return err },
	} {
		for _, step := range []string{"data/heads-", "heads/", "families/box"} {
			t.Run(what+" at "+strings.ReplaceAll(step, "/", " "), func(t *testing.T) {
				t.Parallel()
				hook := &hookStore{Store: dir(t), prefix: step}
				a, b, c := newDoor(t, "a", hook, cluster.Options{}), newDoor(t, "b", hook, cluster.Options{}), newDoor(t, "c", hook, cluster.Options{})
				a.own("box", "alice")
				a.counts("box", "1")
				did := make(chan error, 1)
				hook.once(func() { go func() { did <- do(a, b, c) }() })
				_, err := a.node.Migrate(t.Context(), "box", spec.MigrateOptions{To: "b"})
				derr := <-did
				t.Logf("the move: %v; the other: %v", err, derr)
				gone := strings.HasPrefix(what, "delete") && derr == nil
				on := func() (n int) {
					for _, d := range []*door{a, b, c} {
						if d.phase("box") == state.Running {
							n++
						}
					}
					return n
				}
				if n := on(); n > 1 {
					t.Errorf("it runs on %d hosts", n)
				}
				eventually(t, "it can be used as it was, or is gone", func() bool {
					missing := 0
					for _, d := range []*door{a, b, c} {
						if d.phase("box") == state.Stopped && what == "kill" {
							return true // its memory is lost, as was asked
						}
						switch n, err := d.count("box"); {
						case err == nil && !gone && n == "2":
							return true
						case err == nil:
							t.Fatalf("on %s it counts to %s; it is deleted: %v", d.name, n, gone)
						case errors.Is(err, sandbox.ErrNotFound):
							missing++
						}
					}
					return gone && missing == 3
				})
				if n := on(); n > 1 {
					t.Errorf("it runs on %d hosts after its use", n)
				}
				for _, d := range []*door{a, b, c} {
					if d.phase("box") == state.Running {
						d.sleep("box")
					}
				}
				eventually(t, "the store has its head and nothing else", func() bool {
					none := objects(t, hook, "heads/")+objects(t, hook, "data/heads-") == 0
					return (gone || what == "kill") && none || onlyNeeded(t, hook, "box")
				})
			})
		}
	}
}
