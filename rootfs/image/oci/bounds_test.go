package oci

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// heap returns the heap in use after a garbage collection.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestOpenTarMembers_long_headers_are_not_kept(t *testing.T) {
	const entries = 32
	name := filepath.Join(t.TempDir(), "x.tar")
	imagetest.Write(t, name, string(imagetest.PaddedTar(entries, func(i int) []string { return []string{fmt.Sprintf("path=n%d", i)} })))
	before := heap()
	m, err := openTarMembers(t.Context(), imagetest.Must(os.Open(name)))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if kept := heap() - before; kept > entries<<20/2 {
		t.Errorf("%d members keep %d bytes", entries, kept)
	}
	runtime.KeepAlive(m)
}
