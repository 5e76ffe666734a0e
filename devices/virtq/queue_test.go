package virtq

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

const (
	ramSize = guestmem.MinSize
	descGPA = guestmem.GPA(0x10000)
	availAt = guestmem.GPA(0x20000)
	usedAt  = guestmem.GPA(0x30000)
	tableAt = guestmem.GPA(0x40000)
	dataAt  = guestmem.GPA(0x100000)
)

// ring is the simplest driver.
type ring struct {
	t     testing.TB
	mem   *guestmem.Memory
	q     *Queue
	avail uint16
	size  uint16
}

func newRing(t testing.TB, size uint16, features uint64) *ring {
	t.Helper()
	mem, err := guestmem.New(ramSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	q, err := New(mem, Layout{Size: size, Desc: descGPA, Avail: availAt, Used: usedAt}, features)
	if err != nil {
		t.Fatal(err)
	}
	return &ring{t: t, mem: mem, q: q, size: size}
}

func (r *ring) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

type desc struct {
	addr  guestmem.GPA
	n     uint32
	flags uint16
	next  uint16
}

func (r *ring) desc(table guestmem.GPA, i int, d desc) {
	r.t.Helper()
	p := []byte{
		byte(d.addr), byte(d.addr >> 8), byte(d.addr >> 16), byte(d.addr >> 24),
		byte(d.addr >> 32), byte(d.addr >> 40), byte(d.addr >> 48), byte(d.addr >> 56),
		byte(d.n), byte(d.n >> 8), byte(d.n >> 16), byte(d.n >> 24),
		byte(d.flags), byte(d.flags >> 8), byte(d.next), byte(d.next >> 8),
	}
	r.must(r.mem.Write(table+guestmem.GPA(16*i), p))
}

func (r *ring) offer(heads ...uint16) {
	r.t.Helper()
	for _, h := range heads {
		r.must(r.mem.StoreUint16(availAt+4+2*guestmem.GPA(r.avail%r.size), h))
		r.avail++
	}
	r.must(r.mem.StoreUint16(availAt+2, r.avail))
}

// used reads entry i of the used ring and the used index.
func (r *ring) used(i uint16) (id, n uint32, idx uint16) {
	r.t.Helper()
	var e [8]byte
	r.must(r.mem.Read(usedAt+4+8*guestmem.GPA(i%r.size), e[:]))
	idx, err := r.mem.LoadUint16(usedAt + 2)
	r.must(err)
	return uint32(e[0]) | uint32(e[1])<<8 | uint32(e[2])<<16 | uint32(e[3])<<24,
		uint32(e[4]) | uint32(e[5])<<8 | uint32(e[6])<<16 | uint32(e[7])<<24, idx
}

func (r *ring) pop(c *Chain) bool {
	r.t.Helper()
	ok, err := r.q.Pop(c)
	r.must(err)
	return ok
}

func TestLayouts_that_cannot_be_are_refused(t *testing.T) {
	mem, err := guestmem.New(ramSize)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	good := Layout{Size: 256, Desc: descGPA, Avail: availAt, Used: usedAt}
	for name, change := range map[string]func(*Layout){
		"size zero":                       func(l *Layout) { l.Size = 0 },
		"size three":                      func(l *Layout) { l.Size = 3 },
		"size beyond the largest":         func(l *Layout) { l.Size = 2 * MaxSize },
		"descriptors misaligned":          func(l *Layout) { l.Desc += 8 },
		"avail misaligned":                func(l *Layout) { l.Avail++ },
		"used misaligned":                 func(l *Layout) { l.Used += 2 },
		"descriptors one beyond RAM":      func(l *Layout) { l.Desc = ramSize - 255*16 },
		"avail ring's event beyond RAM":   func(l *Layout) { l.Avail = ramSize - (4 + 2*256) },
		"used ring's event beyond RAM":    func(l *Layout) { l.Used = ramSize - (4 + 8*256) },
		"used ring in the hole":           func(l *Layout) { l.Used = guestmem.HoleStart },
		"descriptors at the top":          func(l *Layout) { l.Desc = ^guestmem.GPA(15) },
		"avail ring that wraps around":    func(l *Layout) { l.Avail = ^guestmem.GPA(1) },
		"used ring of which half remains": func(l *Layout) { l.Used = ramSize - 8*128 },
	} {
		l := good
		change(&l)
		if _, err := New(mem, l, 0); !errors.Is(err, ErrLayout) || !errors.Is(err, ErrDriver) {
			t.Errorf("%s: %v, want ErrLayout", name, err)
		}
	}
	for _, l := range []Layout{
		good,
		{Size: 1, Desc: descGPA, Avail: availAt, Used: usedAt},
		{Size: MaxSize, Desc: descGPA, Avail: availAt, Used: usedAt},
		{Size: 256, Desc: ramSize - 256*16, Avail: availAt, Used: usedAt},
		{Size: 256, Desc: descGPA, Avail: ramSize - (6 + 2*256), Used: usedAt},
		{Size: 256, Desc: descGPA, Avail: availAt, Used: ramSize - (8 + 8*256)},
	} {
		if _, err := New(mem, l, 0); err != nil {
			t.Errorf("%+v: %v", l, err)
		}
	}
}

// Each case is one chain, and the fault that Pop finds in it.
func TestChains(t *testing.T) {
	type half struct{ readable, writable int }
	for _, tc := range []struct {
		name     string
		features uint64
		descs    []desc
		table    []desc
		want     half
		err      error
	}{
		{"one to read", 0, []desc{{dataAt, 10, 0, 0}}, nil, half{10, 0}, nil},
		{"one to write", 0, []desc{{dataAt, 10, descWrite, 0}}, nil, half{0, 10}, nil},
		{"two and two", 0, []desc{{dataAt, 1, descNext, 1}, {dataAt, 2, descNext, 2}, {dataAt, 3, descNext | descWrite, 3}, {dataAt, 4, descWrite, 0}}, nil, half{3, 7}, nil},
		{"order of the table does not matter", 0, []desc{{dataAt, 1, descNext, 3}, {dataAt, 4, descWrite, 0}, {dataAt, 9, 0, 0}, {dataAt, 2, descNext, 1}}, nil, half{3, 4}, nil},
		{"the next of the last one is ignored", 0, []desc{{dataAt, 1, 0, 0xffff}}, nil, half{1, 0}, nil},
		{"to the last byte of RAM", 0, []desc{{ramSize - 1, 1, descWrite, 0}}, nil, half{0, 1}, nil},
		{"all of RAM", 0, []desc{{0, ramSize, 0, 0}}, nil, half{ramSize, 0}, nil},
		{"the same RAM again and again", 0, []desc{{0, ramSize, descNext, 1}, {0, ramSize, descNext, 2}, {0, ramSize, 0, 0}}, nil, half{3 * ramSize, 0}, nil},
		{"indirect", FeatureIndirectDesc, []desc{{tableAt, 48, descIndirect, 0}}, []desc{{dataAt, 1, descNext, 2}, {dataAt, 4, descWrite, 0}, {dataAt, 2, descNext | descWrite, 1}}, half{1, 6}, nil},
		{"indirect after direct", FeatureIndirectDesc, []desc{{dataAt, 8, descNext, 1}, {tableAt, 16, descIndirect, 0}}, []desc{{dataAt, 1, descWrite, 0}}, half{8, 1}, nil},
		{"the write flag of an indirect descriptor is ignored", FeatureIndirectDesc, []desc{{tableAt, 16, descIndirect | descWrite, 0}}, []desc{{dataAt, 1, 0, 0}}, half{1, 0}, nil},
		{"an indirect table as long as the queue", FeatureIndirectDesc, []desc{{tableAt, 16 * 8, descIndirect, 0}}, straight(8), half{8, 0}, nil},
		{"a chain as long as the queue", 0, straight(8), nil, half{8, 0}, nil},

		{"indirect without the feature", 0, []desc{{tableAt, 16, descIndirect, 0}}, []desc{{dataAt, 1, 0, 0}}, half{}, ErrIndirect},
		{"indirect with a next", FeatureIndirectDesc, []desc{{tableAt, 16, descIndirect | descNext, 1}, {dataAt, 1, 0, 0}}, []desc{{dataAt, 1, 0, 0}}, half{}, ErrIndirect},
		{"empty indirect table", FeatureIndirectDesc, []desc{{tableAt, 0, descIndirect, 0}}, nil, half{}, ErrIndirect},
		{"indirect table of odd size", FeatureIndirectDesc, []desc{{tableAt, 20, descIndirect, 0}}, nil, half{}, ErrIndirect},
		{"indirect table longer than the queue", FeatureIndirectDesc, []desc{{tableAt, 16 * 9, descIndirect, 0}}, straight(9), half{}, ErrIndirect},
		{"indirect table beyond RAM", FeatureIndirectDesc, []desc{{ramSize - 16, 32, descIndirect, 0}}, nil, half{}, ErrAddress},
		{"nested indirect", FeatureIndirectDesc, []desc{{tableAt, 16, descIndirect, 0}}, []desc{{tableAt, 16, descIndirect, 0}}, half{}, ErrIndirect},
		{"indirect next beyond its table", FeatureIndirectDesc, []desc{{tableAt, 32, descIndirect, 0}}, []desc{{dataAt, 1, descNext, 2}}, half{}, ErrNextIndex},
		{"indirect loop", FeatureIndirectDesc, []desc{{tableAt, 32, descIndirect, 0}}, []desc{{dataAt, 1, descNext, 1}, {dataAt, 1, descNext, 0}}, half{}, ErrLoop},
		{"direct after indirect in one chain overruns nothing", FeatureIndirectDesc, []desc{{dataAt, 1, descNext | descWrite, 1}, {tableAt, 16, descIndirect, 0}}, []desc{{dataAt, 1, 0, 0}}, half{}, ErrDirection},
		{"loop", 0, []desc{{dataAt, 1, descNext, 1}, {dataAt, 1, descNext, 0}}, nil, half{}, ErrLoop},
		{"next at the end of the table", 0, []desc{{dataAt, 1, descNext, 8}}, nil, half{}, ErrNextIndex},
		{"next far beyond the table", 0, []desc{{dataAt, 1, descNext, 0xffff}}, nil, half{}, ErrNextIndex},
		{"zero length", 0, []desc{{dataAt, 0, 0, 0}}, nil, half{}, ErrZeroLength},
		{"readable after writable", 0, []desc{{dataAt, 1, descNext | descWrite, 1}, {dataAt, 1, 0, 0}}, nil, half{}, ErrDirection},
		{"one byte beyond RAM", 0, []desc{{ramSize - 1, 2, 0, 0}}, nil, half{}, ErrAddress},
		{"in the hole", 0, []desc{{guestmem.HoleStart, 1, 0, 0}}, nil, half{}, ErrAddress},
		{"wraps", 0, []desc{{^guestmem.GPA(0), 2, 0, 0}}, nil, half{}, ErrAddress},
		{"as long as can be", 0, []desc{{0, math.MaxUint32, 0, 0}}, nil, half{}, ErrAddress},
	} {
		r := newRing(t, 8, tc.features)
		for i, d := range tc.descs {
			r.desc(descGPA, i, d)
		}
		for i, d := range tc.table {
			r.desc(tableAt, i, d)
		}
		r.offer(0)
		var c Chain
		ok := r.pop(&c)
		if ok != (tc.err == nil) {
			t.Errorf("%s: popped %v", tc.name, ok)
			continue
		}
		if tc.err != nil {
			if err := r.q.walk(&c, 0); err != tc.err || !errors.Is(err, ErrDriver) {
				t.Errorf("%s: %v, want %v", tc.name, err, tc.err)
			}
			if id, n, idx := r.used(0); id != 0 || n != 0 || idx != 1 || r.q.BadChains() != 1 {
				t.Errorf("%s: used id %d, length %d, index %d, %d bad chains", tc.name, id, n, idx, r.q.BadChains())
			}
			continue
		}
		if got := (half{c.Reader.Remaining(), c.Writer.Remaining()}); got != tc.want {
			t.Errorf("%s: %+v, want %+v", tc.name, got, tc.want)
		}
		if c.Head() != 0 || r.q.BadChains() != 0 {
			t.Errorf("%s: head %d, %d bad chains", tc.name, c.Head(), r.q.BadChains())
		}
	}
}

// straight returns a chain of n single bytes.
func straight(n int) []desc {
	ds := make([]desc, n)
	for i := range ds {
		ds[i] = desc{dataAt, 1, descNext, uint16(i + 1)}
	}
	ds[n-1].flags = 0
	return ds
}

func TestChain_of_more_than_four_gi_b_is_refused(t *testing.T) {
	r := newRing(t, 128, 0)
	for i := range 65 {
		r.desc(descGPA, i, desc{0, ramSize, descNext, uint16(i + 1)})
	}
	r.desc(descGPA, 65, desc{0, 1, 0, 0})
	var c Chain
	if err := r.q.walk(&c, 0); err != ErrTotal {
		t.Errorf("65 times %d bytes: %v, want ErrTotal", ramSize, err)
	}
	// The largest total that a u32 holds is fine.
	r.desc(descGPA, 63, desc{0, ramSize - 1, 0, 0})
	if err := r.q.walk(&c, 0); err != nil || c.Reader.Remaining() != math.MaxUint32 {
		t.Errorf("%d bytes: %v", c.Reader.Remaining(), err)
	}
}

func TestBroken_rings_stop_the_queue(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(r *ring)
		want  error
	}{
		{"avail index one too far", func(r *ring) { r.must(r.mem.StoreUint16(availAt+2, 9)) }, ErrAvailIndex},
		{"avail index behind", func(r *ring) { r.must(r.mem.StoreUint16(availAt+2, 0xffff)) }, ErrAvailIndex},
		{"head at the end of the table", func(r *ring) { r.offer(8) }, ErrHeadIndex},
		{"head far beyond the table", func(r *ring) { r.offer(0xffff) }, ErrHeadIndex},
	} {
		r := newRing(t, 8, 0)
		tc.spoil(r)
		var c Chain
		if ok, err := r.q.Pop(&c); ok || err != tc.want {
			t.Errorf("%s: Pop = %v, %v, want %v", tc.name, ok, err, tc.want)
		}
		// It stays stopped, even when the driver repairs the ring.
		r.must(r.mem.StoreUint16(availAt+2, 0))
		if r.q.Broken() != tc.want {
			t.Errorf("%s: Broken = %v", tc.name, r.q.Broken())
		}
		_, popErr := r.q.Pop(&c)
		_, pendingErr := r.q.Pending()
		_, interruptErr := r.q.NeedsInterrupt()
		_, enableErr := r.q.EnableKicks()
		for _, err := range []error{popErr, pendingErr, interruptErr, enableErr, r.q.Push(0, 0), r.q.DisableKicks()} {
			if err != tc.want {
				t.Errorf("%s: afterwards %v", tc.name, err)
			}
		}
	}
}

