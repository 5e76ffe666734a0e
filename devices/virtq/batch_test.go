package virtq

import (
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestUnpopped_chains_come_again_in_their_order(t *testing.T) {
	r := newRing(t, 8, 0)
	for i := range uint16(3) {
		r.desc(descGPA, int(i), desc{addr: dataAt + 0x1000*guestmem.GPA(i), n: 100, flags: descWrite})
	}
	r.offer(2, 0, 1)
	var chains [3]Chain
	for i := range chains {
		if !r.pop(&chains[i]) {
			t.Fatalf("chain %d is not there", i)
		}
	}
	if err := chains[2].Writer.Skip(60); err != nil {
		t.Fatal(err)
	}
	r.must(r.q.Push(chains[0].Head(), 5))
	r.q.Unpop(&chains[2])
	r.q.Unpop(&chains[1])
	if left := chains[2].Writer.Remaining(); left != 0 {
		t.Errorf("%d bytes are left of a chain that was given back", left)
	}
	if p := r.q.Position(); p != (Position{NextAvail: 1, NextUsed: 1}) {
		t.Errorf("position %+v", p)
	}
	for _, want := range []uint16{0, 1} {
		var c Chain
		if !r.pop(&c) || c.Head() != want || c.Writer.Remaining() != 100 {
			t.Fatalf("popped %d with %d bytes, want %d", c.Head(), c.Writer.Remaining(), want)
		}
	}
}

func TestPush_all_writes_every_element_and_one_index(t *testing.T) {
	r := newRing(t, 4, 0)
	r.q.SetPosition(Position{NextAvail: 65534, NextUsed: 65534})
	r.must(r.q.PushAll([]Used{{3, 10}, {1, 20}, {2, 30}}))
	for i, want := range [][2]uint32{{3, 10}, {1, 20}, {2, 30}} {
		id, n, idx := r.used(uint16(65534 + i))
		if id != want[0] || n != want[1] || idx != 1 {
			t.Errorf("element %d is %d, %d; the index is %d", i, id, n, idx)
		}
	}
	r.q.Break(ErrLoop)
	if err := r.q.PushAll([]Used{{0, 0}}); err == nil {
		t.Error("a broken queue takes chains back")
	}
}
