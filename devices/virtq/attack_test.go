package virtq

import (
	"encoding/binary"
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// A ring full of chains that loop through the whole table costs the square of its size. One Pop looks at a part of
// them, and in the end all are given back.
func TestAttack_ring_of_endless_chains_is_looked_at_in_bounded_pieces(t *testing.T) {
	const size = MaxSize
	mem, err := guestmem.New(guestmem.MinSize)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	q, err := New(mem, Layout{Size: size, Desc: 0x10000, Avail: 0x20000, Used: 0x30000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range size {
		var d [16]byte
		binary.LittleEndian.PutUint64(d[:], 0x100000)
		binary.LittleEndian.PutUint32(d[8:], 1)
		binary.LittleEndian.PutUint16(d[12:], descNext)
		binary.LittleEndian.PutUint16(d[14:], uint16((i+1)%size))
		if err := mem.Write(0x10000+guestmem.GPA(16*i), d[:]); err != nil {
			t.Fatal(err)
		}
		if err := mem.StoreUint16(0x20004+guestmem.GPA(2*i), uint16(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := mem.StoreUint16(0x20002, size); err != nil {
		t.Fatal(err)
	}
	var c Chain
	for calls := 0; q.BadChains() < size; calls++ {
		before := q.Work()
		if ok, err := q.Pop(&c); ok || err != nil {
			t.Fatalf("%t, %v", ok, err)
		}
		if n := (q.Work() - before) / descriptorWork; n > popWork/descriptorWork+size {
			t.Fatalf("one call looked at %d descriptors", n)
		}
		if calls > size {
			t.Fatal("it does not end")
		}
	}
	if p := q.Position(); p.NextUsed != size {
		t.Errorf("%d chains were given back", p.NextUsed)
	}
}