func TestFull_ring_is_not_too_far(t *testing.T) {
	r := newRing(t, 8, 0)
	for i := range uint16(8) {
		r.desc(descGPA, int(i), desc{dataAt + guestmem.GPA(i), uint32(i) + 1, 0, 0})
		r.offer(i)
	}
	var c Chain
	for i := range uint16(8) {
		if !r.pop(&c) || c.Head() != i || c.Reader.Remaining() != int(i)+1 {
			t.Fatalf("chain %d: head %d, %d bytes", i, c.Head(), c.Reader.Remaining())
		}
	}
	if r.pop(&c) {
		t.Fatal("a ninth chain")
	}
}

func TestBad_chains_do_not_hide_the_good_one_behind_them(t *testing.T) {
	r := newRing(t, 8, 0)
	r.desc(descGPA, 0, desc{dataAt, 0, 0, 0})
	r.desc(descGPA, 1, desc{dataAt, 5, 0, 0})
	r.offer(0, 0, 0, 1, 0)
	var c Chain
	if !r.pop(&c) || c.Head() != 1 || c.Reader.Remaining() != 5 {
		t.Fatalf("head %d", c.Head())
	}
	if _, _, idx := r.used(0); idx != 3 || r.q.BadChains() != 3 {
		t.Fatalf("used index %d, %d bad chains", idx, r.q.BadChains())
	}
	if r.pop(&c) {
		t.Fatal("a bad chain was popped")
	}
}

