// Package lazyram restores the RAM of one machine of a test as that of another, whose pages come from a snapshot when
// they are touched.
package lazyram

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Restore returns new RAM with the content of from, which must not change meanwhile, and the pager that fills it. It
// skips the test where the host has no userfaultfd. After the machine of that RAM, the caller closes the pager and the
// RAM, in this order.
func Restore(t testing.TB, from *guestmem.Memory) (*guestmem.Memory, *pager.Pager) {
	t.Helper()
	src, err := snapshot.NewGuestSource(from)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dir := filepath.Join(t.TempDir(), "snap")
	if _, err := snapshot.Create(t.Context(), dir, snapshot.Spec{VCPUs: 1, Memory: src}); err != nil {
		t.Fatal(err)
	}
	snap, err := snapshot.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { snap.Close() })
	mem, err := guestmem.New(from.Size())
	if err != nil {
		t.Fatal(err)
	}
	p, err := pager.New(mem, snap.Memory(), pager.Options{})
	if err != nil {
		mem.Close()
	}
	if errors.Is(err, pager.ErrNotPermitted) || errors.Is(err, pager.ErrNotSupported) {
		t.Skipf("this host cannot restore lazily: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.Start()
	return mem, p
}
