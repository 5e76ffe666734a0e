package pager

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// linux/kvm.h
const (
	kvmCreateVM     = 0xae01
	kvmRunSize      = 0xae04
	kvmCreateVCPU   = 0xae41
	kvmSetRegion    = 0x4020ae46
	kvmSetTSS       = 0xae47
	kvmRun          = 0xae80
	kvmGetRegs      = 0x8090ae81
	kvmSetRegs      = 0x4090ae82
	kvmGetSregs     = 0x8138ae83
	kvmSetSregs     = 0x4138ae84
	kvmExitIO       = 2
	kvmExitMMIO     = 6
	kvmExitHLT      = 5
	kvmExitInternal = 17
)

// tinyGuest is a guest with one vCPU over guest memory.
type tinyGuest struct {
	t    *testing.T
	vcpu int
	run  []byte
	regs [18]uint64
}

func kvmIoctl(fd int, req, arg uintptr) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, arg)
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}

// A guestMode is a way of running code in a guest. On some hosts KVM's emulator interprets real mode, and touches
// guest memory like a system call. User code always runs on the processor, and KVM looks up its pages.
type guestMode struct {
	name        string
	read, write []byte // code that touches the byte at 0x5000 and then exits
	exit        uint32
	sregs       func(t *testing.T, mem *guestmem.Memory, s *[312]byte)
	flags       uint64
}

var guestModes = []guestMode{
	{
		name: "real mode", exit: kvmExitHLT, flags: 2,
		read:  []byte{0xa0, 0x00, 0x50, 0xf4},          // mov al, [0x5000]; hlt
		write: []byte{0xc6, 0x06, 0x00, 0x50, 7, 0xf4}, // mov byte [0x5000], 7; hlt
		sregs: func(_ *testing.T, _ *guestmem.Memory, s *[312]byte) {
			clear(s[0:8])   // CS base
			clear(s[12:14]) // CS selector
		},
	},
	{
		name: "user code", exit: kvmExitIO, flags: 0x3002, // IOPL 3
		read:  []byte{0x8a, 0x04, 0x25, 0, 0x50, 0, 0, 0xe6, 0x10},    // mov al, [0x5000]; out 0x10, al
		write: []byte{0xc6, 0x04, 0x25, 0, 0x50, 0, 0, 7, 0xe6, 0x10}, // mov byte [0x5000], 7; out 0x10, al
		sregs: userSregs,
	},
}

// userSregs makes 64-bit mode at CPL 3, with the first 2 MiB mapped one to one
// by page tables at 0x20000 (SDM volume 3, 4.5).
func userSregs(t *testing.T, mem *guestmem.Memory, s *[312]byte) {
	t.Helper()
	const tables = 0x20000
	for at, entry := range map[guestmem.GPA]uint64{
		tables: tables + 0x1000 | 7, tables + 0x1000: tables + 0x2000 | 7, tables + 0x2000: 0x87,
	} {
		if err := mem.Write(at, binary.LittleEndian.AppendUint64(nil, entry)); err != nil {
			t.Fatal(err)
		}
	}
	segment := func(at int, selector uint16, kind, db, l byte) {
		clear(s[at : at+24])
		binary.LittleEndian.PutUint32(s[at+8:], 0xffffffff)
		binary.LittleEndian.PutUint16(s[at+12:], selector)
		copy(s[at+14:], []byte{kind, 1, 3, db, 1, l, 1}) // type, present, DPL, D/B, S, L, G
	}
	segment(0, 0x33, 0xb, 0, 1) // CS
	for _, at := range []int{24, 48, 72, 96, 120} {
		segment(at, 0x2b, 3, 1, 0) // DS, ES, FS, GS, SS
	}
	binary.LittleEndian.PutUint64(s[224:], 0x80000031) // CR0: PG, NE, ET, PE
	binary.LittleEndian.PutUint64(s[240:], tables)     // CR3
	binary.LittleEndian.PutUint64(s[248:], 0x20)       // CR4: PAE
	binary.LittleEndian.PutUint64(s[264:], 0x500)      // EFER: LMA, LME
}

func eachMode(t *testing.T, f func(t *testing.T, m guestMode)) {
	t.Helper()
	for _, m := range guestModes {
		t.Run(m.name, func(t *testing.T) { f(t, m) })
	}
}