func TestIndices_wrap_around(t *testing.T) {
	for _, features := range []uint64{0, FeatureEventIdx} {
		r := newRing(t, 8, features)
		r.q.SetPosition(Position{NextAvail: 0xfffd, NextUsed: 0xfffd})
		r.avail = 0xfffd
		r.must(r.mem.StoreUint16(availAt+2, r.avail))
		r.desc(descGPA, 3, desc{dataAt, 5, descWrite, 0})
		var c Chain
		for i := range uint16(7) {
			want := 0xfffd + i
			// The driver wants an interrupt for exactly this one.
			r.must(r.mem.StoreUint16(availAt+4+16, want))
			r.offer(3)
			if p, err := r.q.Pending(); !p || err != nil {
				t.Fatalf("round %d: Pending = %v, %v", i, p, err)
			}
			if !r.pop(&c) {
				t.Fatalf("round %d: nothing popped", i)
			}
			r.must(r.q.Push(c.Head(), uint32(i)))
			if id, n, idx := r.used(want); id != 3 || n != uint32(i) || idx != want+1 {
				t.Fatalf("round %d: id %d, length %d, index %#x", i, id, n, idx)
			}
			if wanted, err := r.q.NeedsInterrupt(); !wanted || err != nil {
				t.Fatalf("round %d: NeedsInterrupt = %v, %v", i, wanted, err)
			}
		}
		if got := r.q.Position(); got != (Position{4, 4}) {
			t.Fatalf("position %+v", got)
		}
	}
}

