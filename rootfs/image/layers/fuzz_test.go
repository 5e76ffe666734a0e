package layers

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

func memFile(t *testing.T) *os.File {
	fd, err := unix.MemfdCreate("spool", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "spool")
}

// FuzzLayers merges two streams. Whatever they hold, the result is a tree that can be written, or an error of the
// two expected kinds.
func FuzzLayers(f *testing.F) {
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		const most = 1 << 20
		m := NewMerger(1 << 20)
		lim := NewBudget(most, 1<<20)
		for _, stream := range [][]byte{lower, upper} {
			spool := memFile(t)
			defer spool.Close()
			u, err := Unpack(bytes.NewReader(stream), true, most)
			var l *Layer
			if err == nil {
				l, err = Read(context.Background(), u, spool, lim, true)
				u.Close()
			}
			if err == nil {
				err = m.Apply(context.Background(), l)
			}
			if err != nil {
				if !errors.Is(err, image.ErrBadArchive) && !errors.Is(err, image.ErrTooLarge) {
					t.Fatalf("an error of another kind: %v", err)
				}
				return
			}
		}
		if _, err := m.Tree.Finish(); err != nil {
			t.Fatal(err)
		}
		seen := map[*fstree.Inode]int{}
		err := m.Tree.Walk(func(p string, n *fstree.Inode) error {
			if len(p) > fstree.MaxPathBytes || strings.Count(p, "/") > MaxDepth {
				t.Fatalf("a path of %d bytes, %d deep", len(p), strings.Count(p, "/"))
			}
			if base := path.Base(p); p != "." && (base == "." || base == ".." || base == "/" || len(base) > fstree.MaxNameBytes || strings.IndexByte(base, 0) >= 0) {
				t.Fatalf("a file with the name %q", base)
			}
			if seen[n]++; n.IsDir() && seen[n] > 1 {
				t.Fatalf("a directory with two names, one %q", p)
			}
			return fstree.CheckInode(n)
		})
		if err != nil {
			t.Fatal(err)
		}
		for n, names := range seen {
			if !n.IsDir() && int(n.Nlink) != names {
				t.Fatalf("%d names and a link count of %d", names, n.Nlink)
			}
		}
	})
}