func newTinyGuest(t *testing.T, mem *guestmem.Memory, mode guestMode, code []byte) *tinyGuest {
	t.Helper()
	if testing.Short() {
		t.Skip("runs a guest: not in short mode")
	}
	must := func(fd int, err error) int {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("this host has no KVM: opening /dev/kvm: %v", err)
	}
	defer unix.Close(kvm)
	vm := must(kvmIoctl(kvm, kvmCreateVM, 0))
	t.Cleanup(func() { unix.Close(vm) })
	_, _ = kvmIoctl(vm, kvmSetTSS, 0xfffbd000) // only VMX needs it
	s := mem.Slots()[0]
	region := [4]uint64{0, uint64(s.GPA), s.Size, uint64(s.HVA)}
	must(kvmIoctl(vm, kvmSetRegion, uintptr(unsafe.Pointer(&region))))
	g := &tinyGuest{t: t, vcpu: must(kvmIoctl(vm, kvmCreateVCPU, 0))}
	t.Cleanup(func() { unix.Close(g.vcpu) })
	if g.run, err = unix.Mmap(g.vcpu, 0, must(kvmIoctl(kvm, kvmRunSize, 0)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(g.run) })
	var sregs [312]byte
	must(kvmIoctl(g.vcpu, kvmGetSregs, uintptr(unsafe.Pointer(&sregs))))
	mode.sregs(t, mem, &sregs)
	must(kvmIoctl(g.vcpu, kvmSetSregs, uintptr(unsafe.Pointer(&sregs))))
	const at = 0x8000
	if err := mem.Write(at, code); err != nil {
		t.Fatal(err)
	}
	g.regs[16], g.regs[17] = at, mode.flags // RIP, RFLAGS
	must(kvmIoctl(g.vcpu, kvmSetRegs, uintptr(unsafe.Pointer(&g.regs))))
	return g
}

type exit struct {
	err    error
	reason uint32
	al     byte
	gpa    uint64
}

// start runs the vCPU on a thread of its own until KVM_RUN returns.
func (g *tinyGuest) start() (tid int, done <-chan exit) {
	tids, exits := make(chan int, 1), make(chan exit, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		tids <- unix.Gettid()
		_, err := kvmIoctl(g.vcpu, kvmRun, 0)
		e := exit{err: err, reason: binary.LittleEndian.Uint32(g.run[8:]), gpa: binary.LittleEndian.Uint64(g.run[32:])}
		_, _ = kvmIoctl(g.vcpu, kvmGetRegs, uintptr(unsafe.Pointer(&g.regs)))
		e.al = byte(g.regs[0])
		exits <- e
	}()
	return <-tids, exits
}

// The page at 0x5000 is in a frame of the first pages of its chunk. Code and page tables are in pages of zeros.
var guestRAM = []part{{0, 2}, {5, 6}, {600, 700}}

func (g *tinyGuest) await(done <-chan exit, limit time.Duration) exit {
	g.t.Helper()
	select {
	case e := <-done:
		return e
	case <-time.After(limit):
		g.t.Fatalf("the vCPU is still in KVM_RUN after %v", limit)
		return exit{}
	}
}

func TestA_guest_reads_and_writes_missing_pages(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, guestRAM)
	eachMode(t, func(t *testing.T, m guestMode) {
		want := make([]byte, pageSize)
		content(5, want)
		for _, code := range [][]byte{m.read, m.write} {
			p, mem := restore(t, dir, Options{})
			g := newTinyGuest(t, mem, m, code)
			_, done := g.start()
			if e := g.await(done, 5*time.Second); e.err != nil || e.reason != m.exit {
				t.Fatalf("KVM_RUN: %+v", e)
			} else if bytes.Equal(code, m.read) && e.al != want[0] {
				t.Errorf("the guest read %#x, stored was %#x", e.al, want[0])
			}
			got := make([]byte, pageSize)
			if err := mem.Read(5*pageSize, got); err != nil {
				t.Fatal(err)
			}
			if bytes.Equal(code, m.write) {
				want[0] = 7
			}
			if !bytes.Equal(got, want) {
				t.Error("the page that the guest touched has wrong bytes")
			}
			st := p.Stats()
			t.Logf("%d read faults, %d write faults, %d ensured", st.ReadFaults.Load(), st.WriteFaults.Load(), st.Ensured.Load())
		}
	})
}