func TestInterrupts_without_event_index(t *testing.T) {
	r := newRing(t, 8, 0)
	wanted := func() bool {
		t.Helper()
		w, err := r.q.NeedsInterrupt()
		r.must(err)
		return w
	}
	if wanted() {
		t.Error("an interrupt for nothing")
	}
	r.must(r.q.Push(0, 0))
	if !wanted() {
		t.Error("no interrupt")
	}
	if wanted() {
		t.Error("a second interrupt")
	}
	r.must(r.mem.StoreUint16(availAt, availNoInterrupt))
	r.must(r.q.Push(0, 0))
	if wanted() {
		t.Error("an interrupt that the driver does not want")
	}
}

func TestInterrupts_with_event_index(t *testing.T) {
	for _, tc := range []struct {
		name   string
		event  uint16
		pushes int
		want   bool
	}{
		{"wants the first, gets one", 0, 1, true},
		{"wants the first, gets three", 0, 3, true},
		{"wants the third, gets three", 2, 3, true},
		{"wants the third, gets two", 2, 2, false},
		{"wants none", 0xffff, 3, false},
		{"gets none", 0, 0, false},
	} {
		r := newRing(t, 8, FeatureEventIdx)
		r.must(r.mem.StoreUint16(availAt+4+2*8, tc.event))
		for range tc.pushes {
			r.must(r.q.Push(0, 0))
		}
		got, err := r.q.NeedsInterrupt()
		if err != nil || got != tc.want {
			t.Errorf("%s: %v, %v, want %v", tc.name, got, err, tc.want)
		}
		if again, _ := r.q.NeedsInterrupt(); again {
			t.Errorf("%s: interrupted twice", tc.name)
		}
	}
}

