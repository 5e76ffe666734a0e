package vmm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// scribbler writes to random pages for ever, in each way that a program has:
//
//	RAX random number  R8, R9 multiplier and increment  RBX first page
//	RSI number of pages less one  R10 counter of rounds
var scribbler = []byte{
	0x49, 0x0f, 0xaf, 0xc0, 0x4c, 0x01, 0xc8, // imul rax, r8; add rax, r9
	0x48, 0x89, 0xc1, 0x48, 0xc1, 0xe9, 0x2c, 0x48, 0x21, 0xf1, 0x48, 0xc1, 0xe1, 0x0c, // rcx = (rax>>44 & rsi) << 12
	0x48, 0x89, 0x44, 0x0b, 0x18, // mov [rbx+rcx+0x18], rax
	0x48, 0x89, 0xc1, 0x48, 0xc1, 0xe9, 0x24, 0x48, 0x21, 0xf1, 0x48, 0xc1, 0xe1, 0x0c, // rcx = (rax>>36 & rsi) << 12
	0x48, 0x89, 0xc2, 0xf0, 0x48, 0x0f, 0xc1, 0x54, 0x0b, 0x40, // mov rdx, rax; lock xadd [rbx+rcx+0x40], rdx
	0x48, 0x89, 0xc1, 0x48, 0xc1, 0xe9, 0x1c, 0x48, 0x21, 0xf1, 0x48, 0xc1, 0xe1, 0x0c, // rcx = (rax>>28 & rsi) << 12
	0x48, 0x89, 0xc7, 0x48, 0x8b, 0x84, 0x0b, 0x80, 0x00, 0x00, 0x00, // mov rdi, rax; mov rax, [rbx+rcx+0x80]
	// lock cmpxchg [rbx+rcx+0x80], rdi; mov rax, rdi
	0xf0, 0x48, 0x0f, 0xb1, 0xbc, 0x0b, 0x80, 0x00, 0x00, 0x00, 0x48, 0x89, 0xf8,
	0x48, 0x89, 0xc1, 0x48, 0xc1, 0xe9, 0x18, 0x48, 0x21, 0xf1, 0x48, 0xc1, 0xe1, 0x0c, // rcx = (rax>>24 & rsi) << 12
	0x48, 0x8d, 0xbc, 0x0b, 0xf0, 0x0f, 0x00, 0x00, // lea rdi, [rbx+rcx+0xff0]
	0xb9, 0x04, 0x00, 0x00, 0x00, 0xfc, 0xf3, 0x48, 0xab, // mov ecx, 4; cld; rep stosq, across two pages
	0x48, 0x89, 0xc1, 0x48, 0xc1, 0xe9, 0x20, 0x48, 0x21, 0xf1, 0x48, 0xc1, 0xe1, 0x0c, // rcx = (rax>>32 & rsi) << 12
	0x48, 0x8d, 0xa4, 0x0b, 0x00, 0x08, 0x00, 0x00, 0x50, // lea rsp, [rbx+rcx+0x800]; push rax
	0x48, 0x89, 0xc1, 0x48, 0xc1, 0xe9, 0x14, 0x48, 0x21, 0xf1, 0x48, 0xc1, 0xe1, 0x0c, // rcx = (rax>>20 & rsi) << 12
	0x02, 0x0c, 0x0b, // add cl, [rbx+rcx], only to read
	0x49, 0xff, 0x02, // inc qword [r10]
	0xe9, 0x59, 0xff, 0xff, 0xff, // jmp to the start
}

// The layout of the scribbler's RAM. Virtual addresses equal physical ones, except for its data, which may lie
// elsewhere.
const (
	scribbleVA    = 0x2000000
	scribblePages = 2048
	roundsAt      = 0x1800000
	scribbleTable = 0x3800000 // PML4, PDPT, PD, and a page table for each 2 MiB
	pvClockAt     = 0x3900000
	pvStealAt     = 0x3901000
	pvEOIAt       = 0x3902000
	pvWallAt      = 0x3903000
	vmmArea       = 0x1900000 // where vmmWrites writes
	lowRAM        = 64 << 20
)