// The vCPU must leave KVM_RUN by itself, soon, and must not have executed further code.
func TestA_guest_that_touches_a_bad_page_leaves_KVM(t *testing.T) {
	eachMode(t, func(t *testing.T, m guestMode) {
		for name, code := range map[string][]byte{"read": m.read, "write": m.write} {
			dir := makeSnapshot(t, 64<<20, guestRAM)
			s := openSnapshot(t, dir)
			p, mem := newPagerFor(t, s, Options{})
			g := newTinyGuest(t, mem, m, code)
			damage(t, dir, badAt(t, s, 5))
			p.Start()
			_, done := g.start()
			e := g.await(done, time.Second)
			t.Logf("%s: KVM_RUN returned %v, exit reason %d, address %#x", name, e.err, e.reason, e.gpa)
			// The emulator treats memory that it cannot reach as a device.
			if !errors.Is(e.err, unix.EFAULT) && !(e.err == nil && e.reason == kvmExitMMIO && e.gpa == 0x5000) {
				t.Errorf("%s: KVM_RUN: %+v, want EFAULT or an MMIO exit at the bad page", name, e)
			}
			if err := mem.Read(5*pageSize, make([]byte, 1)); !errors.Is(err, snapshot.ErrCorrupt) {
				t.Errorf("%s: Read of the bad page: got %v, want ErrCorrupt", name, err)
			}
			if err := within(t, time.Second, "Close", p.Close); err != nil {
				t.Error(err)
			}
		}
	})
}

// badAt returns the offset of a byte in the frame of a page.
func badAt(t *testing.T, s *snapshot.Snapshot, page uint64) int64 {
	t.Helper()
	l, err := s.Memory().Leaf(int(page / chunkPages))
	if err != nil {
		t.Fatal(err)
	}
	frame, _, ok := l.Page(int(page % chunkPages))
	if !ok {
		t.Fatalf("page %d is not stored", page)
	}
	return l.Frame(frame).Offset() + 10
}

// What a signal does to a vCPU that waits for a page depends on how KVM touches the page. It must do no harm.
// Either the vCPU leaves KVM_RUN with EINTR and continues when it runs again, or it stays until the page is
// present.
func TestA_signal_to_a_waiting_VCPU_does_no_harm(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, guestRAM)
	want := make([]byte, pageSize)
	content(5, want)
	eachMode(t, func(t *testing.T, m guestMode) {
		p, mem := newPagerFor(t, openSnapshot(t, dir), Options{})
		g := newTinyGuest(t, mem, m, m.read)
		// The code was put in place without a fault. Page 5, at 0x5000, must still be missing.
		if c := p.chunk(0); !c.missing(5) {
			t.Fatal("the page is there already")
		}
		tid, done := g.start()
		time.Sleep(100 * time.Millisecond)
		const signals = 5
		interrupted := 0
		for range signals {
			if err := unix.Tgkill(os.Getpid(), tid, unix.SIGURG); err != nil {
				t.Fatal(err)
			}
			select {
			case e := <-done:
				interrupted++
				if !errors.Is(e.err, unix.EINTR) {
					t.Fatalf("KVM_RUN: %+v, want EINTR", e)
				}
				tid, done = g.start()
			case <-time.After(50 * time.Millisecond):
			}
		}
		t.Logf("%d of %d signals made KVM_RUN return EINTR", interrupted, signals)
		p.Start()
		e := g.await(done, 2*time.Second)
		for errors.Is(e.err, unix.EINTR) {
			_, done = g.start()
			e = g.await(done, 2*time.Second)
		}
		if e.err != nil || e.reason != m.exit || e.al != want[0] {
			t.Errorf("KVM_RUN: %+v, want exit %d with AL = %#x", e, m.exit, want[0])
		}
	})
}

// A vCPU that has not been stopped gets nothing from a closed pager.
func TestClose_drives_a_waiting_VCPU_out(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, guestRAM)
	eachMode(t, func(t *testing.T, m guestMode) {
		p, mem := newPagerFor(t, openSnapshot(t, dir), Options{})
		g := newTinyGuest(t, mem, m, m.read)
		_, done := g.start()
		time.Sleep(50 * time.Millisecond)
		if err := within(t, time.Second, "Close", p.Close); err != nil {
			t.Fatal(err)
		}
		e := g.await(done, time.Second)
		t.Logf("KVM_RUN returned %v, exit reason %d, address %#x", e.err, e.reason, e.gpa)
		if e.err == nil && e.reason == m.exit {
			t.Error("the guest ran on")
		}
	})
}

