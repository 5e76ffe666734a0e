package fleet_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// listedEnv sets how many sandboxes BenchmarkList lists. The default is 1,000.
const listedEnv = "DROWSE_BENCH_LISTED"

// BenchmarkList lists the first page of sleeping sandboxes, with a new Fleet and with one that has read their
// files before.
func BenchmarkList(b *testing.B) {
	n, err := strconv.Atoi(os.Getenv(listedEnv))
	if err != nil {
		n = 1000
	}
	h, err := sandbox.Open(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	for i := range n {
		dir := h.State.VMDir(fmt.Sprintf("s%05d", i))
		record := fmt.Sprintf(`{"version":1,"id":"%032x","spec":{"name":"s%05d","image":"app","vcpus":1,"memory_mib":256,"disk_mib":512,"network":"none"},
			"created":"2026-11-22T12:00:00Z","phase":"asleep","boot":{"kernel_id":"","kernel":"","cmdline":"","image_id":"","image":""},"disk":{"Layers":null},"next_layer":1}`, i, i)
		if err := os.Mkdir(dir, 0o700); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "vm.json"), []byte(record), 0o600); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "sandbox.json"), []byte(`{"version":1,"owner":"build","tags":["ci"]}`), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	time.Sleep(time.Second) // a list always reads files again that were just written
	list := func(b *testing.B, f *fleet.Fleet) {
		l, err := f.List(b.Context(), records.Filter{Owner: "build"})
		if err != nil || len(l.Sandboxes) != records.DefaultPage || len(l.Problems) != 0 {
			b.Fatal(len(l.Sandboxes), l.Problems, err)
		}
	}
	b.Run("new", func(b *testing.B) {
		for b.Loop() {
			list(b, fleet.New(h, fleet.Options{}))
		}
	})
	b.Run("read before", func(b *testing.B) {
		f := fleet.New(h, fleet.Options{})
		list(b, f)
		for b.Loop() {
			list(b, f)
		}
	})
}
