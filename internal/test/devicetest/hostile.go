package devicetest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// chains returns what a hostile driver can make of the descriptors of a queue of the given size. The head is
// descriptor 0, and FreeGPA is free for tables. bad reports that the queue itself must refuse the chain.
func chains(size uint16) []struct {
	name  string
	bad   bool
	descs []Desc
	table []Desc
} {
	const buf = buffersGPA
	// A loop of all descriptors of the queue.
	var ring []Desc
	for i := range size {
		ring = append(ring, Desc{Addr: buf, Len: 16, Flags: DescNext, Next: (i + 1) % size})
	}
	return []struct {
		name  string
		bad   bool
		descs []Desc
		table []Desc
	}{
		{"a descriptor that follows itself", true, []Desc{{buf, 16, DescNext, 0}}, nil},
		{"a loop through the whole table", true, ring, nil},
		{"next beyond the table", true, []Desc{{buf, 16, DescNext, size}}, nil},
		{"next far beyond the table", true, []Desc{{buf, 16, DescNext, 0xffff}}, nil},
		{"zero length", true, []Desc{{buf, 0, 0, 0}}, nil},
		{"zero length to write", true, []Desc{{buf, 16, DescNext, 1}, {buf, 0, DescWrite, 0}}, nil},
		{"address and length wrap", true, []Desc{{^guestmem.GPA(0) - 15, 32, 0, 0}}, nil},
		{"address at the top", true, []Desc{{^guestmem.GPA(0), 1, 0, 0}}, nil},
		{"beyond RAM", true, []Desc{{MemorySize, 16, 0, 0}}, nil},
		{"across the end of RAM", true, []Desc{{MemorySize - 8, 16, DescWrite, 0}}, nil},
		{"in the hole below 4 GiB", true, []Desc{{guestmem.HoleStart, 16, DescWrite, 0}}, nil},
		{"as long as can be", true, []Desc{{buf, 0xffffffff, DescWrite, 0}}, nil},
		{"readable after writable", true, []Desc{{buf, 16, DescNext | DescWrite, 1}, {buf, 16, 0, 0}}, nil},
		{"indirect table of no length", true, []Desc{{FreeGPA, 0, DescIndirect, 0}}, nil},
		{"indirect table of odd length", true, []Desc{{FreeGPA, 17, DescIndirect, 0}}, nil},
		{"indirect table beyond RAM", true, []Desc{{MemorySize, 16, DescIndirect, 0}}, nil},
		{"indirect table that wraps", true, []Desc{{^guestmem.GPA(0) - 7, 16, DescIndirect, 0}}, nil},
		{"indirect table longer than the queue", true, []Desc{{FreeGPA, (uint32(size) + 1) * 16, DescIndirect, 0}}, nil},
		{"indirect table of 4 GiB", true, []Desc{{FreeGPA, 0xfffffff0, DescIndirect, 0}}, nil},
		{"indirect table with a next", true, []Desc{{FreeGPA, 16, DescIndirect | DescNext, 1}, {buf, 16, 0, 0}}, []Desc{{buf, 16, 0, 0}}},
		{"nested indirect table", true, []Desc{{FreeGPA, 16, DescIndirect, 0}}, []Desc{{FreeGPA, 16, DescIndirect, 0}}},
		{"indirect loop", true, []Desc{{FreeGPA, 32, DescIndirect, 0}}, []Desc{{buf, 16, DescNext, 1}, {buf, 16, DescNext, 0}}},
		{"indirect next beyond the table", true, []Desc{{FreeGPA, 16, DescIndirect, 0}}, []Desc{{buf, 16, DescNext, 1}}},
		{"one byte to read", false, []Desc{{buf, 1, 0, 0}}, nil},
		{"one byte to write", false, []Desc{{buf, 1, DescWrite, 0}}, nil},
		{"one byte each", false, []Desc{{buf, 1, DescNext, 1}, {buf, 1, DescWrite, 0}}, nil},
		{"32 MiB to read", false, []Desc{{buf, 32 << 20, 0, 0}}, nil},
		{"32 MiB to write", false, []Desc{{buf, 32 << 20, DescWrite, 0}}, nil},
		{"the queue's own rings to read", false, []Desc{{ringsGPA, ringsStride, 0, 0}}, nil},
		{"unknown flags", false, []Desc{{buf, 16, 0xfff0, 0}}, nil},
	}
}