// MSRs by which a guest tells KVM where to write (Documentation/virt/kvm/x86/msr.rst).
var pvMSRs = []kvm.MSR{
	{Index: 0x4b564d00, Value: pvWallAt},
	{Index: 0x4b564d01, Value: pvClockAt | 1},
	{Index: 0x4b564d03, Value: pvStealAt | 1},
	{Index: 0x4b564d04, Value: pvEOIAt | 1},
}

type scribbleMode struct {
	name string
	user bool
	ram  uint64
	data guestmem.GPA
}

var scribbleModes = []scribbleMode{
	{"kernel code", false, lowRAM, scribbleVA},
	{"user code", true, lowRAM, scribbleVA},
	{"user code above the hole", true, 4 << 30, guestmem.HoleEnd},
}

// startScribbler runs the scribbler with page tables of 4 KiB pages without any accessed or dirty bit, so that the
// processor, or KVM, must write to them.
func startScribbler(t *testing.T, mode scribbleMode) *Machine {
	t.Helper()
	return startScribblerOf(t, mode, testConfig{TrackDirty: true})
}

func startScribblerOf(t *testing.T, mode scribbleMode, cfg testConfig) *Machine {
	t.Helper()
	m := newMachineOf(t, cfg, mode.ram)
	if err := m.Boot(BootOptions{Kernel: program(t, scribbler...)}); err != nil {
		t.Fatal(err)
	}
	const rights = 7 // present, writable, user
	le := binary.LittleEndian
	tables := make([]byte, (3+lowRAM>>21)*guestmem.PageSize)
	le.PutUint64(tables, scribbleTable+0x1000|rights)
	le.PutUint64(tables[0x1000:], scribbleTable+0x2000|rights)
	for i := range uint64(lowRAM >> 21) {
		le.PutUint64(tables[0x2000+8*i:], scribbleTable+0x3000+i<<12|rights)
	}
	for page := range uint64(lowRAM / guestmem.PageSize) {
		at := page * guestmem.PageSize
		if k := page - scribbleVA/guestmem.PageSize; k <= scribblePages {
			at = uint64(mode.data) + k*guestmem.PageSize
		}
		le.PutUint64(tables[0x3000+8*page:], at|rights)
	}
	c := m.cpus[0].kvm
	sregs, err := c.Sregs()
	if err != nil {
		t.Fatal(err)
	}
	sregs.CR3 = scribbleTable
	flags := uint64(2)
	if mode.user {
		// As if IRETQ had returned to user code that may use ports.
		code := kvm.Segment{Limit: 0xffffffff, Selector: 0x33, Typ: 0xb, Present: 1, DPL: 3, S: 1, L: 1, G: 1}
		data := kvm.Segment{Limit: 0xffffffff, Selector: 0x2b, Typ: 3, Present: 1, DPL: 3, DB: 1, S: 1, G: 1}
		sregs.CS, sregs.DS, sregs.ES, sregs.FS, sregs.GS, sregs.SS = code, data, data, data, data, data
		flags |= 3 << 12
	}
	n, err := c.SetMSRs(pvMSRs)
	if err != nil || n != len(pvMSRs) {
		t.Fatalf("KVM took %d of %d paravirtual MSRs: %v", n, len(pvMSRs), err)
	}
	if err := errors.Join(
		m.Memory().Write(scribbleTable, tables),
		c.SetSregs(sregs),
		c.SetRegs(&kvm.Regs{
			RIP: codeAt, RAX: rand.Uint64(), R8: 6364136223846793005, R9: 1442695040888963407,
			RBX: scribbleVA, RSI: scribblePages - 1, R10: roundsAt, RSP: scribbleVA + 0x800, RFLAGS: flags,
		}),
		m.Start(),
	); err != nil {
		t.Fatal(err)
	}
	return m
}

// scribble returns when the guest has made n more rounds.
func scribble(t *testing.T, m *Machine, n uint64) {
	t.Helper()
	rounds := func() uint64 {
		var b [8]byte
		if err := m.Memory().Read(roundsAt, b[:]); err != nil {
			t.Fatal(err)
		}
		return binary.LittleEndian.Uint64(b[:])
	}
	until := rounds() + n
	for deadline := time.Now().Add(time.Minute); rounds() < until; time.Sleep(time.Millisecond) {
		select {
		case <-m.Done():
			x, _ := m.Wait(t.Context())
			t.Fatalf("the guest ended: %v", x)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatal("the guest does not run")
		}
	}
}

