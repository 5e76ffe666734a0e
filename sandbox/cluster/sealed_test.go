package cluster_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/blob/sealed"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// sealedBy returns a store that encrypts with the keys of the lines.
func sealedBy(t *testing.T, s blob.Store, lines ...string) blob.Store {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys")
	must(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600))
	k, err := sealed.ReadKeys(file)
	must(t, err)
	return sealed.New(s, k)
}

func TestSealed_sandbox_of_an_owner_wakes_where_its_key_is(t *testing.T) {
	bare, err := blob.OpenDir(t.TempDir())
	must(t, err)
	host, alice := strings.Repeat("5e", 32), strings.Repeat("a1", 32)
	a := newHost(t, "a", sealedBy(t, bare, host, alice+" alice"), cluster.Options{})
	b := newDoor(t, "b", sealedBy(t, bare, host), cluster.Options{})
	for _, name := range []string{"hers", "nobodys"} {
		a.create(name)
		if name == "hers" {
			_, err := a.State.SetMetadata(t.Context(), name, func(m *spec.Metadata, _ error) error { m.Owner = "alice"; return nil })
			must(t, err)
		}
		a.counts(name, "1")
		a.sleep(name)
	}
	b.counts("nobodys", "2")
	b.sleep("nobodys")
	_, err = b.count("hers")
	want(t, "without her key", err, blob.ErrNoKey)
	_, err = b.as("root", "").Exec(t.Context(), "hers", wire.Exec{Command: []string{"true"}})
	if is := new(records.Error); !errors.As(err, &is) || is.Code != "no-key" || is.Remedy == "" {
		t.Errorf("without her key, by HTTP: %v", err)
	}
	l, err := b.as("all", "").List(t.Context(), records.Filter{})
	if err != nil || rows(l) != "nobodys  asleep" || len(l.Problems) != 1 {
		t.Errorf("a list without her key: %s; %q; %v", rows(l), l.Problems, err)
	}
	a.counts("hers", "2")
	a.counts("nobodys", "3")
	a.sleep("hers")
	// Names are to be seen in the store, and what sandboxes have is not.
	must(t, bare.List(t.Context(), "", func(i blob.Info) error {
		body, _, err := bare.Load(t.Context(), i.Key, blob.MaxObject)
		if err == nil && (strings.Contains(string(body), "alice") || strings.Contains(string(body), `"version"`)) {
			t.Errorf("%s is not sealed", i.Key)
		}
		return err
	}))
	// A host without keys, and one with others, does not join.
	for _, s := range []blob.Store{bare, sealedBy(t, bare, strings.Repeat("0f", 32))} {
		_, err := cluster.Join(t.Context(), newHost(t, "c", dir(t), cluster.Options{}).bare, cluster.Options{Store: s, Name: "d"})
		if err == nil {
			t.Error("a host without the keys has joined")
		}
	}
}

// Whoever has the key of one owner, and can write to the bucket, gets nothing of hosts and other owners by it.
func TestAttack_key_of_an_owner_makes_what_is_of_others(t *testing.T) {
	bare, err := blob.OpenDir(t.TempDir())
	must(t, err)
	host, alice, bob := strings.Repeat("5e", 32), strings.Repeat("a1", 32), strings.Repeat("b2", 32)
	a := newHost(t, "a", sealedBy(t, bare, host, alice+" alice", bob+" bob"), cluster.Options{})
	a.create("box")
	_, err = a.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Owner = "bob"; return nil })
	must(t, err)
	a.counts("box", "1")
	a.sleep("box")
	evil := sealedBy(t, bare, alice)

	// A host of its own.
	rec := `{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"evil:1","key":"` + strings.Repeat("0", 64) + `"}`
	_, err = evil.Swap(t.Context(), "hosts/evil", "", []byte(rec))
	must(t, err)
	_, err = a.node.Peer(t.Context(), "evil", true)
	want(t, "a host that an owner has made", err, blob.ErrCorrupt)

	// A guest of its own in place of bob's.
	var head string
	must(t, bare.List(t.Context(), "heads/", func(i blob.Info) error { head = strings.TrimPrefix(i.Key, "heads/"); return nil }))
	m := newHost(t, "m", dir(t), cluster.Options{})
	m.create("box")
	_, err = m.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	r, err := m.State.Get("box")
	must(t, err)
	doc, err := json.Marshal(map[string]any{"version": 1, "record": r.Portable(), "metadata": spec.Metadata{Owner: "bob"}})
	must(t, err)
	must(t, bare.Delete(t.Context(), "heads/"+head))
	must(t, bare.List(t.Context(), "images/", func(i blob.Info) error { return bare.Delete(t.Context(), i.Key) }))
	man, err := m.State.Manifest(r.Snapshot)
	must(t, err)
	pushHead(t, archive.Open(evil), m.State, archive.Info{ID: head, Name: "box", Image: man.Image}, r.Snapshot, doc)
	b := newHost(t, "b", sealedBy(t, bare, host, alice+" alice", bob+" bob"), cluster.Options{})
	_, err = b.count("box")
	want(t, "a guest that another owner has made", err, blob.ErrCorrupt)

	// And the image of it.
	b.loseImages()
	want(t, "an image that an owner has put", archive.Open(b.store).PullImage(t.Context(), b.State, man.Image), blob.ErrCorrupt)
}