// hostileChains gives every queue every kind of bad chain. The device returns the bad ones unused, and works on
// without a reset.
func hostileChains(t *testing.T, c Case) {
	d := c.start(t, 0)
	for i := range d.Queues() {
		for _, tc := range chains(d.Queue(i).Size()) {
			d.Start(c.Features)
			q := d.Queue(i)
			for n, e := range tc.descs {
				if err := q.WriteDesc(uint16(n), e); err != nil {
					t.Fatal(err)
				}
			}
			for n, e := range tc.table {
				if err := writeDesc(d.mem, FreeGPA, n, e); err != nil {
					t.Fatal(err)
				}
			}
			if !tc.bad {
				// The device may do anything with it, but must stay well.
				q.giveAway(t, 0)
				c.provoke(t, d, i)
				time.Sleep(time.Millisecond)
				continue
			}
			before := d.Transport().Stats().BadChains
			r := q.giveAway(t, 0)
			if !c.provoke(t, d, i) {
				continue
			}
			select {
			case <-r.done:
				if r.used != 0 {
					t.Errorf("queue %d, %s: %d bytes used", i, tc.name, r.used)
				}
				if after := d.Transport().Stats().BadChains; after != before+1 {
					t.Errorf("queue %d, %s: %d bad chains counted", i, tc.name, after-before)
				}
			case <-time.After(Timeout):
				t.Fatalf("queue %d, %s: not given back (status %#x)", i, tc.name, d.Status())
			}
			if s := d.Status(); s&StatusNeedsReset != 0 {
				t.Errorf("queue %d, %s: the device needs a reset", i, tc.name)
			}
		}
	}
	if err := d.HostError(); err != nil {
		t.Errorf("what the guest did was reported as the host's error: %v", err)
	}
	c.works(t, d)
}

// provoke makes the device look at queue i, and reports whether that is possible.
func (c Case) provoke(t testing.TB, d *Driver, i int) bool {
	give, idle := c.Idle[i]
	if give != nil {
		give(t, d)
	}
	return !idle || give != nil
}

// giveAway makes head available, as the head of a chain that already exists.
func (q *Queue) giveAway(t testing.TB, head uint16) *Request {
	t.Helper()
	r := &Request{q: q, done: make(chan struct{})}
	q.mu.Lock()
	q.inFlight[head] = r
	err := q.publish(head)
	q.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	q.ForceKick()
	return r
}

// hostileRings breaks the rings themselves: the device asks for a reset and works again after it.
func hostileRings(t *testing.T, c Case) {
	d := c.start(t, 0)
	for i := range d.Queues() {
		for _, tc := range []struct {
			name  string
			spoil func(q *Queue) error
		}{
			{"avail index far ahead", func(q *Queue) error { return d.mem.StoreUint16(q.avail+2, q.availIdx+q.size+1) }},
			{"avail index behind", func(q *Queue) error { return d.mem.StoreUint16(q.avail+2, q.availIdx-1) }},
			{"head beyond the table", func(q *Queue) error { return q.Publish(q.size) }},
			{"head far beyond the table", func(q *Queue) error { return q.Publish(0xffff) }},
		} {
			d.Start(c.Features)
			q := d.Queue(i)
			if err := tc.spoil(q); err != nil {
				t.Fatal(err)
			}
			q.ForceKick()
			if !c.provoke(t, d, i) {
				continue
			}
			WaitFor(t, fmt.Sprintf("queue %d, %s: NEEDS_RESET", i, tc.name), func() bool { return d.Status()&StatusNeedsReset != 0 })
			WaitFor(t, "the interrupt for it", func() bool { return d.ConfigChanges() > 0 })
			// Repeated kicks of a broken device cost nothing.
			resets := d.Transport().Stats().NeedsReset
			for range 100 {
				d.ForceKickAll()
			}
			if n := d.Transport().Stats().NeedsReset - resets; n > uint64(d.Queues()) {
				t.Errorf("the device was given up %d times more", n)
			}
			// A broken device can be moved, and then still needs a reset.
			if err := d.Move(c.New(t, d.mem)); err != nil {
				t.Fatal(err)
			}
			if d.Status()&StatusNeedsReset == 0 {
				t.Errorf("queue %d, %s: NEEDS_RESET was lost in a move", i, tc.name)
			}
		}
	}
	if err := d.HostError(); err != nil {
		t.Errorf("what the guest did was reported as the host's error: %v", err)
	}
	c.works(t, d)
}