// newImage returns memory for an image of RAM. It is not on the heap, which the race detector takes ten times as
// long to compare.
func newImage(t *testing.T) []byte {
	t.Helper()
	p, err := unix.Mmap(-1, 0, lowRAM+(scribblePages+1)*guestmem.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(p); err != nil {
			t.Error(err)
		}
	})
	return p
}

// ramImage returns all RAM that the scribbler can reach.
func ramImage(t *testing.T, m *Machine, mode scribbleMode, into []byte) []byte {
	t.Helper()
	if into == nil {
		into = newImage(t)
	}
	if err := errors.Join(m.Memory().Read(0, into[:lowRAM]), m.Memory().Read(mode.data, into[lowRAM:])); err != nil {
		t.Fatal(err)
	}
	return into
}

// pageOfImage returns the linear number of the page at an offset of an image.
func pageOfImage(t *testing.T, m *Machine, mode scribbleMode, off int) uint64 {
	t.Helper()
	if off < lowRAM {
		return uint64(off) / guestmem.PageSize
	}
	at, err := m.Memory().Linear(mode.data)
	if err != nil {
		t.Fatal(err)
	}
	return (at + uint64(off-lowRAM)) / guestmem.PageSize
}

// vmmWrites writes to RAM in every way that a device can.
func vmmWrites(t *testing.T, m *Machine, f *os.File) {
	t.Helper()
	mem := m.Memory()
	at := func() guestmem.GPA { return guestmem.GPA(vmmArea + rand.Uint64N(512)*guestmem.PageSize) }
	r := byte(rand.Uint32())
	if err := errors.Join(
		mem.Write(at()+4090, []byte{r, r + 1, r + 2, 1, 2, 3, 4, 5}),
		mem.StoreUint16(at()+2, uint16(r)+1),
		mem.FillFrom(at()+100, 5000, f, int64(r)),
		mem.PreadFull([]guestmem.Range{{GPA: at() + 1, Len: 30}, {GPA: at(), Len: 8192}}, f, int64(r)),
		mem.Zero(at()+7, 100),
		mem.Discard(at(), 2*guestmem.PageSize),
	); err != nil {
		t.Fatal(err)
	}
}

