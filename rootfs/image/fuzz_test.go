package image

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

func memFile(t *testing.T) *os.File {
	fd, err := unix.MemfdCreate("spool", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "spool")
}

// FuzzLayers puts two streams on each other. Whatever they hold, the tree is one that can be written, or the error is
// of the two kinds that tell.
func FuzzLayers(f *testing.F) {
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		const most = 1 << 20
		m := newMerger(DefaultMaxFiles)
		lim := newBudget(most, DefaultMaxFiles)
		for _, stream := range [][]byte{lower, upper} {
			spool := memFile(t)
			defer spool.Close()
			u, err := unpack(bytes.NewReader(stream), true, most)
			var l *layer
			if err == nil {
				l, err = readLayer(context.Background(), u, spool, lim, true)
				u.Close()
			}
			if err == nil {
				err = m.apply(context.Background(), l)
			}
			if err != nil {
				if !errors.Is(err, ErrBadArchive) && !errors.Is(err, ErrTooLarge) {
					t.Fatalf("an error of another kind: %v", err)
				}
				return
			}
		}
		if _, err := m.t.Finish(); err != nil {
			t.Fatal(err)
		}
		seen := map[*fstree.Inode]int{}
		err := m.t.Walk(func(p string, n *fstree.Inode) error {
			if len(p) > fstree.MaxPathBytes || strings.Count(p, "/") > maxDepth {
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

// FuzzDocuments reads indexes, manifests and configurations. What is taken holds the bounds.
func FuzzDocuments(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		want := v1.Platform{OS: "linux", Architecture: "amd64"}
		known := func(err error) {
			if !errors.Is(err, ErrBadManifest) && !errors.Is(err, ErrNoPlatform) && !errors.Is(err, ErrNoSource) {
				t.Fatalf("an error of another kind: %v", err)
			}
		}
		if ix, err := parseIndex(b); err != nil {
			known(err)
		} else {
			if _, err := choose(ix.Manifests, want); err != nil {
				known(err)
			}
			if _, err := chooseNamed(ix.Manifests, "v1", want); err != nil {
				known(err)
			}
		}
		if m, err := parseManifest(b); err != nil {
			known(err)
		} else if len(m.Layers) > maxLayers {
			t.Fatalf("%d layers", len(m.Layers))
		}
		m, diffs, err := parseConfig(b, want)
		if err != nil {
			known(err)
			return
		}
		if len(diffs) > maxLayers || len(m.run.Env) > maxConfigItems || m.run.Workdir != "" && !path.IsAbs(m.run.Workdir) {
			t.Fatalf("%d layers, %+v", len(diffs), m.run)
		}
		for _, kv := range m.run.Env {
			if i := strings.IndexByte(kv, '='); i < 1 || strings.IndexByte(kv, 0) >= 0 {
				t.Fatalf("a variable %q", kv)
			}
		}
	})
}