// mutatedRings makes other vCPUs scribble over the rings, descriptors and tables while the device works on them.
func mutatedRings(t *testing.T, c Case) {
	d := c.start(t, 0)
	for round := range 20 {
		d.Start(c.Features)
		stop := make(chan struct{})
		var scribblers sync.WaitGroup
		for s := range 2 {
			scribblers.Add(1)
			go func() {
				defer scribblers.Done()
				r := newRand(uint64(round*2 + s))
				for {
					select {
					case <-stop:
						return
					default:
					}
					q := d.Queue(r.IntN(d.Queues()))
					var err error
					switch r.IntN(8) {
					case 0, 1, 2:
						err = q.WriteDesc(uint16(r.IntN(int(q.size))), randomDesc(r.Uint64(), r.IntN, q.size))
					case 3, 4:
						err = d.mem.StoreUint16(q.avail+4+2*guestmem.GPA(r.IntN(int(q.size))), uint16(r.IntN(int(q.size))))
					case 5:
						err = writeDesc(d.mem, FreeGPA, r.IntN(16), randomDesc(r.Uint64(), r.IntN, 16))
					case 6:
						q.mu.Lock()
						q.availIdx += uint16(r.IntN(8))
						err = d.mem.StoreUint16(q.avail+2, q.availIdx)
						q.mu.Unlock()
					case 7:
						err = d.mem.StoreUint16(q.avail+4+2*guestmem.GPA(q.size), uint16(r.Uint32()))
					}
					if err != nil {
						t.Error(err)
						return
					}
					q.ForceKick()
				}
			}()
		}
		time.Sleep(10 * time.Millisecond)
		if err := d.PauseAndResume(time.Millisecond); err != nil {
			t.Error(err)
		}
		time.Sleep(5 * time.Millisecond)
		close(stop)
		scribblers.Wait()
	}
	if err := d.HostError(); err != nil {
		t.Errorf("what the guest did was reported as the host's error: %v", err)
	}
	c.works(t, d)
}

// randomDesc returns a descriptor that is valid often enough to get past the first checks.
func randomDesc(v uint64, intn func(int) int, size uint16) Desc {
	e := Desc{
		Addr:  buffersGPA + guestmem.GPA(v%(1<<20)),
		Len:   uint32(1 + intn(8192)),
		Flags: uint16(intn(4)),
		Next:  uint16(intn(int(size))),
	}
	switch intn(16) {
	case 0:
		e.Addr = guestmem.GPA(v)
	case 1:
		e.Len = uint32(v)
	case 2:
		e = Desc{Addr: FreeGPA, Len: uint32(16 * (1 + intn(16))), Flags: DescIndirect}
	case 3:
		e.Next = uint16(v)
	case 4:
		e.Flags = uint16(v)
	}
	return e
}

// A Poster acts as another vCPU: each time that a device reads the first descriptor of a queue, one more buffer is
// available there, Left times. It is a guestmem.Residency. Layout and Left are set while the device stands still.
type Poster struct {
	Mem    *guestmem.Memory
	Layout virtq.Layout
	Left   atomic.Int64
}

// Ensure implements guestmem.Residency.
func (p *Poster) Ensure(gpa guestmem.GPA, _ uint64) error {
	if gpa != p.Layout.Desc || p.Left.Add(-1) < 0 {
		return nil
	}
	index, err := p.Mem.LoadUint16(p.Layout.Avail + 2)
	if err != nil {
		return err
	}
	return p.Mem.StoreUint16(p.Layout.Avail+2, index+1)
}

// Discarding implements guestmem.Residency.
func (p *Poster) Discarding(guestmem.GPA, uint64) {}

func (*Poster) Evict(*guestmem.PageSet) (uint64, error) { return 0, nil }
