package cluster_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
