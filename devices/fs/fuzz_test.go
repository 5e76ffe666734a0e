package fs

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
)

// FuzzRequest makes any one request of a share, and checks that the file beside the share is unchanged.
func FuzzRequest(f *testing.F) {
	f.Add(uint32(opLookup), uint64(rootID), text("f"), uint16(entrySize))
	f.Add(uint32(opCreate), uint64(rootID), append(words(2, 0o644, 0, 0), text("g")...), uint16(entrySize+openOutSize))
	f.Add(uint32(opRename2), uint64(rootID), append(longs(1, 0), text("f", "../g")...), uint16(0))
	f.Add(uint32(opWrite), uint64(2), writeBody(1, 0, []byte("data"), 0, 0), uint16(8))
	f.Add(uint32(opRead), uint64(2), readBody(1, 0, 100), uint16(100))
	f.Add(uint32(opReaddir), uint64(1), readBody(2, 0, 4096), uint16(4096))
	f.Add(uint32(opSetattr), uint64(2), setattrBody(setSize|setMode, 1, 10, 0o7777, 0), uint16(attrOutSize))
	f.Add(uint32(opBatchForget), uint64(0), append(words(1, 0), longs(2, 9)...), uint16(0))
	f.Fuzz(func(t *testing.T, op uint32, node uint64, body []byte, room uint16) {
		if len(body) > 1<<16 || op == opFallocate || op == opSetattr && len(body) > 24 && body[0]&setSize != 0 && body[18]|body[19]|body[20]|body[21]|body[22] != 0 {
			t.Skip() // it would fill the disk
		}
		parent := t.TempDir()
		dir, beside := filepath.Join(parent, "shared"), filepath.Join(parent, "beside")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, p := range []string{beside, filepath.Join(dir, "f")} {
			if err := os.WriteFile(p, []byte("beside"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		c := start(t, dir, true)
		n := c.lookup(rootID, "f")
		c.open(n, unix.O_RDWR)
		c.mustDo(opOpendir, rootID, words(0, 0), openOutSize)
		out := [][]byte{header(op, 77, node, len(body))}
		if len(body) > 0 {
			out = append(out, body)
		}
		c.Queue(queueRequest).Do(out, outHeaderSize+int(room))
		if got, err := os.ReadFile(beside); err != nil || string(got) != "beside" {
			t.Fatalf("%q, %v", got, err)
		}
		if es, err := os.ReadDir(parent); err != nil || len(es) != 2 {
			t.Fatalf("%v, %v", es, err)
		}
		if err := c.HostError(); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzImport: a state that can be imported exports as the same bytes.
func FuzzImport(f *testing.F) {
	var e devices.Encoder
	e.Bytes([]byte("share"))
	e.Bool(true)
	e.Bool(true)
	e.Uint64(4)
	e.Uint64(2)
	e.Uint32(2)
	for _, n := range []struct {
		id, parent uint64
		name       string
	}{{2, 1, "d"}, {3, 2, "f"}} {
		e.Uint64(n.id)
		e.Uint64(n.parent)
		e.Bytes([]byte(n.name))
		e.Uint64(100 + n.id)
		e.Uint64(0)
		e.Uint64(1)
	}
	e.Uint32(1)
	e.Uint64(1)
	e.Uint64(3)
	e.Uint8(2)
	e.Bool(false)
	f.Add(e.Data())
	f.Fuzz(func(t *testing.T, data []byte) {
		needRoot(t)
		d := New(openDir(t, t.TempDir(), true), "share", Options{})
		if d.Import(devices.Payload{Kind: stateKind, Version: stateVersion, Data: data}) != nil {
			return
		}
		p, err := d.Export()
		if err != nil || string(p.Data) != string(data) {
			t.Fatalf("%x became %x (%v)", data, p.Data, err)
		}
	})
}
