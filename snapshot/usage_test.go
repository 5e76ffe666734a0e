package snapshot

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// diskBytes is what a tree takes on disk, each file once.
func diskBytes(t *testing.T, dir string) int64 {
	t.Helper()
	seen := map[uint64]bool{}
	var n int64
	err := filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		if !seen[st.Ino] {
			n += st.Blocks * 512
		}
		seen[st.Ino] = true
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func usage(t *testing.T, dirs ...string) *Usage {
	t.Helper()
	u, err := UsageOf(context.Background(), dirs...)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestUsageSaysWhatRemovingASnapshotFrees(t *testing.T) {
	rnd := rand.New(rand.NewPCG(15, 1))
	r := smallRAM(8, rnd)
	parent := t.TempDir()
	path := func(name string) string { return filepath.Join(parent, name) }
	create := func(name, base string) {
		spec := r.spec()
		if base != "" {
			spec.Base, spec.Changed = open(t, path(base)), guestmem.NewPageSet(r.total())
			for p := uint64(0); p < r.total()/2; p += 100 {
				spec.Changed.Add(p, p+1)
				r.set(p, rnd)
			}
		}
		// With real syncs: blocks are allocated late.
		spec.FS = nil
		if _, err := Create(context.Background(), path(name), spec); err != nil {
			t.Fatal(err)
		}
	}
	create("a", "")
	create("b", "a")
	create("c", "b")
	create("fork", "b")
	names := []string{"a", "b", "c", "fork"}
	for len(names) > 0 {
		var dirs []string
		for _, n := range names {
			dirs = append(dirs, path(n))
		}
		u := usage(t, dirs...)
		if want := diskBytes(t, parent); u.Bytes != want {
			t.Errorf("%v: %d bytes, the file system says %d", names, u.Bytes, want)
		}
		before := diskBytes(t, parent)
		k := rnd.IntN(len(names))
		su := u.Snapshots[k]
		if su.Bytes != su.ExclusiveBytes+su.SharedBytes || su.NeededBytes <= 0 {
			t.Errorf("%+v", su)
		}
		if err := Remove(path(names[k])); err != nil {
			t.Fatal(err)
		}
		if got := before - diskBytes(t, parent); got != su.ExclusiveBytes {
			t.Errorf("removing %s of %v freed %d bytes, want %d", names[k], names, got, su.ExclusiveBytes)
		}
		names = append(names[:k], names[k+1:]...)
	}
}

func TestUsageFindsWhatNobodyNeeds(t *testing.T) {
	r := newRAM(Slot{Size: 2 * ChunkPages * guestmem.PageSize})
	for p := range uint64(64) {
		b := make([]byte, guestmem.PageSize)
		fillPage(b, p, true)
		r.pages[p] = b
	}
	parent := t.TempDir()
	a, b := filepath.Join(parent, "a"), filepath.Join(parent, "b")
	if _, err := Create(context.Background(), a, r.spec()); err != nil {
		t.Fatal(err)
	}
	if u := usage(t, a); u.GarbageBytes != 0 {
		t.Errorf("a full snapshot has %d bytes of garbage", u.GarbageBytes)
	}
	// Two of four frames die.
	changed := guestmem.NewPageSet(r.total())
	changed.Add(0, 32)
	for p := range uint64(32) {
		delete(r.pages, p)
	}
	r.delta(t, b, open(t, a), changed)
	if u := usage(t, a, b); u.GarbageBytes != 0 {
		t.Errorf("%d bytes of garbage, and the base needs all of it", u.GarbageBytes)
	}
	// Seen alone, somebody else may need them.
	if u := usage(t, b); u.GarbageBytes != 0 {
		t.Errorf("%d bytes of garbage in a file that has another name", u.GarbageBytes)
	}
	if err := Remove(a); err != nil {
		t.Fatal(err)
	}
	// Two raw frames of 16 pages, the old leaf with four frames, the old root.
	want := int64(2*16*guestmem.PageSize + leafHeader + 4*frameEntry + 2*ChunkPages + 2*rootEntry)
	if u := usage(t, b); u.GarbageBytes != want {
		t.Errorf("%d bytes of garbage, want %d", u.GarbageBytes, want)
	}
	if _, err := compact(context.Background(), b, noSync{}); err != nil {
		t.Fatal(err)
	}
	u := usage(t, b)
	if u.GarbageBytes != 0 {
		t.Errorf("%d bytes of garbage after Compact", u.GarbageBytes)
	}
	var size int64
	for _, name := range []string{ManifestName, MemoryName} {
		st, err := os.Stat(filepath.Join(b, name))
		if err != nil {
			t.Fatal(err)
		}
		size += st.Size()
	}
	if got := u.Snapshots[0].NeededBytes; got != size {
		t.Errorf("%d bytes are needed, there are %d", got, size)
	}
}

func TestUsageOfADirectoryThatIsNoSnapshotFails(t *testing.T) {
	if _, err := UsageOf(context.Background(), t.TempDir()); !isTyped(err) {
		t.Errorf("got %v", err)
	}
}