func TestKicks_are_asked_for_and_held_off(t *testing.T) {
	for _, features := range []uint64{0, FeatureEventIdx} {
		r := newRing(t, 8, features)
		r.desc(descGPA, 0, desc{dataAt, 1, 0, 0})
		// kicks reports whether a driver that adds one chain would kick.
		kicks := func() bool {
			t.Helper()
			if features == 0 {
				flags, err := r.mem.LoadUint16(usedAt)
				r.must(err)
				return flags&usedNoNotify == 0
			}
			event, err := r.mem.LoadUint16(usedAt + 4 + 8*8)
			r.must(err)
			return r.avail+1-event-1 < 1
		}
		enable := func() bool {
			t.Helper()
			more, err := r.q.EnableKicks()
			r.must(err)
			return more
		}
		var c Chain
		if enable() || !kicks() {
			t.Errorf("features %#x: kicks are not asked for", features)
		}
		r.offer(0)
		r.must(r.q.DisableKicks())
		if kicks() {
			t.Errorf("features %#x: kicks are not held off", features)
		}
		if !enable() {
			t.Errorf("features %#x: the chain that came meanwhile is missed", features)
		}
		if !r.pop(&c) || enable() || !kicks() {
			t.Errorf("features %#x: kicks are not asked for again", features)
		}
	}
}