func TestEvery_page_that_changes_is_in_the_dirty_set(t *testing.T) {
	noise := make([]byte, 16<<10)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	name := filepath.Join(t.TempDir(), "noise")
	if err := os.WriteFile(name, noise, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, mode := range scribbleModes {
		t.Run(mode.name, func(t *testing.T) {
			m := startScribbler(t, mode)
			before := newImage(t) // RAM began as zeros
			var now, after []byte
			changedIn := map[string]int{}
			reported, changed := uint64(0), uint64(0)
			const pauses = 12
			for k := range pauses {
				scribble(t, m, 1+rand.Uint64N(100))
				vmmWrites(t, m, f)
				if err := m.Pause(t.Context()); err != nil {
					t.Fatal(err)
				}
				if _, err := m.Export(); err != nil {
					t.Fatal(err)
				}
				counted, err := m.CountDirty()
				if err != nil {
					t.Fatal(err)
				}
				set, err := m.TakeDirty()
				if err != nil {
					t.Fatal(err)
				}
				if counted > set.Len() {
					t.Errorf("%d pages counted, %d reported", counted, set.Len())
				}
				now = ramImage(t, m, mode, now)
				for off := 0; off < len(now); off += guestmem.PageSize {
					if bytes.Equal(now[off:off+guestmem.PageSize], before[off:off+guestmem.PageSize]) {
						continue
					}
					page := pageOfImage(t, m, mode, off)
					if off < lowRAM || mode.data != scribbleVA {
						changed++
					}
					if !set.Has(page) {
						t.Errorf("pause %d: page %#x has changed and is not in the set", k, page)
					}
					changedIn[areaOf(mode, off)]++
				}
				reported += set.Len()
				if again, err := m.TakeDirty(); err != nil || again.Len() != 0 {
					t.Errorf("taken twice in one pause: %d pages, %v", again.Len(), err)
				}
				// A paused machine's own work must not change RAM.
				if _, err := m.Export(); err != nil {
					t.Fatal(err)
				}
				if after = ramImage(t, m, mode, after); !bytes.Equal(after, now) {
					t.Errorf("pause %d: RAM changed after the set was taken", k)
				}
				before, now = now, before
				if err := m.Resume(); err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("%d pages reported, %d of them had changed: %v", reported, changed, changedIn)
			for _, area := range []string{"data", "page tables", "kvmclock", "VMM"} {
				if changedIn[area] == 0 {
					t.Errorf("nothing changed in %s: this test shows nothing about it", area)
				}
			}
		})
	}
}

// areaOf names what lies at an offset of an image.
func areaOf(mode scribbleMode, off int) string {
	switch {
	case off >= lowRAM || mode.data == scribbleVA && off >= scribbleVA && off < scribbleVA+(scribblePages+1)*guestmem.PageSize:
		return "data"
	case off >= scribbleTable && off < pvClockAt:
		return "page tables"
	case off == pvClockAt:
		return "kvmclock"
	case off == pvStealAt:
		return "steal time"
	case off >= pvEOIAt && off < pvWallAt+guestmem.PageSize:
		return "other KVM"
	case off >= vmmArea && off < vmmArea+3<<20:
		return "VMM"
	}
	return "rest"
}

func TestTake_dirty_is_refused_where_it_would_lie(t *testing.T) {
	m := newMachine(t, testConfig{})
	start(t, m, counting...)
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.TakeDirty(); !errors.Is(err, ErrNotTracked) {
		t.Errorf("without TrackDirty: got %v, want ErrNotTracked", err)
	}
	if _, err := m.CountDirty(); !errors.Is(err, ErrNotTracked) {
		t.Errorf("counting without TrackDirty: got %v, want ErrNotTracked", err)
	}
	m = newMachine(t, testConfig{TrackDirty: true})
	start(t, m, counting...)
	if _, err := m.TakeDirty(); !errors.Is(err, ErrNotPaused) {
		t.Errorf("of a running machine: got %v, want ErrNotPaused", err)
	}
}

func TestPages_given_back_are_reported_again(t *testing.T) {
	m := newMachine(t, testConfig{TrackDirty: true})
	start(t, m, counting...)
	waitCount(t, m, 10)
	take := func() *guestmem.PageSet {
		t.Helper()
		if err := m.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		set, err := m.TakeDirty()
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Resume(); err != nil {
			t.Fatal(err)
		}
		return set
	}
	first := take()
	if !first.Has(counterAt/guestmem.PageSize) || !first.Has(codeAt/guestmem.PageSize) {
		t.Fatal("the first set lacks what the guest and the loader have written")
	}
	m.MarkDirty(first)
	second := take()
	for page := range first.Pages() {
		if first.Has(page) && !second.Has(page) {
			t.Errorf("page %#x was given back and is not reported again", page)
		}
	}
	waitCount(t, m, counter(t, m))
	if third := take(); !third.Has(counterAt/guestmem.PageSize) || third.Has(codeAt/guestmem.PageSize) {
		t.Errorf("the third set has %d pages, want the counter and not the code", third.Len())
	}
}

// KVM's bitmaps end with a word that is not full.
func TestTake_dirty_of_RAM_that_fills_no_whole_word(t *testing.T) {
	for _, ram := range []uint64{lowRAM + guestmem.PageSize, uint64(guestmem.HoleStart) + 3*guestmem.PageSize} {
		m := newMachineOf(t, testConfig{TrackDirty: true}, ram)
		start(t, m, counting...)
		waitCount(t, m, 10)
		if err := m.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		last, err := m.Memory().FromLinear(ram - guestmem.PageSize)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Memory().Write(last, []byte{1}); err != nil {
			t.Fatal(err)
		}
		set, err := m.TakeDirty()
		if err != nil {
			t.Fatal(err)
		}
		if !set.Has(ram/guestmem.PageSize-1) || !set.Has(counterAt/guestmem.PageSize) {
			t.Errorf("%d bytes: the set lacks the last page, or the guest's", ram)
		}
	}
}
