package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// files returns how many objects a near copy has on disk.
func (c *near) files(t *testing.T) (n int) {
	t.Helper()
	if err := c.dir.List(t.Context(), "", func(blob.Info) error { n++; return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

// objects puts objects of a head.
func objectsOf(t *testing.T, s blob.Store, head string, n int) (out []archive.Object) {
	t.Helper()
	for i := range n {
		o := archive.Object{Key: fmt.Sprintf("%sX/1/%d", archive.AheadPrefix(head), i), Size: 1000}
		if err := s.Put(t.Context(), o.Key, make([]byte, o.Size)); err != nil {
			t.Fatal(err)
		}
		out = append(out, o)
	}
	return out
}

func newNear(t *testing.T) (*near, blob.Store) {
	t.Helper()
	s, err := blob.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	c, err := openNear(filepath.Join(t.TempDir(), "near"))
	if err != nil {
		t.Fatal(err)
	}
	return c, s
}

func TestAttack_moves_to_a_host_fill_its_disk(t *testing.T) {
	c, s := newNear(t)
	head, other := spec.NewID(), spec.NewID()
	objects, more := objectsOf(t, s, head, 5), objectsOf(t, s, other, 5)
	c.bytes = maxNear - 3500 // what others have
	for range 2 {            // the second time they are there
		if err := c.fetch(t.Context(), s, head, objects); err != nil || c.files(t) != 3 {
			t.Errorf("%d objects are near: %v", c.files(t), err)
		}
	}
	near := nearStore{s, c}
	for _, o := range objects { // what is not near is read from the store
		if err := near.ReadAt(t.Context(), o.Key, make([]byte, 10), 0); err != nil {
			t.Error(err)
		}
	}
	c.drop(head)
	if c.files(t) != 0 || c.bytes != maxNear-3500 {
		t.Errorf("%d objects stay, %d bytes are counted", c.files(t), c.bytes)
	}
	c.free = func() (int64, error) { return 999, nil }
	if err := c.fetch(t.Context(), s, other, more); err != nil || c.files(t) != 0 {
		t.Errorf("%d objects are near on a disk that is full: %v", c.files(t), err)
	}
}

// dropping drops what is near of a head while it is fetched.
type dropping struct {
	blob.Store
	drop func()
}

func (d dropping) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	d.drop()
	return d.Store.ReadAt(ctx, key, p, off)
}

func TestAttack_copy_that_is_dropped_while_it_is_fetched_stays(t *testing.T) {
	c, s := newNear(t)
	head := spec.NewID()
	objects := objectsOf(t, s, head, 5)
	if err := c.fetch(t.Context(), dropping{s, func() { c.drop(head) }}, head, objects); err != nil || c.files(t) != 0 || c.bytes != 0 {
		t.Errorf("%d objects stay, %d bytes are counted: %v", c.files(t), c.bytes, err)
	}
	// One that takes long is not dropped under way, and after it stays for its time.
	late := dropping{s, func() { c.tidy(time.Now().Add(10 * nearTime)) }}
	if err := c.fetch(t.Context(), late, head, objects); err != nil || c.files(t) != 5 {
		t.Errorf("%d objects are near: %v", c.files(t), err)
	}
	c.tidy(time.Now().Add(nearTime / 2))
	if c.files(t) != 5 {
		t.Error("it was dropped early")
	}
	c.tidy(time.Now().Add(2 * nearTime))
	if c.files(t) != 0 || c.bytes != 0 || len(c.heads) != 0 {
		t.Errorf("%d objects stay, %d bytes are counted", c.files(t), c.bytes)
	}
	// A fetch that fails leaves nothing.
	gone := append(objects, archive.Object{Key: archive.AheadPrefix(head) + "X/1/9", Size: 1})
	if err := c.fetch(t.Context(), s, head, gone); !errors.Is(err, blob.ErrNotFound) || c.files(t) != 0 || c.bytes != 0 {
		t.Errorf("%d objects stay, %d bytes are counted: %v", c.files(t), c.bytes, err)
	}
	if entries, err := os.ReadDir(filepath.Join(c.root, "data")); err == nil && len(entries) > 0 {
		t.Errorf("%d directories stay", len(entries))
	}
}