func TestReader_and_writer_cross_segments(t *testing.T) {
	r := newRing(t, 8, 0)
	r.desc(descGPA, 0, desc{dataAt, 3, descNext, 1})
	r.desc(descGPA, 1, desc{dataAt + 100, 4, descNext, 2})
	r.desc(descGPA, 2, desc{dataAt + 4094, 4, descNext | descWrite, 3})
	r.desc(descGPA, 3, desc{dataAt + 9000, 6, descWrite, 0})
	r.must(r.mem.Write(dataAt, []byte("abc")))
	r.must(r.mem.Write(dataAt+100, []byte("defg")))
	r.offer(0)
	var c Chain
	if !r.pop(&c) {
		t.Fatal("nothing popped")
	}
	p := make([]byte, 5)
	r.must(c.Reader.ReadFull(p))
	if string(p) != "abcde" || c.Reader.Remaining() != 2 {
		t.Fatalf("read %q, %d left", p, c.Reader.Remaining())
	}
	if err := c.Reader.ReadFull(make([]byte, 3)); !errors.Is(err, ErrShort) || c.Reader.Remaining() != 2 {
		t.Fatalf("reading too much: %v, %d left", err, c.Reader.Remaining())
	}
	rest, err := io.ReadAll(&c.Reader)
	if err != nil || string(rest) != "fg" {
		t.Fatalf("rest %q, %v", rest, err)
	}
	if n, err := c.Writer.Write([]byte("0123456789x")); n != 0 || !errors.Is(err, ErrShort) || c.Writer.Written() != 0 {
		t.Fatalf("writing too much: %d, %v, %d written", n, err, c.Writer.Written())
	}
	r.must(c.Writer.Skip(1))
	if n, err := c.Writer.Write([]byte("12345")); n != 5 || err != nil {
		t.Fatalf("Write = %d, %v", n, err)
	}
	r.must(c.Writer.Zero(2))
	rs, err := c.Writer.Ranges(nil, 2)
	if err != nil || len(rs) != 1 || rs[0] != (guestmem.Range{GPA: dataAt + 9004, Len: 2}) {
		t.Fatalf("Ranges = %v, %v", rs, err)
	}
	c.Writer.Wrote(2)
	if c.Writer.Written() != 9 || c.Writer.Remaining() != 0 {
		t.Fatalf("%d written, %d left", c.Writer.Written(), c.Writer.Remaining())
	}
	if _, err := c.Writer.Ranges(nil, 1); !errors.Is(err, ErrShort) {
		t.Fatalf("Ranges beyond the end: %v", err)
	}
	if err := c.Reader.Skip(-1); !errors.Is(err, ErrShort) {
		t.Fatalf("skipping backwards: %v", err)
	}
	got := make([]byte, 4)
	r.must(r.mem.Read(dataAt+4094, got))
	if !bytes.Equal(got, []byte{0, '1', '2', '3'}) {
		t.Fatalf("first segment % x", got)
	}
	got = make([]byte, 6)
	r.must(r.mem.Read(dataAt+9000, got))
	if !bytes.Equal(got, []byte{'4', '5', 0, 0, 0, 0}) {
		t.Fatalf("second segment % x", got)
	}
}

func TestFile_transfers_of_a_chain(t *testing.T) {
	r := newRing(t, 64, 0)
	// Many small segments, each in a different page.
	want := make([]byte, 0, 1000)
	for i := range 20 {
		flags := uint16(descNext)
		if i >= 10 {
			flags |= descWrite
		} else {
			p := bytes.Repeat([]byte{byte(i + 1)}, 37+i)
			want = append(want, p...)
			r.must(r.mem.Write(dataAt+guestmem.GPA(5000*i), p))
		}
		if i == 19 {
			flags &^= descNext
		}
		r.desc(descGPA, i, desc{dataAt + guestmem.GPA(5000*i), uint32(37 + i%10), flags, uint16(i + 1)})
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	r.must(err)
	defer f.Close()
	r.offer(0)
	var c Chain
	if !r.pop(&c) {
		t.Fatal("nothing popped")
	}
	if err := c.Reader.DrainTo(f, 0, len(want)+1); !errors.Is(err, ErrShort) {
		t.Fatalf("draining too much: %v", err)
	}
	r.must(c.Reader.DrainTo(f, 11, 100))
	r.must(c.Reader.DrainTo(f, 111, len(want)-100))
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, 11); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("the file differs (%v)", err)
	}
	r.must(c.Writer.FillFrom(f, 11, 50))
	r.must(c.Writer.FillFrom(f, 61, len(want)-50))
	if c.Writer.Written() != uint32(len(want)) {
		t.Fatalf("%d written", c.Writer.Written())
	}
	at := 0
	for i := 10; i < 20; i++ {
		p := make([]byte, 27+i)
		r.must(r.mem.Read(dataAt+guestmem.GPA(5000*i), p))
		if !bytes.Equal(p, want[at:at+len(p)]) {
			t.Fatalf("segment %d differs", i)
		}
		at += len(p)
	}
	// A file that ends early is the host's error, and nothing counts as written.
	r.offer(0)
	if !r.pop(&c) {
		t.Fatal("nothing popped")
	}
	if err := c.Writer.FillFrom(f, int64(len(want)), 100); !errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, ErrDriver) || c.Writer.Written() != 0 {
		t.Fatalf("reading beyond the end of the file: %v, %d written", err, c.Writer.Written())
	}
	r.must(f.Close())
	if err := c.Reader.DrainTo(f, 0, 1); err == nil || errors.Is(err, ErrDriver) {
		t.Fatalf("writing to a closed file: %v", err)
	}
}

