package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
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

func (s *hookStore) Put(ctx context.Context, key string, body []byte) error {
	s.call(key)
	return s.Store.Put(ctx, key, body)
}

// SealFor implements blob.Sealer.
func (s *hookStore) SealFor(owner string) blob.Store {
	return &sealedHook{blob.SealFor(s.Store, owner), s}
}

// LoadOf implements blob.Sealer.
func (s *hookStore) LoadOf(ctx context.Context, key string, limit int64) ([]byte, blob.Version, string, error) {
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
