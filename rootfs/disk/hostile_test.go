package disk

import (
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// A layer of a few KiB may claim a table of gigabytes, which is a hole in its file.
func TestAttack_layer_with_a_table_that_is_a_hole_takes_no_memory(t *testing.T) {
	const tableLen = 256 << 20
	h := header{size: 256 << 30, id: ID{1}, state: StateSealed, tableLen: tableLen}
	h.tableOff = h.endOfData()
	zeros := make([]byte, 1<<20)
	for range tableLen / len(zeros) {
		h.tableCRC = crc32.Update(h.tableCRC, crcTable, zeros)
	}
	buf := make([]byte, headerSpace)
	h.encode(buf)
	path := filepath.Join(t.TempDir(), "layer")
	must(t, os.WriteFile(path, buf, 0o600))
	must(t, os.Truncate(path, h.tableOff+tableLen))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	wantErr(t, Verify(Stack{Layers: []string{path}}), ErrCorrupt)
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 {
		t.Errorf("to refuse it %d MiB were allocated", n>>20)
	}
}