// failing is a residency that fails, like a pager that cannot load a page. That is the host's error, not the
// driver's.
type failing struct{ err error }

func (f *failing) Ensure(guestmem.GPA, uint64) error { return f.err }
func (f *failing) Discarding(guestmem.GPA, uint64)   {}

func (*failing) Evict(*guestmem.PageSet) (uint64, error) { return 0, nil }

func TestMemory_that_cannot_be_loaded_is_the_hosts_error(t *testing.T) {
	r := newRing(t, 8, 0)
	f := &failing{}
	r.mem.SetResidency(f)
	r.desc(descGPA, 0, desc{dataAt, 5, descWrite, 0})
	r.offer(0)
	f.err = unix.EIO
	var c Chain
	_, popErr := r.q.Pop(&c)
	_, pendingErr := r.q.Pending()
	_, enableErr := r.q.EnableKicks()
	for _, err := range []error{popErr, pendingErr, enableErr, r.q.Push(0, 0)} {
		if !errors.Is(err, unix.EIO) || errors.Is(err, ErrDriver) {
			t.Errorf("got %v", err)
		}
	}
	f.err = nil
	if r.q.Broken() != nil || !r.pop(&c) {
		t.Error("the queue does not go on when the memory is back")
	}
}

func TestPop_allocates_nothing(t *testing.T) {
	for name, features := range map[string]uint64{"direct": 0, "indirect": FeatureIndirectDesc} {
		r := newRing(t, 256, features)
		if features == 0 {
			for i, d := range straight(3) {
				r.desc(descGPA, i, d)
			}
		} else {
			r.desc(descGPA, 0, desc{tableAt, 48, descIndirect, 0})
			for i, d := range straight(3) {
				r.desc(tableAt, i, d)
			}
		}
		var c Chain
		p := make([]byte, 3)
		n := testing.AllocsPerRun(100, func() {
			r.offer(0)
			if !r.pop(&c) || c.Reader.ReadFull(p) != nil || r.q.Push(c.Head(), 0) != nil {
				t.Fatal("it does not work")
			}
			if _, err := r.q.NeedsInterrupt(); err != nil {
				t.Fatal(err)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// popImage pops until no chain in guest memory is left.
func popImage(t testing.TB, mem *guestmem.Memory, layout Layout, features uint64, pos Position) {
	q, err := New(mem, layout, features)
	if err != nil {
		if !errors.Is(err, ErrDriver) {
			t.Fatalf("New: %v", err)
		}
		return
	}
	q.SetPosition(pos)
	var c Chain
	for range 3 * int(layout.Size) {
		ok, err := q.Pop(&c)
		if err != nil {
			if !errors.Is(err, ErrDriver) || q.Broken() == nil {
				t.Fatalf("Pop: %v", err)
			}
			return
		}
		if !ok {
			break
		}
		checkChain(t, mem, &c, layout.Size)
		if err := q.Push(c.Head(), 1); err != nil {
			t.Fatalf("Push: %v", err)
		}
		if _, err := q.NeedsInterrupt(); err != nil {
			t.Fatalf("NeedsInterrupt: %v", err)
		}
	}
	if _, err := q.EnableKicks(); err != nil {
		t.Fatalf("EnableKicks: %v", err)
	}
}

// checkChain checks what Pop promises.
func checkChain(t testing.TB, mem *guestmem.Memory, c *Chain, size uint16) {
	if c.Head() >= size || len(c.segments) == 0 || len(c.segments) > MaxSegments {
		t.Fatalf("head %d, %d segments in a queue of %d", c.Head(), len(c.segments), size)
	}
	for _, half := range []*cursor{&c.Reader.cursor, &c.Writer.cursor} {
		total := half.Remaining()
		var ranges []guestmem.Range
		ranges, err := half.Ranges(ranges, total)
		if err != nil || half.Remaining() != 0 {
			t.Fatalf("Ranges: %v, %d left", err, half.Remaining())
		}
		for _, r := range ranges {
			if r.Len == 0 || !mem.Contains(r.GPA, uint64(r.Len)) {
				t.Fatalf("range %+v", r)
			}
			total -= int(r.Len)
		}
		if total != 0 {
			t.Fatalf("the ranges differ from the total by %d", total)
		}
	}
}

// FuzzPop writes an image to the start of guest memory and pops from a queue inside. The input places the queue's
// parts, which may overlap.
func FuzzPop(f *testing.F) {
	for _, chain := range [][]desc{
		{{64, 16, descNext, 1}, {80, 16, descWrite, 0}},
		{{0, 32, descIndirect, 0}, {96, 8, descNext | descWrite, 1}},
		{{64, 16, descNext, 0}},
		{{0xffff_ffff_ffff_fff0, 32, 0, 0}, {ramSize - 1, 2, descNext, 7}},
	} {
		image := make([]byte, 512)
		for i, d := range chain {
			binary.LittleEndian.PutUint64(image[16*i:], uint64(d.addr))
			binary.LittleEndian.PutUint32(image[16*i+8:], d.n)
			binary.LittleEndian.PutUint16(image[16*i+12:], d.flags)
			binary.LittleEndian.PutUint16(image[16*i+14:], d.next)
		}
		image[130] = 3 // the avail index; its heads are 0, 1, 0
		image[134] = 1
		f.Add(image, uint16(8), uint16(0), uint16(128), uint16(256), true, uint16(0), uint16(0))
	}
	mem, err := guestmem.New(ramSize)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { mem.Close() })
	f.Fuzz(func(t *testing.T, image []byte, size, desc, avail, used uint16, indirect bool, nextAvail, nextUsed uint16) {
		if len(image) > 64<<10 {
			return
		}
		if err := mem.Zero(0, 1<<20); err != nil {
			t.Fatal(err)
		}
		if err := mem.Write(0, image); err != nil {
			t.Fatal(err)
		}
		features := FeatureEventIdx
		if indirect {
			features |= FeatureIndirectDesc
		}
		popImage(t, mem, Layout{
			Size: size, Desc: guestmem.GPA(desc), Avail: guestmem.GPA(avail), Used: guestmem.GPA(used),
		}, features, Position{NextAvail: nextAvail, NextUsed: nextUsed})
	})
}

// TestRandomImages does the work of FuzzPop in every test run, with mostly valid images.
func TestRandomImages(t *testing.T) {
	const size = 16
	mem, err := guestmem.New(ramSize)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	for seed := range uint64(4000) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		r := &ring{t: t, mem: mem, size: size}
		any16 := func(limit int) uint16 {
			if rnd.IntN(40) == 0 {
				return uint16(rnd.Uint32())
			}
			return uint16(rnd.IntN(limit))
		}
		for _, table := range []guestmem.GPA{descGPA, tableAt} {
			for i := range size {
				d := desc{dataAt + guestmem.GPA(rnd.IntN(1<<16)), uint32(1 + rnd.IntN(5000)), any16(4), any16(size)}
				switch rnd.IntN(30) {
				case 0:
					d.addr = guestmem.GPA(rnd.Uint64())
				case 1:
					d.n = rnd.Uint32()
				case 2:
					d = desc{tableAt, uint32(16 * rnd.IntN(size+2)), descIndirect, 0}
				}
				r.desc(table, i, d)
			}
		}
		for range rnd.IntN(size + 1) {
			r.offer(any16(size))
		}
		popImage(t, mem, Layout{Size: size, Desc: descGPA, Avail: availAt, Used: usedAt},
			uint64(rnd.IntN(4))<<28, Position{})
		r.must(mem.Zero(availAt, 4096))
	}
}

func BenchmarkPopPush(b *testing.B) {
	r := newRing(b, 256, FeatureEventIdx)
	for i, d := range straight(3) {
		r.desc(descGPA, i, d)
	}
	var c Chain
	b.ReportAllocs()
	for b.Loop() {
		r.offer(0)
		r.pop(&c)
		r.must(r.q.Push(c.Head(), 0))
	}
}