func TestLoad_under_a_guest_keeps_its_writes(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, guestRAM)
	eachMode(t, func(t *testing.T, m guestMode) {
		p, mem := restore(t, dir, Options{})
		g := newTinyGuest(t, mem, m, m.write)
		_, done := g.start()
		if err := p.Load(context.Background()); err != nil {
			t.Fatal(err)
		}
		if e := g.await(done, 5*time.Second); e.err != nil || e.reason != m.exit {
			t.Fatalf("KVM_RUN: %+v", e)
		}
		got := make([]byte, 1)
		if err := mem.Read(5*pageSize, got); err != nil || got[0] != 7 {
			t.Errorf("the guest's byte is %d, %v", got[0], err)
		}
	})
}

// incrementer adds one to a word in every page from 0x40000 to 0x1fffff, in an endless loop.
var incrementer = []byte{
	0xbb, 0, 0, 4, 0, // mov ebx, 0x40000
	0x48, 0xff, 0x03, // inc qword [rbx]
	0x81, 0xc3, 0, 0x10, 0, 0, // add ebx, 0x1000
	0x81, 0xfb, 0, 0, 0x20, 0, // cmp ebx, 0x200000
	0x72, 0xef, // jb to the inc
	0xeb, 0xe8, // jmp to the start
}

// spin runs the vCPU until the caller calls stop.
func (g *tinyGuest) spin() (stop func() error) {
	tids, done := make(chan int, 1), make(chan error, 1)
	var stopping atomic.Bool
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		tids <- unix.Gettid()
		for !stopping.Load() {
			if _, err := kvmIoctl(g.vcpu, kvmRun, 0); err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
				done <- err
				return
			}
		}
		done <- nil
	}()
	tid := <-tids
	return func() error {
		stopping.Store(true)
		for {
			// Signal repeatedly, for the signal may come before KVM_RUN does.
			if err := unix.Tgkill(os.Getpid(), tid, unix.SIGURG); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
			select {
			case err := <-done:
				return err
			case <-time.After(time.Millisecond):
			}
		}
	}
}

// The guest was restored lazily and writes all the time. Meanwhile the test loads, freezes and reads its RAM, page by
// page.
func TestA_frozen_view_of_a_lazily_restored_guest_that_writes(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, []part{{0, 2}, {0x40, 3000}})
	for _, how := range []struct {
		name string
		opts FreezeOptions
	}{{"copied", FreezeOptions{Expect: 2000}}, {"protected", FreezeOptions{CopyBytes: MinCopyBytes}}} {
		t.Run(how.name, func(t *testing.T) {
			p, mem := restore(t, dir, Options{})
			g := newTinyGuest(t, mem, guestModes[1], incrementer)
			stop := g.spin()
			const pages = 0x200 + 700 // the pages that the guest writes to, and some more
			saved := uint64(0)
			for round := range 8 {
				for from, b := counterOf(t, mem), []byte{0}; counterOf(t, mem) < from+2; {
					if err := mem.Read(gpa(2999), b); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Millisecond)
				}
				if err := stop(); err != nil {
					t.Fatal(err)
				}
				f, err := Prepare(mem, p, how.opts)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { f.Close() })
				image := make([]byte, pages*pageSize)
				if err := mem.Read(0, image); err != nil {
					t.Fatal(err)
				}
				set := guestmem.NewPageSet(mem.Size() / pageSize)
				set.Add(0, pages)
				if err := f.Freeze(set); err != nil {
					t.Fatal(err)
				}
				stop = g.spin()
				// In every other round the guest comes first, at every page.
				const written = 0x200 - 0x40
				for deadline := time.Now().Add(time.Minute); round%2 == 0 && f.Stats().Protected && f.Stats().Saved < written; {
					if time.Now().After(deadline) {
						t.Fatalf("the guest does not write: %+v", f.Stats())
					}
					time.Sleep(time.Millisecond)
				}
				b := make([]byte, pageSize)
				for page := uint64(pages); page > 0; page-- {
					if err := f.ReadPages(page-1, b); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(b, image[(page-1)*pageSize:][:pageSize]) {
						t.Fatalf("page %#x is not as it was", page-1)
					}
					if page%3 == 0 {
						f.Release(page-1, page+2)
					}
				}
				saved += f.Stats().Saved
				if err := f.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d pages saved before they were overwritten", saved)
			if (saved > 0) != (how.name == "protected") {
				t.Errorf("%d pages were saved", saved)
			}
		})
	}
}

// counterOf returns the word of the last page that the incrementer writes to.
func counterOf(t *testing.T, mem *guestmem.Memory) uint64 {
	t.Helper()
	var b [8]byte
	if err := mem.Read(0x1ff000, b[:]); err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b[:])
}
