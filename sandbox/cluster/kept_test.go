package cluster_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// countedPuts counts the bytes of heads that are put into a store.
type countedPuts struct {
	blob.Store
	bytes atomic.Int64
}

// Put implements blob.Store.
func (c *countedPuts) Put(ctx context.Context, key string, body []byte) error {
	if strings.HasPrefix(key, "data/heads-") {
		c.bytes.Add(int64(len(body)))
	}
	return c.Store.Put(ctx, key, body)
}

// has is how many bytes of heads there are.
func (c *countedPuts) has(t *testing.T) (n int64) {
	t.Helper()
	must(t, c.List(t.Context(), "data/heads-", func(i blob.Info) error { n += i.Size; return nil }))
	return n
}

// A sleep puts what the store lacks, also on another host, and what nobody needs any more goes.
func TestPublish_puts_only_what_the_store_lacks(t *testing.T) {
	d, err := blob.OpenDir(t.TempDir())
	must(t, err)
	bare := &countedPuts{Store: d}
	keyed := func(lines ...string) blob.Store { return sealedBy(t, bare, lines...) }
	key, alice, newer := strings.Repeat("5e", 32), strings.Repeat("a1", 32)+" alice", strings.Repeat("a2", 32)+" alice"
	a, b := newHost(t, "a", keyed(key, alice), cluster.Options{}), newHost(t, "b", keyed(key, alice), cluster.Options{})
	a.vms.Pages, b.vms.Pages = 1024, 1024
	a.create("box")
	count := 0
	sleeps := func(h *host) (bytes int64) {
		t.Helper()
		before := bare.bytes.Load()
		count++
		h.counts("box", string(rune('0'+count)))
		h.sleep("box")
		return bare.bytes.Load() - before
	}
	whole := sleeps(a)
	for i, h := range []*host{a, a, b, b} { // the first one of another host has what was sent as it is here
		if n := sleeps(h); n > whole/4 {
			t.Errorf("sleep %d: %d bytes are put after %d", i+2, n, whole)
		}
	}
	eventually(t, "the store has little of earlier sleeps", func() bool { return bare.has(t) < whole*2 })
	// What is sealed otherwise is put again.
	_, err = b.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Owner = "alice"; return nil })
	must(t, err)
	if n := sleeps(b); n < whole/2 {
		t.Errorf("for its owner %d bytes of %d are sealed", n, whole)
	}
	if n := sleeps(b); n > whole/4 {
		t.Errorf("for its owner, the second time, %d bytes are put after %d", n, whole)
	}
	c := newHost(t, "c", keyed(key, newer, alice), cluster.Options{})
	c.vms.Pages = 1024
	if n := sleeps(c); n < whole/2 {
		t.Errorf("of %d bytes %d are sealed under the newer key", whole, n)
	}
	must(t, c.Sandbox("box").Delete(t.Context(), sandbox.DeleteOptions{}))
	eventually(t, "nothing of it is left", func() bool { return bare.has(t) == 0 })
}
