package erofs_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// An image has a large directory, and as many hard links to what is in it.
func TestAttack_hard_links_have_their_whole_directory_read_once_for_each(t *testing.T) {
	const files = 5000
	tree := fstree.New()
	for i := range files {
		n := &fstree.Inode{Mode: 0o644, Mtime: time.Unix(1, 0)}
		for _, kind := range []string{"a", "b"} {
			if err := tree.Add(fmt.Sprintf("d/%s%05d", kind, i), n); err != nil {
				t.Fatal(err)
			}
		}
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := erofs.Write(t.Context(), tree, f, nil); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	// The directory has some 250 KB. One look for each link is more than a gigabyte.
	if took := after.TotalAlloc - before.TotalAlloc; took > 300<<20 {
		t.Errorf("writing %d hard links took %d MiB of memory in turn", files, took>>20)
	}
}
